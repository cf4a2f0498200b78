"""What a table of a SQLite file looks like now: its columns, its key and its unique indexes.

A shape is stored in the file beside the queue and numbered; each queue row names the shape that
its image has. So a row can be decoded whatever became of the table since. Tables that cannot be
captured are refused here, with the reason.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Collection
from typing import Any

import msgspec

from headwater.capture.source import SourceColumn, SourceTable, TableSpec
from headwater.capture.sqlite.statements import index_parts, quoted
from headwater.capture.sqlite.values import converter, mirror_type
from headwater.errors import SourceRefused

COLUMNS_MAX = 900
"""Columns of a captured table; SQLite has 2000 for a table, and the queue needs some."""

OWN_PREFIX = "_headwater_"

_COLLATIONS = ("BINARY", "NOCASE", "RTRIM")


class UniqueIndex(msgspec.Struct, frozen=True):
    """Expressions whose values no two rows share; `collations` has one for each. `columns` says
    that they are plain columns. Without `predicate` it concerns all rows."""

    expressions: tuple[str, ...]
    collations: tuple[str, ...]
    columns: bool = True
    predicate: str | None = None


class Shape(msgspec.Struct, frozen=True):
    """A captured table. `columns` are those that the mirror has, in their order."""

    table: str
    columns: tuple[str, ...]
    declared: tuple[str, ...]
    types: tuple[str, ...]
    key: tuple[str, ...]
    uniques: tuple[UniqueIndex, ...]
    """The first one is the key."""
    every: tuple[str, ...]
    """All columns of the table, also those that are left out."""
    statement: str = ""
    """A hash of the statement that would create the table: a column that was dropped and added
    again with another default has other values."""

    def key_places(self) -> tuple[int, ...]:
        return tuple(self.columns.index(name) for name in self.key)

    def described(self, spec: TableSpec) -> SourceTable:
        """Only the columns of the key are declared as not null: a value that does not fit its type
        becomes NULL."""
        columns = tuple(
            SourceColumn(name, type, nullable=name not in self.key)
            for name, type in zip(self.columns, self.types, strict=True)
        )
        return SourceTable(spec.name, spec.target or self.table, columns, self.key)


class SchemaObject(msgspec.Struct, frozen=True, array_like=True):
    """A table, index, view or trigger; `statement` is a hash of its SQL. `count` is how many
    statements made it: a queue gets its columns one by one."""

    name: str
    table: str
    statement: str
    count: int = 1

    @property
    def dropped_with(self) -> str:
        """The objects of a table are dropped with it. Another source drops its triggers itself."""
        own = self.name.startswith(OWN_PREFIX) and not self.table.startswith(OWN_PREFIX)
        return self.name if own else self.table


class SchemaMark(msgspec.Struct, frozen=True):
    """The schema of a file at one moment. Each statement that alters it adds one to `version`, and
    so does VACUUM."""

    version: int
    objects: tuple[SchemaObject, ...]

    def hides_alterations(self, since: SchemaMark) -> bool:
        """Whether two statements or more since then left nothing in the schema. They may have
        dropped a column and added it again; one alone (VACUUM) cannot.

        >>> t, i = SchemaObject("t", "t", "1"), SchemaObject("i", "t", "2")
        >>> [SchemaMark(n, (t, i)).hides_alterations(SchemaMark(7, (t,))) for n in (8, 9, 10)]
        [False, False, True]
        """
        before, after = ({o.name: o for o in mark.objects} for mark in (since, self))
        both = before.keys() & after.keys()
        explained = sum(after[name].count for name in after.keys() - before.keys())
        explained += len({before[name].dropped_with for name in before.keys() - after.keys()})
        explained += sum(after[name].count - before[name].count for name in both)
        explained += any(
            before[name] != after[name] and before[name].count == after[name].count for name in both
        )
        return self.version - since.version - explained >= 2


def read_mark(db: sqlite3.Connection, without: Collection[str]) -> SchemaMark:
    """Without these objects, and those that SQLite makes itself, as a part of other statements."""
    (version,) = db.execute("pragma main.schema_version").fetchone()
    rows = db.execute(
        "select name, tbl_name, sql from sqlite_master"
        " where sql is not null and substr(name, 1, 7) <> 'sqlite_' order by name"
    ).fetchall()
    return SchemaMark(
        version,
        tuple(
            SchemaObject(name, table, _hash(sql), 1 + _widened(name, sql))
            for name, table, sql in rows
            if name not in without
        ),
    )


def _widened(name: str, sql: str) -> int:
    is_queue = name.startswith(OWN_PREFIX) and name.endswith("_queue")
    return len(re.findall(r", [ck]\d+\b", sql)) if is_queue else 0


def _hash(statement: str) -> str:
    return hashlib.sha256(statement.encode()).hexdigest()[:16]


def refusal(table: str, reason: str, hint: str) -> SourceRefused:
    return SourceRefused(f"the SQLite table {table!r} cannot be captured: {reason}", hint=hint)


def find_specs(db: sqlite3.Connection, specs: tuple[TableSpec, ...]) -> list[TableSpec]:
    """The tables of a definition, in the order of their names. Where it names none: all tables but
    virtual ones, and those in which these store what they have."""
    if specs:
        return sorted(specs, key=lambda spec: spec.name)
    names = db.execute(
        "select name from sqlite_master where type = 'table' and substr(name, 1, 7) <> 'sqlite_'"
        " and substr(name, 1, ?) <> ? order by name",
        (len(OWN_PREFIX), OWN_PREFIX),
    ).fetchall()
    left_out = {*virtual_tables(db), *_shadow_tables(db)}
    return [TableSpec(name) for (name,) in names if name not in left_out]


def virtual_tables(db: sqlite3.Connection) -> list[str]:
    names = db.execute(
        "select name from sqlite_master where type = 'table' and sql like 'create virtual%'"
        " order by name"
    )
    return [name for (name,) in names.fetchall()]


def _shadow_tables(db: sqlite3.Connection) -> list[str]:
    """SQLite before 3.37 does not say which these are."""
    rows = db.execute("pragma main.table_list").fetchall()
    return [name for schema, name, type, *_ in rows if (schema, type) == ("main", "shadow")]


def find_table(db: sqlite3.Connection, name: str) -> tuple[str, str] | None:
    """The name of a table as it was created, and its statement."""
    found = db.execute(
        "select name, type, coalesce(sql, '') from sqlite_master"
        " where type in ('table', 'view') and name = ? collate nocase",
        (name,),
    ).fetchone()
    if found is None:
        return None
    if found[1] == "view":
        raise refusal(name, "it is a view", "Capture the tables that it reads.")
    if found[2].upper().startswith("CREATE VIRTUAL"):
        raise refusal(name, "it is a virtual table", "Capture the table that its rows come from.")
    if name.lower().startswith(("sqlite_", OWN_PREFIX)):
        raise refusal(name, "it is an internal table", "Name tables of your own.")
    return found[0], found[2]


def read_shape(db: sqlite3.Connection, spec: TableSpec) -> Shape | None:
    """None if there is no such table."""
    found = find_table(db, spec.name)
    if found is None:
        return None
    table, statement = found
    info = db.execute(f"pragma table_xinfo({quoted(table)})").fetchall()
    info = [row for row in info if row[6] != 1]
    key = tuple(row[1] for row in sorted(info, key=lambda row: row[5]) if row[5])
    if not key:
        raise refusal(
            table,
            "it has no primary key, and VACUUM may change the rowids of its rows",
            "Declare a primary key, or list the other tables (tables = […], --table).",
        )
    names = _wanted(table, spec, [row[1] for row in info], key)
    declared = {row[1]: row[2] or "" for row in info}
    types = tuple(_type_of(table, spec, name, declared[name], name in key) for name in names)
    return Shape(
        table, names, tuple(declared[n] for n in names), types, key,
        _unique_indexes(db, table, key, declared), tuple(declared),
        _hash(statement),
    )  # fmt: skip


def _wanted(table: str, spec: TableSpec, every: list[str], key: tuple[str, ...]) -> tuple[str, ...]:
    by_name = {name.lower(): name for name in every}
    for name in (*(spec.columns or ()), *spec.exclude, *spec.types):
        if name.lower() not in by_name:
            raise refusal(
                table, f"it has no column {name!r}", f"Its columns are {', '.join(every)}."
            )
    left_out = {by_name[name.lower()] for name in spec.exclude}
    if spec.columns is not None:
        left_out |= set(every) - {by_name[name.lower()] for name in spec.columns}
    if missing := [name for name in key if name in left_out]:
        raise refusal(
            table, f"the column {missing[0]!r} of its key is left out", "Do not leave it out."
        )
    names = tuple(name for name in every if name not in left_out)
    if len(names) > COLUMNS_MAX:
        raise refusal(
            table,
            f"it has {len(names)} columns, more than {COLUMNS_MAX}",
            "Leave columns out: exclude=[…].",
        )
    return names


def _type_of(table: str, spec: TableSpec, name: str, declared: str, key: bool) -> str:
    overrides = {column.lower(): type for column, type in spec.types.items()}
    usual = mirror_type(declared, key=key)
    wanted = overrides.get(name.lower())
    if key and declared.upper().strip() in ("", "ANY"):
        raise refusal(
            table,
            f"the column {name!r} of its key has no type, so that 1 and '1' are different keys",
            "Declare a type, for example TEXT.",
        )
    if wanted is None:
        return usual
    converter(wanted)
    if key and wanted != usual:
        raise refusal(
            table,
            f"the type {wanted!r} was given for the column {name!r} of its key",
            f"Only {usual!r} has one text for each of its values; leave it out of types.",
        )
    return wanted


def _unique_indexes(
    db: sqlite3.Connection, table: str, key: tuple[str, ...], declared: dict[str, str]
) -> tuple[UniqueIndex, ...]:
    primary: UniqueIndex | None = None
    others = []
    for _, name, unique, origin, partial in db.execute(
        f"pragma index_list({quoted(table)})"
    ).fetchall():
        if unique:
            found = _unique_index(db, table, name, bool(partial))
            if origin == "pk":
                primary = found
            else:
                others.append(found)
    if primary is None:  # the column is the rowid itself
        return (UniqueIndex(key, ("BINARY",) * len(key)), *others)
    alias = _rowid_alias(db, table, declared)
    if alias is not None:
        others.append(UniqueIndex((alias,), ("BINARY",)))
    return (primary, *others)


def _unique_index(db: sqlite3.Connection, table: str, name: str, partial: bool) -> UniqueIndex:
    rows: list[Any] = db.execute(f"pragma index_xinfo({quoted(name)})").fetchall()
    rows = [row for row in rows if row[5]]
    for row in rows:
        if row[4].upper() not in _COLLATIONS:
            raise refusal(
                table,
                f"its unique index {name!r} uses the collation {row[4]!r} of a program",
                "Use BINARY, NOCASE or RTRIM, or leave the table out.",
            )
    collations = tuple(row[4].upper() for row in rows)
    if not partial and all(row[1] >= 0 for row in rows):
        return UniqueIndex(tuple(row[2] for row in rows), collations)
    (sql,) = db.execute("select sql from sqlite_master where name = ?", (name,)).fetchone()
    expressions, predicate = index_parts(sql)
    return UniqueIndex(tuple(expressions), collations, columns=False, predicate=predicate)


def _rowid_alias(db: sqlite3.Connection, table: str, declared: dict[str, str]) -> str | None:
    """A name of the rowid, by which a row can be replaced as by any unique index."""
    taken = {name.lower() for name in declared}
    alias = next((name for name in ("rowid", "_rowid_", "oid") if name not in taken), None)
    if alias is None:
        return None
    try:
        db.execute(f"select {alias} from {quoted(table)} limit 0")
    except sqlite3.OperationalError:
        return None  # WITHOUT ROWID
    return alias
