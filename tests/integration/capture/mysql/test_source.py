"""The source against a real MariaDB: whole transactions, schema changes, progress, what it must not
leave behind, and everything that can go wrong with a binary log."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from headwater import limits
from headwater.capture.mysql.positions import Position
from headwater.capture.mysql.source import MysqlSource
from headwater.capture.source import (
    UNCHANGED,
    Item,
    Progress,
    SchemaChange,
    TableDropped,
    TableSpec,
    TransactionPart,
)
from headwater.errors import PositionLost, SourceRefused, SourceUnavailable
from tests.contract.sources.drivers.mysql import MysqlDriver
from tests.support.mariadb import running_mariadb
from tests.support.mysql.reading import (
    changed,
    copied,
    opened,
    transactions,
)


async def _orders(driver: MysqlDriver) -> None:
    await driver.execute("create table orders (id int primary key, n int, note text)")


async def _changes(driver: MysqlDriver, *statements: str, name: str = "orders") -> list[Item]:
    """What the statements, on one connection, amount to."""
    async with opened(driver.definition(name)) as source:
        await source.tables()
        after = await source.start()
        await driver.execute(*statements)
        return await changed(source, after, await source.start())


def _plain(items: list[Item]) -> list[Any]:
    """Operations with their rows, one list for each transaction; other items as their type."""
    found = list[Any]()
    for item in items:
        if isinstance(item, TransactionPart):
            found.append([(c.op, list(c.before), list(c.after)) for c in item.changes])
        elif not isinstance(item, Progress):
            found.append(type(item))
    return found


ROW = ("1", "1", None)

STATEMENTS: list[tuple[list[str], list[Any]]] = [
    (["insert into orders values (1, 1, null)"], [[("insert", [], [ROW])]]),
    (["begin", "insert into orders values (1, 1, null)", "rollback"], []),
    (
        ["begin", "insert into orders values (1, 1, null)", "savepoint s",
         "insert into orders values (2, 2, null)", "rollback to s", "commit"],
        [[("insert", [], [ROW])]],
    ),
    (
        ["insert into orders values (1, 1, null)", "update orders set id = 5"],
        [[("insert", [], [ROW])], [("update", [ROW], [("5", "1", None)])]],
    ),
    (
        ["insert into orders values (1, 1, null)", "update orders set n = 1"],
        [[("insert", [], [ROW])]],
    ),
    (
        ["insert into orders values (1, 1, null)", "replace into orders values (1, 1, 'x')"],
        [[("insert", [], [ROW])], [("update", [ROW], [("1", "1", "x")])]],
    ),
    (
        ["insert into orders values (1, 1, null)", "delete from orders"],
        [[("insert", [], [ROW])], [("delete", [ROW], [])]],
    ),
    (
        ["insert into orders values (1, 1, null)", "truncate orders"],
        [[("insert", [], [ROW])], [("truncate", [], [])]],
    ),
    (
        ["begin", "insert into orders values (1, 1, null)", "delete from orders", "commit"],
        [[("insert", [], [ROW]), ("delete", [ROW], [])]],
    ),
    (["create table other (id int primary key)", "insert into other values (1)"], []),
    (["alter table orders add index (n)", "analyze table orders", "create view v as select 1"], []),
    (["create temporary table orders (id int)", "drop temporary table orders"], []),
    (["alter table orders drop column note"], [SchemaChange]),
    (["drop table orders"], [TableDropped]),
    (["rename table orders to orders_old"], [TableDropped]),
    (["alter table orders rename to orders_old"], [TableDropped]),
    (
        ["drop table orders", "create table orders (id int primary key)",
         "insert into orders values (1)"],
        [TableDropped, SchemaChange, [("insert", [], [("1",)])]],
    ),
    (
        ["set statement max_statement_time = 60 for alter table orders add column a int default 5",
         "insert into orders (id) values (1)"],
        [SchemaChange, [("insert", [], [("1", None, None, "5")])]],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("statements", "expected"), STATEMENTS)
async def test_statements(driver: MysqlDriver, statements: list[str], expected: list[Any]) -> None:
    await _orders(driver)
    assert _plain(await _changes(driver, *statements)) == expected


async def test_schema_change_says_whether_to_copy(driver: MysqlDriver) -> None:
    await _orders(driver)
    for statement, copies in (
        ("alter table orders add column a int not null default 5", True),
        ("alter table orders modify note varchar(3)", True),
        ("alter table orders drop column a", False),
        ("alter table orders add column g int generated always as (n + 1)", True),
        ("alter ignore table orders add unique (n)", True),
    ):
        (change,) = [i for i in await _changes(driver, statement) if isinstance(i, SchemaChange)]
        assert change.copies == copies, statement


async def test_names(driver: MysqlDriver) -> None:
    name = "Bestell`ung \"1\" 'ö' 日本.x"
    await driver.execute(
        "create table `" + name.replace("`", "``") + "` (`the ``key` int primary key, `ü %s` int)"
    )
    quoted = "`" + name.replace("`", "``") + "`"
    items = await _changes(
        driver,
        f"insert into {quoted} values (1, 2), (3, 4)",
        f"truncate table {quoted}",
        f"insert into {quoted} values (1, 2)",
        f"alter table {quoted} drop column `ü %s`",
        name=name,
    )
    first: Any = [("insert", [], [("1", "2"), ("3", "4")])]
    rest: Any = [[("truncate", [], [])], [("insert", [], [("1", "2")])], SchemaChange]
    assert _plain(items) == [first, *rest]
    async with opened(driver.definition(name)) as source:
        (table,) = await source.tables()
        assert table.name == table.target == name
        assert await copied(source, table, rows=1) == {("1",): ("1",)}


async def test_left_out_columns_are_in_no_row(driver: MysqlDriver) -> None:
    await driver.execute("create table t (secret varchar(99), id int primary key, n int, o int)")
    for spec in (TableSpec("t", exclude=("secret",)), TableSpec("t", columns=("id", "n", "o"))):
        async with opened(driver.definition(tables=(spec,))) as source:
            (table,) = await source.tables()
            assert [column.name for column in table.columns] == ["id", "n", "o"]
            after = await source.start()
            await driver.execute("replace into t values ('hidden', 1, 2, 3)")
            items = await changed(source, after, await source.start())
            assert "hidden" not in repr(items)
            assert await copied(source, table) == {("1",): ("1", "2", "3")}


async def test_all_tables_of_the_database(driver: MysqlDriver) -> None:
    await driver.execute(
        "create table b (id int primary key)", "create table a (id int primary key)"
    )
    await driver.execute("create view v as select 1 as one")
    async with opened(driver.definition()) as source:
        assert [table.name for table in await source.tables()] == ["a", "b"]


async def test_table_of_another_database(driver: MysqlDriver) -> None:
    other = f"{driver.database}_other"
    await driver.execute(f"create database {other}", f"create table {other}.t (id int primary key)")
    try:
        items = await _changes(driver, f"insert into {other}.t values (1)", name=f"{other}.t")
        assert _plain(items) == [[("insert", [], [("1",)])]]
    finally:
        await driver.execute(f"drop database {other}")


# ------------------------------------------------------------------------ parts and progress


async def test_large_transaction_passes_in_bounded_parts(driver: MysqlDriver) -> None:
    await _orders(driver)
    items = await _changes(
        driver, "insert into orders select seq, seq, repeat('x', 500) from seq_1_to_30000"
    )
    parts = transactions(items)
    rows = [row for part in parts for c in part.changes for row in c.after]
    assert [row[0] for row in rows] == [str(i) for i in range(1, 30001)]
    assert {part.position is None for part in parts[:-1]} == {True}
    assert parts[-1].position is not None
    assert parts[-1].committed_at is not None
    sizes = [sum(len(c.after) for c in part.changes) for part in parts]
    assert max(sizes) <= limits.SOURCE_PART_CHANGES


async def test_large_rows_are_parts_of_their_own(driver: MysqlDriver) -> None:
    await driver.execute("create table t (id int primary key, data longblob)")
    size = limits.SOURCE_PART_BYTES * 3
    items = await _changes(
        driver,
        "begin",
        *(f"insert into t values ({i}, repeat(x'0a', {size}))" for i in range(2)),
        "commit",
        name="t",
    )
    parts = transactions(items)
    assert [[len(c.after) for c in part.changes] for part in parts] == [[1], [1]]
    assert parts[0].changes[0].after[0][1] == "\\x" + "0a" * size
    async with opened(driver.definition("t")) as source:
        (table,) = await source.tables()
        chunk = await source.snapshot(table, None, 10)
        assert (len(chunk.rows), chunk.last) == (1, ("0",))
        assert len(await copied(source, table)) == 2


async def _next_progress(changes: Any, source: MysqlSource, upto: str) -> None:
    async with asyncio.timeout(30):
        async for item in changes:
            assert isinstance(item, Progress)
            if source.contains(item.position, upto):
                return


async def test_progress_without_changes(driver: MysqlDriver) -> None:
    """For tables that are not captured, after a rotation, and for databases elsewhere."""
    await _orders(driver)
    async with (
        opened(driver.definition("orders")) as source,
        aclosing(source.changes(await source.start())) as changes,
    ):
        await driver.execute("create table other (id int primary key)")
        await _next_progress(changes, source, await source.start())
        await driver.execute("insert into other values (1)")
        await _next_progress(changes, source, await source.start())
        await driver.execute("flush binary logs")
        await _next_progress(changes, source, await source.start())


async def _next(changes: AsyncIterator[Item]) -> Item:
    return await anext(changes)


async def _until(driver: MysqlDriver, question: str) -> None:
    """Until the question has a row."""
    async with asyncio.timeout(60):
        while not await driver.execute(question):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_closing_leaves_nothing(driver: MysqlDriver) -> None:
    await _orders(driver)
    count = "select count(*) from information_schema.processlist where user = 'headwater'"
    async with opened(driver.definition("orders")) as source:
        changes = source.changes(await source.start())
        await driver.execute("insert into orders values (1, 1, null)")
        await anext(changes)
        dumps = f"{count} and command like 'Binlog%'"
        assert (await driver.execute(dumps))[0][0] == 1
        await changes.aclose()
        await _until(driver, f"{dumps} having count(*) = 0")
    await _until(driver, f"{count} having count(*) = 0")
    assert not [t for t in threading.enumerate() if t.name == "headwater-binlog"]


async def test_closing_while_the_buffer_is_full(driver: MysqlDriver) -> None:
    await _orders(driver)
    async with opened(driver.definition("orders")) as source:
        changes = source.changes(await source.start())
        await driver.execute("insert into orders select seq, 1, null from seq_1_to_50000")
        await anext(changes)
        async with asyncio.timeout(30):
            await changes.aclose()


async def test_a_cancelled_reader(driver: MysqlDriver) -> None:
    await _orders(driver)
    async with opened(driver.definition("orders")) as source:
        changes = source.changes(await source.start())
        reading = asyncio.create_task(_next(changes))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await changes.aclose()
    assert not [t for t in threading.enumerate() if t.name == "headwater-binlog"]


async def test_closing_ends_a_query(driver: MysqlDriver) -> None:
    """A table that another session has locked is not waited for."""
    await _orders(driver)
    writer = await driver.writer()
    await writer._run("lock tables orders write")
    async with opened(driver.definition("orders")) as source:
        (table,) = await source.tables()
        reading = asyncio.create_task(source.snapshot(table, None, 10))
        waiting = (
            "select 1 from information_schema.processlist where state like 'Waiting for%lock%'"
        )
        await _until(driver, waiting)
        async with asyncio.timeout(30):
            await source.close()
            with pytest.raises(SourceUnavailable):
                await reading


# ------------------------------------------------------------------------ the copy


async def test_copy_to_tail_without_a_gap_under_writes(driver: MysqlDriver) -> None:
    """Chunks are read while three writers commit. Each row is as its chunk says, and then changed
    by the transactions after the chunk's mark: neither one too many nor one too few."""
    await driver.execute("create table t (id int primary key, n int not null)")
    await driver.execute("insert into t select seq * 2, 0 from seq_1_to_3000")
    stop = threading.Event()

    def write(number: int) -> None:
        rng = random.Random(number)
        with driver.server.connect(driver.database) as connection, connection.cursor() as cursor:
            for _ in range(3000):
                if stop.is_set():
                    return
                cursor.execute("update t set n = n + 1 where id = %s", (rng.randrange(6000),))
                cursor.execute("insert ignore into t values (%s, 0)", (rng.randrange(6000),))
                cursor.execute("delete from t where id = %s", (rng.randrange(6000),))

    writers = [threading.Thread(target=write, args=(i,)) for i in range(3)]
    async with opened(driver.definition("t")) as source:
        (table,) = await source.tables()
        after = await source.start()
        for writer in writers:
            writer.start()
        rows, marks, last = dict[int, tuple[Any, ...]](), list[tuple[int, str]](), None
        try:
            while True:
                chunk = await source.snapshot(table, last, 50)
                rows |= {int(str(row[0])): row for row in chunk.rows}
                assert chunk.low == chunk.high
                last = chunk.last
                marks.append((int(last[0]) if last else 10**9, chunk.high))
                if last is None:
                    break
        finally:
            stop.set()
            for writer in writers:
                writer.join()
        items = await changed(source, after, await source.start())
        applied = 0
        for part in transactions(items):
            for c in part.changes:
                row = (c.after or c.before)[0]
                assert row is not None
                number = int(str(row[0]))
                mark = next(mark for end, mark in marks if number <= end)
                assert part.position is not None
                if source.contains(mark, part.position):
                    continue
                applied += 1
                if c.op == "insert":
                    assert number not in rows
                else:
                    assert rows.pop(number) == c.before[0]
                if c.after:
                    rows[number] = c.after[0]
        assert applied
        assert {(str(k),): row for k, row in rows.items()} == await copied(source, table)


# ------------------------------------------------------------------------ positions


async def test_resume_after_the_server_was_killed(driver: MysqlDriver) -> None:
    await _orders(driver)
    async with opened(driver.definition("orders")) as source:
        after = await source.start()
        await driver.execute("insert into orders values (1, 1, null)")
        changes = source.changes(after)
        item = await anext(changes)
        assert isinstance(item, TransactionPart)
        await driver.kill_server()
        with pytest.raises(SourceUnavailable):
            async for _ in changes:
                pass
        with pytest.raises(SourceUnavailable):
            await source.start()
        await driver.start_server()
        await driver.execute("insert into orders values (2, 2, null)")
        assert item.position is not None
        items = await changed(source, item.position, await source.start())
        assert _plain(items) == [[("insert", [], [("2", "2", None)])]]
        items = await changed(source, after, await source.start())
        assert len(transactions(items)) == 2


async def test_purged_log_is_a_lost_position(driver: MysqlDriver) -> None:
    await _orders(driver)
    async with opened(driver.definition("orders")) as source:
        after = await source.start()
        await driver.lose_position()
        with pytest.raises(PositionLost, match="no longer has"):
            await anext(source.changes(after))


async def test_purged_log_without_unread_changes_is_not(driver: MysqlDriver) -> None:
    await _orders(driver)
    async with opened(driver.definition("orders")) as source:
        await driver.execute("insert into orders values (1, 1, null)")
        after = await source.start()
        await driver.execute("flush binary logs")
        last = (await driver.execute("show binary logs"))[-1][0]
        await driver.execute(f"purge binary logs to '{last}'")
        await driver.execute("insert into orders values (2, 1, null)")
        items = await changed(source, after, await source.start())
        assert len(transactions(items)) == 1


async def test_reset_log_is_a_lost_position(driver: MysqlDriver) -> None:
    await _orders(driver)
    async with opened(driver.definition("orders")) as source:
        await driver.execute("flush binary logs", "insert into orders values (1, 1, null)")
        after = await source.start()
        await driver.execute("reset master", "flush binary logs")
        await driver.execute(*["insert into orders values (5, 1, null)", "delete from orders"] * 9)
        with pytest.raises(PositionLost, match=r"reset|no longer has"):
            await anext(source.changes(after))
        after = await source.start()
        await driver.execute("reset master", "insert into orders values (6, 1, null)")
        with pytest.raises(PositionLost, match=r"reset|no longer has"):
            await anext(source.changes(after))


@pytest.mark.parametrize(
    "position",
    [
        "nonsense",
        "mysql 1 b.000001:4 -",
        "mariadb 9 binlog.000001:4 -",
        "mariadb 9 b.000001:4 0-9-999",
    ],
)
async def test_position_of_another_server(driver: MysqlDriver, position: str) -> None:
    await _orders(driver)
    async with opened(driver.definition("orders")) as source:
        with pytest.raises(PositionLost):
            await anext(source.changes(position))


async def test_failover_by_gtid(driver: MysqlDriver) -> None:
    """A replica with the same GTIDs, but other files and offsets, continues after its primary."""
    with running_mariadb(server_id="2", log_slave_updates="1") as replica:
        primary = driver.server
        await driver.execute("reset master")
        primary.run("grant replication slave on *.* to repl@'%' identified by 'x'")
        replica.run(
            "create database if not exists filler", "reset master", "set global gtid_slave_pos = ''"
        )
        replica.run(
            f"change master to master_host = '127.0.0.1', master_port = {primary.port},"
            " master_user = 'repl', master_password = 'x', master_use_gtid = slave_pos",
            f"create database {driver.database}",
            "reset master",
            "start slave",
        )
        await driver.execute("create table t (id int primary key)", "insert into t values (1)")
        async with opened(driver.definition("t")) as source:
            await source.tables()
            after = await source.start()
            await driver.execute("insert into t values (2)")
            await driver.execute("flush binary logs", "insert into t values (3)")
            middle = await source.start()
            await driver.execute("insert into t values (4)")
            end = await source.start()
        moved = MysqlDriver(replica, driver.database)
        gtids = Position.parse(end).gtids
        await _until(moved, f"select 1 from dual where master_gtid_wait('{gtids}', 5) = 0")
        await moved.execute("stop slave")
        await moved.execute("insert into t values (5)")
        async with opened(moved.definition("t")) as source:
            await source.tables()
            assert not source.contains(middle, await source.start())
            assert source.contains(await source.start(), end)
            for position, expected in ((after, ["2", "3", "4", "5"]), (middle, ["4", "5"])):
                items = await changed(source, position, await source.start())
                rows = [row[0] for p in transactions(items) for c in p.changes for row in c.after]
                assert rows == expected
            last = transactions(items)[0].position
            assert last is not None
            assert Position.parse(last).server == "2"
            items = await changed(source, last, await source.start())
            assert [c.after for p in transactions(items) for c in p.changes] == [[("5",)]]


async def test_estimate(driver: MysqlDriver) -> None:
    """For the bar of a copy. The engine's own estimate is not exact."""
    await _orders(driver)
    await driver.execute(
        "insert into orders select seq, 1, null from seq_1_to_5000", "analyze table orders"
    )
    async with opened(driver.definition("orders")) as source:
        (table,) = await source.tables()
        assert 2_500 < (await source.estimate(table) or 0) < 10_000


async def test_health(driver: MysqlDriver) -> None:
    await _orders(driver)
    async with opened(driver.definition("orders")) as source:
        await source.acknowledge(await source.start())
        assert await source.health() == _health("ok", 0)
        await driver.execute("insert into orders select seq, 1, null from seq_1_to_5000")
        health = await source.health()
        assert health.state == "ok"
        assert (health.lag_bytes or 0) > 5000
        await driver.execute("purge binary logs before now() + interval 1 day", "flush binary logs")
        logs = await driver.execute("show binary logs")
        await driver.execute(f"purge binary logs to '{logs[-2][0]}'")
        health = await source.health()
        assert health.state in ("lagging", "lost")
        assert health.warning
        await driver.lose_position()
        assert (await source.health()).state == "lost"
        await source.remove()


def _health(state: str, lag: int) -> Any:
    from headwater.capture.source import Health

    return Health(state, lag)


# ------------------------------------------------------------------------ what sessions may do


async def test_compressed_events(driver: MysqlDriver) -> None:
    await _orders(driver)
    await driver.execute("set global log_bin_compress = 1, global log_bin_compress_min_len = 10")
    try:
        items = await _changes(
            driver,
            "insert into orders select seq, 1, repeat('x', 300) from seq_1_to_3",
            "update orders set n = 2, note = null",
            "delete from orders",
            "alter table orders add column a_rather_long_name int default 5",
        )
    finally:
        await driver.execute("set global log_bin_compress = 0")
    old = [(str(i), "1", "x" * 300) for i in (1, 2, 3)]
    new = [(str(i), "2", None) for i in (1, 2, 3)]
    expected: Any = [[("insert", [], old)], [("update", old, new)], [("delete", new, [])]]
    assert _plain(items) == [*expected, SchemaChange]


async def test_without_checksums(driver: MysqlDriver) -> None:
    await _orders(driver)
    await driver.execute("set global binlog_checksum = NONE")
    try:
        items = await _changes(driver, "insert into orders values (1, 1, null)")
    finally:
        await driver.execute("set global binlog_checksum = CRC32")
    assert _plain(items) == [[("insert", [], [ROW])]]


async def test_session_with_minimal_rows(driver: MysqlDriver) -> None:
    await _orders(driver)
    minimal = "set binlog_row_image = MINIMAL"
    items = await _changes(
        driver, "insert into orders values (1, 1, 'x')", minimal, "update orders set n = 2",
        "update orders set id = 3", "delete from orders",
    )  # fmt: skip
    assert _plain(items)[1:] == [
        [("update", [("1", UNCHANGED, UNCHANGED)], [("1", "2", UNCHANGED)])],
        [("update", [("1", UNCHANGED, UNCHANGED)], [("3", UNCHANGED, UNCHANGED)])],
        [("delete", [("3", UNCHANGED, UNCHANGED)], [])],
    ]
    with pytest.raises(SourceRefused, match="binlog_row_image=MINIMAL"):
        await _changes(driver, minimal, "insert into orders (id) values (1)")


async def test_session_that_logs_statements(driver: MysqlDriver) -> None:
    await _orders(driver)
    with pytest.raises(PositionLost, match=r"orders was written by a statement"):
        await _changes(
            driver, "set binlog_format = STATEMENT", "insert into orders values (1, 1, null)"
        )


async def test_xa_transactions(driver: MysqlDriver) -> None:
    await _orders(driver)
    insert = "insert into orders values (1, 1, null)"
    items = await _changes(driver, "xa start 'a'", insert, "xa end 'a'", "xa commit 'a' one phase")
    assert _plain(items) == [[("insert", [], [ROW])]]
    with pytest.raises(SourceRefused, match="XA transaction"):
        await _changes(
            driver, "xa start 'b'", "delete from orders", "xa end 'b'", "xa prepare 'b'",
            "xa commit 'b'",
        )  # fmt: skip


async def test_table_without_transactions(driver: MysqlDriver) -> None:
    await driver.execute("create table m (id int primary key) engine = MyISAM")
    await driver.execute("create table i (id int primary key)")
    items = await _changes(
        driver, "begin", "insert into i values (1)", "insert into m values (1), (2)", "rollback",
        name="m",
    )  # fmt: skip
    assert _plain(items) == [[("insert", [], [("1",), ("2",)])]]


async def test_wrong_keys_name_the_row(driver: MysqlDriver) -> None:
    await driver.execute("create table t (k varchar(9) primary key)")
    with pytest.raises(SourceRefused, match=r"t: the key of the row \('a.b', …\) has in k"):
        await _changes(driver, "insert into t values ('a\\0b')", name="t")
    async with opened(driver.definition("t")) as source:
        (table,) = await source.tables()
        with pytest.raises(SourceRefused, match="the key of the row"):
            await source.snapshot(table, None, 10)


async def test_tinyint_as_boolean(driver: MysqlDriver) -> None:
    await driver.execute("create table t (id int primary key, a bool, b tinyint(2))")
    async with opened(driver.definition("t", options={"tinyint1": "boolean"})) as source:
        (table,) = await source.tables()
        assert [column.type for column in table.columns] == ["integer", "boolean", "smallint"]
        after = await source.start()
        await driver.execute("insert into t values (1, 5, 5), (2, 0, 0), (3, null, null)")
        items = await changed(source, after, await source.start())
        rows = [row for p in transactions(items) for c in p.changes for row in c.after]
        assert rows == [("1", "t", "5"), ("2", "f", "0"), ("3", None, None)]
        assert list((await copied(source, table)).values()) == rows


async def test_a_second_reader_with_the_same_server_id(driver: MysqlDriver) -> None:
    await _orders(driver)
    definition = driver.definition("orders", options={"server_id": 4242})
    async with opened(definition) as one, opened(definition) as two:
        first = one.changes(await one.start())
        reading = asyncio.create_task(_next(first))
        processes = (
            "select count(*) from information_schema.processlist where command like 'Binlog%'"
        )
        async with asyncio.timeout(30):
            await _until(driver, f"{processes} having count(*) > 0")
            second = two.changes(await two.start())
            other = asyncio.create_task(_next(second))
            with pytest.raises((SourceRefused, SourceUnavailable)):
                await reading
        await driver.execute("insert into orders values (1, 1, null)")
        assert isinstance(await other, TransactionPart)
        await first.aclose()
        await second.aclose()
