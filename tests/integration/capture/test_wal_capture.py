"""Capture from the WAL: enabling, changing the way of capture, DDL, partitions, a runner that is
not there, a slot that is lost, and what is left behind: nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import Any

import psycopg
import pytest

from headwater import Headwater, limits
from headwater.admin.status import wal_capture_status
from headwater.capture.postgres import doctor, schema, triggers
from headwater.capture.postgres.wal import replication
from headwater.capture.postgres.wal.append import WalCapture, runner
from headwater.capture.postgres.wal.append.process import WalCaptureProcess
from headwater.database import Connection, connect
from headwater.errors import ConfigError, DatabaseError, HeadwaterError, SourceUnavailable
from headwater.hub.hub import Hub
from headwater.log import complete, maintenance
from headwater.model import Position
from headwater.pipeline.stream.planning import Planner
from tests.support.log_probe import LogProbe, enable, probing, rows, run
from tests.support.subscribers import Recorder, live
from tests.support.wal_capture import capturing, enable_wal, ends

ORDERS = "create table orders (id int primary key, n int, note text)"


@asynccontextmanager
async def captured(url: str, connection: Connection, *names: str) -> AsyncIterator[LogProbe]:
    """Tables that are captured from the WAL, a runner, and a probe of the log."""
    await enable_wal(connection, *names)
    async with capturing(url), probing(url) as probe:
        yield probe


async def test_changes_have_the_writers_transaction_and_commit_time(
    url: str, connection: Connection
) -> None:
    await run(connection, ORDERS)
    async with captured(url, connection, "orders") as probe:
        await run(connection, "begin; insert into orders values (1, 1, 'a')")
        ((xid,),) = await rows(connection, "select pg_current_xact_id()::text::bigint")
        await run(connection, "update orders set n = 2; commit")
        (transaction,) = await probe.transactions()
        assert [change.op for change in transaction.changes] == ["insert", "update"]
        assert {change.xid for change in transaction.changes} == {xid}
        ((at,),) = await rows(connection, f"select pg_xact_commit_timestamp('{xid}'::xid)")
        assert transaction.at == at


async def test_a_message_says_who_writes(url: str, connection: Connection) -> None:
    await run(connection, ORDERS)
    async with captured(url, connection, "orders") as probe:
        await run(
            connection,
            "begin; select headwater.set_actor('ada', 'ship', 'trace-1');"
            " insert into orders values (1); commit",
            "begin; select pg_logical_emit_message(true, 'headwater.actor', 'nothing');"
            " insert into orders values (2); commit",
        )
        first, second = await probe.changes()
        assert (first.actor.user_id, first.actor.function_name) == ("ada", "ship")
        assert first.actor.trace_id == "trace-1"
        assert second.actor.user_id is None


async def test_a_mutation_is_named_as_the_writer(url: str, connection: Connection) -> None:
    await run(connection, ORDERS)
    hw = Headwater(url)
    hw.table("orders", capture="wal")

    @hw.mutation
    async def ship(ctx: Any) -> None:
        await ctx.execute("insert into orders values (1)")

    async with hw, probing(url) as probe:
        await ship()
        (change,) = await probe.changes()
        assert change.actor.function_name == "ship"
        assert change.actor.trace_id
        await hw.disable("orders")


async def test_changing_the_way_of_capture_is_a_reset_and_loses_nothing(
    url: str, connection: Connection
) -> None:
    await run(connection, ORDERS)
    await enable(connection, "orders")
    async with capturing(url), probing(url) as probe:
        await run(connection, "insert into orders values (1)")
        await triggers.enable(connection, "orders", "wal")
        assert await rows(connection, "select from pg_trigger where not tgisinternal") == []
        await _running(connection)
        await run(connection, "insert into orders values (2)")
        await triggers.enable(connection, "orders")  # stays as it is
        await triggers.enable(connection, "orders", "trigger")
        await run(connection, "insert into orders values (3)")
        assert await probe.story() == [
            ("insert", 1), ("reset",), ("insert", 2), ("reset",), ("insert", 3),
        ]  # fmt: skip
        assert await ends(connection)
        assert await probe.story() == []


async def test_transactions_stay_in_order_when_read_after_capture_from_the_wal_has_ended(
    url: str, connection: Connection
) -> None:
    """The changes of before were appended after those that triggers wrote."""
    await run(connection, ORDERS, "insert into orders values (1, 0)")
    await enable_wal(connection, "orders")
    async with capturing(url), probing(url) as probe:
        since = probe.position
    await run(connection, "update orders set n = 1")
    # As `triggers.enable`, but a runner that comes later appends what is in the WAL.
    await run(connection, "select headwater.enable_reactivity('orders', 'trigger')")
    await run(connection, "update orders set n = 2")
    async with capturing(url):
        assert await ends(connection)
    async with probing(url) as probe:
        probe.position = since
        found = [change.after["n"] if change.after else None for change in await probe.changes()]
        assert found == [1, None, 2]
        assert [each async for each in _values_of(probe, since)] == found


async def _values_of(probe: LogProbe, since: Position) -> AsyncIterator[int | None]:
    """The same page by page."""
    async for transaction in probe.reader.catch_up(probe.connection, since, probe.position):
        for change in transaction.changes:
            yield change.after["n"] if change.after else None


async def test_disabling_the_last_table_leaves_nothing_behind(
    url: str, connection: Connection
) -> None:
    await run(connection, ORDERS, "create table lines (id int primary key)")
    await run(connection, "alter table lines replica identity nothing")
    async with captured(url, connection, "orders", "lines") as probe:
        await run(connection, "insert into orders values (1)")
        await triggers.disable(connection, "orders")
        await run(connection, "insert into orders values (2)", "insert into lines values (1)")
        assert await probe.story() == [("insert", 1), ("reset",), ("insert", 1)]
        await triggers.disable(connection, "lines")
        assert await ends(connection)
        assert await probe.story() == [("reset",)]
    assert await rows(connection, "select from pg_publication") == []
    identities = "select relname, relreplident from pg_class where relname in ('orders', 'lines')"
    assert dict(await rows(connection, identities)) == {"orders": "d", "lines": "n"}
    assert (await triggers.list_tables(connection))[0].capture == "trigger"


async def test_a_slot_that_is_in_use_a_moment_longer_is_dropped(
    url: str, connection: Connection
) -> None:
    await run(connection, ORDERS)
    async with captured(url, connection, "orders"):
        await _running(connection)
        await run(connection, "update headwater.tables set enabled = false")
        ending = asyncio.create_task(runner.end(connection))
    await ending
    assert await rows(connection, "select from pg_replication_slots") == []


async def test_disabling_without_a_runner_drops_the_slot(url: str, connection: Connection) -> None:
    await run(connection, ORDERS)
    await enable_wal(connection, "orders")
    await run(connection, "insert into orders values (1)")
    await triggers.disable(connection, "orders")
    assert await rows(connection, "select from pg_replication_slots") == []
    async with probing(url) as probe:
        assert await probe.story() == []


async def test_uninstalling_drops_the_slot_and_restores_the_tables(
    url: str, connection: Connection
) -> None:
    await run(connection, ORDERS)
    async with captured(url, connection, "orders"):
        assert await schema.uninstall(connection)
        assert await rows(connection, "select from pg_replication_slots") == []
        assert await rows(connection, "select from pg_publication") == []


async def test_partitions_and_children_are_captured_with_their_table(
    url: str, connection: Connection
) -> None:
    await run(
        connection,
        "create table parts (id int primary key, n int) partition by range (id)",
        "create table parts_1 partition of parts for values from (0) to (10)",
        "create table parts_2 (n int, id int not null)",
        "alter table parts attach partition parts_2 for values from (10) to (20)",
        "create table parents (id int primary key, n int)",
        "create table children (more text, primary key (id)) inherits (parents)",
    )
    async with captured(url, connection, "parts", "parents") as probe:
        await run(
            connection,
            "insert into parts values (1, 1), (11, 2)",
            "update parts set n = 3",
            "update parts set id = 12 where id = 1",
            "insert into children values (1, 1, 'x')",
        )
        assert await probe.story() == [
            ("insert", 1), ("insert", 11), ("update", 1), ("update", 11), ("delete", 1),
            ("insert", 12), ("insert", 1),
        ]  # fmt: skip
        await run(connection, "truncate parts_1", "truncate parts", "truncate only parents")
        assert await probe.story() == [("reset",), ("truncate",), ("reset",)]
        await run(
            connection,
            "create table parts_3 partition of parts for values from (20) to (30)",
            "insert into parts values (21, 1)",
            "update parts set n = 2 where id = 21",  # the row before it is not in the WAL
        )
        assert [op for op, *_ in await probe.story()] == ["reset", "insert", "reset"]
        await maintenance.once(connection)
        await probe.story()
        await run(connection, "update parts set n = 3 where id = 21")
        assert await probe.story() == [("update", 21)]


DDL = (
    "alter table orders add column more int",
    "alter table orders add column more int default 7",
    "alter table orders alter column n type bigint using n * 1000",
    "alter table orders drop column note",
    "alter table orders rename column note to text",
)


@pytest.mark.parametrize("statement", DDL)
@pytest.mark.parametrize("runs", [True, False])
async def test_rows_after_ddl_have_the_new_shape_or_follow_a_reset(
    url: str, connection: Connection, statement: str, runs: bool
) -> None:
    """Where the runner did not run, it meets changes from before the DDL when the catalog is
    already ahead of them."""
    await run(connection, ORDERS)
    await enable_wal(connection, "orders")
    async with probing_while(url, runs=True) as probe:
        await run(connection, "insert into orders values (1, 1, 'a')")
        assert await probe.story() == [("insert", 1)]
    async with probing_while(url, runs=runs) as probe:
        await run(connection, "update orders set n = 2")
        changes = await probe.changes() if runs else []
        await run(connection, statement, "update orders set n = 3")
        async with capturing(url):
            changes += await probe.changes()
    last = changes[-1]
    assert last.op == "update"
    resets = [change for change in changes if change.op == "reset"]
    rewrites = "default 7" in statement or "using" in statement
    assert bool(resets) == (rewrites or not runs)
    (true,) = await rows(connection, "select row_to_json(o) from orders o")
    assert last.after == true[0]


@asynccontextmanager
async def probing_while(url: str, *, runs: bool) -> AsyncIterator[LogProbe]:
    if not runs:
        async with capturing(url), probing(url) as probe:
            pass
        connection = await connect(url, purpose="probe", application_path=True)
        try:
            yield LogProbe(connection, probe.reader, probe.position)
        finally:
            await connection.close()
        return
    async with capturing(url), probing(url) as probe:
        yield probe


async def test_a_renamed_label_is_a_reset_of_maintenance(url: str, connection: Connection) -> None:
    await run(
        connection,
        "create type mood as enum ('sad', 'glad')",
        "create table moods (id int primary key, mood mood)",
    )
    async with captured(url, connection, "moods") as probe:
        await run(connection, "insert into moods values (1, 'sad')")
        await run(connection, "alter type mood rename value 'sad' to 'blue'")
        await maintenance.once(connection)
        assert await probe.story() == [("insert", 1), ("reset",)]
        await maintenance.once(connection)
        assert await probe.story() == []


async def test_a_large_transaction_is_appended_whole(
    url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WAL_APPEND_CHANGES", 100)
    await run(connection, ORDERS)
    async with captured(url, connection, "orders") as probe:
        await run(connection, "insert into orders select i, i from generate_series(1, 5000) i")
        (transaction,) = await probe.transactions()
        assert [change.key for change in transaction.changes] == [(i,) for i in range(1, 5001)]


async def test_a_large_transaction_shows_progress_before_its_end(
    url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WAL_APPEND_CHANGES", 100)
    await run(connection, ORDERS)
    async with captured(url, connection, "orders") as probe:
        batches = "select last_value from headwater.wal_batches"
        ((before,),) = await rows(connection, batches)
        await run(connection, "insert into orders select i, i from generate_series(1, 5000) i")
        await probe.transactions()
        ((after,),) = await rows(connection, batches)
        assert after - before > 5
        await run(connection, "insert into orders values (0)")
        await probe.transactions()
        assert await rows(connection, batches) == [(after,)], "a small one pays nothing"


async def test_an_append_fails_where_another_process_has_appended(
    url: str, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that lost its connection to the slot, and does not know yet."""
    await run(connection, ORDERS)
    async with captured(url, connection, "orders") as probe:
        await run(connection, "insert into orders values (1)")
        assert await probe.story() == [("insert", 1)]
        await run(
            connection,
            "update headwater.wal_capture set lsn = pg_current_wal_insert_lsn()",
            "insert into orders values (2)",
        )
        # It stops, and begins again at the place that was saved.
        assert await probe.story() == [("insert", 2)]
    assert "or another process reads it" in caplog.text


async def test_a_value_that_the_log_does_not_accept_is_a_reset(
    url: str, connection: Connection
) -> None:
    """Nested too deeply for the stack of the session that appends."""
    await run(connection, "create table docs (id int primary key, doc json)")
    ((database,),) = await rows(connection, "select current_database()::text")
    await run(connection, f"alter database {database} set max_stack_depth = '100kB'")
    async with captured(url, connection, "docs") as probe:
        depth = 2_000
        await run(
            connection,
            f"insert into docs values (1, (repeat('[', {depth}) || repeat(']', {depth}))::json)",
        )
        assert await probe.story() == [("reset",)]
        await run(connection, "insert into docs values (2, '[]')")
        assert await probe.story() == [("insert", 2)]


async def test_a_row_that_is_too_large_for_the_log_is_a_reset(
    url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control character takes six bytes in JSON."""
    monkeypatch.setattr(limits, "WAL_IMAGE_BYTES_MAX", 10_000)
    await run(connection, ORDERS)
    async with captured(url, connection, "orders") as probe:
        await run(connection, "insert into orders values (1, 1, repeat('x', 5000))")
        assert await probe.story() == [("insert", 1)]
        await run(connection, "begin; insert into orders values (2, 2, repeat(chr(1), 2000))")
        ((xid,),) = await rows(connection, "select pg_current_xact_id()::text::bigint")
        await run(connection, "commit", "insert into orders values (3, 3, 'small')")
        reset, insert = await probe.changes()
        assert (reset.op, reset.xid, insert.op, insert.key) == ("reset", xid, "insert", (3,))
        await run(connection, "update orders set n = 4 where id = 2")
        assert await probe.story() == [("reset",)]


async def test_rows_that_the_log_refuses_for_any_reason_are_a_reset(
    url: str, connection: Connection
) -> None:
    """Capture continues: the same error would come for ever."""
    await run(connection, ORDERS)
    async with captured(url, connection, "orders") as probe:
        await run(
            connection,
            "create function public.refuse() returns trigger language plpgsql as $$ begin"
            " if new.op = 'I' then raise 'broken' using errcode = 'XX000'; end if;"
            " return new; end $$",
            "create trigger refuse before insert on headwater.log for each row"
            " execute function public.refuse()",
            "insert into orders values (1)",
        )
        assert await probe.story() == [("reset",)]
        await run(connection, "drop trigger refuse on headwater.log")
        await run(connection, "insert into orders values (2)")
        assert await probe.story() == [("insert", 2)]


async def test_a_slot_that_the_server_cannot_read_is_replaced(
    url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row before and after its change has more than the 1 GB of a message."""
    await run(connection, ORDERS)
    async with captured(url, connection, "orders") as probe:
        pass
    present = "select slot from headwater.wal_capture"
    ((unreadable,),) = await rows(connection, present)

    async def open_stream(url: str, slot: str, *values: Any, **options: Any) -> Any:
        stream = await replication.open_stream(url, slot, *values, **options)
        if slot == unreadable:
            monkeypatch.setattr(stream, "receive", _too_large)
        return stream

    monkeypatch.setattr(runner, "open_stream", open_stream)
    async with probing_at(url, probe) as probe, capturing(url):
        await run(connection, "insert into orders values (1)")
        async with asyncio.timeout(30):
            while await rows(connection, present) == [(unreadable,)]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert ("reset",) in await probe.story()
        await run(connection, "insert into orders values (2)")
        assert await probe.story() == [("insert", 2)]


async def _too_large() -> Any:
    raise SourceUnavailable("too large") from psycopg.errors.ProgramLimitExceeded("too large")


# ---------------------------------------------------------------------- a runner that is not there


async def test_readers_do_not_go_past_what_is_not_in_the_log(
    url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.log.complete.WAL_CAPTURE_SECONDS", 0.2)
    await run(connection, ORDERS, "create table accounts (id int primary key)")
    await enable(connection, "accounts")
    async with captured(url, connection, "orders") as probe:
        pass
    async with probing_at(url, probe) as probe:
        await run(connection, "insert into orders values (1)", "insert into accounts values (1)")
        with pytest.raises(DatabaseError, match=r"WAL capture is not running: \d+ bytes behind"):
            await probe.story()
        status = await wal_capture_status(connection)
        assert status is not None
        assert not status.running
        found = [f for f in await doctor.examine(connection) if f.topic == "WAL capture"]
        assert [each.level for each in found] == ["fail"]
        assert "not running" in found[0].detail
        async with capturing(url):
            assert await probe.story() == [("insert", 1), ("insert", 1)]


@asynccontextmanager
async def probing_at(url: str, probe: LogProbe) -> AsyncIterator[LogProbe]:
    connection = await connect(url, purpose="probe", application_path=True)
    try:
        yield LogProbe(connection, probe.reader, probe.position)
    finally:
        await connection.close()


async def test_a_lost_slot_is_replaced_and_its_tables_are_read_again(
    url: str, connection: Connection
) -> None:
    await run(connection, ORDERS)
    async with captured(url, connection, "orders") as probe:
        pass
    await run(connection, "insert into orders values (1)")
    await _slots_are_free(connection)
    await run(connection, "select pg_drop_replication_slot(slot_name) from pg_replication_slots")
    async with probing_at(url, probe) as probe:
        with pytest.raises(DatabaseError, match="lost"):
            await probe.story()
        async with capturing(url):
            await _running(connection)
            assert await probe.story() == [("reset",)]
            await run(connection, "insert into orders values (2)")
            assert await probe.story() == [("insert", 2)]


async def _slots_are_free(connection: Connection) -> None:
    """The server frees a slot some time after its reader has gone."""
    async with asyncio.timeout(10):
        while True:
            found = await connection.execute("select 1 from pg_replication_slots where active")
            if await found.fetchone() is None:
                return
            await asyncio.sleep(0.02)


async def _running(connection: Connection) -> None:
    async with asyncio.timeout(10):
        while True:
            status = await wal_capture_status(connection)
            if status is not None and status.running:
                return
            await asyncio.sleep(0.02)


async def test_one_of_two_runners_works_and_the_other_takes_over(
    url: str, connection: Connection
) -> None:
    await run(connection, ORDERS)
    first = WalCapture(url)
    async with captured(url, connection, "orders") as probe:
        task = asyncio.create_task(first.run())
        await run(connection, "insert into orders values (1)")
        assert await probe.story() == [("insert", 1)]
    async with probing_at(url, probe) as probe:
        await run(connection, "insert into orders values (2)")
        assert await probe.story() == [("insert", 2)]
    first.stop()
    await task


async def test_a_process_is_started_while_tables_need_it_and_replaced_when_killed(
    url: str, connection: Connection
) -> None:
    await run(connection, ORDERS)
    watch = WalCaptureProcess(url)
    task = asyncio.create_task(watch.run())
    try:
        await enable_wal(connection, "orders")
        async with probing(url) as probe:
            for number in range(3):
                await run(connection, f"insert into orders values ({number})")
                assert await probe.story() == [("insert", number)]
                assert watch.pid is not None
                os.kill(watch.pid, signal.SIGKILL)
        await triggers.disable(connection, "orders")
        assert await ends(connection)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert watch.pid is None


async def test_an_application_captures_its_tables(url: str, connection: Connection) -> None:
    await run(connection, ORDERS)
    hw = Headwater(url)
    hw.table("orders", capture="wal")
    async with hw:
        feed = hw.changes("orders")
        task = asyncio.ensure_future(anext(feed))
        await asyncio.sleep(0)
        async with asyncio.timeout(20):
            number = 0
            while not task.done():  # until the feed has begun
                number += 1
                await run(connection, f"insert into orders values ({number})")
                await asyncio.sleep(0.05)
        assert task.result().changes[0].op == "insert"
        await feed.aclose()
        await hw.disable("orders")


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("create unlogged table t (id int primary key)", "unlogged"),
        ("create table t (id int)", "no primary key"),
        ("create view t as select 1 as id", "is a view"),
    ],
)
async def test_a_table_that_cannot_be_captured_is_refused_and_nothing_is_left(
    connection: Connection, statement: str, message: str
) -> None:
    await run(connection, statement)
    with pytest.raises(HeadwaterError, match=message) as raised:
        await triggers.enable(connection, "t", "wal")
    assert raised.value.hint
    assert await rows(connection, "select from pg_replication_slots") == []
    assert await rows(connection, "select from pg_publication") == []


async def test_another_word_than_trigger_or_wal_is_refused(connection: Connection) -> None:
    await run(connection, ORDERS)
    with pytest.raises(ConfigError, match="not known"):
        await triggers.enable(connection, "orders", "binlog")  # type: ignore[arg-type]
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="no capture 'binlog'"):
        await run(connection, "select headwater.enable_reactivity('orders', 'binlog')")


async def test_a_role_without_the_right_to_replicate_is_refused_with_the_way_out(
    connection: Connection,
) -> None:
    await run(connection, ORDERS)
    ((role,),) = await rows(connection, "select 'plain_' || md5(random()::text)")
    await run(connection, f"create role {role}", f"alter table orders owner to {role}")
    await run(connection, f"grant all on all tables in schema headwater to {role}")
    await run(connection, f"grant usage on schema headwater to {role}")
    await run(connection, f"grant execute on all functions in schema headwater to {role}")
    ((database,),) = await rows(connection, "select current_database()::text")
    await run(connection, f"grant create on database {database} to {role}", f"set role {role}")
    try:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="may not read the WAL"):
            await run(connection, "select headwater.enable_reactivity('orders', 'wal')")
    finally:
        await run(connection, "reset role", f"drop owned by {role}", f"drop role {role}")


async def test_a_role_that_only_inherits_from_the_owner_does_not_capture(
    url: str, connection: Connection
) -> None:
    """The right to replicate is not inherited."""
    await run(connection, ORDERS)
    ((role,),) = await rows(connection, "select 'member_' || md5(random()::text)")
    await run(
        connection, f"create role {role}_owner", f"create role {role} login in role {role}_owner"
    )
    await enable_wal(connection, "orders")
    await run(connection, f"alter schema headwater owner to {role}_owner")
    for rights in ("select on all tables", "execute on all functions"):
        await run(connection, f"grant {rights} in schema headwater to {role}_owner")
    member = await connect(url.replace("postgres@", f"{role}@"), purpose="test")
    try:
        assert await runner.is_free(connection)
        assert not await runner.is_free(member)
        (found,) = [f for f in await doctor.examine(member) if f.topic == "WAL capture"]
        assert found.hint == f"As a superuser: alter role {role} replication"
        await run(connection, f"alter role {role} replication")
        assert await runner.is_free(member)
    finally:
        await member.close()
        await run(connection, "alter schema headwater owner to postgres")
        for each in (role, f"{role}_owner"):
            await run(connection, f"drop owned by {each}", f"drop role {each}")


async def test_a_table_that_is_enabled_again_is_captured_by_the_same_run(
    url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(connection, ORDERS)
    await enable_wal(connection, "orders")
    ((slot,),) = await rows(connection, "select wal_slot from headwater.installation")
    over = _NotOver()
    run_ = runner._Run(connection, over, over, slot)  # type: ignore[arg-type]
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.0)
    await run(connection, "update headwater.tables set enabled = false")
    assert not await run_._is_over()
    await run(connection, "update headwater.tables set enabled = true")
    over.confirmed = 1 << 62
    assert not await run_._is_over()
    await run(connection, "update headwater.tables set enabled = false")
    assert await run_._is_over()


class _NotOver:
    """A stream and an appender that have nothing to do."""

    confirmed = 0
    has_work = False


async def test_a_table_of_a_superuser_is_prepared_by_its_owner(connection: Connection) -> None:
    await run(connection, ORDERS)
    ((role,),) = await rows(connection, "select 'plain_' || md5(random()::text)")
    ((database,),) = await rows(connection, "select current_database()::text")
    await run(connection, f"create role {role} replication")
    await run(connection, f"grant all on all tables in schema headwater to {role}")
    await run(connection, f"grant all on all sequences in schema headwater to {role}")
    await run(connection, f"grant usage on schema headwater to {role}")
    await run(connection, f"grant execute on all functions in schema headwater to {role}")
    await run(connection, f"grant create on database {database} to {role}", f"set role {role}")
    enable = "select headwater.check_wal('orders'::regclass)"
    try:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="another role") as raised:
            await run(connection, enable)
        hint = raised.value.diag.message_hint or ""
        assert "grant postgres" not in hint
        statements = hint.partition("As its owner postgres: ")[2].partition("; then enable")[0]
        await run(connection, "reset role", *statements.split("; "), f"set role {role}")
        await run(connection, enable)
        await triggers.enable(connection, "orders", "wal")
        await triggers.disable(connection, "orders")
    finally:
        await run(connection, "reset role", f"drop owned by {role}", f"drop role {role}")


async def test_a_hub_is_not_ready_without_capture_and_continues_with_it(
    url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.log.complete.WAL_CAPTURE_SECONDS", 1.0)
    await run(connection, ORDERS)
    await enable_wal(connection, "orders")
    recorder = Recorder()
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(AsyncExitStack())
        await running.enter_async_context(capturing(url))
        await _running(connection)
        hub = await stack.enter_async_context(Hub(url))
        await hub.live(live("orders", order=["id"], limit=5), recorder)
        await run(connection, "insert into orders values (1)")
        await _until(lambda: [row["id"] for row in recorder.rows] == [1])
        await running.aclose()
        await run(connection, "insert into orders values (2)")
        await _until(lambda: not hub.ready)
        assert [row["id"] for row in recorder.rows] == [1]
        await stack.enter_async_context(capturing(url))
        await _until(lambda: [row["id"] for row in recorder.rows] == [1, 2])
        await _until(lambda: hub.ready)


async def test_a_hub_takes_a_new_snapshot_while_a_large_transaction_is_appended(
    url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(connection, ORDERS)
    await enable_wal(connection, "orders")
    recorder, behind = Recorder(), [3]
    original = complete.wait

    async def wait(*arguments: Any, holds_snapshot: bool) -> None:
        if holds_snapshot and behind[0]:
            behind[0] -= 1
            raise complete.StillBehind("a large transaction")
        await original(*arguments, holds_snapshot=holds_snapshot)

    async with capturing(url), Hub(url) as hub:
        await hub.live(live("orders", order=["id"], limit=5), recorder)
        monkeypatch.setattr(complete, "wait", wait)
        await run(connection, "insert into orders values (1)")
        await _until(lambda: [row["id"] for row in recorder.rows] == [1])
        assert behind == [0]
        assert hub.ready


async def test_a_planner_says_whether_its_caller_holds_a_snapshot(
    url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(connection, ORDERS)
    await enable_wal(connection, "orders")
    held: list[bool] = []
    monkeypatch.setattr(
        complete, "wait_blocking", lambda *_, holds_snapshot: held.append(holds_snapshot)
    )
    with closing(Planner(url)) as planner:
        planner.now()
        planner.now(holds_snapshot=True)
    assert held == [False, True]


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - another task makes it true
            await asyncio.sleep(0.02)
