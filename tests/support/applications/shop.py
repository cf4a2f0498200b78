"""A shop under load: a table, writers with every kind of statement, random live queries over it,
and the database's own answer to each of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec
import psycopg

from headwater.capture.postgres import triggers
from headwater.database import Connection, connect
from headwater.live.query import BoundQuery, LiveQuery
from headwater.live.statements import page
from headwater.log.images import ImageDecoder
from headwater.model import Table
from headwater.protocol import Wire
from headwater.testing.gateway_process import Served, serving
from tests.support.databases import finish, fresh_database, passable_folder

REGIONS = 5
STATUSES = ("new", "paid", "packed", "shipped", "lost")
WORDS = ("a", "B", "ä", "z z", "", "%", "long " * 20)

TABLE = """
    create table orders (
      id int primary key,
      region int,
      status text,
      amount numeric(12, 2),
      weight double precision,
      note text,
      updated_at timestamptz not null default clock_timestamp()
    )"""


async def open_shop(
    connection: Connection, *, rows: int = 200, capture: triggers.Capture = "trigger"
) -> None:
    """Make the table, fill it, and have it captured."""
    await connection.execute(TABLE)
    await connection.execute(
        "insert into orders select i, i %% 5, 'new', (i * 37 %% 1000) / 10.0, i %% 7, 'x'"
        " from generate_series(1, %s) i",
        (rows,),
    )
    await triggers.enable(connection, "orders", capture)


@contextmanager
def shop_served(server_url: str, *, rows: int, **settings: Any) -> Iterator[Served]:
    """A gateway with a shop of its own, shared by the tests of a file that do not change it."""

    async def opened() -> None:
        connection = await connect(url, purpose="test", application_path=True)
        await open_shop(connection, rows=rows)
        await connection.close()

    with passable_folder() as folder, fresh_database(server_url, installed=True) as url:
        finish(opened())
        with serving(url, folder, **settings) as served:
            yield served


def random_query(chance: random.Random) -> dict[str, Any]:
    """A live query as clients write them; mostly ordered, now and then streamed."""
    where = chance.choice(
        [
            [],
            [["region", "=", chance.randrange(REGIONS)]],
            [["region", "in", chance.sample(range(REGIONS), 2)], ["status", "!=", "lost"]],
            [["amount", ">=", chance.randrange(100)], ["amount", "<", chance.randrange(50, 150)]],
            {"or": [["status", "=", chance.choice(STATUSES)], ["note", "is null"]]},
            {"not": [["status", "in", list(STATUSES[:2])]]},
            [["note", "ilike", "%A%"]],
            [["weight", "between", [1, 4]]],
        ]
    )
    if chance.random() < 0.1:
        return {"table": "orders", "where": where, "mode": "streamed"}
    order = chance.choice(
        [
            [],
            [["amount", "desc"]],
            [["amount", "asc", "nulls first"], ["region", "desc"]],
            [["updated_at", "desc"]],
            [["note", "asc"], ["status", "desc"]],
            [["weight", "desc", "nulls last"]],
        ]
    )
    columns = chance.choice([None, None, ["amount", "status"]])
    limit = chance.choice([1, 3, 10, 30])
    return {"table": "orders", "where": where, "order": order, "limit": limit, "columns": columns}


class Writer:
    """One client of the shop: random transactions, of which some are taken back."""

    def __init__(self, url: str, number: int, seed: int) -> None:
        self._url = url
        self._chance = random.Random(seed * 1000 + number)
        self._next = (number + 1) * 1_000_000
        self.committed = 0

    async def write(self, until: asyncio.Event, *, pause: float = 0.0) -> None:
        while not until.is_set():
            try:
                connection = await connect(self._url, purpose="writer", application_path=True)
            except Exception:
                await asyncio.sleep(0.05)  # the database may be restarting
                continue
            try:
                while not until.is_set():
                    await self._transact(connection)
                    await asyncio.sleep(pause)
            except (psycopg.OperationalError, psycopg.Rollback):
                pass  # the second is raised when the connection was lost during the rollback
            finally:
                await connection.close()

    async def _transact(self, connection: Connection) -> None:
        chance = self._chance
        try:
            async with connection.transaction():
                for _ in range(chance.choice((1, 1, 1, 2, 5))):
                    await self._operate(connection)
                if chance.random() < 0.1:
                    raise psycopg.Rollback
            self.committed += 1
        except (psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected):
            pass

    async def _operate(self, connection: Connection) -> None:
        chance = self._chance
        id = chance.randrange(1, 200) if chance.random() < 0.9 else self._next
        values = {
            "id": id,
            "region": chance.choice([*range(REGIONS), None]),
            "status": chance.choice(STATUSES),
            "amount": chance.choice([None, chance.randrange(15_000) / 100]),
            "weight": chance.choice([None, float("nan"), chance.randrange(7), 1e300]),
            "note": chance.choice([None, *WORDS]),
        }
        statement = chance.choice(_STATEMENTS)
        if "insert" in statement:
            self._next += 1
        await connection.execute(statement.encode(), values)


_STATEMENTS = (
    "insert into orders (id, region, status, amount, weight, note) values"
    " (%(id)s, %(region)s, %(status)s, %(amount)s, %(weight)s, %(note)s) on conflict do nothing",
    "insert into orders (id, region, status, amount, weight, note) values"
    " (%(id)s, %(region)s, %(status)s, %(amount)s, %(weight)s, %(note)s) on conflict do nothing",
    "update orders set amount = %(amount)s, updated_at = clock_timestamp() where id = %(id)s",
    "update orders set region = %(region)s, note = %(note)s where id = %(id)s",
    "update orders set status = %(status)s, weight = %(weight)s where id = %(id)s",
    "update orders set status = %(status)s where id = %(id)s",
    "delete from orders where id = %(id)s",
    "delete from orders where id = %(id)s",
    "update orders set id = id + 500 where id = %(id)s"
    " and not exists (select from orders o where o.id = %(id)s + 500)",
)


@asynccontextmanager
async def writing(
    url: str, *, writers: int = 8, seed: int, pause: float = 0.0
) -> AsyncIterator[list[Writer]]:
    """Writers that write inside the block, and have stopped after it."""
    until = asyncio.Event()
    all_of_them = [Writer(url, number, seed) for number in range(writers)]
    async with asyncio.TaskGroup() as tasks:
        for writer in all_of_them:
            tasks.create_task(writer.write(until, pause=pause))
        try:
            yield all_of_them
        finally:
            until.set()


class Truth:
    """What the database itself answers to a live query, in the form clients get."""

    def __init__(self, connection: Connection, table: Table) -> None:
        self._connection = connection
        self._table = table
        self._decode = ImageDecoder(table)
        self._wire = Wire(table)

    @classmethod
    async def of(cls, connection: Connection, name: str) -> Truth:
        return cls(connection, await triggers.find_enabled(connection, name))

    async def rows(self, query: dict[str, Any]) -> list[dict[str, Any]]:
        bound = BoundQuery(LiveQuery.from_json(query), self._table)
        count = bound.limit if bound.mode == "maintained" else 1_000_000
        question = page(bound, bound.after, count)
        text = f"select row_to_json(answer)::text from ({question.text}) answer"
        cursor = await self._connection.execute(text.encode(), question.values)
        found = [self._decode(image) for (image,) in await cursor.fetchall()]
        seen = found if bound.select is None else map(bound.select, found)
        return [msgspec.json.decode(msgspec.json.encode(self._wire.row(row))) for row in seen]


async def until(condition: Any, *, seconds: float = 30.0, every: float = 0.05) -> None:
    """Wait for a condition, which may be async. AssertionError when it does not come true."""
    async with asyncio.timeout(seconds):
        while True:
            met = condition()
            if asyncio.iscoroutine(met):
                met = await met
            if met:
                return
            await asyncio.sleep(every)
