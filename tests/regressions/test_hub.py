"""Defects that reviews found in the hub, each as the shortest test."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from headwater import limits
from headwater.database import Connection
from headwater.errors import Forbidden, HeadwaterError, InvalidQuery
from headwater.hub import flush
from headwater.hub.feeds.view import FeedQuery
from headwater.hub.hub import Hub
from headwater.hub.live_views.initial_snapshots import _OPENING_CONNECTIONS, InitialSnapshots
from headwater.hub.subscriptions.subscriber import Access
from headwater.live.filters.filter import c
from headwater.live.query import Rules
from headwater.model import Position
from tests.integration.hub.test_visibility import ROLE, notes, user
from tests.support.log_probe import enable, rows, run
from tests.support.subscribers import Recorder, answer, live

__all__ = ["notes"]


@pytest.fixture
async def orders(connection: Connection) -> Connection:
    await run(
        connection,
        "create table orders (id int primary key, owner int, amount float8)",
        "insert into orders select i, i % 2, i from generate_series(1, 5) i",
    )
    await enable(connection, "orders")
    return connection


async def test_another_table_takes_the_name(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.live(live("orders"), recorder)
        await run(
            orders,
            "create table fresh (id int primary key, owner int, amount float8)",
            "insert into fresh values (100, 1, 1)",
        )
        await enable(orders, "fresh")
        await run(
            orders,
            "begin; alter table orders rename to old; alter table fresh rename to orders; commit",
            "insert into orders values (101, 1, 1)",
        )
        await recorder.until_rows(await answer(orders, "select * from orders order by id"))


async def test_dropped_and_made_again(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.live(live("orders"), recorder)
        feed = Recorder()
        await hub.feed(FeedQuery(("orders",)), feed)
        await run(
            orders,
            "drop table orders",
            "create table orders (id int primary key, owner int, amount float8)",
        )
        await enable(orders, "orders")
        await run(orders, "insert into orders values (101, 1, 1)")
        await recorder.until_rows(await answer(orders, "select * from orders order by id"))
        await feed.until(lambda: "101" in str(feed.messages))


@pytest.mark.parametrize("mode", ["maintained", "streamed"])
async def test_moved_while_its_table_was_looked_up_again(
    url: str, orders: Connection, mode: str
) -> None:
    async with Hub(url) as hub:
        recorder, other = Recorder(), Recorder()
        subscription = await hub.live(live("orders", mode=mode), recorder)
        await hub.live(live("orders", mode=mode), other)
        view = subscription.target
        assert view is not None
        hub.live_views.reopen(view)
        await subscription.change_access(Access(where=c.owner == 1))
        await asyncio.gather(*(t for t in hub._resources._tasks if "_rejoin" in str(t)))
        await run(orders, "insert into orders values (8, 0, 1), (9, 1, 1)")
        await recorder.until(lambda: {"id": 9, "owner": 1, "amount": 1} in recorder.rows)
        await other.until(lambda: len(other.rows) == 7)
        assert {row["owner"] for row in recorder.rows} == {1}
        assert recorder.views[-1] != other.views[-1]
        assert recorder.fault is None


async def test_numbers_that_json_cannot_hold_are_distinguished(
    url: str, orders: Connection
) -> None:
    await run(orders, "insert into orders values (6, 0, 'NaN'), (7, 0, 'Infinity')")
    async with Hub(url) as hub:
        for value in ("NaN", "Infinity", "-Infinity"):
            recorder = Recorder()
            await hub.live(live("orders", where=[["amount", "=", value]]), recorder)
            want = await answer(orders, f"select * from orders where amount = '{value}'")
            assert [r["id"] for r in recorder.rows] == [r["id"] for r in want], value
        for after, first in ((None, 6), ("NaN", 7), ("Infinity", 5)):
            recorder = Recorder()
            await hub.live(live("orders", order=["amount desc"], after=[after, 9]), recorder)
            assert recorder.rows[0]["id"] == first


@pytest.mark.parametrize(
    ("type_", "first", "second"),
    [
        ("interval", "1 day", "24:00:00"),
        ("int4range", "[1,3)", "[2,5)"),
        ("float8", "NaN", "0"),
        ("float8", "0", "-0"),
        ("bytea", r"\x00", r"\xff"),
        ("timestamptz", "infinity", "2020-01-01"),
        ("timetz", "10:00:00+00", "11:00:00+01"),
        ("inet", "10.0.0.1", "10.0.0.1/32"),
    ],
)
@pytest.mark.parametrize("query", [{}, {"order": ["n"]}, {"mode": "streamed"}])
async def test_keys_of_many_types(
    url: str, connection: Connection, type_: str, first: str, second: str, query: dict[str, Any]
) -> None:
    await run(
        connection,
        f"create table t (k {type_} primary key, n int)",
        f"insert into t values ('{first}', 1)",
    )
    await enable(connection, "t")
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.live(live("t", **query), recorder)
        await run(connection, f"update t set k = '{second}'", "update t set n = 2")
        await recorder.until(lambda: [row["n"] for row in recorder.rows] == [2])
        await run(connection, "delete from t")
        await recorder.until(lambda: recorder.rows == [])


@pytest.mark.parametrize(("type_", "value"), [("int[]", "{1}"), ("jsonb", "{}"), ("pair", "(1,2)")])
async def test_a_key_that_finds_nothing_is_refused(
    url: str, connection: Connection, type_: str, value: str
) -> None:
    await run(
        connection,
        "create type pair as (a int, b int)",
        f"create table t (k {type_} primary key)",
        f"insert into t values ('{value}')",
    )
    await enable(connection, "t")
    async with Hub(url) as hub:
        with pytest.raises(InvalidQuery, match="primary key"):
            await hub.live(live("t"), Recorder())


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("mode", ["maintained", "streamed"])
async def test_a_view_that_cannot_decode_its_rows_does_not_affect_others(
    url: str, orders: Connection, mode: str, empty: bool
) -> None:
    """A type that is cast to a JSON object cannot be recognised before there is a row. Each such
    result once lost a connection, so more of them are requested than there are connections."""
    await run(
        orders,
        "create type mood as enum ('good', 'bad')",
        "create function as_object(mood) returns json language sql immutable"
        " as $$ select json_build_object('mood', ($1)::text) $$",
        "create cast (mood as json) with function as_object(mood)",
        "create table t (k mood primary key, n int)",
    )
    await enable(orders, "t")
    if not empty:
        await run(orders, "insert into t values ('good', 0)")
    async with Hub(url) as hub:
        untouched = Recorder()
        await hub.live(live("orders"), untouched)
        for i in range(_OPENING_CONNECTIONS + 1):
            recorder = Recorder()
            query = live("t", mode=mode, where=[["n", "<", 1 + i]])
            if empty:
                await hub.live(query, recorder)
            else:
                with pytest.raises(HeadwaterError, match="TypeError"):
                    await hub.live(query, recorder)
        await run(orders, "insert into t values ('bad', 0)", "insert into orders values (9, 9, 9)")
        await untouched.until(lambda: len(untouched.rows) == 6)
        assert hub.ready
        if empty:
            await recorder.until(lambda: recorder.error is not None)
            assert recorder.error is not None
            assert recorder.error.code == "internal"
        await hub.live(live("orders", limit=1), Recorder())


async def test_a_subscriber_leaves_while_it_gets_a_part(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaver(Recorder):
        def deliver(self, frame: Any) -> None:
            super().deliver(frame)
            task.cancel()
            leaving.close()

    async with Hub(url) as hub:
        query = live("orders", mode="streamed")
        leaver, recorder = Leaver(), Recorder()
        with monkeypatch.context() as held:
            # Neither is served before both wait.
            held.setattr(InitialSnapshots, "can_start", False)
            task = asyncio.create_task(hub.live(query, leaver))
            other = asyncio.create_task(hub.live(query, recorder))
            while not (len(hub.live_views.views) and next(iter(hub.live_views.views)).waiting[1:]):
                await hub.flushes.next_flush()
        leaving = next(
            each for each in next(iter(hub.live_views.views)).waiting if each.subscriber is leaver
        )
        hub.flushes.wake()
        await other
        assert len(recorder.rows) == 5


async def test_a_subscriber_with_a_part_of_a_result_gets_the_failure(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.live.state.streamed._STREAMED_PAGE_ROWS", 2)
    async with Hub(url) as hub:
        recorder = Recorder()
        recorder.reads.clear()
        subscription = await hub.live(live("orders", mode="streamed"), recorder)
        assert recorder.messages[-1].more
        assert subscription.target is not None
        hub.live_views.fail_all(subscription.target, Forbidden("no longer"))
        assert isinstance(recorder.error, Forbidden)
        recorder.reads.set()
        await hub.flushes.next_flush()
        assert list(hub.live_views) == []


async def test_members_of_a_guarded_stream(url: str, notes: Connection) -> None:
    """The policy reads another table: a new subscriber sees rows that earlier ones do not see
    yet."""
    await run(notes, "delete from members")
    async with Hub(url, recheck=0.6) as hub:
        query = live("notes", mode="streamed")
        early, late = Recorder(), Recorder()
        await hub.live(query, early, access=user(1))
        assert early.rows == []
        await run(notes, "insert into members values (1)")
        await hub.live(query, late, access=user(1))
        assert len(late.rows) == 20
        await run(notes, "update notes set owner = 2")
        await late.until(lambda: late.rows == [], 3)
        await early.until(lambda: early.rows == [], 3)


async def test_a_right_revoked_from_a_feed_of_everything(url: str, notes: Connection) -> None:
    await run(
        notes,
        "alter table notes disable row level security",
    )
    async with Hub(url, recheck=0.2) as hub:
        recorder = Recorder()
        await hub.feed(FeedQuery(), recorder, access=user(1))
        await run(notes, f"revoke select on notes from {ROLE}")
        await recorder.until(lambda: recorder.error, 5)
        assert isinstance(recorder.error, Forbidden)


async def test_a_feed_of_everything_gets_no_table_without_a_check(
    url: str, notes: Connection
) -> None:
    await run(notes, "alter table notes disable row level security")
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.feed(FeedQuery(), recorder, access=user(1))
        await run(notes, "create table hidden (id int primary key)")
        await enable(notes, "hidden")
        await run(
            notes,
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'headwater tables'",
            "insert into hidden values (1)",
        )
        await recorder.until(lambda: recorder.error or "hidden" in str(recorder.messages), 5)
        assert isinstance(recorder.error, Forbidden)
        assert "hidden" not in str(recorder.messages)


async def test_after_the_lookup_connection_was_cut(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        await hub.live(live("orders"), Recorder())
        await run(
            orders,
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'headwater tables'",
        )
        await hub.live(live("orders", limit=3), Recorder())


async def test_a_streamed_query_has_no_limit(url: str, orders: Connection) -> None:
    async with Hub(url, rules={"orders": Rules(limit_max=3)}) as hub:
        recorder = Recorder()
        await hub.live(live("orders", mode="streamed"), recorder)
        assert len(recorder.rows) == 5


async def test_a_window_that_slides_has_the_rights_given_meanwhile(
    url: str, orders: Connection
) -> None:
    async with Hub(url) as hub:
        recorder = Recorder()
        subscription = await hub.live(live("orders"), recorder)
        await asyncio.gather(
            subscription.change_access(Access(where=c.owner == 1)), subscription.reanchor([1])
        )
        assert [row["id"] for row in recorder.rows] == [3, 5]
        await asyncio.gather(
            subscription.reanchor([0]), subscription.change_access(Access(where=c.owner == 0))
        )
        assert [row["id"] for row in recorder.rows] == [2, 4]


async def test_a_gap_while_paused_is_sent_later(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        recorder = Recorder()
        feed = await hub.feed(FeedQuery(("orders",)), recorder)
        feed.pause()
        hub.feeds.resync()
        await hub.flushes.next_flush()
        feed.resume()
        await recorder.until(lambda: "gap" in recorder.kinds())
        await run(orders, "insert into orders values (9, 9, 9)")
        await recorder.until(lambda: recorder.kinds()[-1] == "changes")


def seqs(recorder: Recorder) -> list[int]:
    return [
        change["seq"]
        for message in recorder.messages
        for transaction in message.transactions
        for change in transaction.changes
    ]


async def test_paused_while_it_waits_for_room(url: str, orders: Connection) -> None:
    class Narrow(Recorder):
        async def room(self) -> None:
            asked.set()
            await super().room()

    async with Hub(url) as hub:
        since = hub.position
        await run(orders, "insert into orders values (9, 9, 9)")
        await hub.flushes.next_flush()
        asked, recorder = asyncio.Event(), Narrow()
        recorder.reads.clear()
        feed = await hub.feed(FeedQuery(("orders",), since=since), recorder)
        await asked.wait()
        feed.pause()
        recorder.reads.set()
        await hub.flushes.next_flush()
        await hub.flushes.next_flush()
        assert recorder.messages == []
        feed.resume()
        await run(orders, "insert into orders values (10, 9, 9)")
        await recorder.until(lambda: len(seqs(recorder)) >= 2)
        assert len(seqs(recorder)) == len(set(seqs(recorder))) == 2


async def test_paused_while_it_waits_to_join(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Hub(url) as hub:
        since = hub.position
        await run(orders, "insert into orders values (9, 9, 9)")
        await hub.flushes.next_flush()
        recorder, paused, real = Recorder(), asyncio.Event(), hub.flushes.between

        async def paused_meanwhile() -> None:
            await real()
            if seqs(recorder) and not paused.is_set():
                await run(orders, "insert into orders values (10, 9, 9)")
                await hub.flushes.next_flush()
                await hub.flushes.next_flush()
                feed.pause()
                paused.set()

        monkeypatch.setattr(hub.flushes, "between", paused_meanwhile)
        feed = await hub.feed(FeedQuery(("orders",), since=since), recorder)
        await paused.wait()
        await hub.flushes.next_flush()
        assert len(seqs(recorder)) == 1
        feed.resume()
        await run(orders, "insert into orders values (11, 9, 9)")
        await recorder.until(lambda: len(seqs(recorder)) >= 3)
        assert len(seqs(recorder)) == len(set(seqs(recorder))) == 3


async def test_many_undecided_rows_do_not_make_a_flush_read_a_whole_stream(
    url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WINDOW_ASK_KEYS_MAX", 10)
    await run(
        connection,
        "create table t (id int primary key, span interval)",
        "insert into t select i, '1 day' from generate_series(1, 50) i",
    )
    await enable(connection, "t")
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.live(live("t", mode="streamed", where=[["span", "=", "24:00:00"]]), recorder)
        await run(connection, "update t set span = '24:00:00'")
        await recorder.until(lambda: "reset" in recorder.kinds())
        assert recorder.messages[-1].reason == "resync"
        assert len(recorder.rows) == 50


async def test_truncated_between_the_snapshot_and_a_question(
    url: str, orders: Connection, other: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that reads a table after it was truncated finds it empty, also in an older
    snapshot."""
    async with Hub(url) as hub:
        hub.reconciler.seconds = (
            None  # reconciling asks, too, and this is about the question of the flush
        )
        recorder = Recorder()
        await hub.live(live("orders", order=["amount desc"], limit=1), recorder)

        export = flush._Flush.export

        async def truncated_first(one: flush._Flush) -> str:
            monkeypatch.setattr(flush._Flush, "export", export)
            await run(other, "truncate orders")
            return await export(one)

        monkeypatch.setattr(flush._Flush, "export", truncated_first)
        await run(orders, "insert into orders select i, 0, i from generate_series(6, 40) i")
        # In one flush with the insert, the delete would leave nothing to ask.
        await recorder.until(lambda: recorder.rows[0]["id"] == 40)
        await run(orders, "delete from orders where id > 10")
        await recorder.until(lambda: recorder.rows == [])
        ((truncated,),) = await rows(
            orders, "select xid::text::bigint from headwater.log where op = 'T'"
        )
        assert recorder.position is not None
        assert Position.parse(recorder.position).contains(truncated)


async def test_a_database_that_hangs(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "FLUSH_SECONDS_MAX", 1.0)
    async with Hub(url) as hub:
        recorder = Recorder()
        await hub.live(live("orders"), recorder)
        ((pid,),) = await rows(
            orders,
            "select pid from pg_stat_activity where application_name = 'headwater reader'"
            " and datname = current_database()",
        )
        os.kill(pid, signal.SIGSTOP)
        try:
            await run(orders, "insert into orders values (9, 9, 9)")
            await recorder.until(lambda: len(recorder.rows) == 6, 60)
        finally:
            os.kill(pid, signal.SIGCONT)
