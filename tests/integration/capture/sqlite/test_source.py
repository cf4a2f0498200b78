"""A SQLite file as a source: other processes, files that change, tables that change, bad input."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater import limits
from headwater.capture.source import (
    Item,
    SchemaChange,
    SourceDefinition,
    TableDropped,
    TableSpec,
    TransactionPart,
)
from headwater.capture.sqlite.notification import FileWatch
from headwater.capture.sqlite.source import SqliteSource
from headwater.errors import ConfigError, PositionLost, SourceRefused, SourceUnavailable
from tests.support.sqlite_mirror import ExactMirror

SECONDS = 30.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a shop.db"


@pytest.fixture
def mode() -> str:
    return "wal"


@pytest.fixture
def db(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(path, isolation_level=None, timeout=SECONDS)
    connection.execute(f"pragma journal_mode = {mode}")
    connection.execute("create table orders (id integer primary key, name text, amount numeric)")
    yield connection
    connection.close()


def source_of(path: Path, *tables: TableSpec | str, **options: Any) -> SqliteSource:
    specs = tuple(TableSpec(t) if isinstance(t, str) else t for t in tables)
    return SqliteSource(SourceDefinition("shop", f"sqlite:///{path}", "shop", specs, **options))


@pytest.fixture
async def mirror(db: sqlite3.Connection, path: Path) -> AsyncIterator[ExactMirror]:
    mirror = ExactMirror(source_of(path, "orders"))
    await mirror.start()
    yield mirror
    await mirror.restart()
    await mirror.source.close()


def items(mirror: ExactMirror, kind: type[Item]) -> list[Any]:
    return [item for item in mirror.items if isinstance(item, kind)]


# ------------------------------------------------------------ writers

WRITER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
first, count = int(sys.argv[2]), int(sys.argv[3])
for id in range(first, first + count):
    db.execute("begin immediate")
    db.execute("insert into orders values (?, 'half', 1)", (id,))
    db.execute("update orders set name = 'whole' where id = ?", (id,))
    if id % 3:
        db.execute("commit")
    else:
        db.execute("rollback")
"""


def writer(path: Path, first: int, count: int, program: str = WRITER) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", program, str(path), str(first), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


@pytest.mark.parametrize("mode", ["wal", "delete", "truncate"])
async def test_several_processes_write(path: Path, mirror: ExactMirror) -> None:
    processes = [writer(path, first, 60) for first in (0, 1000)]
    while any(process.poll() is None for process in processes):
        await mirror.catch_up()
        # A reader sees whole transactions only.
        assert {row[1] for row in mirror.rows["orders"].values()} <= {"whole"}
        await mirror.source.acknowledge(mirror.position)
    for process in processes:
        process.communicate()
    await mirror.catch_up()
    await mirror.compare()
    assert len(mirror.rows["orders"]) == 80
    assert mirror.changes == 160


KILLED = """
import sqlite3, sys, os, signal
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
db.execute("pragma cache_size = 5")  # pages go to the file before the commit
db.execute("begin immediate")
for id in range(int(sys.argv[2]), int(sys.argv[2]) + int(sys.argv[3])):
    db.execute("insert into orders values (?, ?, 1)", (id, "x" * 500))
print("ready", flush=True)
signal.pause()
"""


@pytest.mark.parametrize("mode", ["wal", "delete"])
async def test_a_writer_that_is_killed(
    db: sqlite3.Connection, path: Path, mirror: ExactMirror
) -> None:
    db.execute("insert into orders values (1, 'before', 1)")
    await mirror.catch_up()
    process = writer(path, 100, 500, KILLED)
    assert process.stdout is not None
    await asyncio.to_thread(process.stdout.readline)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    db.execute("insert into orders values (2, 'after', 1)")
    await mirror.catch_up()
    await mirror.compare()
    assert sorted(mirror.rows["orders"]) == [("1",), ("2",)]


async def test_a_file_that_is_attached_under_another_name(path: Path, mirror: ExactMirror) -> None:
    other = sqlite3.connect(":memory:", isolation_level=None)
    other.execute("attach ? as elsewhere", (str(path),))
    other.execute("create table orders (id, name, amount)")
    other.execute("create table _headwater_shop_queue (a)")
    other.execute("insert into elsewhere.orders values (1, 'attached', 1)")
    other.execute("insert into orders values (2, 'memory', 1)")
    other.close()
    await mirror.catch_up()
    assert mirror.rows["orders"] == {("1",): ("1", "attached", "1")}


NEWER = """
import apsw, sys
db = apsw.Connection(sys.argv[1])
db.set_busy_timeout(60_000)
assert apsw.sqlite_lib_version() != sys.argv[2]
for statement in (
    "insert into orders values (1, 'a', 1), (2, 'b', 2), (60, 'c', 3)",
    "insert or replace into orders values (40, 'B', 5)",
    "insert into orders values (1, 'z', 9) on conflict do update set amount = 7",
    "update or replace orders set id = 40 where id = 1",
    "insert or replace into orders select id, name || '!', amount from orders",
    *sys.argv[3:],
):
    db.execute(statement)
"""


@pytest.mark.parametrize("last", ["", "alter table orders drop column amount"])
async def test_a_program_with_another_sqlite(db: sqlite3.Connection, path: Path, last: str) -> None:
    """The triggers that one release made work in another."""
    db.execute("create unique index by_name on orders (lower(name)) where name <> ''")
    db.execute(
        "create trigger own after insert on orders when new.id > 50 begin"
        " update orders set name = new.name || '+' where id = new.id; end"
    )
    mirror = ExactMirror(source_of(path, "orders"))
    await mirror.start()
    command = [sys.executable, "-c", NEWER, str(path), sqlite3.sqlite_version, last]
    await asyncio.to_thread(subprocess.run, command, check=True)
    await mirror.catch_up()
    await mirror.compare()
    assert sorted(mirror.rows["orders"]) == [("40",), ("60",)]
    assert mirror.rows["orders"][("60",)][1] == "c+!+"
    assert len(items(mirror, SchemaChange)) == bool(last)
    await mirror.restart()
    await mirror.source.close()


async def test_several_tables_are_one_transaction(db: sqlite3.Connection, path: Path) -> None:
    db.execute('create table "order ""lines""" (a text, b text, primary key (b, a)) without rowid')
    mirror = ExactMirror(source_of(path))
    await mirror.start()
    await mirror.catch_up()
    db.execute("begin")
    db.execute("insert into orders values (1, 'a', 1)")
    db.execute('insert into "order ""lines""" values (?, ?)', ("ü", "b"))
    db.execute("commit")
    await mirror.catch_up()
    await mirror.compare()
    (part,) = items(mirror, TransactionPart)
    assert [change.table for change in part.changes] == ["orders", 'order "lines"']
    assert part.committed_at is not None
    await mirror.restart()
    await mirror.source.close()


async def test_a_large_transaction_passes_in_parts(
    db: sqlite3.Connection, mirror: ExactMirror
) -> None:
    db.execute(
        "with recursive n (i) as (select 1 union all select i + 1 from n where i < 9000)"
        " insert into orders select i, 'n', i from n"
    )
    db.execute("update orders set name = 'm'")
    await mirror.catch_up()
    await mirror.compare()
    parts = items(mirror, TransactionPart)
    assert [part.position for part in parts].count(None) >= 4
    for part in parts:
        rows = sum(len(change.after) for change in part.changes)
        assert rows <= limits.SOURCE_PART_CHANGES
    assert parts[-1].position == mirror.position


async def test_large_rows_pass_in_parts(db: sqlite3.Connection, mirror: ExactMirror) -> None:
    db.execute("begin")
    for id in range(12):
        db.execute("insert into orders values (?, ?, 1)", (id, "x" * 2_000_000))
    db.execute("commit")
    await mirror.catch_up()
    await mirror.compare()
    for part in items(mirror, TransactionPart):
        size = sum(len(row[1]) for change in part.changes for row in change.after)
        assert size <= limits.SOURCE_PART_BYTES + 2_000_000
    chunk = await mirror.source.snapshot(mirror.tables["orders"], None, 100)
    assert len(chunk.rows) == 8
    assert chunk.last == ("7",)


async def test_acknowledged_rows_are_deleted(db: sqlite3.Connection, mirror: ExactMirror) -> None:
    for id in range(3000):
        db.execute("insert into orders values (?, 'a', 1)", (id,))
    await mirror.catch_up()
    await mirror.source.acknowledge(mirror.position)
    assert db.execute("select count(*) from _headwater_shop_queue").fetchone() == (1,)
    await mirror.restart()
    db.execute("delete from orders where id < 5")
    await mirror.catch_up()
    await mirror.compare()


async def test_an_acknowledgement_never_waits_for_a_writer(
    db: sqlite3.Connection, path: Path
) -> None:
    source = source_of(path, "orders", options={"busy_seconds": 0.0})
    position = await source.start()
    db.execute("begin immediate")
    await source.acknowledge(position)
    db.execute("rollback")
    await source.close()


async def test_closing_leaves_no_thread(db: sqlite3.Connection, path: Path) -> None:
    before = threading.active_count()
    source = source_of(path, "orders")
    iterator = source.changes(await source.start())
    await anext(iterator)
    waiting = asyncio.ensure_future(anext(iterator))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    await iterator.aclose()
    await source.close()
    assert threading.active_count() == before


async def test_without_notification(
    db: sqlite3.Connection, mirror: ExactMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.capture.sqlite.notification._open_watch", lambda folder: None)
    db.execute("insert into orders values (1, 'a', 1)")
    await mirror.catch_up()
    await mirror.compare()


async def test_a_notification_wakes(db: sqlite3.Connection, path: Path) -> None:
    watch = FileWatch(path)
    assert watch.notifies
    assert not await watch.wait(0)
    db.execute("insert into orders values (1, 'a', 1)")
    assert await watch.wait(SECONDS)
    watch.close()


# ------------------------------------------------------------ tables that change

DDL: list[tuple[str, list[str]]] = [
    ("add", ["alter table orders add column extra integer default 5",
             "insert into orders (id, extra) values (50, 7)"]),
    ("drop", ["alter table orders drop column name", "insert into orders values (50, 1)",
              "update orders set amount = 9", "delete from orders where id = 1"]),
    ("rename column", ["alter table orders rename column name to title",
                       "update orders set title = 'renamed'"]),
    ("drop and add", ["alter table orders drop column name",
                      "alter table orders add column name text default 'again'",
                      "insert into orders values (50, 1, 'n')"]),
    ("drop and add the same", ["alter table orders drop column amount",
                               "alter table orders add column amount numeric"]),
    ("drop and add beside others", ["begin", "alter table orders drop column amount",
                                    "create table more (id integer primary key)",
                                    "alter table orders add column amount numeric",
                                    "create index by_name on orders (name)", "commit"]),
    ("another default", ["alter table orders drop column amount",
                         "alter table orders add column amount numeric default 7"]),
    ("rebuild", ["begin", "create table new_orders (id integer primary key, amount real, z text)",
                 "insert into new_orders select id, amount, 'z' from orders", "drop table orders",
                 "alter table new_orders rename to orders",
                 "insert into orders values (51, 1.5, 'in between')", "commit",
                 "insert into orders values (52, 1.5, 'after')"]),
    ("another key", ["drop table orders", "create table orders (a text primary key, id int)",
                     "insert into orders values ('k', 1)"]),
    ("unique", ["create unique index by_name on orders (name)",
                "insert or replace into orders values (60, 'n2', 1)"]),
    ("trigger", ["create trigger stamp after insert on orders begin"
                 " update orders set name = 'stamped' where id = new.id; end",
                 "insert into orders values (70, 'x', 1)"]),
    ("our triggers are gone", ["drop trigger _headwater_shop_1_ai",
                               "insert into orders values (80, 'missed', 1)"]),
    ("vacuum", ["vacuum", "update orders set name = 'vacuumed'"]),
]  # fmt: skip


@pytest.mark.parametrize("statements", [s for _, s in DDL], ids=[name for name, _ in DDL])
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
async def test_tables_that_change(
    db: sqlite3.Connection, mirror: ExactMirror, statements: list[str], at_once: bool
) -> None:
    for id in range(1, 5):
        db.execute("insert into orders values (?, ?, ?)", (id, f"n{id}", id))
    await mirror.catch_up()
    for statement in statements:
        db.execute(statement)
        if not at_once and not db.in_transaction and statement != "vacuum":
            await mirror.catch_up_without_start()
    await mirror.catch_up()
    await mirror.compare()
    assert [table.name for table in await mirror.source.tables()] == ["orders"]


async def test_statements_about_other_objects_copy_nothing(
    db: sqlite3.Connection, mirror: ExactMirror
) -> None:
    for statement in (
        "create table others (id integer primary key autoincrement, name text unique)",
        "create index by_name on orders (name)",
        "create view named as select name from orders",
        "vacuum",
        "analyze",
        "alter table others add column more",
        "drop table others",
    ):
        db.execute(statement)
        db.execute("insert into orders (name) values (?)", (statement,))
        await mirror.catch_up_without_start()
    assert not [change for change in items(mirror, SchemaChange) if change.table.name == "orders"]
    await mirror.catch_up()
    await mirror.compare()


async def test_columns_of_a_unique_index(db: sqlite3.Connection, mirror: ExactMirror) -> None:
    """Others can be dropped at once, and these when Headwater has noticed that it is gone."""
    db.execute("alter table orders add column code text")
    db.execute("alter table orders add column other text")
    db.execute("create unique index by_code on orders (lower(code)) where amount > 1")
    await mirror.catch_up()
    db.execute("alter table orders drop column other")
    db.execute("insert into orders values (1, 'a', 2, 'x'), (2, 'b', 2, 'y')")
    db.execute("insert or replace into orders values (3, 'c', 2, 'X')")
    await mirror.catch_up()
    await mirror.compare()
    db.execute("drop index by_code")
    with pytest.raises(sqlite3.OperationalError, match="trigger _headwater_shop_"):
        db.execute("alter table orders drop column code")
    await mirror.catch_up_without_start()
    db.execute("alter table orders drop column code")
    db.execute("insert or replace into orders values (3, 'd', 4)")
    await mirror.catch_up()
    await mirror.compare()


async def test_a_change_of_columns_while_nothing_follows(
    db: sqlite3.Connection, mirror: ExactMirror
) -> None:
    """The position says which columns the mirror has seen."""
    db.execute("insert into orders values (1, 'a', 1)")
    await mirror.catch_up()
    await mirror.restart()
    db.execute("insert into orders values (2, 'b', 1)")
    db.execute("alter table orders add column extra text default 'x'")
    db.execute("insert into orders values (3, 'c', 1, 'y')")
    await mirror.catch_up()
    await mirror.compare()
    (change,) = items(mirror, SchemaChange)
    assert [column.name for column in change.table.columns] == ["id", "name", "amount", "extra"]
    await mirror.restart()
    mirror.items.clear()
    await mirror.catch_up()
    assert not items(mirror, SchemaChange)


async def test_a_table_that_is_dropped(db: sqlite3.Connection, path: Path) -> None:
    db.execute("create table lines (id integer primary key)")
    mirror = ExactMirror(source_of(path, "lines", "orders"))
    await mirror.start()
    await mirror.catch_up()
    db.execute("alter table lines rename to others")
    db.execute("insert into others values (1)")
    db.execute("insert into orders values (1, 'a', 1)")
    await mirror.catch_up_without_start(lambda: bool(mirror.rows["orders"]))
    assert items(mirror, TableDropped) == [TableDropped("lines")]
    found = db.execute("select count(*) from sqlite_master where tbl_name = 'others'").fetchone()
    assert found == (1,)  # no trigger of ours
    await mirror.restart()
    await mirror.source.close()


# ------------------------------------------------------------ files that change


async def lost(mirror: ExactMirror) -> str:
    await mirror.restart()
    with pytest.raises(PositionLost) as raised:
        await mirror.catch_up_without_start(lambda: False)
    assert "headwater source resnapshot shop" in (raised.value.hint or "")
    return str(raised.value)


async def test_a_queue_that_was_emptied(db: sqlite3.Connection, mirror: ExactMirror) -> None:
    db.execute("insert into orders values (1, 'a', 1)")
    await mirror.catch_up()
    db.execute("delete from _headwater_shop_queue")
    db.execute("insert into orders values (2, 'a', 1)")
    assert "emptied" in await lost(mirror)
    db.execute("delete from _headwater_shop_queue")
    assert "emptied" in await lost(mirror)
    await mirror.start()
    db.execute("insert into orders values (3, 'a', 1)")
    await mirror.catch_up()
    await mirror.compare()


async def test_a_queue_that_is_emptied_while_it_is_read(
    db: sqlite3.Connection, mirror: ExactMirror
) -> None:
    await mirror.catch_up()
    iterator = mirror.source.changes(mirror.position)
    await anext(iterator)
    db.execute("insert into orders values (1, 'a', 1)")
    db.execute("delete from _headwater_shop_queue")
    db.execute("insert into orders values (2, 'a', 1)")
    with pytest.raises(PositionLost):
        await asyncio.wait_for(anext(iterator), SECONDS)


async def test_another_file(db: sqlite3.Connection, path: Path, mirror: ExactMirror) -> None:
    await mirror.catch_up()
    other = path.with_name("other.db")
    with sqlite3.connect(other) as new:
        new.execute("create table orders (id integer primary key, name text, amount numeric)")
    new.close()
    db.close()
    for end in ("-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)
    os.replace(other, path)
    with pytest.raises(PositionLost, match="another file"):
        await mirror.catch_up_without_start(lambda: False)


@pytest.mark.parametrize("mode", ["delete"])
async def test_an_older_copy(db: sqlite3.Connection, path: Path, mirror: ExactMirror) -> None:
    await mirror.catch_up()
    backup = path.with_name("backup.db")
    shutil.copy(path, backup)
    for id in range(5):
        db.execute("insert into orders values (?, 'a', 1)", (id,))
    await mirror.catch_up()
    await mirror.restart()
    os.replace(backup, path)
    assert "older copy" in await lost(mirror)
    db.close()
    with sqlite3.connect(path) as restored:
        for id in range(9):
            restored.execute("insert into orders values (?, 'b', 1)", (id,))
    restored.close()
    assert "a copy that was changed" in await lost(mirror)


async def test_a_file_that_is_removed(
    db: sqlite3.Connection, path: Path, mirror: ExactMirror
) -> None:
    await mirror.catch_up()
    os.unlink(path)
    with pytest.raises(SourceUnavailable, match="does not exist"):
        await mirror.catch_up_without_start(lambda: False)
    await mirror.source.remove()


# ------------------------------------------------------------ values


async def test_values_that_do_not_fit(db: sqlite3.Connection, path: Path) -> None:
    db.execute("create table loose (id text primary key, n integer, at datetime, raw text)")
    spec = TableSpec("loose", types={"raw": "numeric(12,2)"}, exclude=("at",))
    mirror = ExactMirror(source_of(path, spec))
    await mirror.start()
    db.execute("insert into loose values ('1', 'many', 'now', '10.25')")
    db.execute("insert into loose values ('2', 9007199254740993, null, 'x')")
    db.execute("insert into loose values (null, 1, null, null)")
    db.execute("insert into loose values (cast(x'ff' as text), 1, null, null)")
    db.execute("update loose set id = '3' where id is null")
    await mirror.catch_up()
    assert mirror.rows["loose"] == {
        ("1",): ("1", None, "10.25"),
        ("2",): ("2", "9007199254740993", None),
        ("3",): ("3", "1", None),
    }
    await mirror.compare()
    warning = (await mirror.source.health()).warning or ""
    assert "values of loose.n are not bigint" in warning
    assert "rows of loose have a key that is NULL" in warning
    assert "loose.at" not in warning
    await mirror.restart()
    await mirror.source.close()


# ------------------------------------------------------------ bad input

REFUSED: list[tuple[str, TableSpec, str]] = [
    ("create table t (a)", TableSpec("t"), "no primary key"),
    ("create table t (a primary key)", TableSpec("t"), "has no type"),
    ("create view t as select 1", TableSpec("t"), "is a view"),
    ("create virtual table t using fts5(a)", TableSpec("t"), "virtual table"),
    ("create table t (a int primary key, b)", TableSpec("t", exclude=("a",)), "left out"),
    ("create table t (a int primary key, b)", TableSpec("t", columns=("a", "z")), "column 'z'"),
    ("create table t (a int primary key, b)", TableSpec("t", types={"b": "point"}), "'point'"),
    ("create table t (a date primary key)", TableSpec("t", types={"a": "date"}), "of its key"),
]


@pytest.mark.parametrize(("ddl", "spec", "reason"), REFUSED, ids=[r for _, _, r in REFUSED])
async def test_tables_that_cannot_be_captured(
    db: sqlite3.Connection, path: Path, ddl: str, spec: TableSpec, reason: str
) -> None:
    db.execute(ddl)
    source = source_of(path, "orders", spec)
    (problem,) = await source.check()
    assert reason in problem.what
    assert problem.fix
    with pytest.raises(SourceRefused, match=reason):
        await source.tables()
    with pytest.raises(SourceRefused, match=reason):
        await source.start()
    assert not db.execute("select 1 from sqlite_master where name like '%headwater%'").fetchall()
    await source.close()


async def test_a_table_that_does_not_exist(db: sqlite3.Connection, path: Path) -> None:
    """Only the runner knows whether it was mirrored before: the others are described."""
    source = source_of(path, "orders", TableSpec("t"))
    (problem,) = await source.check()
    assert ("no such table" in problem.what, problem.missing) == (True, "t")
    assert "t" not in [table.name for table in await source.tables()]
    await source.close()


def no_database(path: Path) -> None:
    path.write_bytes(b"this is not a database, but it is long enough to have a header" * 20)


FILES: list[tuple[Callable[[Path], None], str]] = [
    (no_database, "cannot be read"),
    (Path.touch, "no tables"),
]


@pytest.mark.parametrize(("make", "reason"), FILES, ids=[reason for _, reason in FILES])
async def test_files_that_cannot_be_captured(
    path: Path, make: Callable[[Path], None], reason: str
) -> None:
    make(path)
    source = source_of(path)
    (problem,) = await source.check()
    assert reason in problem.what
    await source.close()


async def test_virtual_tables_and_their_shadow_tables_are_left_out(
    db: sqlite3.Connection, path: Path
) -> None:
    db.execute("create table notes (id integer primary key, text text)")
    db.execute("create virtual table search using fts5(text)")
    source = source_of(path)
    (problem,) = await source.check()
    assert problem.warning
    assert "the virtual table search is not mirrored" in problem.what
    assert [table.name for table in await source.tables()] == ["notes", "orders"]
    await source.start()
    await source.close()


async def test_a_file_that_does_not_exist_may_exist_later(path: Path) -> None:
    source = source_of(path)
    with pytest.raises(SourceUnavailable, match="does not exist"):
        await source.check()
    await source.close()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:x.db"])
def test_urls_without_a_file(url: str) -> None:
    with pytest.raises(SourceRefused, match="names no file"):
        SqliteSource(SourceDefinition("shop", url, "shop"))


def test_options_that_do_not_exist(path: Path) -> None:
    with pytest.raises(ConfigError, match="'colour'"):
        source_of(path, options={"colour": "red"})


async def test_names_of_sources_that_differ_in_case(db: sqlite3.Connection, path: Path) -> None:
    """SQLite does not distinguish their objects: the second is refused, and removes nothing."""
    one = SqliteSource(SourceDefinition("a_b", f"sqlite:///{path}", "o"))
    other = SqliteSource(SourceDefinition("A_B", f"sqlite:///{path}", "p"))
    mirror = ExactMirror(one)
    await mirror.start()
    (problem,) = await other.check()
    assert "source 'a_b'" in problem.what
    with pytest.raises(SourceRefused, match="only in case"):
        await other.start()
    await other.remove()
    await other.close()
    db.execute("insert into orders values (1, 'a', 1)")
    await mirror.catch_up()
    await mirror.compare()
    assert await one.check() == []
    await one.remove()
    await one.close()


async def test_two_sources_of_one_file(db: sqlite3.Connection, path: Path) -> None:
    one = source_of(path, "orders")
    other = SqliteSource(SourceDefinition('shop_1_"x', f"sqlite:///{path}", "o"))
    mirrors = ExactMirror(one), ExactMirror(other)
    for mirror in mirrors:
        await mirror.start()
    db.execute("insert into orders values (1, 'a', 1)")
    for mirror in mirrors:
        await mirror.catch_up()
        await mirror.compare()
        assert not items(mirror, SchemaChange)
        await mirror.restart()
    await one.remove()
    await one.remove()
    db.execute("insert into orders values (2, 'a', 1)")
    await mirrors[1].catch_up()
    await mirrors[1].compare()
    await mirrors[1].restart()
    await other.remove()
    await one.close()
    await other.close()
    assert [name for (name,) in db.execute("select name from sqlite_master")] == [
        "orders", "sqlite_sequence",
    ]  # fmt: skip
