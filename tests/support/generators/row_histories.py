"""Random histories of tables with hostile names and keys, from a seed, with copies of the truth.

Between the steps the lake takes in what the log has, makes snapshots and is compacted. A copy has
every row as PostgreSQL had it at a position; a `quiet` one also at a time, because no transaction
was open then.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import errors, sql

from headwater.live.kinds import single
from headwater.model import Position
from headwater.pipeline.compaction import tables as compaction
from headwater.pipeline.reading.resolver import LakePaths
from tests.support.lake.truth import Database, copy, take_in, take_snapshot

TEXTS = ("", "'", "\\", "a\"b'c\\", "ä✓😀", "null", "%_\n\t", '{"id":1}', "ß" * 900)
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)

KEYS: dict[str, tuple[Any, ...]] = {
    "int": tuple(range(1, 9)),
    "bigint": (-(2**63), -1, 0, 1, 2**63 - 1),
    "text": TEXTS,
    "varchar(950)": TEXTS,
    "char(4)": ("    ", "a   ", "ab  ", "'\\  "),
    "numeric": tuple(map(Decimal, ("0", "-0.5", "1.10", "12345678901234567890.5"))),
    "numeric(10,2)": tuple(map(Decimal, ("0.00", "-0.50", "1.10", "99999999.99"))),
    "float8": (0.0, -1.5, 1e300, 1e15, 1e14, 0.1, 1e-5, float("inf")),
    "real": (0.0, 1.0, 0.5, 1e6, 123456.0),
    "timestamptz": tuple(EPOCH + timedelta(microseconds=n) for n in (0, 1, 100, 10**6, 10**12)),
    "time": tuple(map(time.fromisoformat, ("00:00", "10:00:00.5", "23:59:59.999999"))),
    "date": tuple(EPOCH.date() + timedelta(days=n) for n in (0, 1, 400)),
    "uuid": tuple(UUID(int=n) for n in (0, 1, 2**127)),
    "boolean": (True, False),
}

OTHERS: dict[str, tuple[Any, ...]] = {
    "int": (Decimal("7.5"), 10**12, 10**30),
    "bigint": (Decimal("-0.5"), 2**63, Decimal("-1e50")),
    "numeric(10,2)": tuple(map(Decimal, ("1.1", "1.104", "1.095", "-0", "1e30", "1e50", "NaN"))),
}
"""Constants that the type cannot hold, or that are written in another way than its values."""

TABLES = ("orders", "it's", 'quo"te\\d', "Ünïcode ✓", "select", "x" * 63)
COLUMNS = ("id", "k'ey", 'k"2\\', "Größe")


class KeyedTable(NamedTuple):
    """A table, with the names and types of its key."""

    name: str
    key: tuple[tuple[str, str], ...]

    @property
    def sql(self) -> sql.Identifier:
        return sql.Identifier(self.name)


class KeyFilter(NamedTuple):
    """Constants that each column of the key is compared with."""

    values: dict[str, list[Any]]

    @property
    def conditions(self) -> tuple[str, ...]:
        """As people type them."""
        return tuple(
            json.dumps([name, "in", list(map(_constant, values))])
            for name, values in self.values.items()
        )

    def matches(self, key: tuple[Any, ...]) -> bool:
        return all(part in own for part, own in zip(key, self.values.values(), strict=True))


def _constant(value: Any) -> Any:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, float):
        value = Decimal(repr(value))  # it prints Infinity as PostgreSQL does
    return value if isinstance(value, int | str) else str(value)


class Truth(NamedTuple):
    """The rows of a table at a position, by key."""

    table: KeyedTable
    position: Position
    at: datetime
    quiet: bool
    rows: dict[tuple[Any, ...], dict[str, Any]]


class RowHistory:
    """Changes random tables of a database, and writes their lake. Needs no Spark."""

    def __init__(self, seed: int, database: Database, other: Database, url: str, root: str) -> None:
        self.rng = random.Random(seed)
        self.truths: list[Truth] = []
        self.reached: Position | None = None
        self._database, self._other, self._url = database, other, url
        self._paths = LakePaths(root)
        self._columns = 0
        self._added: defaultdict[KeyedTable, list[str]] = defaultdict(list)
        self.tables = [self._table(name) for name in self.rng.sample(TABLES, 2)]
        take_in(root, url)

    def play(self, turns: int) -> None:
        """Leaves the newest changes in the log alone."""
        for turn in range(turns):
            self._transaction(self._database)
            if turn == turns - 1:  # a change in any case
                self._insert(self._database, self.tables[0])
            if self.rng.random() < 0.2:
                self._overlapping()
            self._copy(quiet=True)
            if turn < turns - 2:
                self.rng.choice((self.fill, self._snapshot, self._compact, _nothing))()
        self.truths.sort(key=lambda truth: truth.at)

    # -------------------------------------------------------------------- tables

    def _table(self, name: str) -> KeyedTable:
        types = self.rng.sample(list(KEYS), self.rng.choice((1, 1, 2)))
        names = self.rng.sample(COLUMNS, len(types))
        table = KeyedTable(name, tuple(zip(names, types, strict=True)))
        columns = [sql.SQL("{} " + kind).format(sql.Identifier(c)) for c, kind in table.key]
        key = sql.SQL(", ").join(map(sql.Identifier, names))
        self._run(
            "create table {t} ({columns}, n int, amount numeric(12,2), note text, r real,"
            " changed timestamptz, primary key ({key}))",
            t=table.sql,
            columns=sql.SQL(", ").join(columns),
            key=key,
        )
        for _ in range(3):  # rows from before capture
            self._insert(self._database, table)
        quoted = table.sql.as_string(self._database)
        self._database.execute("select headwater.enable_reactivity(%s)", [quoted])
        return table

    def a_key(self, table: KeyedTable) -> tuple[Any, ...]:
        return tuple(self.rng.choice(KEYS[kind]) for _, kind in table.key)

    def a_filter(self, table: KeyedTable) -> KeyFilter:
        values = {
            name: self.rng.choices((*KEYS[kind], *OTHERS.get(kind, ())), k=self.rng.randint(1, 4))
            for name, kind in table.key
        }
        return KeyFilter(values)

    def _run(self, text: str, **parts: sql.Composable) -> None:
        self._database.execute(sql.SQL(text).format(**parts))

    # -------------------------------------------------------------------- changes

    def _transaction(self, database: Database, *, alters: bool = True) -> None:
        table = self.rng.choice(self.tables)
        with database.transaction():
            for _ in range(self.rng.randint(1, 4)):
                self._statement(database, table)
            if alters and self.rng.random() < 0.2:
                self._alter(table)
            if alters and self.rng.random() < 0.05:
                # So that the log has each row: a history begins with its first change.
                self._run("update {t} set n = 0", t=table.sql)
                self._run("truncate {t}", t=table.sql)

    def _overlapping(self) -> None:
        """A transaction that is open while another one commits and a copy is taken."""
        busy = errors.LockNotAvailable, errors.UniqueViolation
        with self._other.transaction():
            for database in (self._other, self._database):
                database.execute("set lock_timeout = '10ms'")
                with suppress(*busy):  # both may want one key
                    self._transaction(database, alters=False)
                database.execute("reset lock_timeout")
            self._copy(quiet=False)

    def _statement(self, database: Database, table: KeyedTable) -> None:
        own, other = self.a_key(table), self.a_key(table)
        match self.rng.randint(0, 5):
            case 0 | 1 | 2:
                self._insert(database, table, own)
            case 3:
                self._where(database, table, "delete from {t} where {own}", own)
            case 4:
                names = [sql.Identifier(name) for name, _ in table.key]
                moved = [
                    sql.SQL("{} = {}").format(n, sql.Literal(v))
                    for n, v in zip(names, other, strict=True)
                ]
                text = (
                    "update {t} set {moved} where {own}"
                    " and not exists (select from {t} where {other})"
                )
                self._where(
                    database, table, text, own,
                    moved=sql.SQL(", ").join(moved), other=_is(table, other),
                )  # fmt: skip
            case 5:
                text = "update {t} set n = coalesce(n, 0) + 1 where {own}"
                self._where(database, table, text, own)

    def _where(
        self,
        database: Database,
        table: KeyedTable,
        text: str,
        own: tuple[Any, ...],
        **parts: sql.Composable,
    ) -> None:
        query = sql.SQL(text).format(t=table.sql, own=_is(table, own), **parts)
        database.execute(query)

    def _insert(
        self, database: Database, table: KeyedTable, key: tuple[Any, ...] | None = None
    ) -> None:
        names = sql.SQL(", ").join(sql.Identifier(name) for name, _ in table.key)
        values = sql.SQL(", ").join(map(sql.Literal, key or self.a_key(table)))
        query = sql.SQL(
            "insert into {t} ({names}, note, r, changed)"
            " values ({values}, {note}, {r}, clock_timestamp())"
            " on conflict ({names}) do update set note = excluded.note, changed = excluded.changed"
        ).format(
            t=table.sql,
            names=names,
            values=values,
            note=sql.Literal(self.rng.choice((*TEXTS, None))),
            r=sql.Literal(self.rng.choice((0.1, -2.5, None))),
        )
        database.execute(query)

    def _alter(self, table: KeyedTable) -> None:
        """A column more, and a change of every row with it; so each copy has the new columns. Or
        another name for such a column, and a change of one row."""
        self._columns += 1
        added, name = self._added[table], f"more {self._columns}"
        if added and self.rng.random() < 0.7:
            old = sql.Identifier(added.pop())
            self._run(
                "alter table {t} rename {old} to {c}", t=table.sql, old=old, c=sql.Identifier(name)
            )
        else:
            column = sql.Identifier(name)
            self._run("alter table {t} add column {c} int", t=table.sql, c=column)
            self._run("update {t} set {c} = 7", t=table.sql, c=column)
        added.append(name)
        self._insert(self._database, table)

    # -------------------------------------------------------------------- the lake

    def fill(self) -> None:
        take_in(self._paths.root, self._url)

    def _snapshot(self) -> None:
        table = self.rng.choice(self.tables)
        quoted = table.sql.as_string(self._database)
        (oid,) = self._database.execute("select %s::regclass::int8", [quoted]).fetchone() or (0,)
        take_snapshot(self._paths.root, self._url, oid)

    def _compact(self) -> None:
        self.fill()
        list(compaction.compact(self._paths.root, _no_spark))

    # -------------------------------------------------------------------- the truth

    def _copy(self, *, quiet: bool) -> None:
        for table in self.tables:
            quoted = table.sql.as_string(self._database)
            taken = copy(self._database, quoted)
            names = [name for name, _ in table.key]
            rows = {tuple(row[n] for n in names): _as_stored(row) for row in taken.rows}
            self.truths.append(Truth(table, taken.position, taken.at, quiet, rows))


def _as_stored(row: dict[str, Any]) -> dict[str, Any]:
    """The values as the lake's types have them."""
    stored = {name: _text(v) if isinstance(v, UUID | time) else v for name, v in row.items()}
    real = row["r"]
    return stored | {"r": None if real is None else single(real)}


def _text(value: UUID | time) -> str:
    text = str(value)
    return text.rstrip("0") if "." in text else text


def _is(table: KeyedTable, key: tuple[Any, ...]) -> sql.Composed:
    parts = (
        sql.SQL("{} = {}").format(sql.Identifier(name), sql.Literal(value))
        for (name, _), value in zip(table.key, key, strict=True)
    )
    return sql.SQL(" and ").join(parts)


def _nothing() -> None:
    """The lake stays as it is."""


def _no_spark() -> Any:
    raise AssertionError("small files are joined without Spark")
