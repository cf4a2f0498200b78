"""Text streams: what is written while a text arrives, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headwater import (
    ConfigError,
    FunctionFailed,
    Headwater,
    Identity,
    InvalidQuery,
    LimitExceeded,
    NotFound,
    limits,
)
from headwater.database import Connection, connect
from headwater.embedded import EmbeddedPostgres
from tests.support.applications.shop import until
from tests.support.databases import FAST, passable_folder
from tests.support.log_probe import rows, run

MESSAGES = """
    create table messages (
      id int primary key, chat_id int not null default 1, content text, state text
    )"""


@pytest.fixture
async def hw(url: str, connection: Connection) -> AsyncIterator[Headwater]:
    await run(connection, MESSAGES, "insert into messages values (1)")
    async with Headwater(url) as hw:
        await hw.enable("messages")
        yield hw


async def written(connection: Connection, id: int = 1) -> tuple[Any, ...]:
    return (await rows(connection, f"select content, state from messages where id = {id}"))[0]


async def texts(connection: Connection) -> list[str]:
    """Every text that was ever written into the row, in order."""
    found = await rows(
        connection,
        "select after ->> 'content' from headwater.log where op = 'U' order by seq",
    )
    return [text for (text,) in found]


async def test_a_text_grows_and_is_done(hw: Headwater, connection: Connection) -> None:
    async with hw.text_stream("messages", id=1, every=0.01) as out:
        assert await written(connection) == ("", "streaming")
        out.append("Once")
        await until(lambda: _is(connection, ("Once", "streaming")))
        out.append(" upon")
        out.append(" a time")
        await until(lambda: _is(connection, ("Once upon a time", "streaming")))
        out.append(".")
        assert out.text == "Once upon a time."
    assert await written(connection) == ("Once upon a time.", "done")


async def _is(connection: Connection, wanted: tuple[Any, ...]) -> bool:
    return await written(connection) == wanted


async def test_tokens_are_collected_and_never_taken_back(
    hw: Headwater, connection: Connection
) -> None:
    count = 500
    async with hw.text_stream("messages", id=1, every=0.05) as out:
        for number in range(count):
            out.append(f"{number} ")
            await asyncio.sleep(0)
            if number % 100 == 0:
                await out.flush()
    seen = await texts(connection)
    assert seen[-1] == "".join(f"{number} " for number in range(count))
    assert all(later.startswith(earlier) for earlier, later in pairwise(seen))
    assert 6 <= len(seen) < 100


async def test_an_exception_leaves_the_text_written_so_far(
    hw: Headwater, connection: Connection
) -> None:
    async def write_text() -> None:
        async with hw.text_stream("messages", id=1, every=60) as out:
            out.append("Half of ")
            out.append("it")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await write_text()
    assert await written(connection) == ("Half of it", "error")


@pytest.mark.parametrize("times", [1, 3])
async def test_cancelling_leaves_the_text_written_so_far(
    hw: Headwater, connection: Connection, times: int
) -> None:
    begun = asyncio.Event()

    async def write_text() -> None:
        async with hw.text_stream("messages", id=1, every=60) as out:
            out.append("first ")
            await out.flush()
            out.append("and last")
            begun.set()
            await asyncio.Event().wait()

    speaking = asyncio.create_task(write_text())
    await begun.wait()
    for _ in range(times):
        speaking.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await speaking
    assert await written(connection) == ("first and last", "cancelled")


async def test_a_row_that_is_not_there(hw: Headwater, connection: Connection) -> None:
    with pytest.raises(NotFound, match="there is no row messages 7"):
        async with hw.text_stream("messages", id=7):
            pass
    for _ in range(2):  # once inserted, it is the same row
        stream = hw.text_stream("messages", id=7, values={"chat_id": 42})
        async with stream as out:
            out.append("hello")
    assert await rows(connection, "select * from messages where id = 7") == [
        (7, 42, "hello", "done")
    ]


async def test_a_row_that_goes_away(hw: Headwater, connection: Connection) -> None:
    async def write_text() -> None:
        async with hw.text_stream("messages", id=1, every=0.01) as out:
            await connection.execute("delete from messages")
            while True:
                out.append("a")
                await asyncio.sleep(0)

    with pytest.raises(NotFound):
        await write_text()


async def test_other_columns_and_keys(hw: Headwater, connection: Connection) -> None:
    await connection.execute(
        'create schema "My %"; create table "My %"."T %s" ('
        ' a int, "b %" text, "said %" text, primary key (a, "b %"))'
    )
    stream = hw.text_stream(
        '"My %"."T %s"', id=(1, "x"), column="said %", state=None, values={}, text="So "
    )
    async with stream as out:
        out.append("100 %")
    found = await rows(connection, 'select * from "My %%"."T %%s"'.replace("%%", "%"))
    assert found == [(1, "x", "So 100 %")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"table": "nowhere"}, "no table nowhere"),
        ({"column": "body"}, "no column body"),
        ({"state": "how"}, "no column how"),
        ({"values": {"who": 1}}, "no column who"),
        ({"id": (1, 2)}, "the primary key of messages is id"),
        ({"every": 0}, "is not more than 0"),
    ],
)
async def test_options_that_do_not_fit(hw: Headwater, options: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"table": "messages", "id": 1} | options
    with pytest.raises(ConfigError, match=said):
        async with hw.text_stream(given.pop("table"), **given):
            pass


async def test_an_id_of_another_type(hw: Headwater) -> None:
    with pytest.raises(FunctionFailed):
        async with hw.text_stream("messages", id="one"):
            pass


async def test_a_text_that_postgresql_cannot_store(
    hw: Headwater, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TEXT_STREAM_CHARS_MAX", 10)
    async with hw.text_stream("messages", id=1) as out:
        out.append("Zoë")
        with pytest.raises(InvalidQuery, match="NUL"):
            out.append("\0")
        with pytest.raises(InvalidQuery, match="an incomplete character"):
            out.append("\ud83d")
        with pytest.raises(LimitExceeded, match="at most 10 characters"):
            out.append("12345678")
        out.append(" 123456")
    assert await written(connection) == ("Zoë 123456", "done")
    with pytest.raises(ConfigError):
        out.append("x")
    with pytest.raises(ConfigError):
        await out.flush()


async def test_it_needs_headwater_to_run(url: str) -> None:
    with pytest.raises(ConfigError, match="not running"):
        async with Headwater(url).text_stream("messages", id=1):
            pass


async def test_the_signal_is_in_the_same_transaction(hw: Headwater, connection: Connection) -> None:
    ann = Identity(user="ann")
    async with hw.text_stream("messages", id=1, topic="chat:42", identity=ann) as out:
        out.append("hello")
    found = await rows(
        connection,
        "select count(*), count(distinct xid), min(user_id), min(function_name)"
        " from headwater.log where op in ('U', 'I') group by op order by op",
    )
    (signals, *_), (updates, *_) = found
    assert signals == updates
    assert {(one[2], one[3]) for one in found} == {("ann", "text_stream")}
    together = await rows(
        connection,
        "select count(*) from headwater.log where op in ('U', 'I') group by xid",
    )
    assert set(together) == {(2,)}


async def test_the_database_is_down_for_a_while(tmp_path: Path) -> None:
    settings = FAST | {"synchronous_commit": "on"}
    with (
        passable_folder() as folder,
        EmbeddedPostgres(folder / "data", settings=settings) as server,
    ):
        async with Headwater(server.url) as hw:
            connection = await connect(server.url, purpose="test", application_path=True)
            await run(connection, MESSAGES, "insert into messages values (1)")
            await connection.close()
            async with hw.text_stream("messages", id=1, every=0.02) as out:
                out.append("before ")
                await out.flush()
                await asyncio.to_thread(server.stop_now, "immediate")
                out.append("meanwhile ")
                await asyncio.sleep(0.1)
                ending = asyncio.create_task(asyncio.to_thread(server.start))
                out.append("after")
            await ending
            connection = await connect(server.url, purpose="test", application_path=True)
            assert await written(connection) == ("before meanwhile after", "done")
            await connection.close()
