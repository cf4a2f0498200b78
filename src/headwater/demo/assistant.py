"""The assistant in the chat. It is not a language model, but it writes word by word like one.

It reads the messages of visitors from the log, and each answer is a row that grows. The numbers in
an answer are read from the shop's database with the role of the visitor, so that an answer contains
nothing that the visitor may not read.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from contextlib import aclosing

import msgspec
import psycopg

from headwater.app import Headwater
from headwater.database import Connection
from headwater.demo.shop import PEOPLE, Person
from headwater.errors import HeadwaterError
from headwater.live.filters.filter import c

logger = logging.getLogger(__name__)

WORD_SECONDS = 0.04


async def serve(hw: Headwater) -> None:
    """Answer the messages of visitors, one after the other."""
    async with aclosing(hw.changes("messages", where=c.author == "visitor")) as feed:
        async for transaction in feed:
            for change in transaction.changes:
                if change.op == "insert" and change.after is not None:
                    await _try_to_answer(hw, change.after["room"], change.after["content"])


def _user_of(room: str) -> Person | None:
    """The user of a room. None for other rooms, which a visitor may create with psql."""
    return next((person for person in PEOPLE.values() if person.name == room), None)


async def _try_to_answer(hw: Headwater, room: str, question: str) -> None:
    visitor = _user_of(room)
    if visitor is None:
        return
    try:
        await _answer(hw, visitor, question)
    except (psycopg.Error, HeadwaterError) as error:
        # The next message is answered again when the database is back.
        logger.warning("The assistant of the demo could not answer: %s", error)


async def _answer(hw: Headwater, visitor: Person, question: str) -> None:
    async with hw.connection("demo") as connection:
        text = await answer_to(question, visitor, connection)
        cursor = await connection.execute(
            "insert into messages (room, author, state) values (%s, 'assistant', 'streaming')"
            " returning id",
            (visitor.name,),
        )
        row = await cursor.fetchone()
        assert row is not None
    async with hw.text_stream("messages", id=row[0]) as out:
        for word in re.findall(r"\S+\s*", text):
            out.append(word)
            await asyncio.sleep(WORD_SECONDS * random.uniform(0.3, 1.7))


async def answer_to(question: str, visitor: Person, connection: Connection) -> str:
    """The answer to a question, with numbers that the visitor may read."""
    words = set(re.findall(r"[a-z]+", question.lower()))
    answer = next((text for keys, text in _ANSWERS if words & keys), _OTHERWISE)
    async with connection.transaction():
        claims = msgspec.json.encode(visitor.token_claims).decode()
        await connection.execute(_AS, (visitor.role, claims))
        numbers = await (await connection.execute(_NUMBERS)).fetchone()
    assert numbers is not None
    names = ("orders", "new", "shipped", "best", "best_amount", "largest", "largest_item")
    return answer.format(**dict(zip(names, numbers, strict=True)))


_AS = "select set_config('role', %s, true), set_config('request.jwt.claims', %s, true)"

_NUMBERS = """
    select count(*), count(*) filter (where status = 'new'),
      count(*) filter (where status = 'shipped'),
      (select region from orders group by region order by sum(amount) desc limit 1),
      (select sum(amount) from orders group by region order by sum(amount) desc limit 1),
      max(amount), (select item from orders order by amount desc, id limit 1)
    from orders
"""

_ANSWERS = (
    (
        {"revenue", "region", "regions", "best", "sales", "north", "south", "east", "west"},
        "The {best} leads with {best_amount} on the books. I have just added that up with SQL; the "
        "bars on this page come from Spark, which keeps the same sums in a table of their own, "
        "change by change.",
    ),
    (
        {"order", "orders", "many", "new", "count", "status", "shipped"},
        "There are {orders} orders at this moment: {new} of them are new, and {shipped} are on "
        "their way. By the time you have read this sentence, the board has moved on.",
    ),
    (
        {"expensive", "largest", "biggest", "most", "dear", "price"},
        "The largest order is for {largest}: {largest_item}. Sort the board by amount and you will "
        "find it at the top.",
    ),
    (
        {"who", "how", "work", "works", "you", "headwater", "model", "live", "stream"},
        "I am no language model, I only write like one. Each of my words is appended to a text "
        "stream, which saves the whole text to a row of the table messages every 100 ms. Each save "
        "is a change in the log, and every tab that follows this room gets it.",
    ),
    (
        {"hello", "hi", "hey", "moin", "hallo"},
        "Hello! Ask me how many orders there are, which region sells best, or how this chat works.",
    ),
)

_OTHERWISE = (
    "I am a modest assistant: ask me about orders, regions, the largest order, or how this works. "
    "While you think about it: {orders} orders are on the books."
)
