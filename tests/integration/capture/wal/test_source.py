"""The PostgreSQL source against real servers: what each change of the database becomes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from headwater.capture.postgres.wal import source as source_module
from headwater.capture.postgres.wal.source import PostgresSource
from headwater.capture.running.check import check_source
from headwater.capture.source import (
    UNCHANGED,
    Progress,
    RowChanges,
    SchemaChange,
    TableDropped,
    TableSpec,
    TableVersions,
    TransactionPart,
)
from tests.contract.sources.drivers.postgres_wal import PostgresWalDriver
from tests.support.wal_replica import Replica, judge


class Setting:
    """A source that is made for a test, and removed after it."""

    def __init__(self, driver: PostgresWalDriver) -> None:
        self.driver = driver
        self.sources: list[PostgresSource] = []

    def source(self, *tables: str, **options: Any) -> PostgresSource:
        found = PostgresSource(self.driver.definition(*tables, **options))
        self.sources.append(found)
        return found

    async def copied(self, *tables: str, **options: Any) -> Replica:
        """A replica after the first copy."""
        replica = Replica(self.source(*tables, **options))
        await replica.begin()
        await replica.catch_up(self.driver.url)
        replica.items.clear()
        return replica

    async def changes(self, replica: Replica, *statements: str) -> list[RowChanges]:
        """What the statements become. The replica then equals the database."""
        await self.driver.execute(*statements)
        await replica.catch_up(self.driver.url)
        for name, table in replica.tables.items():
            if name not in replica.dropped:
                rows = sorted(replica.rows[name].values(), key=repr)
                assert rows == await judge(self.driver.url, table, f"public.{name}"), name
        parts = [item for item in replica.items if isinstance(item, TransactionPart)]
        replica.items.clear()
        return [change for part in parts for change in part.changes]


@pytest.fixture
async def setting(driver: PostgresWalDriver) -> AsyncIterator[Setting]:
    await driver.create_table("orders")
    found = Setting(driver)
    yield found
    for source in found.sources:
        await source.remove()
        await source.close()


async def test_each_operation_is_one_change(setting: Setting) -> None:
    replica = await setting.copied("orders")
    changes = await setting.changes(
        replica,
        "insert into orders values (1, 'a', 1.5, null), (2, 'b', 2, 'x')",
        "update orders set name = 'c' where id = 1",
        "update orders set id = 3 where id = 1",
        "delete from orders where id = 2",
        "truncate orders",
    )
    assert changes == [
        RowChanges("orders", "insert", [("1", "a", "1.50", None), ("2", "b", "2.00", "x")]),
        RowChanges("orders", "update", [("1", "c", "1.50", None)]),
        RowChanges(
            "orders", "update", [("3", "c", "1.50", None)], [("1", UNCHANGED, UNCHANGED, UNCHANGED)]
        ),
        RowChanges("orders", "delete", (), [("2", UNCHANGED, UNCHANGED, UNCHANGED)]),
        RowChanges("orders", "truncate"),
    ]


async def test_a_large_value_that_was_not_touched_is_not_sent(setting: Setting) -> None:
    replica = await setting.copied("orders")
    await setting.changes(replica, "insert into orders values (1, 'a', 1, repeat('x', 100000))")
    update = "update orders set name = name || 'b'"
    assert await setting.changes(replica, update) == [
        RowChanges("orders", "update", [("1", "ab", "1.00", UNCHANGED)])
    ]
    (change,) = await setting.changes(replica, "update orders set id = 2")
    assert change.after[0][3] is UNCHANGED


async def test_with_replica_identity_full_every_value_is_known(setting: Setting) -> None:
    await setting.driver.execute("alter table orders replica identity full")
    replica = await setting.copied("orders")
    large = "x" * 100_000
    await setting.changes(replica, f"insert into orders values (1, 'a', 1, '{large}')")
    (change,) = await setting.changes(replica, "update orders set id = 2, name = 'b'")
    assert change.before == [("1", "a", "1.00", large)]
    assert change.after == [("2", "b", "1.00", large)]


async def test_an_identity_index_is_the_key_of_the_mirror(setting: Setting) -> None:
    await setting.driver.execute(
        "create table codes (id int primary key, code text not null unique)",
        "alter table codes replica identity using index codes_code_key",
        "insert into codes values (1, 'a'), (2, 'b'), (3, 'c')",
    )
    replica = await setting.copied("codes")
    assert replica.tables["codes"].key == ("code",)
    changes = await setting.changes(
        replica,
        "update codes set id = 9 where code = 'a'",
        "update codes set code = 'z' where code = 'b'",
        "delete from codes where id = 3",
    )
    assert [change.before for change in changes] == [(), [(UNCHANGED, "b")], [(UNCHANGED, "c")]]


async def test_partitions_are_their_root(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "CATALOG_SECONDS", 0.1)
    await setting.driver.execute(
        "create table parts (id int, day int, primary key (id, day)) partition by range (day)",
        "create table parts_1 partition of parts for values from (0) to (10)",
        "create table parts_2 (day int not null, x int, id int not null)",
        "alter table parts_2 drop column x",
        "alter table parts attach partition parts_2 for values from (10) to (20)",
        "insert into parts values (1, 1), (2, 12)",
    )
    replica = await setting.copied("parts")
    assert len(replica.rows["parts"]) == 2
    changes = await setting.changes(
        replica, "insert into parts values (3, 13)", "update parts set day = 15 where id = 1"
    )
    assert [change.op for change in changes] == ["insert", "delete", "insert"]

    # What the log does not say: the table is copied again.
    for statement in (
        "alter table parts detach partition parts_2",
        "alter table parts attach partition parts_2 for values from (10) to (20)",
        "truncate parts_2",
    ):
        await setting.driver.execute(statement)
        await replica.run(lambda: any(isinstance(i, SchemaChange) for i in replica.items))
        await setting.changes(replica)
    assert list(replica.rows["parts"]) == []


async def test_a_new_partition_needs_no_copy(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "CATALOG_SECONDS", 0.05)
    await setting.driver.execute(
        "create table parts (id int, day int, primary key (id, day)) partition by range (day)"
    )
    replica = await setting.copied("parts")
    for day in range(3):
        await setting.changes(
            replica,
            f"create table parts_{day} partition of parts for values from ({day}) to ({day + 1})",
            f"insert into parts values (1, {day})",
        )
    await setting.changes(replica, "truncate parts")
    assert not any(isinstance(item, SchemaChange) for item in replica.items)


async def test_a_generated_column_is_there_if_the_log_has_it(setting: Setting) -> None:
    await setting.driver.execute(
        "create table prices (id int primary key, net int, gross int generated always as"
        " (net * 2) stored)",
        "insert into prices values (1, 5)",
    )
    source = setting.source("prices")
    warnings = [problem.what for problem in await source.check()]
    replica = await setting.copied("prices")
    await setting.changes(replica, "update prices set net = 6")
    logged = "gross" in [column.name for column in replica.tables["prices"].columns]
    assert logged == (not any("generated column gross" in each for each in warnings))
    assert replica.rows["prices"] == {("1",): ("1", "6", "12") if logged else ("1", "6")}


async def test_columns_can_be_left_out(setting: Setting) -> None:
    await setting.driver.execute("insert into orders values (1, 'a', 1, 'secret')")
    specs = [
        TableSpec("orders", columns=("id", "amount")),
        TableSpec("orders", exclude=("note", "name")),
    ]
    for spec in specs:
        replica = await setting.copied(tables=(spec,))
        assert replica.rows["orders"] == {("1",): ("1", "1.00")}
        changes = await setting.changes(
            replica, "update orders set note = 'other', amount = 2", "update orders set amount = 1"
        )
        assert [change.after for change in changes] == [[("1", "2.00")], [("1", "1.00")]]
        await replica.source.remove()


async def test_a_column_that_is_added_later_is_mirrored_despite_exclude(setting: Setting) -> None:
    spec = TableSpec("orders", exclude=("note",))
    replica = await setting.copied(tables=(spec,))
    await setting.changes(
        replica,
        "alter table orders add column n int default 3",
        "insert into orders values (1, 'a', 1, 'secret')",
    )
    assert replica.rows["orders"] == {("1",): ("1", "a", "1.00", "3")}


async def test_a_filter_never_hides_an_update_from_the_runner(setting: Setting) -> None:
    """It is pushed down only where that changes nothing for writers. The rest is the runner's."""
    by_key = TableSpec("orders", where=["id", ">", 10])
    replica = await setting.copied(tables=(by_key,))
    await setting.driver.execute("insert into orders values (1, 'a', 1, null), (11, 'b', 1, null)")
    await replica.catch_up(setting.driver.url)
    assert ("11",) in replica.rows["orders"]
    await replica.source.remove()

    source = setting.source(tables=(TableSpec("orders", where=["amount", ">=", "10.5"]),))
    (table,) = await source.tables()
    position = await source.start()
    assert (await source.snapshot(table, None, 10)).rows == []
    # With such a filter in the publication, PostgreSQL would refuse this update.
    await setting.driver.execute("update orders set amount = 20 where id = 1")
    async with aclosing(source.changes(position)) as items:
        async for item in items:
            if isinstance(item, TransactionPart):
                assert item.changes[0].after == [("1", "a", "20.00", None)]
                break


@pytest.mark.parametrize(
    ("statements", "columns", "copies"),
    [
        (["alter table orders add column n int"], 5, False),
        (["alter table orders add column n int default 7"], 5, True),
        (
            [
                "alter table orders add column n timestamptz default clock_timestamp()",
                "alter table orders alter n drop default",
            ],
            5,
            True,
        ),
        (["alter table orders drop column note"], 3, False),
        (["alter table orders alter amount type numeric(14,3)"], 4, True),
        (["alter table orders rename name to title"], 4, True),
    ],
)
async def test_columns_change_while_running(
    setting: Setting, statements: list[str], columns: int, copies: bool
) -> None:
    await setting.driver.execute("insert into orders values (1, 'a', 1, 'x')")
    replica = await setting.copied("orders")
    await setting.driver.execute(*statements, "update orders set amount = 2")
    await replica.run(lambda: any(isinstance(i, SchemaChange) for i in replica.items))
    (change,) = [item for item in replica.items if isinstance(item, SchemaChange)]
    assert (len(change.table.columns), change.copies) == (columns, copies)
    await setting.changes(replica)


async def test_columns_that_change_without_a_row_and_a_dropped_table(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "CATALOG_SECONDS", 0.1)
    await setting.driver.execute("insert into orders values (1, 'a', 1, 'x')")
    await setting.driver.create_table("others")
    replica = await setting.copied("orders", "others")
    await setting.driver.execute("alter table orders add column n int default 7")
    await replica.run(lambda: any(isinstance(i, SchemaChange) for i in replica.items))
    await setting.changes(replica)
    await setting.driver.execute("drop table others")
    await replica.run(lambda: bool(replica.dropped))
    assert replica.items[-1] == TableDropped("others")
    await setting.changes(replica, "update orders set n = 8")


async def test_a_large_transaction_is_streamed_in_parts(setting: Setting) -> None:
    replica = await setting.copied("orders")
    writer = await setting.driver.writer()
    await writer.execute(
        "insert into orders select i, 'n' || i, i, repeat('z', 50) from generate_series(1, 9000) i"
    )
    await writer.execute("savepoint a")
    await writer.execute("update orders set name = 'rolled back'")
    await writer.execute("rollback to savepoint a")
    await setting.driver.execute("insert into orders values (100001, 'other', 1, null)")
    await replica.catch_up(setting.driver.url)
    assert len(replica.rows["orders"]) == 1
    replica.items.clear()
    await writer.commit()
    changes = await setting.changes(replica)
    assert max(len(change.after) for change in changes) <= 2000
    assert sum(len(change.after) for change in changes) == 9000


async def test_an_idle_source_advances_and_its_log_is_released(setting: Setting) -> None:
    replica = await setting.copied("orders")
    await setting.driver.create_table("unrelated")
    begun = replica.position
    await setting.driver.execute(
        "insert into unrelated select i, 'x', 1, repeat('x', 900) from generate_series(1, 20000) i"
    )
    await replica.catch_up(setting.driver.url)
    assert {type(item) for item in replica.items} <= {Progress, TableVersions}
    assert not replica.source.contains(begun, replica.position)
    await replica.source.acknowledge(replica.position)


async def test_names_of_every_kind(setting: Setting) -> None:
    names = ['we "ird%s.näme', "UPPER", "select"]
    for name in names:
        await setting.driver.create_table(name)
        writer = await setting.driver.writer()
        await writer.insert(name, {"id": 1, "name": "a", "amount": 1, "note": None})
        await writer.commit()
    replica = await setting.copied(*names)
    writer = await setting.driver.writer()
    for name in names:
        await writer.insert(name, {"id": 2, "name": "b", "amount": 1, "note": None})
    await writer.commit()
    await replica.catch_up(setting.driver.url)
    assert {name: len(rows) for name, rows in replica.rows.items()} == dict.fromkeys(names, 2)


async def test_types_have_the_same_text_in_the_copy_and_in_the_log(setting: Setting) -> None:
    cases = setting.driver.types
    await setting.driver.create_typed_table("typed", cases)
    await setting.driver.insert_typed("typed", 1, [*cases])
    await setting.driver.insert_typed("typed", 2, [None] * len(cases))
    replica = await setting.copied("typed")
    types = [column.type for column in replica.tables["typed"].columns]
    assert types == ["bigint", *(case.mirror_type for case in cases)]
    (change,) = await setting.changes(replica, "update typed set id = 3 where id = 1")
    assert replica.rows["typed"][("3",)] == change.after[0]
    printed = {"interval": "P1Y2DT3H4M5S"}
    assert change.after[0] == (
        "3", *(printed.get(case.declared, case.mirror_value) for case in cases)
    )  # fmt: skip
    assert replica.rows["typed"][("2",)] == ("2", *[None] * len(cases))


async def test_a_table_that_is_listed_with_and_without_its_schema_is_refused(
    setting: Setting,
) -> None:
    await setting.driver.execute("create table swap (id int primary key)")
    checked = await check_source(setting.driver.definition("swap", "public.swap"))
    assert [problem.warning for problem in checked.problems] == [False]
    assert "have the same mirror: swap" in checked.problems[0].what
