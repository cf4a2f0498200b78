"""Mirrors and runners over a real PostgreSQL, with a scripted source: what people request, what
goes wrong, and what stays as it was."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from headwater.capture.mirror import registry, tables
from headwater.capture.postgres import schema
from headwater.capture.running.supervisor import Supervisor
from headwater.capture.source import (
    UNCHANGED,
    Item,
    Problem,
    Progress,
    RowChanges,
    SourceDefinition,
    TableSpec,
)
from headwater.database import Connection, connect
from headwater.errors import ConfigError, NotFound, SourceUnavailable
from tests.support.scripted_source import Commit, History, ScriptedSource

SHOP = SourceDefinition("shop", "sqlite:///generated", "shop")


class Stage:
    """A source over a history that tests extend, and a supervisor."""

    def __init__(self, url: str, connection: Connection) -> None:
        self.url = url
        self.connection = connection
        self.history = History(7, 20, tables=("orders",), truncates=False)
        self.visible = 20
        self.oldest = 0
        self.problems: list[Problem] = []
        self.unavailable = False
        self.filters_rows = False
        self.opened: list[ScriptedSource] = []
        self._supervisor = Supervisor(url, open_source=self.open, chunk_rows=7, retry_seconds=0.01)
        self._task: asyncio.Task[None] | None = None

    def open(self, definition: SourceDefinition) -> ScriptedSource:
        if self.unavailable:
            raise SourceUnavailable("the source is down", hint="Start it.")
        source = ScriptedSource(
            definition, self.history, lambda: self.visible, random.Random(1), oldest=self.oldest
        )
        source.problems = self.problems
        self.opened.append(source)
        return source

    def commit(self, *changes: RowChanges) -> None:
        """One more commit of the source."""
        after = {name: dict(rows) for name, rows in self.history.state(self.visible).items()}
        for change in changes:
            rows = after[change.table]
            for row in change.before:
                assert row is not None
                rows.pop(str(row[0]))
            rows.update({str(row[0]): row for row in change.after})
        self.history.commits.append(Commit(changes, (), after))
        self.visible += 1

    async def start(self, definition: SourceDefinition = SHOP) -> None:
        await registry.declare(self.connection, definition, "command")
        self._task = asyncio.create_task(self._supervisor.run())

    async def stop(self) -> None:
        await self._supervisor.stop()
        if self._task is not None:
            await self._task
            self._task = None

    async def state(self) -> registry.SourceState:
        (found,) = await registry.sources(self.connection)
        return found

    async def until(self, state: str) -> registry.SourceState:
        async def is_there() -> registry.SourceState | None:
            found = await self.state()
            return found if found.state == state else None

        found: registry.SourceState = await until(is_there, state)
        return found

    async def until_equal(self, table: str = "orders") -> None:
        async def is_equal() -> bool:
            return await self.rows(table) == self.expected(table)

        await until(is_equal, "mirror equals source")

    async def rows(self, table: str = "orders") -> list[tuple[Any, ...]]:
        try:
            return await self.fetch(
                f"select t.id::text, t.name, t.amount::text, t.note from shop.{table} t"
                " order by t.id"
            )
        except psycopg.errors.UndefinedTable:
            return []

    def expected(self, table: str = "orders") -> list[tuple[Any, ...]]:
        rows = self.history.state(self.visible)[table]
        return [rows[key] for key in sorted(rows, key=int)]

    async def fetch(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        cursor = await self.connection.execute(statement.encode(), values)
        return await cursor.fetchall()


async def until(condition: Callable[[], Awaitable[Any]], what: str, seconds: float = 30) -> Any:
    found = None
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while not (found := await condition()):  # noqa: ASYNC110 - a row of the database
                await asyncio.sleep(0.02)
    assert found, what
    return found


@pytest.fixture
async def stage(url: str) -> AsyncIterator[Stage]:
    connection = await connect(url, purpose="test")
    stage = Stage(url, connection)
    yield stage
    await stage.stop()
    await connection.close()


# ------------------------------------------------------------------------ state and requests


async def test_the_state_of_a_source_is_reported_and_reactive(stage: Stage) -> None:
    await stage.start()
    await stage.until_equal()
    found = await stage.until("running")
    assert (found.kind, found.into_schema, found.error) == ("sqlite", "shop", None)
    assert [(t.name, t.state) for t in found.tables] == [("orders", "live")]
    assert await stage.fetch(
        "select enabled from headwater.tables where relid = 'headwater.sources'::regclass"
    ) == [(True,)]
    await stage.stop()
    assert (await stage.state()).state == "stopped"


async def test_a_paused_source_applies_nothing_until_it_is_resumed(stage: Stage) -> None:
    await stage.start()
    await stage.until_equal()
    await registry.request_pause(stage.connection, "shop")
    await stage.until("paused")
    before = await stage.rows()
    stage.commit(RowChanges("orders", "insert", [("1000", "new", "1.00", None)]))
    await asyncio.sleep(0.2)
    assert await stage.rows() == before
    await registry.request_resume(stage.connection, "shop")
    await stage.until_equal()


async def test_a_lost_position_leaves_the_rows_until_a_resnapshot(stage: Stage) -> None:
    await stage.start()
    await stage.until_equal()
    await stage.stop()
    old = await stage.rows()
    stage.commit(RowChanges("orders", "insert", [("1000", "new", "1.00", None)]))
    stage.oldest = stage.visible
    stage._supervisor = Supervisor(stage.url, open_source=stage.open, retry_seconds=0.01)
    await stage.start()
    lost = await stage.until("lost")
    assert "resnapshot shop" in (lost.hint or "")
    assert await stage.rows() == old
    await registry.request_resnapshot(stage.connection, "shop")
    await stage.until_equal()
    await stage.until("running")
    assert await stage.fetch("select resnapshot from headwater.source_definitions") == [(None,)]


async def test_a_resnapshot_writes_only_what_differs_and_leaves_what_people_added(
    stage: Stage,
) -> None:
    await stage.start()
    await stage.until_equal()
    await stage.until("running")
    await stage.connection.execute("create index by_name on shop.orders (name)")
    await stage.connection.execute("grant select on shop.orders to public")
    key = stage.expected()[0][0]
    async with stage.connection.transaction():
        await stage.connection.execute("set local headwater.applies = 'shop'")
        await stage.connection.execute("delete from shop.orders where id = %s", (key,))
    ((seq,),) = await stage.fetch("select max(seq) from headwater.log")
    await registry.request_resnapshot(stage.connection, "shop", ("orders",))
    await stage.until_equal()
    logged = await stage.fetch(
        "select l.op::text, l.after ->> 'id' from headwater.log l where l.seq > %s and l.shape in"
        " (select id from headwater.shapes where relid = 'shop.orders'::regclass)",
        seq,
    )
    assert logged == [("I", key)]
    assert await stage.fetch("select to_regclass('shop.by_name') is not null") == [(True,)]
    assert await stage.fetch("select has_table_privilege('public', 'shop.orders', 'select')") == [
        (True,)
    ]


@pytest.mark.parametrize("drop", [False, True])
async def test_a_removed_source_leaves_nothing_behind(stage: Stage, drop: bool) -> None:
    await stage.start()
    await stage.until_equal()
    await registry.request_remove(stage.connection, "shop", drop=drop)

    async def is_gone() -> bool:
        return await registry.definitions(stage.connection) == []

    await until(is_gone, "removed")
    assert stage.opened[-1].removed
    assert await registry.sources(stage.connection) == []
    assert await stage.fetch("select from headwater.source_tables") == []
    if drop:
        assert await stage.fetch("select to_regclass('shop.orders')") == [(None,)]
        assert await stage.fetch("select to_regnamespace('shop')") == [(None,)]
    else:
        await stage.connection.execute("delete from shop.orders")


@pytest.mark.parametrize(
    "statements",
    [("create schema shop",), ("create schema shop", "create table shop.mine ()")],
    ids=["made by somebody else", "with another table"],
)
async def test_a_schema_that_is_in_use_stays(stage: Stage, statements: tuple[str, ...]) -> None:
    for statement in statements:
        await stage.connection.execute(statement.encode())
    if len(statements) > 1:
        await stage.connection.execute(
            "comment on schema shop is 'made by Headwater for the mirrors of a source'"
        )
    async with stage.connection.transaction():
        await tables.drop_schema(stage.connection, "shop")
    assert await stage.fetch("select to_regnamespace('shop') is not null") == [(True,)]


async def test_two_runners_apply_each_change_once(stage: Stage) -> None:
    await stage.start()
    await stage.until_equal()
    second = Supervisor(stage.url, open_source=stage.open, retry_seconds=0.01)
    running = asyncio.create_task(second.run())
    for number in range(20):
        stage.commit(RowChanges("orders", "insert", [(str(1000 + number), "new", "1.00", None)]))
        await asyncio.sleep(0.01)
    await stage.until_equal()
    await second.stop()
    await running
    assert len(stage.opened) == 1, "the second one never opened the source"


async def test_a_position_is_saved_from_the_one_that_was_saved_before(stage: Stage) -> None:
    await stage.start()
    await stage.until_equal()
    await stage.stop()
    with pytest.raises(psycopg.errors.SerializationFailure, match="not at the position"):
        await stage.connection.execute("select headwater.save_position('shop', '3', '4', null)")


async def test_a_copied_database_has_the_position_and_waits_to_be_resumed(stage: Stage) -> None:
    await stage.start()
    await stage.until_equal()
    await stage.stop()
    await stage.connection.execute("update headwater.installation set home = 'elsewhere'")
    await schema.install(stage.connection)
    assert await stage.fetch("select paused from headwater.source_definitions") == [(True,)]
    assert await stage.fetch("select xid::text, position from headwater.source_transactions") == [
        ("1", "20")
    ]
    await registry.request_resume(stage.connection, "shop")
    stage.commit(RowChanges("orders", "insert", [("1000", "new", "1.00", None)]))
    stage._supervisor = Supervisor(stage.url, open_source=stage.open, retry_seconds=0.01)
    await stage.start()
    await stage.until_equal()


async def test_positions_are_trimmed_with_the_log_but_the_last_one(stage: Stage) -> None:
    await stage.start()
    await stage.until_equal()
    for number in range(5):
        stage.commit(RowChanges("orders", "insert", [(str(1000 + number), "new", "1.00", None)]))
    await stage.until_equal()
    await stage.stop()
    count = "select count(*) from headwater.source_transactions"
    ((before,),) = await stage.fetch(count)
    assert before > 5
    assert await stage.fetch("select headwater.trim_source_transactions()") == [(0,)]
    await stage.fetch("select setval('headwater.log_floor', 1000000000)")
    assert await stage.fetch("select headwater.trim_source_transactions()") == [(before - 1,)]
    assert await stage.fetch("select position from headwater.source_transactions") == [("25",)]


# ------------------------------------------------------------------------ what goes wrong


class DeafSource(ScriptedSource):
    """Loses the first cancellation, as `asyncio.wait_for` can before Python 3.12."""

    async def changes(self, after: str) -> AsyncGenerator[Item, None]:
        yield Progress(after)
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)


async def test_a_source_that_loses_a_cancellation_is_stopped_all_the_same(stage: Stage) -> None:
    def open_deaf(definition: SourceDefinition) -> DeafSource:
        return DeafSource(definition, stage.history, lambda: stage.visible, random.Random(1))

    stage._supervisor = Supervisor(stage.url, open_source=open_deaf)
    await stage.start()
    await stage.until_equal()
    async with asyncio.timeout(20):
        await stage.stop()


async def test_a_problem_at_the_source_refuses_it_with_the_fix(stage: Stage) -> None:
    stage.problems = [Problem("the log is off", "Switch it on.")]
    await stage.start()
    found = await stage.until("refused")
    assert (found.error, found.hint) == ("the log is off", "Switch it on.")
    assert await stage.fetch("select to_regnamespace('shop')") == [(None,)]


async def test_a_warning_is_shown_and_does_not_prevent_the_source(stage: Stage) -> None:
    stage.problems = [Problem("the log is small", "Make it larger.", warning=True)]
    await stage.start()
    await stage.until_equal()
    assert "Make it larger" in ((await stage.until("running")).warning or "")


async def test_a_source_that_cannot_be_reached_is_tried_again(stage: Stage) -> None:
    stage.unavailable = True
    await stage.start()
    assert (await stage.until("failed")).hint == "Start it."
    stage.unavailable = False
    await stage.until_equal()


async def test_a_table_of_somebody_else_is_not_touched(stage: Stage) -> None:
    await stage.connection.execute("create schema shop create table orders (id int)")
    await stage.start()
    found = await stage.until("refused")
    assert "shop.orders exists and is not the mirror" in (found.error or "")
    assert "headwater source remove --drop-tables" in (found.hint or "")
    assert await stage.fetch("select from headwater.source_tables") == []


async def test_a_mirror_that_differs_is_named_and_nothing_is_applied(stage: Stage) -> None:
    await stage.start()
    await stage.until_equal()
    key, *_ = stage.expected()[0]
    async with stage.connection.transaction():
        await stage.connection.execute("set local headwater.applies = 'shop'")
        await stage.connection.execute("delete from shop.orders where id = %s", (key,))
    row = (key, "changed", "1.00", None)
    stage.commit(
        RowChanges("orders", "insert", [("1000", "new", "1.00", None)]),
        RowChanges("orders", "update", [row]),
    )
    found = await stage.until("diverged")
    assert "shop.orders no longer equals its source" in (found.error or "")
    assert "resnapshot shop" in (found.hint or "")
    assert await stage.fetch("select from shop.orders where id = 1000") == []
    await registry.request_resnapshot(stage.connection, "shop")
    await stage.until_equal()


async def test_a_mirror_is_read_only(stage: Stage) -> None:
    await stage.start()
    await stage.until_equal()
    for statement in (
        "insert into shop.orders (id) values (5000)",
        "update shop.orders set name = ''",
        "delete from shop.orders",
        "truncate shop.orders",
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="read-only"):
            await stage.connection.execute(statement.encode())
    await stage.connection.execute("create role clerk_of_mirrors")
    try:
        await stage.connection.execute("grant usage on schema shop to clerk_of_mirrors")
        await stage.connection.execute("grant all on shop.orders to clerk_of_mirrors")
        async with stage.connection.transaction(force_rollback=True):
            await stage.connection.execute("set local role clerk_of_mirrors")
            await stage.connection.execute("set local headwater.applies = 'shop'")
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="read-only"):
                await stage.connection.execute("delete from shop.orders")
    finally:
        await stage.connection.execute("drop owned by clerk_of_mirrors")
        await stage.connection.execute("drop role clerk_of_mirrors")


# ------------------------------------------------------------------------ definitions


async def test_a_table_added_later_is_copied_and_one_left_out_stays(stage: Stage) -> None:
    stage.history = History(7, 20, tables=("orders", "customers"), truncates=False)
    orders = SourceDefinition("shop", SHOP.url, "shop", (TableSpec("orders"),))
    await stage.start(orders)
    await stage.until_equal()
    both = SourceDefinition("shop", SHOP.url, "shop", (TableSpec("orders"), TableSpec("customers")))
    assert await registry.declare(stage.connection, both, "command")
    await stage.until_equal("customers")
    customers = SourceDefinition("shop", SHOP.url, "shop", (TableSpec("customers"),))
    await registry.declare(stage.connection, customers, "command")

    async def is_removed() -> bool:
        tables = {table.name: table.state for table in (await stage.state()).tables}
        return tables.get("orders") == "removed"

    await until(is_removed, "orders is removed")
    assert await stage.rows("orders") == stage.expected("orders")


async def test_a_predicate_leaves_rows_out(stage: Stage) -> None:
    where = ["amount", ">=", 500]
    definition = SourceDefinition("shop", SHOP.url, "shop", (TableSpec("orders", where=where),))
    await stage.start(definition)

    def wanted() -> list[tuple[Any, ...]]:
        return [row for row in stage.expected() if float(row[2]) >= 500]

    async def is_equal() -> bool:
        return await stage.rows() == wanted()

    await until(is_equal, "copied")
    small, large = ("1000", "a", "1.00", None), ("1001", "b", "900.00", "x")
    stage.commit(RowChanges("orders", "insert", [small, large]))
    await until(is_equal, "inserted")
    stage.commit(
        RowChanges("orders", "update", [("1000", "a", "700.00", None), ("1001", "b", "2.00", "x")])
    )
    await until(is_equal, "updated")


async def test_a_feed_has_no_rows_and_all_changes(stage: Stage) -> None:
    definition = SourceDefinition("shop", SHOP.url, "shop", feed_only=True)
    await stage.start(definition)
    await stage.until("running")
    stage.commit(
        RowChanges("orders", "insert", [("1000", "new", "1.00", None)]),
        RowChanges(
            "orders",
            "update",
            [("1000", "other", "1.00", UNCHANGED)],
            [("1000", "new", "1.00", None)],
        ),
        RowChanges("orders", "truncate"),
    )

    async def logged() -> list[tuple[Any, ...]]:
        return await stage.fetch(
            "select l.op::text, l.before ->> 'name', l.after ->> 'name', t.position"
            " from headwater.log l join headwater.source_transactions t on t.xid = l.xid"
            " where l.op <> 'R' and l.shape in"
            " (select id from headwater.shapes where relid = 'shop.orders'::regclass)"
            " order by l.seq"
        )

    await until(logged, "changes in the log")
    assert await logged() == [
        ("I", None, "new", "21"), ("U", "new", "other", "21"), ("T", None, None, "21"),
    ]  # fmt: skip
    assert await stage.rows() == []


async def test_a_feed_leaves_rows_out(stage: Stage) -> None:
    """What the log has of rows that match, begin to match, or no longer do."""
    where = ["amount", ">=", 500]
    tables = (TableSpec("orders", where=where),)
    await stage.start(SourceDefinition("shop", SHOP.url, "shop", tables, feed_only=True))
    await stage.until("running")

    def row(key: str, amount: str) -> tuple[str, str, str, None]:
        return (key, "a", amount, None)

    stage.commit(
        RowChanges("orders", "insert", [row("1000", "1.00"), row("1001", "900.00")]),
        RowChanges(
            "orders", "update",
            [row("1000", "2.00"), row("1001", "800.00")],
            [row("1000", "1.00"), row("1001", "900.00")],
        ),
        RowChanges(
            "orders", "update",
            [row("1000", "700.00"), row("1001", "3.00")],
            [row("1000", "2.00"), row("1001", "800.00")],
        ),
        RowChanges("orders", "update", [row("1000", "701.00"), row("1001", "4.00")]),
        RowChanges("orders", "delete", (), [row("1000", "701.00"), row("1001", "4.00")]),
        RowChanges("orders", "truncate"),
    )  # fmt: skip

    async def logged() -> list[tuple[Any, ...]]:
        return await stage.fetch(
            "select l.op::text, coalesce(l.after, l.before) ->> 'id',"
            " l.before ->> 'amount', l.after ->> 'amount'"
            " from headwater.log l where l.op <> 'R' and l.shape in"
            " (select id from headwater.shapes where relid = 'shop.orders'::regclass)"
            " order by l.seq"
        )

    await until(logged, "changes in the log")
    assert await logged() == [
        ("I", "1001", None, "900.00"),
        ("U", "1001", "900.00", "800.00"),
        ("I", "1000", None, "700.00"),
        ("D", "1001", "800.00", None),
        # Without the row before, it may have matched: its key is deleted.
        ("U", "1000", None, "701.00"),
        ("D", "1001", None, None),
        ("D", "1000", "701.00", None),
        ("T", None, None, None),
    ]


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        (SourceDefinition("a b", "sqlite:///x", "shop"), "cannot be the name"),
        (SourceDefinition("shop", "oracle://x", "shop"), "begins with postgresql://"),
        (SourceDefinition("shop", "sqlite:///x", "headwater"), "cannot be the schema"),
        (
            SourceDefinition(
                "shop", "sqlite:///x", "shop", (TableSpec("a", columns=("b",), exclude=("c",)),)
            ),
            "columns or exclude",
        ),
        (
            SourceDefinition("shop", "sqlite:///x", "shop", (TableSpec("a"), TableSpec("a"))),
            "twice",
        ),
    ],
)
async def test_a_wrong_definition_is_refused(
    connection: Connection, definition: SourceDefinition, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        await registry.declare(connection, definition, "command")
    assert await registry.definitions(connection) == []


async def test_what_cannot_be_changed_is_refused(connection: Connection) -> None:
    assert await registry.declare(connection, SHOP, "command")
    assert not await registry.declare(connection, SHOP, "file")
    for other, words in (
        (SourceDefinition("shop", "sqlite:///generated", "elsewhere"), "cannot be changed"),
        (SourceDefinition("shop", "mysql://x/y", "shop"), "is a sqlite database"),
        (SourceDefinition("other", "sqlite:///generated", "shop"), "is that of source shop"),
    ):
        with pytest.raises(ConfigError, match=words):
            await registry.declare(connection, other, "command")
    with pytest.raises(NotFound, match="there is no source nothing"):
        await registry.request_pause(connection, "nothing")
    with pytest.raises(NotFound, match="has no table nothing"):
        await registry.request_resnapshot(connection, "shop", ("nothing",))


async def test_a_restored_database_may_give_a_mirror_the_former_oid_of_another(
    connection: Connection,
) -> None:
    await connection.execute(
        "create schema shop; create table shop.a (id int); create table shop.b (id int);"
        " insert into headwater.sources (name, kind, into_schema) values ('shop', 'mysql', 'shop');"
        " insert into headwater.source_tables (source, name, target, relid, state, description)"
        " values ('shop', 'a', 'a', 99999, 'live', '{}'),"
        " ('shop', 'b', 'b', 'shop.a'::regclass, 'live', '{}')"
    )
    await connection.execute("select headwater.adopt_sources()")
    cursor = await connection.execute(
        "select relid::regclass::text from headwater.source_tables order by name"
    )
    assert await cursor.fetchall() == [("shop.a",), ("shop.b",)]
