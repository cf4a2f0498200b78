"""Folding the changes of a SQLite file gives its tables, whatever is executed.

Generated tables have unusual keys, unique indexes, foreign keys and triggers of their own;
generated statements replace, ignore, change keys, cascade, and are rolled back in part or as a
whole, from connections that know the file by different names. After each step the mirror is
compared with the tables. The mirror accepts only changes that fit its rows.
"""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

from headwater import SqliteChange, SqliteHooks
from headwater.capture.source import SourceDefinition, TableSpec
from headwater.capture.sqlite import changes, reading
from headwater.capture.sqlite.source import SqliteSource
from tests.support.generators.sizes import first_seed, size
from tests.support.sqlite_mirror import ExactMirror

HISTORIES = size("sqlite", 40, large=2000)
FIRST = first_seed(0)
STEPS = 25

TABLES = [
    "create table {t} (k integer primary key, u text {unique}, v, w text {generated})",
    "create table {t} (k integer primary key autoincrement, u text {unique}, v,"
    " w text {generated})",
    "create table {t} (k text primary key, u text {unique}, v, w text {generated})",
    "create table {t} (k text primary key collate nocase, u text {unique}, v, w text {generated})",
    "create table {t} (k text, u text {unique}, v integer, w text {generated},"
    " primary key (k, v) on conflict replace)",
    "create table {t} (k int, u text {unique}, v text, w text {generated},"
    " primary key (v, k)) without rowid",
    "create table {t} (k text primary key, u text {unique}, v, w text {generated}) without rowid",
    "create table {t} (k integer primary key, u text {unique}, v any, w text {generated}) strict",
    "create table {t} (k text primary key not null, rowid text, u text {unique}, v,"
    " w text {generated})",
]
UNIQUE = ["", "", "unique", "unique collate nocase", "unique on conflict replace"]
STORED = "generated always as (u || v) stored"
GENERATED = ("", "", "generated always as (u || '!')", STORED)
INDEXES = [
    "create unique index {i} on {t} (lower(u), v)",
    "create unique index {i} on {t} (v) where u > 'm'",
    "create unique index {i} on {t} (u collate nocase desc, v)",
    "create unique index {i} on {t} (v, coalesce(u, 'x')) where v is not null and u <> 'a'",
]
TRIGGERS = [
    "create {temp} trigger {i} after insert on {t} begin"
    " update {t} set u = u || '+' where k = new.k; end",
    "create {temp} trigger {i} after update of v on {t} begin"
    " update {t} set u = coalesce(new.u, '') || '*' where k = new.k; end",
    "create {temp} trigger {i} after insert on {t} when new.v % 3 = 0 begin"
    " delete from {t} where k = new.k; end",
    "create {temp} trigger {i} after delete on {t} when old.v % 2 = 0 begin"
    " insert or ignore into {t} (k, u, v) values (old.k, 'again', old.v + 1); end",
    "create {temp} trigger {i} before insert on {t} begin delete from {t} where u = new.u; end",
    "create {temp} trigger {i} after insert on {t} begin"
    " insert or replace into {other} (k, u, v) values (new.k, new.u, new.v); end",
    "create {temp} trigger {i} after delete on {t} begin delete from {other} where k = old.k; end",
]


class History:
    """One file and its writers."""

    errors: tuple[type[Exception], ...] = (sqlite3.IntegrityError, sqlite3.OperationalError)
    generated: tuple[str, ...] = GENERATED

    def __init__(self, seed: int, path: Path) -> None:
        self.random = random.Random(seed)
        self.path = path
        self.names = ["alpha", 'be "ta']
        self.fail = "or fail"
        db = self.connect(path)
        db.execute(f"pragma journal_mode = {self.random.choice(['wal', 'delete', 'persist'])}")
        self.create_tables(db)
        if self.random.random() < 0.5:
            self.create_triggers(db)
        other = self.connect(Path(":memory:"))
        other.execute("attach ? as shop", (str(path),))
        self.writers = [(db, "main"), (other, "shop")]

    def open(self, path: Path) -> Any:
        return sqlite3.connect(path, isolation_level=None, timeout=20)

    def connect(self, path: Path) -> Any:
        db = self.open(path)
        db.execute(f"pragma recursive_triggers = {self.random.choice([0, 0, 1])}")
        db.execute(f"pragma foreign_keys = {self.random.choice([0, 1])}")
        return db

    def create_tables(self, db: Any) -> None:
        for name in self.names:
            statement = self.random.choice(TABLES).format(
                t=_quoted(name),
                unique=self.random.choice(UNIQUE),
                generated=self.random.choice(self.generated),
            )
            db.execute(statement)
            if self.random.random() < 0.4:
                index = self.random.choice(INDEXES)
                db.execute(index.format(i=_quoted(f"index of {name}"), t=_quoted(name)))
        db.execute(
            "create table tree (k integer primary key, u text, v, parent references tree (k)"
            " on delete cascade on update cascade deferrable initially deferred)"
        )

    def create_triggers(self, db: Any, temp: str = "") -> None:
        for n in range(self.random.randint(1, 2)):
            name, other = self.random.sample(self.names, 2)
            # Temporary triggers always run before ours. One that removes or replaces the row that
            # was just inserted is a documented limit.
            kinds = [TRIGGERS[i] for i in (0, 1, 6)] if temp else TRIGGERS
            statement = self.random.choice(kinds).format(
                temp=temp, i=_quoted(f"own {temp} {n}"), t=_quoted(name), other=_quoted(other)
            )
            with suppress(*self.errors):  # it exists
                db.execute(statement)

    # ------------------------------------------------------------ statements

    def key(self) -> int | str:
        r = self.random.randint(1, 6)
        keys: list[int | str] = [r, r, f"key{r}", f"KEY{r}"]
        return self.random.choice(keys)

    def text(self) -> str | None:
        return self.random.choice(["a", "b", "A", "z", "q", None, "ü\N{SNOWMAN}", "", "o'h"])

    def number(self) -> int | str | None:
        return self.random.choice([1, 2, 3, 4, 5, 6, None, 2**60, "x"])

    def statement(self, schema: str) -> tuple[str, tuple[object, ...]]:
        kind = self.random.random()
        if kind < 0.15:
            return self.tree_statement(schema)
        t = f"{schema}.{_quoted(self.random.choice(self.names))}"
        conflict = self.random.choice(
            ["", "", "or replace", "or replace", "or ignore", "or rollback", self.fail]
        )
        row = (self.key(), self.text(), self.number())
        if kind < 0.5:
            rows = self.random.choice([1, 1, 3])
            values = [v for _ in range(rows) for v in (self.key(), self.text(), self.number())]
            places = ", ".join(["(?, ?, ?)"] * rows)
            return f"insert {conflict} into {t} (k, u, v) values {places}", tuple(values)
        if kind < 0.6:
            action = self.random.choice(["nothing", "update set v = excluded.v, u = 'up'"])
            return f"insert into {t} (k, u, v) values (?, ?, ?) on conflict do {action}", row
        if kind < 0.75:
            return f"update {conflict} {t} set u = ?, v = ? where k = ?", (*row[1:], row[0])
        if kind < 0.85:
            return f"update {conflict} {t} set k = ? where k = ?", (self.key(), self.key())
        if kind < 0.88:
            return f"update {conflict} {t} set v = v + 1", ()
        if kind < 0.91:
            return f"replace into {t} (k, u, v) select k, u, v from {t}", ()
        if kind < 0.98:
            return f"delete from {t} where k = ? or v = ?", (row[0], row[2])
        return f"delete from {t}", ()

    def tree_statement(self, schema: str) -> tuple[str, tuple[object, ...]]:
        one, two = self.random.randint(1, 5), self.random.randint(1, 5)
        return self.random.choice(
            [
                (f"insert into {schema}.tree values (?, 'n', 1, ?)", (one, two)),
                (f"insert or replace into {schema}.tree values (?, 'r', 1, ?)", (one, one)),
                (f"update {schema}.tree set k = ? where k = ?", (one, two)),
                (f"delete from {schema}.tree where k = ?", (one,)),
            ]
        )

    def execute(self, db: Any, schema: str) -> None:
        # A conflict, a wrong type, a rolled back transaction: the statement changed what it did.
        with suppress(*self.errors):
            db.execute(*self.statement(schema))

    def transaction(self) -> None:
        db, schema = self.random.choice(self.writers)
        if self.random.random() < 0.3:
            self.execute(db, schema)
            return
        db.execute("begin immediate")
        for _ in range(self.random.randint(1, 6)):
            action = self.random.random()
            with suppress(*self.errors):  # no such savepoint, no transaction
                if action < 0.1:
                    db.execute("savepoint s")
                elif action < 0.2:
                    db.execute("rollback to s")
                elif action < 0.25:
                    db.execute("release s")
                else:
                    self.execute(db, schema)
        if db.in_transaction and self.random.random() < 0.2:
            db.execute("rollback")
        with suppress(*self.errors):
            db.execute("commit")
        if db.in_transaction:
            db.execute("rollback")  # a deferred constraint was violated

    def close(self) -> None:
        for db, _ in self.writers:
            db.close()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


async def follow(
    seed: int,
    path: Path,
    between: Callable[[History], None] | None = None,
    *,
    steps: int = STEPS,
    most: int = 3,
) -> int:
    """Of each step, at most this many transactions are read together."""
    history = History(seed, path)
    tables = tuple(TableSpec(name) for name in [*history.names, "tree"])
    source = SqliteSource(SourceDefinition("shop", f"sqlite:///{path}", "shop", tables))
    mirror = ExactMirror(source)
    # Of a row that other triggers change inside a statement, the row before is not always known.
    mirror.compares_before = False
    with closing(history):
        for _ in range(3):
            history.transaction()
        await mirror.start()
        if between is not None:
            between(history)
        for _ in range(steps):
            for _ in range(history.random.randint(1, most)):
                history.transaction()
            await mirror.catch_up()
            await mirror.compare()
            if history.random.random() < 0.2:
                await mirror.restart()
            if history.random.random() < 0.3:
                await source.acknowledge(mirror.position)
        await mirror.restart()
        await source.remove()
    await source.close()
    return mirror.changes


@pytest.mark.parametrize("seed", range(FIRST, FIRST + HISTORIES))
async def test_folded_changes_are_the_tables(seed: int, tmp_path: Path) -> None:
    assert await follow(seed, tmp_path / "shop.db") > 0


@pytest.mark.parametrize("seed", range(FIRST, FIRST + max(HISTORIES // 8, 5)))
async def test_any_position_can_be_resumed(seed: int, tmp_path: Path) -> None:
    """From each position, with the rows that the mirror had there, the rest leads to the tables."""
    path = tmp_path / "shop.db"
    history = History(seed, path)
    tables = tuple(TableSpec(name) for name in [*history.names, "tree"])
    source = SqliteSource(SourceDefinition("shop", f"sqlite:///{path}", "shop", tables))
    mirror = ExactMirror(source)
    mirror.compares_before = False
    saved = []
    with closing(history):
        await mirror.start()
        for _ in range(STEPS):
            saved.append((mirror.position, {n: dict(rows) for n, rows in mirror.rows.items()}))
            history.transaction()
            await mirror.catch_up()
    for position, rows in history.random.sample(saved, 8):
        await mirror.restart()
        mirror.position, mirror.rows = position, rows
        await mirror.catch_up()
        await mirror.compare()
    await mirror.restart()
    await source.close()


@pytest.mark.parametrize("seed", range(FIRST, FIRST + max(HISTORIES // 8, 5)))
async def test_many_windows(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one poll that are read in many parts."""
    monkeypatch.setattr(reading, "SOURCE_PART_CHANGES", 60)
    for module in (reading, changes):
        monkeypatch.setattr(module, "NEIGHBOURS", 25)
    assert await follow(seed, tmp_path / "shop.db", steps=4, most=60) > 0


@pytest.mark.parametrize("seed", range(FIRST, FIRST + max(HISTORIES // 4, 5)))
async def test_triggers_that_were_created_later(seed: int, tmp_path: Path) -> None:
    """Of the file, which run before ours; and temporary ones, which a connection has for itself."""

    def create(history: History) -> None:
        temp = history.random.choice(["", "temp"])
        if temp:
            # They always run before ours; FAIL in one leaves a change that no trigger can write.
            history.fail = "or abort"
        history.create_triggers(history.writers[0][0], temp)

    await follow(seed, tmp_path / "shop.db", create)


class HookedHistory(History):
    """The same with apsw. Each connection has hooks, and all have one mirror: rows of each table,
    counted, because a key may be NULL."""

    errors = (apsw.Error,)
    generated = ("", STORED)

    def __init__(self, seed: int, path: Path) -> None:
        self.mirror: dict[str, Counter[tuple[Any, ...]]] = {}
        self.transactions = 0
        super().__init__(seed, path)

    def open(self, path: Path) -> Any:
        db = apsw.Connection(str(path))
        db.set_busy_timeout(20_000)
        SqliteHooks(db).on_commit(self.fold)
        return db

    def fold(self, committed: Sequence[SqliteChange]) -> None:
        assert committed
        self.transactions += 1
        for change in committed:
            rows = self.mirror.setdefault(change.table, Counter())
            if change.before is not None:
                rows[tuple(change.before.values())] -= 1
                assert rows[tuple(change.before.values())] >= 0, change
            if change.after is not None:
                rows[tuple(change.after.values())] += 1

    def compare(self) -> None:
        for name in [*self.names, "tree"]:
            rows = self.writers[0][0].execute(f"select * from {_quoted(name)}")
            assert +self.mirror.get(name, Counter()) == Counter(rows), name


@pytest.mark.parametrize("seed", range(FIRST, FIRST + HISTORIES))
def test_folded_hooks_are_the_tables(seed: int, tmp_path: Path) -> None:
    history = HookedHistory(seed, tmp_path / "shop.db")
    with closing(history):
        for _ in range(STEPS):
            history.transaction()
            history.compare()
    assert history.transactions
