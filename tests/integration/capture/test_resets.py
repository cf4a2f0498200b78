"""Changes without a logged row: DDL that changes rows or their meaning, triggers that are switched
off, tables that are enabled, disabled and dropped. The log has a `reset`, and readers are right
afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from headwater.capture.postgres import triggers
from headwater.database import Connection
from headwater.errors import CaptureError, InvalidQuery
from headwater.hub.hub import Hub
from headwater.identity import ANONYMOUS
from headwater.queries.context import Context
from tests.integration.hub.test_reactive import Follower, query
from tests.support.log_probe import LogProbe, enable, probing, rows, run
from tests.support.subscribers import Recorder, answer, live

SYNC = "select headwater.sync_tables()"
EVERY = "select id, b, doubled, m::text, l::text, p::text from items order by id"


@pytest.fixture(params=["postgres", "system_postgres"])
def server_url(request: pytest.FixtureRequest) -> str:
    server = request.getfixturevalue(request.param)
    return server if isinstance(server, str) else str(server.url)


@pytest.fixture
async def probe(url: str) -> AsyncIterator[LogProbe]:
    async with probing(url) as found:
        yield found


ITEMS = (
    "drop table if exists items, parents",
    "drop type if exists mood, pair, moods cascade",
    "create type mood as enum ('sad', 'glad')",
    "create type pair as (x int, m mood)",
    "create domain feeling as mood",
    "create type moods as range (subtype = mood)",
    "create table items (id int primary key, a int, b int, m mood, l mood[], f feeling, p pair,"
    " r moods, doubled int generated always as (a * 2) stored)",
    "insert into items select i, i, i, 'sad', '{sad}', 'sad', '(1,sad)', '[sad,glad]'"
    " from generate_series(1, 5) i",
    "select headwater.enable_reactivity('items')",
    SYNC,  # one before it was dropped, which is logged, too
)


async def prepare(*sessions: Connection) -> None:
    """A new table whose images depend on much, and plans that are cached."""
    await run(sessions[0], *ITEMS)
    for session in sessions * 6:
        await run(session, "update items set a = a + 1 where id = 1")


@pytest.fixture
async def items(connection: Connection, other: Connection, probe: LogProbe) -> Connection:
    await prepare(connection, other)
    await probe.changes()
    return connection


AT_ONCE: dict[str, list[str]] = {
    "rewritten": ["alter table items alter b type int using b * 1000"],
    "widened": ["alter table items alter b type bigint"],
    "a column with a default": ["alter table items add c int default 7"],
    "a column with a volatile default": ["alter table items add c float default random()"],
    "triggers off and on": [
        "alter table items disable trigger all",
        "update items set b = -1",
        "alter table items enable trigger all",
    ],
    "triggers off and on in one transaction": [
        "begin",
        "alter table items disable trigger user",
        "delete from items where id = 4",
        "alter table items enable trigger user",
        "commit",
    ],
    "set expression": ["alter table items alter doubled set expression as (a * 3)"],
}
"""The first write that comes after it says so."""

IN_TIME: dict[str, list[str]] = {
    "rewritten twice in one transaction": [
        "begin",
        "alter table items alter b type int using b * 10",
        SYNC,
        "alter table items alter b type int using b * 10",
        "commit",
    ],
    "a label renamed": ["alter type mood rename value 'sad' to 'blue'"],
    "an attribute more": ["alter type pair add attribute y int"],
    "an attribute less": ["alter type pair drop attribute m"],
    "an attribute renamed": ["alter type pair rename attribute x to z"],
    "a cast to json": [
        "create function as_json(pair) returns json language sql immutable return to_json(($1).x)",
        "create cast (pair as json) with function as_json(pair)",
    ],
    "triggers dropped": ["drop trigger headwater_update on items", "update items set b = -1"],
    "a trigger disabled": [
        "alter table items disable trigger headwater_delete",
        "delete from items where id = 4",
    ],
    "functions dropped": [
        "do $$ begin execute format('drop function headwater.capture_%s_update() cascade',"
        " 'items'::regclass::oid); end $$",
        "update items set b = -1",
    ],
}
"""The next maintenance does: the table itself is not altered, or nothing is captured any more."""

NOT_AT_ALL: dict[str, list[str]] = {
    "vacuum full": ["vacuum full items"],
    "cluster": ["cluster items using items_pkey"],
    "unlogged and logged": ["alter table items set unlogged", "alter table items set logged"],
    "a default": ["alter table items alter b set default 7"],
    "not null": ["alter table items alter b set not null"],
    "statistics": ["analyze items", "alter table items alter b set statistics 7"],
    "a label more": ["alter type mood add value 'calm'"],
    "a column of nulls": ["alter table items add c int"],
    "a column renamed": ["alter table items rename b to bb"],
    "a column dropped": ["alter table items drop b"],
    "a right": ["grant select (id) on items to public"],
    "an index": ["create index on items (b)", "reindex table items"],
    "rolled back": ["begin", "alter table items alter b type int using b * 1000", "rollback"],
    "the catalog vacuumed": ["vacuum full pg_attribute", "vacuum full pg_trigger"],
    "a function in an expression of another": ["create function f() returns int return 1"],
}


def cases(found: dict[str, list[str]], connection: Connection) -> list[tuple[str, list[str]]]:
    """Those that the server knows."""
    old = connection.info.server_version < 170_000
    return [each for each in found.items() if not (old and "set expression" in each[1][0])]


def alone(hub: Hub) -> None:
    """Without the comparison at every flush: between the DDL and its reset there is a difference,
    and the reset alone must end it."""
    hub.reconciler.seconds = 3600.0


async def test_the_first_write_logs_the_reset(
    url: str, connection: Connection, other: Connection, probe: LogProbe
) -> None:
    async with Hub(url, recheck=3600) as hub:
        alone(hub)
        for name, ddl in cases(AT_ONCE, connection):
            await prepare(connection, other)
            clients = await Clients().follow(hub)
            await run(connection, *ddl)
            await probe.changes()
            await run(other, "update items set a = a + 1 where id = 2")
            await run(connection, "update items set a = a + 1 where id = 2")
            assert await probe.story() == [("reset",), ("update", 2), ("update", 2)], name
            await clients.expect_the_tables_rows(hub, connection, name)
            # Maintenance makes the functions fit again, and logs nothing more.
            await run(connection, SYNC)
            assert await probe.story() == [], name
            assert await rows(connection, SYNC) == [(0,)], name


async def test_maintenance_logs_the_reset(
    url: str, connection: Connection, other: Connection, probe: LogProbe
) -> None:
    async with Hub(url, recheck=3600) as hub:
        alone(hub)
        for name, ddl in cases(IN_TIME, connection):
            await prepare(connection, other)
            clients = await Clients().follow(hub)
            await run(connection, *ddl)
            await run(other, "update items set a = a + 1 where id = 2")
            await probe.changes()
            await run(connection, SYNC)
            assert await probe.story() == [("reset",)], name
            assert await rows(connection, SYNC) == [(0,)], name
            await clients.expect_the_tables_rows(hub, connection, name)
            await run(other, "update items set a = a + 1 where id = 2")
            assert await probe.story() == [("update", 2)], name


async def test_maintenance_logs_the_reset_of_a_table_without_writes(
    items: Connection, probe: LogProbe
) -> None:
    await run(items, "alter table items alter b type int using b * 1000", SYNC)
    assert await probe.story() == [("reset",)]
    assert await rows(items, SYNC) == [(0,)]


async def test_ddl_that_changes_no_row_is_no_reset(
    connection: Connection, other: Connection, probe: LogProbe
) -> None:
    for name, ddl in cases(NOT_AT_ALL, connection):
        await prepare(connection, other)
        await probe.changes()
        await run(connection, *ddl)
        await run(other, "update items set a = a + 1 where id = 2")
        await run(connection, SYNC, "update items set a = a + 1 where id = 2")
        assert await probe.story() == [("update", 2), ("update", 2)], name


async def test_truncate_is_logged_as_truncate(items: Connection, probe: LogProbe) -> None:
    await run(items, "truncate items", SYNC, "insert into items (id) values (1)", SYNC)
    assert await probe.story() == [("truncate",), ("insert", 1)]


@pytest.mark.parametrize("kind", ["partitioned", "inherited"])
async def test_relations_below_a_table(
    kind: str, connection: Connection, other: Connection, probe: LogProbe
) -> None:
    """The table itself has no rows that could be rewritten."""
    if kind == "partitioned":
        await run(
            connection,
            "create table t (id int primary key, b int) partition by range (id)",
            "create table t1 partition of t for values from (0) to (10)",
            "create table t2 partition of t for values from (10) to (20)",
        )
    else:
        await run(
            connection,
            "create table t (id int primary key, b int)",
            "create table t1 (own int) inherits (t)",
            "create table t2 () inherits (t)",
        )
    await enable(connection, "t")
    await run(connection, "insert into t1 (id, b) values (1, 1)")
    await run(connection, "insert into t2 (id, b) values (11, 1)")
    await probe.changes()
    await run(connection, "alter table t alter b type int using b * 10")
    await run(other, "update t1 set b = b + 1")
    await run(connection, "update t set b = b + 1 where id = 11")
    assert await probe.story() == [("reset",), ("update", 1), ("update", 11)]
    await run(connection, "alter table t alter b type int using b * 10", SYNC)
    assert await probe.story() == [("reset",)]


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
async def test_a_type_that_is_altered_after_a_column_of_it_was_added(
    level: str, items: Connection, probe: LogProbe
) -> None:
    """Rows that were written in between have the old labels."""
    await run(
        items,
        "create type kind as enum ('new', 'old')",
        "alter table items add column k kind",
        f"begin isolation level {level}",
        "update items set k = 'new' where id = 1",
        "commit",
        "alter type kind rename value 'new' to 'fresh'",
        SYNC,
    )
    assert (await probe.story())[-1] == ("reset",)
    await run(items, "drop type kind cascade")


async def test_a_second_writer_logs_the_reset_too(
    items: Connection, other: Connection, probe: LogProbe
) -> None:
    """It cannot wait for the first, which may be rolled back: each transaction logs one reset."""
    await run(items, "alter table items alter b type int using b * 1000", "begin")
    await run(items, "update items set a = 0 where id = 1")
    await run(other, "begin", "update items set a = 0 where id = 2", "rollback")
    await run(other, "begin", *(f"update items set a = 0 where id = {key}" for key in (2, 3)))
    await run(other, "commit")
    assert await probe.story() == [("reset",), ("update", 2), ("update", 3)]
    await run(items, "rollback")
    await run(other, "update items set a = 0 where id = 4")
    assert await probe.story() == [("reset",), ("update", 4)]
    await run(items, "update items set a = 0 where id = 1")
    assert await probe.story() == [("update", 1)]


async def test_a_writer_cannot_hide_a_reset(items: Connection, probe: LogProbe) -> None:
    """With a setting in which earlier versions remembered that the session had logged it."""
    await run(items, "alter table items alter b type int using b * 1000")
    await run(
        items,
        "select set_config('headwater.reset_' || 'items'::regclass::oid, (select hashtextextended("
        " string_agg(headwater.observe(c.member, c.root)::text, ' ' order by c.member), 0)::text"
        " from headwater.captures c where c.root = 'items'::regclass), false)",
        "update items set a = 0 where id = 1",
    )
    assert await probe.story() == [("reset",), ("update", 1)]


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_a_writer_with_a_snapshot_of_its_own(
    level: str, items: Connection, other: Connection, probe: LogProbe
) -> None:
    await run(items, "alter table items alter b type int using b * 1000")
    await run(other, f"begin isolation level {level}", "select from items")
    # Another writer logs it first; that must not fail this one.
    await run(items, "update items set a = 0 where id = 1")
    await run(other, "update items set a = 0 where id = 2", "commit")
    assert await probe.story() == [("reset",), ("update", 1), ("reset",), ("update", 2)]


async def test_a_writer_without_rights(
    url: str, items: Connection, other: Connection, probe: LogProbe
) -> None:
    role = f"writer_{items.info.dbname}"
    await run(items, f"create role {role}", f"grant select, update on items to {role}")
    try:
        await run(items, "alter table items alter b type int using b * 1000")
        await run(other, f"set role {role}", "update items set a = 0 where id = 2", "reset role")
        assert await probe.story() == [("reset",), ("update", 2)]
    finally:
        await run(items, f"drop owned by {role}", f"drop role {role}")


async def test_writes_of_a_replica_are_captured(items: Connection, probe: LogProbe) -> None:
    as_replica = [
        "set session_replication_role = replica",
        "update items set a = 0 where id = 1",
        "truncate items",
        "set session_replication_role = origin",
    ]
    await run(items, *as_replica)
    assert await probe.story() == [("update", 1), ("truncate",)]
    await run(items, "insert into items (id) values (1)")
    await run(
        items, "alter table items disable trigger all", "alter table items enable trigger all"
    )
    await run(items, SYNC, *as_replica)
    assert await probe.story() == [("insert", 1), ("reset",), ("update", 1), ("truncate",)]


async def test_triggers_of_an_earlier_release_fire_in_every_session(
    items: Connection, probe: LogProbe
) -> None:
    """From the next time that the table is enabled: an upgrade takes no locks on tables."""
    await run(
        items, "alter table items disable trigger all", "alter table items enable trigger all"
    )
    await run(items, "update headwater.captures set triggers_mark = null, meaning = null")
    await enable(items, "items")
    # What happened before the upgrade is not known.
    assert await probe.story() == [("reset",)]
    assert await rows(
        items, "select distinct tgenabled from pg_trigger where tgname like 'headwater%'"
    ) == [("A",)]


async def test_a_partition_that_was_detached_for_a_while(
    connection: Connection, probe: LogProbe
) -> None:
    await run(
        connection,
        "create table t (id int primary key) partition by range (id)",
        "create table t1 partition of t for values from (0) to (10)",
    )
    await enable(connection, "t")
    await probe.changes()
    await run(
        connection,
        "alter table t detach partition t1",
        "insert into t1 values (1)",
        "alter table t attach partition t1 for values from (0) to (10)",
        SYNC,
    )
    assert await probe.story() == [("reset",)]


async def test_a_foreign_key_with_an_action_added_later(items: Connection, probe: LogProbe) -> None:
    """A statement may then bring several versions of a row: the function must be another."""
    await run(
        items,
        "create table parents (id int primary key)",
        "insert into parents select generate_series(0, 50)",
        "update items set a = 1, b = 1 where id = 1",
        "alter table items add foreign key (a) references parents on update cascade",
        "alter table items add foreign key (b) references parents on update cascade",
    )
    await probe.changes()
    await run(items, "update parents set id = 100 where id = 1")
    steps = [c.op for c in await probe.changes() if c.key == (1,)]
    assert await rows(items, SYNC) == [(1,)]
    await run(items, "update parents set id = 101 where id = 100")
    assert steps == [c.op for c in await probe.changes() if c.key == (1,)] == ["update", "update"]


# ------------------------------------------------------------------------ through a hub


async def everything(ctx: Context) -> Any:
    return await ctx.fetch(EVERY)


ALL = query(everything)


class Clients:
    """A client of a live query, and a client of a reactive query."""

    def __init__(self) -> None:
        self._live, self._reactive = Recorder(), Follower()

    async def follow(self, hub: Hub) -> Clients:
        self._handle = await hub.live(live("items"), self._live)
        await self._reactive.follow(hub, ALL)
        return self

    async def expect_the_tables_rows(self, hub: Hub, connection: Connection, story: str) -> None:
        """Both clients have the rows of the table, and so have new ones."""
        table = await answer(connection, "select * from items order by id")
        found = await answer(connection, EVERY)
        await self._live.until(lambda: self._live.rows == table)
        await self._reactive.until(lambda: self._reactive.value == found)
        late = await Clients().follow(hub)
        assert (late._live.rows, late._reactive.value) == (table, found), story
        for each in (self, late):
            each._handle.close()
            each._reactive.handle.close()


async def test_a_query_notices_at_once_that_capture_was_disabled(
    url: str, items: Connection, other: Connection
) -> None:
    async with Hub(url, recheck=3600) as hub:
        alone(hub)
        client, reactive = Recorder(), Follower()
        await hub.live(live("items"), client)
        await reactive.follow(hub, ALL)
        await run(items, "select headwater.disable_reactivity('items')")
        await run(other, "update items set b = 77")
        await reactive.until(lambda: reactive.failure)
        assert reactive.failure is not None
        assert "items, whose changes are not captured" in reactive.failure.message
        called = await hub.reactive.call(ALL, ALL.bind({}), ANONYMOUS)
        assert b'"b":77' in bytes(called.value)
        refused = Follower()
        with pytest.raises(CaptureError, match="not captured"):
            await refused.follow(hub, ALL)
        (table,) = await triggers.list_tables(items)
        assert not table.enabled
        await enable(items, "items")
        again = await Follower().follow(hub, ALL)
        assert again.value == await answer(items, EVERY)
        await reactive.until(lambda: reactive.value == again.value)
        await client.until_rows(await answer(items, "select * from items order by id"))
        assert client.error is None


async def test_a_query_over_a_partition_notices_it_too(url: str, connection: Connection) -> None:
    await run(
        connection,
        "create table t (id int primary key) partition by range (id)",
        "create table t1 partition of t for values from (0) to (10)",
    )

    async def below(ctx: Context) -> Any:
        return await ctx.fetch("select id from t1")

    asked = query(below)
    async with Hub(url, recheck=3600) as hub:
        with pytest.raises(CaptureError, match="not captured"):
            await Follower().follow(hub, asked)
        await enable(connection, "t")
        follower = await Follower().follow(hub, asked)
        await run(connection, "insert into t values (1)")
        await follower.until(lambda: follower.value == [{"id": 1}])


async def test_a_dropped_table_ends_its_subscriptions(url: str, items: Connection) -> None:
    async with Hub(url, recheck=3600) as hub:
        alone(hub)
        client, reactive = Recorder(), Follower()
        await hub.live(live("items"), client)
        await reactive.follow(hub, ALL)
        await run(items, "drop table items", SYNC)
        await client.until(lambda: client.error)
        await reactive.until(lambda: reactive.failure)


# ------------------------------------------------------------------------ virtual columns


@pytest.fixture
async def ratios(connection: Connection) -> Connection:
    if connection.info.server_version < 180_000:
        pytest.skip("virtual columns came with PostgreSQL 18")
    await run(
        connection,
        "create table ratios (id int primary key, a int, n text,"
        " ratio int generated always as (10 / a), place oid generated always as (tableoid))",
        "insert into ratios values (1, 5, 'x')",
    )
    await enable(connection, "ratios")
    return connection


async def test_virtual_columns_are_left_out_and_named(url: str, ratios: Connection) -> None:
    (table,) = await triggers.list_tables(ratios)
    assert table.left_out == ["ratio", "place"]
    async with Hub(url) as hub:
        client = Recorder()
        await hub.live(live("ratios"), client)
        await run(ratios, "insert into ratios values (2, 0, 'y')")
        await client.until_rows([{"id": 1, "a": 5, "n": "x"}, {"id": 2, "a": 0, "n": "y"}])
        for wrong in (
            {"where": [["ratio", "=", 2]]},
            {"order": ["ratio"]},
            {"columns": ["ratio"]},
        ):
            with pytest.raises(InvalidQuery, match="virtual column 'ratio' of ratios") as caught:
                await hub.live(live("ratios", **wrong), Recorder())
            assert "computed when it is read" in str(caught.value.hint)


async def test_a_reactive_query_may_read_virtual_columns(url: str, ratios: Connection) -> None:
    async def of_two(ctx: Context) -> Any:
        return await ctx.fetch("select id, ratio from ratios where ratio > 1 order by id")

    async with Hub(url) as hub:
        follower = await Follower().follow(hub, query(of_two))
        assert follower.value == [{"id": 1, "ratio": 2}]
        await run(ratios, "update ratios set a = 2")
        await follower.until(lambda: follower.value == [{"id": 1, "ratio": 5}])
        await run(ratios, "alter table ratios alter ratio set expression as (20 / a)", SYNC)
        await run(ratios, "update ratios set n = 'again'")
        await follower.until(lambda: follower.value == [{"id": 1, "ratio": 10}])
