"""Defects that reviews found in capture and in the reader, each as the shortest test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

from headwater.capture.postgres import triggers
from headwater.database import Connection, connect
from headwater.embedded import EmbeddedPostgres
from headwater.errors import CaptureError
from headwater.log.reading import reader as reader_module
from headwater.log.reading.follow import follow
from headwater.log.reading.reader import LogReader
from headwater.model import Change, Table
from tests.support.databases import passable_folder
from tests.support.log_probe import LogProbe, enable, probing, rows, run


@pytest.fixture
async def probe(url: str) -> AsyncIterator[LogProbe]:
    async with probing(url) as found:
        yield found


async def captured(connection: Connection, probe: LogProbe, *statements: str) -> None:
    """Make the table t, capture it, and skip the changes so far."""
    await run(connection, *statements)
    await enable(connection, "t")
    await probe.changes()


COLUMNS = ["n", "o", "r", "v", "image", "user_id", "first", "logged", "statement", "state", "tg_op"]


@pytest.mark.parametrize("name", COLUMNS)
async def test_a_column_named_like_one_of_headwater(
    name: str, connection: Connection, probe: LogProbe
) -> None:
    virtual = connection.info.server_version >= 180_000
    generated = f", g int generated always as ({name} * 2) {'' if virtual else 'stored'}"
    await captured(connection, probe, f"create table t (id int primary key, {name} int{generated})")
    await run(
        connection, "insert into t values (1, 1)", f"update t set {name} = 2", "delete from t"
    )
    assert [c.op for c in await probe.changes()] == ["insert", "update", "delete"]


async def test_a_cast_of_the_keys_type_is_not_called(
    url: str, connection: Connection, probe: LogProbe
) -> None:
    """An array of a domain is collatable, and the owner of the domain can create a cast to text."""
    await captured(
        connection,
        probe,
        "create domain d as text",
        "create table t (id d[] primary key, a int)",
        "create table loot (who text)",
        "create function spy(d[]) returns text language plpgsql as"
        " $$ begin insert into loot values (current_user); return 'x'; end $$",
        "create cast (d[] as text) with function spy(d[])",
    )
    await run(connection, "insert into t values ('{a}', 1)", "update t set a = 2")
    await run(connection, "update t set id = '{b}'")
    assert [c.op for c in await probe.changes()] == ["insert", "update", "delete", "insert"]
    assert await rows(connection, "select * from loot") == []


async def test_prepared_transactions() -> None:
    """NOTIFY would forbid them, so where they are possible it is not sent, and readers poll."""
    from headwater.capture.postgres import schema

    settings = {"max_prepared_transactions": "5"}
    with passable_folder() as folder, EmbeddedPostgres(folder / "d", settings=settings) as server:
        connection = await connect(server.url, purpose="test", application_path=True)
        await schema.install(connection)
        await run(connection, "create table t (id int primary key)")
        await enable(connection, "t")
        feed = follow(server.url)
        first = asyncio.ensure_future(anext(feed))
        async with asyncio.timeout(20):
            while not await rows(  # noqa: ASYNC110
                connection,
                "select 1 from pg_stat_activity where application_name = 'headwater poller'",
            ):
                await asyncio.sleep(0.02)
            await run(connection, "begin", "insert into t values (1)", "prepare transaction 'a'")
            await run(connection, "commit prepared 'a'")
            assert [c.key for c in (await first).changes] == [(1,)]
        await feed.aclose()
        await connection.close()


@pytest.mark.parametrize("rename", [False, True])
async def test_repeatable_read_across_ddl(
    rename: bool, connection: Connection, other: Connection, probe: LogProbe
) -> None:
    """The writer's catalog is older than the table: it gets a retryable error, and then is
    right."""
    await captured(connection, probe, "create table t (id int primary key, a int)")
    await run(other, "insert into t values (1, 1)", "update t set a = 2")
    await run(other, "begin isolation level repeatable read", "select 1")
    if rename:
        await run(connection, "alter table t rename id to k")
    else:
        await run(connection, "alter table t add column c int default 7")
    with pytest.raises((psycopg.errors.SerializationFailure, psycopg.errors.UndefinedColumn)):
        await run(other, "update t set a = 3")
    await run(other, "rollback", "update t set a = 4")
    last = (await probe.changes())[-1]
    assert last.after == ({"k": 1, "a": 4} if rename else {"id": 1, "a": 4, "c": 7})


async def test_repeatable_read_without_ddl(
    connection: Connection, other: Connection, probe: LogProbe
) -> None:
    await captured(connection, probe, "create table t (id int primary key, a int)")
    await run(other, "begin isolation level repeatable read", "select 1")
    await run(other, "insert into t values (1, 1)", "update t set a = 2", "delete from t", "commit")
    assert [c.op for c in await probe.changes()] == ["insert", "update", "delete"]


async def test_serializable_writers_do_not_disturb_each_other(
    connection: Connection, other: Connection, probe: LogProbe
) -> None:
    await captured(connection, probe, "create table t (id int primary key)")
    for i in range(4):
        for writer in (connection, other):
            await run(writer, "begin isolation level serializable")
        for k, writer in enumerate((connection, other, connection, other)):
            await run(writer, f"insert into t values ({i * 10 + k})")
        await run(connection, "commit")
        await run(other, "commit")
    assert len(await probe.changes()) == 16


async def test_temporal_keys(connection: Connection, probe: LogProbe) -> None:
    if connection.info.server_version < 180_000:
        pytest.skip("came with PostgreSQL 18")
    await captured(
        connection,
        probe,
        "create table t (a int4range, v int4range, x int, primary key (a, v without overlaps))",
    )
    await run(connection, "insert into t values ('[1,2)', '[1,5)', 1)", "update t set x = 2")
    assert [c.op for c in await probe.changes()] == ["insert", "update"]


async def test_a_publication_of_all_tables(connection: Connection, probe: LogProbe) -> None:
    await captured(
        connection,
        probe,
        "create publication everything for all tables",
        "create table t (id int primary key, a int)",
        "create function again() returns trigger language plpgsql as"
        " $$ begin update t set a = a + 1 where id = new.id; return null; end $$",
        "create trigger again after insert on t for each row execute function again()",
    )
    await run(connection, "alter table t replica identity full", "insert into t values (1, 0)")
    assert [c.after["a"] for c in await probe.changes() if c.after] == [0, 1]


@pytest.mark.parametrize("level", ["row", "statement"])
async def test_user_triggers_that_write_to_their_table(
    level: str, connection: Connection, probe: LogProbe
) -> None:
    await captured(
        connection,
        probe,
        "create table t (id int primary key, a int)",
        "create function again() returns trigger language plpgsql as"
        " $$ begin update t set a = a + 100 where a < 100; return null; end $$",
        f"create trigger a_first after insert on t for each {level} execute function again()",
    )
    await run(connection, "insert into t values (1, 1)")
    assert [c.after["a"] for c in await probe.changes() if c.after] == [1, 101]


async def following(url: str, count: int, **options: Any) -> list[Change]:
    found: list[Change] = []
    feed = follow(url, **options)
    async with asyncio.timeout(30):
        async for transaction in feed:
            found += transaction.changes
            if len(found) >= count:
                break
    await feed.aclose()
    return found


class TestBacklogs:
    @pytest.fixture(autouse=True)
    def small_pages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", 10)

    async def test_a_transaction_left_for_the_second_page(
        self, url: str, connection: Connection, other: Connection, probe: LogProbe
    ) -> None:
        await captured(connection, probe, "create table t (id int primary key)")
        await run(other, "begin", "insert into t values (0)")
        await run(connection, *(f"insert into t values ({i})" for i in range(1, 31)))
        feed = follow(url, since=probe.position)
        keys = [(await anext(feed)).changes[0].key[0] for _ in range(30)]
        await run(other, "commit")
        await run(connection, *(f"insert into t values ({i})" for i in range(31, 61)))
        keys += [(await anext(feed)).changes[0].key[0] for _ in range(31)]
        await feed.aclose()
        assert sorted(keys) == list(range(61))

    async def test_a_transaction_that_ends_in_a_table_without_readers(
        self, url: str, connection: Connection, other: Connection, probe: LogProbe
    ) -> None:
        await captured(
            connection,
            probe,
            "create table t (id int primary key)",
            "create table b (id int primary key)",
        )
        await enable(connection, "b")
        start = (await probe.reader.read(probe.connection, probe.position)).position
        await run(other, "begin", "insert into t values (10)")
        await run(connection, "insert into t values (20)")
        await run(other, "insert into b select i from generate_series(1, 50) i", "commit")

        def wants(table: Table) -> bool:
            return table.name == "t"

        found = await following(url, 2, since=start, wants=wants)
        assert sorted(c.key[0] for c in found) == [10, 20]


class TestSlots:
    """The server's clock, moved by hand."""

    @pytest.fixture
    async def clock(self, connection: Connection, probe: LogProbe) -> Connection:
        await captured(connection, probe, "create table t (id int primary key)")
        return connection

    async def set_slot(self, connection: Connection, slot: int) -> None:
        await run(
            connection,
            "create or replace function headwater.slot_at(at timestamptz) returns smallint"
            f" language sql stable return {slot}::smallint",
        )

    async def test_the_clock_jumps(self, clock: Connection, probe: LogProbe) -> None:
        for slot in (3, 9, 8, 20, 3):
            await self.set_slot(clock, slot)
            await run(clock, f"insert into t values ({slot}) on conflict do nothing")
            await run(clock, "delete from t")
            assert len(await probe.changes()) == 2

    async def test_a_transaction_commits_what_it_wrote_long_ago(
        self, clock: Connection, other: Connection, probe: LogProbe
    ) -> None:
        await self.set_slot(clock, 8)
        await run(other, "begin", "insert into t values (1)")
        await self.set_slot(clock, 11)
        assert await probe.story() == []
        await run(clock, "insert into t values (2)")
        assert await probe.story() == [("insert", 2)]
        await run(other, "commit")
        assert await probe.story() == [("insert", 1)]


async def test_a_transaction_older_than_the_retention(
    connection: Connection, other: Connection, probe: LogProbe
) -> None:
    """Readers cannot pass it, so newer changes must stay."""
    await captured(connection, probe, "create table t (id int primary key)")
    await run(other, "begin", "select pg_current_xact_id()")
    await run(connection, "insert into t values (1)")
    await run(
        connection,
        "update headwater.log set at = at - interval '40 days', slot = (slot + 5) % 32",
        "select headwater.trim_log()",
    )
    reader = await LogReader.open(probe.connection)
    batch = await reader.read(probe.connection, probe.position)
    assert [c.key for t in batch.transactions for c in t.changes] == [(1,)]
    await run(other, "commit")


async def test_children_are_captured_through_their_parent_only(connection: Connection) -> None:
    await run(
        connection,
        "create table pa (id int primary key)",
        "create table ch (primary key (id)) inherits (pa)",
    )
    with pytest.raises(CaptureError, match="is a child of"):
        await triggers.enable(connection, "ch")


async def test_a_deferrable_key(connection: Connection) -> None:
    await run(connection, "create table t (id int primary key deferrable)")
    with pytest.raises(CaptureError, match="is deferrable"):
        await triggers.enable(connection, "t")


@pytest.mark.parametrize(
    "between",
    [
        [
            "alter table t detach partition t1",
            "alter table t attach partition t1 for values in (1)",
        ],
        ["alter table t1 disable trigger all", "alter table t1 enable trigger all"],
    ],
    ids=["attached again", "enabled again"],
)
async def test_a_partition_is_not_captured_twice(
    between: list[str], connection: Connection, probe: LogProbe
) -> None:
    await captured(
        connection,
        probe,
        "create table t (id int, p int, primary key (id, p)) partition by list (p)",
        "create table t1 partition of t for values in (1)",
    )
    await run(connection, *between, "insert into t1 values (1, 1)")
    # Rows may have been written in between that were not captured.
    assert await probe.story() == [("reset",), ("insert", 1, 1)]


async def test_a_cascade_into_a_partition_that_is_new(
    connection: Connection, probe: LogProbe
) -> None:
    await captured(
        connection,
        probe,
        "create table parents (id int primary key)",
        "create table t (id int, p int references parents on delete cascade, primary key (id, p))"
        " partition by list (p)",
    )
    await run(
        connection,
        "create table t1 partition of t for values in (1)",
        "insert into parents values (1)",
        "insert into t1 values (5, 1)",
    )
    await probe.changes()
    await run(connection, "delete from parents")
    assert await probe.story() == [("delete", 5, 1)]


POISON = [
    ("json", """'{"a": 1E9999}'""", '{"a": 1E9999}'),
    ("jsonb", "('1' || repeat('0', 5000))::jsonb", "1" + "0" * 5000),
    ("json", "(repeat('[', 3000) || repeat(']', 3000))::json", "[" * 3000 + "]" * 3000),
]


@pytest.mark.parametrize(("type_", "value", "text"), POISON, ids=["huge", "long", "deep"])
async def test_values_beyond_python(
    type_: str, value: str, text: str, connection: Connection, probe: LogProbe
) -> None:
    await captured(connection, probe, f"create table t (id int primary key, j {type_}, a text)")
    await run(connection, f"insert into t values (1, {value}, 'x')", "update t set a = 'y'")
    insert, update = await probe.changes()
    assert insert.after is not None
    assert update.after is not None
    assert (insert.after["j"], insert.after["a"], update.after["a"]) == (text, "x", "y")


async def test_a_page_larger_than_the_server_can_send(
    connection: Connection, probe: LogProbe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gigabyte would be slow to make: a fake refusal is raised for pages of more than 3 rows."""
    await captured(connection, probe, "create table t (id int primary key)")
    fetch = reader_module._fetch_page

    async def refusing(*arguments: Any) -> bytes:
        if arguments[-1] > 3:
            raise psycopg.errors.ProgramLimitExceeded("out of memory")
        return await fetch(*arguments)

    monkeypatch.setattr(reader_module, "_fetch_page", refusing)
    await run(connection, *(f"insert into t values ({i})" for i in range(20)))
    until = await probe.reader.now(probe.connection)
    found = [
        t.changes[0].key[0]
        async for t in probe.reader.catch_up(probe.connection, probe.position, until)
    ]
    assert found == list(range(20))


async def test_a_database_in_latin1(server_url: str) -> None:
    from headwater.capture.postgres import schema

    admin = await connect(server_url, purpose="test", application_path=True)
    await run(
        admin,
        "create database latin encoding 'LATIN1' locale 'C' locale_provider libc"
        " template template0",
    )
    try:
        url = server_url.replace("/postgres?", "/latin?")
        connection = await connect(url, purpose="test", application_path=True)
        await schema.install(connection)
        async with probing(url) as probe:
            await captured(connection, probe, "create table t (id text primary key)")
            await run(connection, "insert into t values ('größe')")
            assert await probe.story() == [("insert", "größe")]
        await connection.close()
    finally:
        await run(admin, "drop database latin with (force)")
        await admin.close()


async def test_triggers_that_were_dropped_or_disabled_come_back(
    connection: Connection, probe: LogProbe
) -> None:
    await captured(connection, probe, "create table t (id int primary key)")
    await run(
        connection,
        "drop trigger headwater_insert on t",
        "alter table t disable trigger headwater_delete",
    )
    await enable(connection, "t")
    await run(connection, "insert into t values (1)", "delete from t")
    assert await probe.story() == [("reset",), ("insert", 1), ("delete", 1)]


async def test_two_programs_enable_a_table_at_once(url: str, connection: Connection) -> None:
    await run(connection, "create table t (id int primary key)")

    async def start() -> str:
        async with await connect(url, purpose="test", application_path=True) as mine:
            return await triggers.enable(mine, "t")

    assert await asyncio.gather(*(start() for _ in range(6))) == ["t"] * 6


async def test_many_statements_in_one_transaction(connection: Connection, probe: LogProbe) -> None:
    """Each NOTIFY once read all that the transaction had written: quadratic, minutes here."""
    await captured(connection, probe, "create table t (id int primary key)")
    await run(
        connection,
        "do $$ begin for i in 1 .. 20000 loop insert into t values (i); end loop; end $$",
    )
    assert len(await probe.changes()) == 20000


class TestSeveralVersionsOfARow:
    """One statement touches a row twice: its versions are paired in order, not each with each."""

    async def test_two_foreign_keys_cascade_into_it(
        self, connection: Connection, probe: LogProbe
    ) -> None:
        await captured(
            connection,
            probe,
            "create table p (id int primary key)",
            "create table t (id int primary key, a int references p on update cascade,"
            " b int references p on update cascade)",
            "insert into p values (1)",
            "insert into t values (7, 1, 1)",
        )
        await run(connection, "update p set id = 2")
        steps = [(c.before, c.after) for c in await probe.changes()]
        one, two, three = ({"id": 7, "a": a, "b": b} for a, b in ((1, 1), (2, 1), (2, 2)))
        assert steps == [(one, two), (two, three)]

    async def test_one_key_in_parent_and_child(
        self, connection: Connection, probe: LogProbe
    ) -> None:
        await captured(
            connection,
            probe,
            "create table t (id int primary key, a int)",
            "create table t1 (primary key (id)) inherits (t)",
            "insert into t values (1, 10)",
            "insert into t1 values (1, 20)",
        )
        await run(connection, "update t set a = a + 1")
        assert sorted((c.op, c.after["a"]) for c in await probe.changes() if c.after) == [
            ("update", 11),
            ("update", 21),
        ]
