"""`headwater.signal` in the database, and signals as an application gives them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import psycopg
import pytest

from headwater import (
    BlockingContext,
    ConfigError,
    Forbidden,
    Headwater,
    Identity,
    InvalidQuery,
    MutationContext,
    Refused,
)
from headwater.database import Connection, connect
from headwater.hub.feeds.view import FeedQuery
from headwater.hub.hub import Hub
from headwater.log.reading.reader import LogReader
from headwater.log.signals import channel_of, is_signals
from headwater.model import Change
from tests.support.log_probe import enable, probing, rows, run
from tests.support.subscribers import Recorder


class Signals:
    """Reads the log with the signals in it."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def __aenter__(self) -> Signals:
        self._connection = await connect(self._url, purpose="probe", application_path=True)
        self._reader = await LogReader.open(self._connection, lambda table: True)
        self._position = await self._reader.now(self._connection)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._connection.close()

    async def changes(self) -> list[Change]:
        batch = await self._reader.read(self._connection, self._position)
        self._position = batch.position
        return [change for each in batch.transactions for change in each.changes]

    async def __call__(self) -> list[tuple[str, list[str]]]:
        found = [change for change in await self.changes() if is_signals(change.table)]
        images = [change.after for change in found if change.after is not None]
        return [(image["topic"], image["ids"]) for image in images]


@pytest.fixture
async def signals(url: str) -> AsyncIterator[Signals]:
    async with Signals(url) as signals:
        yield signals


async def test_a_signal_is_a_row_of_the_log(connection: Connection, signals: Signals) -> None:
    await run(connection, "set headwater.user_id = 'ann'")
    await run(connection, "select headwater.signal('chat:42', array['1', 'a b', 'ä'])")
    await run(connection, "select headwater.signal('org:7')", "select headwater.signal('x', null)")
    first, second, third = await signals.changes()
    assert first.after == {"topic": "chat:42", "ids": ["1", "a b", "ä"]}
    assert (first.op, first.key, first.actor.user_id) == ("insert", ("chat:42",), "ann")
    assert [each.after and each.after["ids"] for each in (second, third)] == [[], []]
    assert await rows(connection, "select * from headwater.signals") == []


async def test_a_signal_commits_with_its_transaction(
    connection: Connection, signals: Signals
) -> None:
    async with connection.transaction(force_rollback=True):
        await run(connection, "select headwater.signal('a')")
    async with connection.transaction():
        await run(connection, "select headwater.signal('b')", "select headwater.signal('c')")
        assert await signals() == []
    assert await signals() == [("b", []), ("c", [])]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
async def test_transactions_at_the_same_time(
    url: str, connection: Connection, signals: Signals, level: str, first: bool
) -> None:
    if level == "serializable" or not first:
        # The first of all registers the shape of signals, which serializable ones must do alone.
        await run(connection, "select headwater.signal('before')")
        await signals()
    other = await connect(url, purpose="test", application_path=True)
    for each in (connection, other):
        await run(each, f"begin isolation level {level}", "select 1")
    for each in (connection, other):
        await run(each, "select headwater.signal('a')", "commit")
    assert await signals() == [("a", []), ("a", [])]
    await other.close()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("signal(null)", "1 to 200 characters"),
        ("signal('')", "1 to 200 characters"),
        ("signal(repeat('x', 201))", "1 to 200 characters, not 201"),
        ("signal('chat:42,org:1')", "neither commas nor control"),
        ("signal(e'chat:42\\norg:1')", "neither commas nor control"),
        ("signal(e'chat:\\u0085')", "neither commas nor control"),
        ("signal(e'chat:\\u2028')", "neither commas nor control"),
        ("signal('a', array_fill('1'::text, array[10001]))", "at most 10000 ids, not 10001"),
        ("signal('a', array['1', null])", "is null"),
    ],
)
async def test_signals_that_are_refused(connection: Connection, call: str, reason: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=reason):
        await run(connection, f"select headwater.{call}")


async def test_names_of_signals_are_data(connection: Connection, signals: Signals) -> None:
    for name in ("%", "'; drop table headwater.log; --", "x" * 200, '"', "\\", "ä"):
        await connection.execute("select headwater.signal(%s, %s)", (name, [name]))
        assert await signals() == [(name, [name])]


async def test_a_signal_of_any_size(connection: Connection, signals: Signals) -> None:
    """Beyond what NOTIFY can carry."""
    ids = [f"{n:036}" for n in range(10_000)]
    await connection.execute("select headwater.signal('a', %s)", (ids,))
    assert await signals() == [("a", ids)]


async def test_a_signal_notifies_on_its_own_channel(url: str, connection: Connection) -> None:
    other = await connect(url, purpose="test", application_path=True)
    await run(other, f'listen "{channel_of("chat:ä")}"', "listen headwater")
    await run(connection, "select headwater.signal('chat:b')", "select headwater.signal('chat:ä')")
    notices = [each async for each in other.notifies(timeout=30, stop_after=1)]
    assert [each.payload for each in notices] == ["v1:signal"]
    await other.close()


async def test_roles(connection: Connection, signals: Signals) -> None:
    """Roles that may write to a captured table may signal, and no others."""
    await run(connection, "drop role if exists signaller", "create role signaller")
    await run(connection, "create table orders (id int primary key, note text)")
    await enable(connection, "orders")
    signal = "select headwater.signal('a')"
    try:
        await run(connection, "set role signaller")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="signaller may not signal"):
            await run(connection, signal)
        await run(connection, "reset role", "grant select on orders to signaller")
        await run(connection, "set role signaller")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await run(connection, signal)
        for grant in ("insert", "update (note)"):
            await run(connection, "reset role", f"grant {grant} on orders to signaller")
            await run(connection, "set role signaller", signal)
            await run(connection, "reset role", "revoke all on orders from signaller")
        usable = await rows(
            connection,
            "select p.proname::text from pg_proc p"
            " where pronamespace = 'headwater'::regnamespace"
            " and has_function_privilege('signaller', p.oid, 'execute')"
            " union all select relname::text from pg_class"
            " where relnamespace = 'headwater'::regnamespace and relkind in ('r', 'p', 'v')"
            " and has_table_privilege('signaller', oid, 'select, insert, update, delete')",
        )
        # Beside it what every partition and every reader of the log needs
        # (tests/integration/capture/test_privileges.py), and what names the actor of a transaction.
        needed = {"capture_row", "note_move", "pass_row", "trimmed", "set_actor", "say_actor"}
        assert {name for (name,) in usable} == {"signal", *needed}
    finally:
        await run(connection, "reset role", "drop owned by signaller", "drop role signaller")


async def test_signals_are_not_sent_as_changes(url: str, connection: Connection) -> None:
    await run(connection, "create table orders (id int primary key)")
    await enable(connection, "orders")
    recorder = Recorder()
    async with Hub(url) as hub, probing(url) as probe:
        await hub.feed(FeedQuery(), recorder)
        async with connection.transaction():
            await run(connection, "select headwater.signal('a')", "insert into orders values (1)")
        await run(connection, "select headwater.signal('a')")
        await hub.flushes.next_flush()
        assert await probe.story() == [("insert", 1)]
        transactions = [each for message in recorder.messages for each in message.transactions]
        assert [change["table"] for each in transactions for change in each.changes] == ["orders"]


async def test_signals_by_name(url: str, connection: Connection) -> None:
    """A role that enables the table of signals may follow them like any other table."""
    await run(connection, "create table orders (id int primary key)")
    hw = Headwater(url)
    hw.table("headwater.signals")
    async with hw:
        start = await hw.position()
        await hw.signal("chat:1", [1])
        async with aclosing(hw.changes("headwater.signals", since=start)) as feed:
            transaction = await anext(feed)
    (change,) = transaction.changes
    assert change.after == {"topic": "chat:1", "ids": ["1"]}


# ------------------------------------------------------------------------ the application


STARTED: list[asyncio.Task[None]] = []


@pytest.fixture
async def hw(url: str) -> AsyncIterator[Headwater]:
    connection = await connect(url, purpose="test", application_path=True)
    await run(connection, "create table messages (id int primary key, body text)")
    await connection.close()
    hw = Headwater(url)
    hw.table("messages")
    outer = hw

    @hw.mutation
    async def write(ctx: MutationContext, id: int, fail: bool = False) -> None:
        await ctx.execute("insert into messages values (%s, '')", id)
        await ctx.signal("chat:1", [id])
        await outer.signal("chat:2", [id, (id, "b")])
        if fail:
            raise Refused("no")

    @hw.mutation
    def write_blocking(ctx: BlockingContext, id: int) -> None:
        ctx.execute("insert into messages values (%s, '')", id)
        ctx.signal("chat:1", [id])

    @hw.mutation
    async def start(ctx: MutationContext, id: int) -> None:
        over = asyncio.Event()

        async def later() -> None:
            await over.wait()
            await outer.signal(f"chat:{id}", [id])

        STARTED.append(asyncio.create_task(later()))
        asyncio.get_running_loop().call_later(0.2, over.set)

    @hw.mutation
    async def write_wrongly(ctx: MutationContext) -> None:
        await ctx.signal("a,b")

    @hw.topic("chat:{id}", entity="messages")
    async def chat(ctx: Any, id: int) -> bool:
        return bool(ctx.user == "ann" and await ctx.fetch_value("select %s = 1", id))

    hw.topic("open:{id}", poke=True)
    async with hw:
        yield hw


async def test_in_a_mutation(hw: Headwater, signals: Signals) -> None:
    await hw.mutations["write"](id=1)
    (insert, *sent) = await signals.changes()
    assert {each.xid for each in sent} == {insert.xid}
    assert {each.actor.function_name for each in sent} == {"write"}
    assert [each.after for each in sent] == [
        {"topic": "chat:1", "ids": ["1"]},
        {"topic": "chat:2", "ids": ["1", '[1,"b"]']},
    ]
    with pytest.raises(Refused):
        await hw.mutations["write"](id=2, fail=True)
    assert await signals() == []
    await hw.mutations["write_blocking"](id=3)
    assert await signals() == [("chat:1", ["3"])]
    with pytest.raises(InvalidQuery, match="neither commas"):
        await hw.mutations["write_wrongly"]()


async def test_in_a_task_that_a_mutation_started(hw: Headwater, signals: Signals) -> None:
    """A task that it started continues by itself when the mutation is over."""
    await hw.mutations["start"](id=5)
    await STARTED.pop()
    assert await signals() == [("chat:5", ["5"])]


async def test_outside_of_mutations(hw: Headwater, signals: Signals) -> None:
    await hw.signal("chat:1", [7])
    await hw.signal("org:1")
    assert await signals() == [("chat:1", ["7"]), ("org:1", [])]
    with pytest.raises(InvalidQuery, match="neither commas"):
        await hw.signal("chat:1,chat:2")
    with pytest.raises(ConfigError, match="a text"):
        await hw.signal("chat:1", "7")
    with pytest.raises(ConfigError, match="too late"):
        hw.topic("late", poke=True)


async def test_which_users_may_follow_a_topic(hw: Headwater) -> None:
    ann, bob = Identity(user="ann"), Identity(user="bob")
    chat, places = hw.topics.find("chat:1")
    await hw.topics.check(chat, places, ann)
    with pytest.raises(Forbidden, match="you may not follow topic chat:1"):
        await hw.topics.check(chat, places, bob)
    with pytest.raises(Forbidden):
        await hw.topics.check(*hw.topics.find("chat:2"), ann)
    with pytest.raises(InvalidQuery, match="expected int"):
        await hw.topics.check(*hw.topics.find("chat:x' or true --"), ann)
    await hw.topics.check(*hw.topics.find("open:x"), bob)
