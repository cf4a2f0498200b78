"""Questions to the database that take long: only their live queries lag, exact at every position.

A question waits for a lock that the test holds. It hangs until the lock is released, so nothing
depends on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from headwater import limits
from headwater.admin.status import read_status
from headwater.database import Connection, connect
from headwater.gateway import usage as usage_module
from headwater.gateway.usage import UsageReport
from headwater.hub.hub import Hub
from headwater.hub.live_views.background import BackgroundQueries
from headwater.hub.live_views.initial_snapshots import _OPENING_CONNECTIONS
from headwater.hub.reading.snapshot_pool import SnapshotPool
from headwater.hub.subscriptions.costs import Cost
from headwater.metrics import Metrics
from headwater.model import Position
from tests.support.databases import fresh_database
from tests.support.generators.sizes import first_seed, size
from tests.support.log_probe import enable, rows, run
from tests.support.row_policies import QUESTIONS, READERS, ROLE, asking, random_write, user
from tests.support.subscribers import (
    Historian,
    Recorder,
    TableHistory,
    answer,
    live,
    logged,
    present_position,
)

SEED = first_seed(1)
ROUNDS = size("lagging", 2, large=100)
"""Histories, on each server."""

_LOCK = 7_700_000
"""Of user N, the advisory lock with this key plus N makes the policy wait."""


@pytest.fixture(params=["embedded", "system"])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    server = (
        request.getfixturevalue("postgres").url
        if request.param == "embedded"
        else request.getfixturevalue("system_postgres")
    )
    with fresh_database(server, installed=True) as url:
        yield url


@asynccontextmanager
async def guarded_notes(url: str) -> AsyncIterator[Connection]:
    """A table whose policy waits for the lock of its user, and one without a policy."""
    async with await connect(url, purpose="test", application_path=True) as connection:
        await run(
            connection,
            *READERS,
            "create table calm (id int primary key, n int)",
            "insert into calm values (1, 0)",
            "create table notes (id int primary key, owner int, rank int)",
            "insert into notes select i, i % 4, i from generate_series(1, 40) i",
            "create function patient(person int) returns boolean language plpgsql as $$ begin"
            f" perform pg_advisory_xact_lock_shared({_LOCK} + person); return true; end $$",
            "alter table notes enable row level security",
            "create policy own on notes for select using (owner = me() and patient(me()))",
            f"grant select on notes to {ROLE}",
        )
        await enable(connection, "notes", "calm")
        try:
            yield connection
        finally:
            await run(connection, f"drop owned by {ROLE}, {QUESTIONS}")


class Locks:
    """The locks that questions wait for."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.held: set[int] = set()

    async def take(self, number: int) -> None:
        if number not in self.held:
            # Questions that run right now must have passed it.
            await run(self._connection, f"select pg_advisory_lock({_LOCK} + {number})")
            self.held.add(number)

    async def release(self, number: int) -> None:
        if number in self.held:
            await run(self._connection, f"select pg_advisory_unlock({_LOCK} + {number})")
            self.held.discard(number)

    async def are_waited_for(self, count: int = 1) -> None:
        """Until this many questions hang."""
        async with asyncio.timeout(60):
            while True:
                ((found,),) = await rows(
                    self._connection,
                    "select count(distinct pid) from pg_locks where locktype = 'advisory'"
                    f" and not granted and objid between {_LOCK} and {_LOCK} + 1000",
                )
                if found >= count:
                    return
                await asyncio.sleep(0.01)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing takes too long, and a question that was asked with others is soon asked alone."""
    monkeypatch.setattr("headwater.hub.live_views.background._QUESTION_QUICK_SECONDS", 0.03)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("mode", "rests"), [("maintained", False), ("streamed", False), ("maintained", True)]
)
async def test_lagging_views_are_exact_at_every_position(
    database: str, mode: str, rests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random writes, while questions of random users hang and continue; users come, and fall
    behind. The rows of each at each position are those of the log; views of another table miss
    nothing. Also if users rest after each of their questions."""
    if rests:
        monkeypatch.setattr("headwater.hub.live_views.background._JOB_LOOP_SECONDS", -1.0)
        monkeypatch.setattr("headwater.hub.live_views.background._JOB_REST_TIMES", 1e6)
        monkeypatch.setattr("headwater.hub.live_views.background._JOB_REST_SECONDS_MAX", 0.02)
        monkeypatch.setattr("headwater.hub.loop_time._LOOP_TURN_SECONDS", 0.0)
    chance = random.Random(f"{SEED} {mode}")
    order: dict[str, Any] = {} if mode == "streamed" else {"order": ["rank"], "limit": 6}
    async with (
        guarded_notes(database) as connection,
        await connect(database, purpose="test") as other,
        Hub(database, settings=asking(database)) as hub,
    ):
        locks = Locks(other)
        calm = Recorder()
        await hub.live(live("calm"), calm)
        initial = await answer(connection, "select * from notes")
        followers: list[tuple[int, Historian, Any]] = []
        for turn in range(ROUNDS):
            await _follow(hub, followers, turn % 4, order, mode)
            for _ in range(12):
                hangs = chance.choice([0, 1, 2, 3])
                if chance.random() < 0.4:
                    await locks.take(hangs)
                elif chance.random() < 0.5:
                    await locks.release(hangs)
                writes = [random_write(chance) for _ in range(chance.choice((1, 2, 5)))]
                await run(connection, "begin", *writes, "update calm set n = n + 1", "commit")
                # A view over another table has this change, also while questions hang.
                await calm.until_rows(await answer(connection, "select * from calm"))
                if chance.random() < 0.2:
                    chance.choice(followers)[2].resync("overflow")
            for number in list(locks.held):
                await locks.release(number)
            position = await present_position(connection)
            for _, _, handle in followers:
                await hub.reached(position, [handle])
            history = TableHistory(initial, await logged(connection, "notes"))
            for number, recorder, _ in followers:
                assert (recorder.error, recorder.fault) == (None, None)
                for at, held in recorder.history:
                    mine = [row for row in history.at(at) if row["owner"] == number]
                    if mode == "maintained":
                        mine.sort(key=lambda row: row["rank"])
                    assert held == mine[: order.get("limit")], f"SEED={SEED}, at {at}"
        assert calm.kinds() == ["snapshot", *["deltas"] * (len(calm.messages) - 1)]
        async with asyncio.timeout(60):
            while hub.live_views.lagging:
                await hub.flushes.changed()


async def _follow(
    hub: Hub, followers: list[Any], number: int, order: dict[str, Any], mode: str
) -> None:
    recorder = Historian()
    handle = await hub.live(live("notes", mode=mode, **order), recorder, access=user(number))
    followers.append((number, recorder, handle))


@pytest.mark.usefixtures("patient")
async def test_many_slow_users_delay_no_others_and_use_few_connections(url: str) -> None:
    """Each question of 215 users hangs. Views of another table, and of a user whose questions do
    not, have their changes meanwhile."""
    count = size("slow_users", 12, large=215)
    async with guarded_notes(url) as connection, await connect(url, purpose="test") as other:
        await run(connection, "update notes set owner = id")
        async with Hub(url, settings=asking(url)) as hub:
            calm, quick = Recorder(), Recorder()
            await hub.live(live("calm"), calm)
            await hub.live(live("notes"), quick, access=user(0))
            slow = [Recorder() for _ in range(count)]
            await asyncio.gather(
                *(
                    hub.live(live("notes"), each, access=user(number))
                    for number, each in enumerate(slow, 1)
                )
            )
            locks = Locks(other)
            for number in range(1, count + 1):
                await locks.take(number)
            await run(
                connection, "insert into notes select i, i, 0 from generate_series(101, 340) i"
            )
            await locks.are_waited_for(2)
            for turn in range(3):
                await run(connection, f"update calm set n = {turn + 1}")
                await calm.until_rows([{"id": 1, "n": turn + 1}])
                await run(connection, f"insert into notes values ({1000 + turn}, 0, 0)")
                await quick.until(lambda turn=turn: quick.replica.row((1000 + turn,)))  # type: ignore[misc]
            ((connections,),) = await rows(
                connection, f"select count(*) from pg_stat_activity where usename = '{QUESTIONS}'"
            )
            assert connections <= limits.QUESTION_CONNECTIONS + _OPENING_CONNECTIONS
            assert all("deltas" not in each.kinds() for each in slow)
            for number in range(1, count + 1):
                await locks.release(number)
            await run(connection, "update notes set rank = 5 where id between 1 and 40")
            for number, each in enumerate(slow[:40], 1):
                own = f"select * from notes where owner = {number} order by id"
                await each.until_rows(await answer(connection, own))


@pytest.mark.usefixtures("patient")
async def test_a_lagging_view_is_counted_and_named(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LAG_SHOWN_SECONDS", 0.0)
    monkeypatch.setattr(usage_module, "LAG_SHOWN_SECONDS", 0.0)
    metrics = Metrics()
    async with (
        guarded_notes(url) as connection,
        await connect(url, purpose="test") as other,
        Hub(url, settings=asking(url), metrics=metrics) as hub,
    ):
        hub.reconciler.seconds = None  # what it asks waits for the lock, too
        recorder, locks = Recorder(), Locks(other)
        handle = await hub.live(live("notes"), recorder, access=user(1))
        await locks.take(1)
        await run(connection, "insert into notes values (100, 1, 1)")
        await locks.are_waited_for()
        assert b"headwater_views_lagging 1.0" in metrics.render()
        usage = UsageReport("gw", hub, metrics, lambda: ())
        named = [json.loads(bytes(entry.detail)) for entry in await usage.entries()]
        assert [each["role"] for each in named if "lagging_since" in each] == [ROLE]
        ((view, lag),) = hub.live_views.lagged()
        assert view.query.table.label == "notes"
        before = recorder.position
        await run(connection, "insert into notes values (101, 1, 1)")
        position = await present_position(connection)
        waiting = asyncio.create_task(hub.reached(position, [handle]))
        assert await hub.contains(position)
        assert not waiting.done()
        assert (recorder.position, lag.reached) == (before, Position.parse(before or ""))
        await locks.release(1)
        await waiting
        assert recorder.replica.row((101,))
        assert b"headwater_views_lagging 0.0" in metrics.render()


async def test_a_policy_that_refuses_to_be_ended(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is closed, its statement is ended at the server, and its view is read
    again."""
    monkeypatch.setattr(limits, "QUESTION_SECONDS_MAX", 0.2)
    monkeypatch.setattr("headwater.hub.live_views.background._QUESTION_QUICK_SECONDS", 0.02)
    monkeypatch.setattr(limits, "FLUSH_QUESTIONS_SECONDS", 0.1)
    async with guarded_notes(url) as connection, await connect(url, purpose="test") as other:
        stubborn = (
            "create or replace function patient(person int) returns boolean language plpgsql as"
            " $$ begin loop begin"
            f" perform pg_advisory_xact_lock_shared({_LOCK} + person); return true;"
            " exception when query_canceled then null; end; end loop; end $$"
        )
        await run(connection, stubborn)
        async with Hub(url, settings=asking(url)) as hub:
            calm, recorder, locks = Recorder(), Recorder(), Locks(other)
            await hub.live(live("calm"), calm)
            await hub.live(live("notes"), recorder, access=user(1))
            await locks.take(1)
            await run(connection, "insert into notes values (100, 1, 1)")
            await locks.are_waited_for()
            await run(connection, "update calm set n = 1")
            await calm.until_rows([{"id": 1, "n": 1}])
            async with asyncio.timeout(60):
                while hub.live_views.lagging:  # until it is read again
                    await hub.flushes.changed()
            await locks.release(1)
            own = "select * from notes where owner = 1 order by id"
            await recorder.until_rows(await answer(connection, own))
            assert "reset" in recorder.kinds()


@pytest.mark.usefixtures("patient")
async def test_more_changes_than_a_lagging_view_may_queue(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LAG_CHANGES_MAX", 20)
    async with (
        guarded_notes(url) as connection,
        await connect(url, purpose="test") as other,
        Hub(url, settings=asking(url)) as hub,
    ):
        calm, recorder, locks = Recorder(), Recorder(), Locks(other)
        await hub.live(live("calm"), calm)
        await hub.live(live("notes"), recorder, access=user(1))
        await locks.take(1)
        for turn in range(30):
            await run(
                connection,
                f"insert into notes values ({100 + turn}, 1, 1)",
                f"update calm set n = {turn}",
            )
            await calm.until_rows([{"id": 1, "n": turn}])
        await locks.release(1)
        own = "select * from notes where owner = 1 order by id"
        await recorder.until_rows(await answer(connection, own))
        assert "reset" in recorder.kinds()


async def test_the_status_of_lagging_views(url: str) -> None:
    async with await connect(url, purpose="test") as connection:
        await run(
            connection,
            "insert into headwater.activity (gateway, kind, id, type, name, detail, since,"
            " alive_until) values"
            " ('gw', 'gateway', 'gw', null, 'host', '{}', now(), now() + interval '1 minute'),"
            " ('gw', 'view', '7', 'live', 'notes',"
            ' \'{"role": "web", "lagging_since": "2026-01-01T10:00:00Z"}\', now(), null),'
            " ('gw', 'view', '8', 'live', 'calm', '{}', now(), null)",
        )
        (found,) = (await read_status(connection, "")).lagging
        assert (found.view, found.table, found.role) == ("7", "notes", "web")


@pytest.mark.usefixtures("patient")
async def test_a_client_that_leaves_while_a_connection_is_borrowed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client leaves between the step that must ask and the question itself. No flush fails, and
    other clients miss nothing."""
    async with guarded_notes(url) as connection, Hub(url, settings=asking(url)) as hub:
        hub.reconciler.seconds = None  # it borrows connections, too
        calm, begin = Recorder(), SnapshotPool.begin
        await hub.live(live("calm"), calm)
        joining: list[asyncio.Task[Any]] = []

        async def leave_meanwhile(self: SnapshotPool, *arguments: Any) -> Any:
            lent = await begin(self, *arguments)
            joining[0].cancel()
            await asyncio.wait(joining)
            return lent

        monkeypatch.setattr(SnapshotPool, "begin", leave_meanwhile)
        joining.append(asyncio.create_task(hub.live(live("notes"), Recorder(), access=user(1))))
        await asyncio.wait(joining)
        await run(connection, "update calm set n = 1")
        await calm.until_rows([{"id": 1, "n": 1}])
        assert (hub.flushes.faulted_at, hub.live_views.lagging, len(hub.live_views.views)) == (
            None,
            {},
            1,
        )


async def test_a_user_whose_rows_occupied_the_event_loop_rests(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile others get their changes, with or without a policy. Waiting changes come later."""
    monkeypatch.setattr("headwater.hub.live_views.background._JOB_LOOP_SECONDS", -1.0)
    rest, busy = BackgroundQueries._rest, (ROLE, user(1).claims)

    def only_one(self: BackgroundQueries, who: Hashable, seconds: float) -> None:
        if who == busy:
            rest(self, who, seconds)

    monkeypatch.setattr(BackgroundQueries, "_rest", only_one)
    async with guarded_notes(url) as connection, Hub(url, settings=asking(url)) as hub:
        hub.reconciler.seconds = None
        calm, resting, other, late = (Recorder() for _ in range(4))
        await hub.live(live("calm"), calm)
        await hub.live(live("notes"), other, access=user(2))
        monkeypatch.setattr("headwater.hub.live_views.background._JOB_REST_TIMES", 1e12)
        monkeypatch.setattr("headwater.hub.live_views.background._JOB_REST_SECONDS_MAX", 3600.0)
        await hub.live(live("notes"), resting, access=user(1))
        assert list(hub.live_part.background._resting) == [busy]
        joining = asyncio.create_task(hub.live(live("notes", limit=3), late, access=user(1)))
        for turn in range(3):
            await run(
                connection,
                f"insert into notes values ({100 + turn}, 1, 0), ({200 + turn}, 2, 0)",
                f"update calm set n = {turn + 1}",
            )
            await calm.until_rows([{"id": 1, "n": turn + 1}])
            await other.until(lambda turn=turn: other.replica.row((200 + turn,)))  # type: ignore[misc]
        assert resting.kinds() == ["snapshot"]
        assert not joining.done()
        # Now for no longer than a moment, which ends by itself.
        monkeypatch.setattr("headwater.hub.live_views.background._JOB_REST_SECONDS_MAX", 0.01)
        hub.live_part.background._rest(busy, 0.0)
        await joining
        own = "select * from notes where owner = 1 order by id"
        await resting.until_rows(await answer(connection, own))
        await late.until_rows(await answer(connection, f"{own} limit 3"))
        assert "reset" not in resting.kinds()


async def test_live_queries_that_are_slow_in_memory(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every live query counts as slow, and a flush takes one of them forward: the others lag, take
    turns, and are exact at every position."""
    monkeypatch.setattr(limits, "APPLY_QUICK_SECONDS", -1.0)
    monkeypatch.setattr("headwater.hub.live_views.part._FLUSH_APPLY_SECONDS", 0.0)
    monkeypatch.setattr(Cost, "is_slow", lambda _, **__: True)
    chance = random.Random(SEED)
    async with guarded_notes(url) as connection, Hub(url) as hub:
        await run(connection, "alter table notes disable row level security")
        initial = await answer(connection, "select * from notes")
        followers: list[tuple[int, dict[str, Any], Historian, Any]] = []
        for number in range(8):
            query: dict[str, Any] = {"mode": "streamed"} if number < 4 else {"limit": 3}
            recorder = Historian()
            where = [["owner", "=", number % 4]]
            handle = await hub.live(live("notes", where=where, **query), recorder)
            followers.append((number % 4, query, recorder, handle))
        put_off = 0
        for _ in range(20):
            writes = [random_write(chance) for _ in range(chance.choice((1, 2, 5)))]
            await run(connection, "begin", *writes, "commit")
            await hub.flushes.next_flush()
            put_off += len(hub.live_views.lagging)
        assert put_off
        position = await present_position(connection)
        await hub.reached(position, [handle for *_, handle in followers])
        history = TableHistory(initial, await logged(connection, "notes"))
        for number, query, recorder, _ in followers:
            assert "reset" not in recorder.kinds()
            assert recorder.fault is None
            for at, held in recorder.history:
                mine = [row for row in history.at(at) if row["owner"] == number]
                assert held == mine[: query.get("limit")], f"SEED={SEED}, at {at}"
