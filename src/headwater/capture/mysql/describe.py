"""Tables as the catalog has them now, with what is needed to read their rows.

A `Table` is the contract's `SourceTable` with the shapes of all its columns. It is made from the
catalog here, and from a table map in `described_by`, for rows that are older than the catalog.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from headwater.capture.mysql.connection import Address, query, quoted
from headwater.capture.mysql.positions import Dialect
from headwater.capture.mysql.types import MAYBE_ZERO, Shape, from_catalog, from_wire, mirror_type
from headwater.capture.mysql.values import decoder, is_known_charset
from headwater.capture.mysql.wire.events import TableMap
from headwater.capture.source import SourceColumn, SourceDefinition, SourceTable, TableSpec
from headwater.errors import SourceRefused

if TYPE_CHECKING:
    from pymysql.connections import Connection

NAME_BYTES_MAX = 63
"""PostgreSQL's bound for a name."""


class Table(msgspec.Struct, frozen=True):
    """A captured table. `shapes` has all columns of the source's table, also those left out."""

    schema: str
    name: str
    spec: TableSpec
    shapes: tuple[Shape, ...]
    source: SourceTable
    engine: str = ""

    def shape(self, name: str) -> Shape | None:
        return next((shape for shape in self.shapes if shape.name == name), None)


class Charsets(msgspec.Struct):
    """The server's collations by number, and the characters of its one-byte character sets."""

    names: dict[int, str]
    tables: dict[str, str]

    def name(self, collation: int) -> str:
        return self.names.get(collation, "utf8mb4")

    def decode(self, data: bytes, charset: str) -> str:
        return decoder(charset, self.tables)(data)


class Found(msgspec.Struct):
    """What the catalog says about a table."""

    schema: str
    name: str
    type: str
    engine: str
    shapes: list[Shape]
    key: list[str]


# ------------------------------------------------------------------------ names


def locate(spec: TableSpec, database: str, existing: set[tuple[str, str]]) -> tuple[str, str]:
    """The schema and the table of a name: `orders`, `sales.orders`, or with a dot in the name.

    >>> locate(TableSpec("sales.orders"), "shop", set())
    ('sales', 'orders')
    >>> locate(TableSpec("odd.name"), "shop", {("shop", "odd.name")})
    ('shop', 'odd.name')
    """
    if (database, spec.name) in existing or "." not in spec.name:
        return database, spec.name
    schema, _, name = spec.name.partition(".")
    return schema, name


def schemas(definition: SourceDefinition, database: str) -> set[str]:
    found = {database}
    for spec in definition.tables:
        if "." in spec.name:
            found.add(spec.name.partition(".")[0])
    return found


# ------------------------------------------------------------------------ the catalog


def read_charsets(connection: Connection[Any], dialect: Dialect) -> Charsets:
    source = (
        "collation_character_set_applicability where id is not null"
        if dialect == "mariadb"
        else "collations"
    )
    rows = query(connection, f"select id, character_set_name from information_schema.{source}")
    names = {int(number): str(name) for number, name in rows}
    tables = dict[str, str]()
    every = bytes(range(256)).hex()
    single = "select character_set_name from information_schema.character_sets where maxlen = 1"
    for (charset,) in query(connection, single):
        if not is_known_charset(charset) and charset != "binary":
            found = query(connection, f"select convert(_{charset} x'{every}' using utf8mb4)")
            tables[charset] = str(found[0][0])
    return Charsets(names, tables)


def find_tables(
    connection: Connection[Any],
    definition: SourceDefinition,
    address: Address,
    *,
    fold: bool,
    mariadb: bool,
) -> tuple[list[tuple[TableSpec, Found]], list[TableSpec]]:
    """The tables of the definition, and those that do not exist. `fold`: names have no case."""
    found = _catalog(connection, schemas(definition, address.database), definition, mariadb)
    if not definition.tables:
        base = [each for each in found.values() if each.type == "BASE TABLE"]
        mine = [each for each in base if each.schema == address.database]
        return [(TableSpec(each.name), each) for each in mine], []
    by_name = {(_folded(s, fold), _folded(n, fold)): each for (s, n), each in found.items()}
    present, absent = list[tuple[TableSpec, Found]](), list[TableSpec]()
    for spec in definition.tables:
        schema, name = locate(spec, address.database, set(found))
        each = by_name.get((_folded(schema, fold), _folded(name, fold)))
        if each is None:
            absent.append(spec)
        else:
            present.append((spec, each))
    return present, absent


def _folded(name: str, fold: bool) -> str:
    return name.lower() if fold else name


def _catalog(
    connection: Connection[Any], names: set[str], definition: SourceDefinition, mariadb: bool
) -> dict[tuple[str, str], Found]:
    wanted = tuple(sorted(names))
    places = ", ".join(["%s"] * len(wanted))
    found = dict[tuple[str, str], Found]()
    for schema, name, type, engine in query(
        connection,
        "select table_schema, table_name, table_type, coalesce(engine, '')"
        f" from information_schema.tables where table_schema in ({places})",
        wanted,
    ):
        found[schema, name] = Found(schema, name, type, engine, [], [])
    json = _json_columns(connection, wanted, places) if mariadb else set()
    booleans = definition.options.get("tinyint1") == "boolean"
    for schema, name, column, type, charset, nullable in query(
        connection,
        "select table_schema, table_name, column_name, column_type, character_set_name, is_nullable"
        f" from information_schema.columns where table_schema in ({places})"
        " order by table_schema, table_name, ordinal_position",
        wanted,
    ):
        if (schema, name) in found:
            shape = from_catalog(
                column, type, charset, nullable=nullable == "YES",
                is_json=(schema, name, column) in json, booleans=booleans,
            )  # fmt: skip
            found[schema, name].shapes.append(shape)
    for schema, name, column in query(
        connection,
        "select table_schema, table_name, column_name from information_schema.key_column_usage"
        f" where table_schema in ({places}) and constraint_name = 'PRIMARY'"
        " order by table_schema, table_name, ordinal_position",
        wanted,
    ):
        if (schema, name) in found:
            found[schema, name].key.append(column)
    return found


def _json_columns(
    connection: Connection[Any], wanted: tuple[str, ...], places: str
) -> set[tuple[str, str, str]]:
    """MariaDB's JSON is a longtext with a check of the same name as the column."""
    rows = query(
        connection,
        "select constraint_schema, table_name, constraint_name, check_clause"
        f" from information_schema.check_constraints where constraint_schema in ({places})",
        wanted,
    )
    return {
        (schema, table, name)
        for schema, table, name, clause in rows
        if clause.lower() == f"json_valid({quoted(name).lower()})"
    }


# ------------------------------------------------------------------------ tables


def describe(spec: TableSpec, found: Found) -> Table:
    """Raises `SourceRefused` with the table's name for one that cannot be mirrored."""
    problem = problem_of(spec, found)
    if problem is not None:
        raise SourceRefused(problem[0], hint=problem[1])
    source = _mirrored(spec, found.name, found.shapes, found.key)
    return Table(found.schema, found.name, spec, tuple(found.shapes), source, found.engine)


def described_by(table_map: TableMap, table: Table, charsets: Charsets) -> Table:
    """The table as it was when the rows were written."""
    with_names = bool(table_map.columns) and table_map.columns[0].name is not None
    shapes = list[Shape]()
    for i, column in enumerate(table_map.columns):
        if with_names:
            hint = table.shape(column.name or "")
        else:
            hint = table.shapes[i] if len(table.shapes) == len(table_map.columns) else None
        shapes.append(from_wire(column, hint, charsets.name, charsets.decode))
    key = list(table.source.key)
    if table_map.key:
        key = [shapes[i].name for i in table_map.key]
    found = Found(table.schema, table.name, "BASE TABLE", table.engine, shapes, key)
    return describe(table.spec, found)


def _mirrored(spec: TableSpec, name: str, shapes: list[Shape], key: list[str]) -> SourceTable:
    columns = tuple(
        SourceColumn(
            shape.name,
            spec.types.get(shape.name) or mirror_type(shape) or "text",
            shape.name not in key and (shape.nullable or shape.kind in MAYBE_ZERO),
        )
        for shape in shapes
        if is_mirrored(spec, shape.name)
    )
    return SourceTable(spec.name, spec.target or name, columns, tuple(key))


def is_mirrored(spec: TableSpec, column: str) -> bool:
    if spec.columns is not None:
        return column in spec.columns
    return column not in spec.exclude


def problem_of(spec: TableSpec, found: Found) -> tuple[str, str] | None:
    """Why a table cannot be mirrored, and what to do about it."""
    name = spec.name
    if found.type != "BASE TABLE":
        return (
            f"{name} is a {found.type.lower()}, not a plain table",
            "Capture the tables that it reads." if "VIEW" in found.type else "Leave it out.",
        )
    present = {shape.name for shape in found.shapes}
    for column in (*(spec.columns or ()), *spec.exclude, *spec.types):
        if column not in present:
            return f"{name} has no column {column}", "Correct the definition of the source."
    if not found.key:
        return (
            f"{name} has no primary key",
            f"alter table {quoted(found.schema, found.name)} add primary key (…), or list the other"
            " tables (tables = […], --table)",
        )
    if missing := [column for column in found.key if not is_mirrored(spec, column)]:
        return (
            f"{name} leaves out {missing[0]}, a column of its key",
            "Mirror all columns of the primary key.",
        )
    return next(filter(None, (_column_problem(spec, shape) for shape in found.shapes)), None)


def _column_problem(spec: TableSpec, shape: Shape) -> tuple[str, str] | None:
    if not is_mirrored(spec, shape.name):
        return None
    if mirror_type(shape) is None:
        return (
            f"{spec.name}.{shape.name} has the type {shape.declared or 'of another release'},"
            " which cannot be mirrored",
            f'Leave it out: exclude = ["{shape.name}"]',
        )
    if len(shape.name.encode()) > NAME_BYTES_MAX:
        return (
            f"the name of {spec.name}.{shape.name} is longer than PostgreSQL's 63 bytes",
            "Rename the column, or leave it out with exclude.",
        )
    return None


# ------------------------------------------------------------------------ changes of a table


def has_fewer(table: Table, known: Table) -> bool:
    """Whether columns went and nothing else changed, so that the rows need no copy."""
    new, old = table.source, known.source
    return set(new.columns) <= set(old.columns) and new.key == old.key


def same_columns(table: Table, known: Table) -> bool:
    """Whether rows have the announced columns, of which some may be nullable only here."""
    new, old = table.source, known.source
    return new.key == old.key and [(c.name, c.type) for c in new.columns] == [
        (c.name, c.type) for c in old.columns
    ]


def has_key(table: Table, present: Table) -> bool:
    key = table.source.key
    return key == present.source.key and {c for c in table.source.columns if c.name in key} <= set(
        present.source.columns
    )


def with_gaps(table: Table, present: Table | None) -> Table:
    """Columns that the catalog no longer has may be NULL: a copy cannot read them."""
    columns = set(present.source.columns) if present else set()
    gaps = [
        column if column in columns or column.name in table.source.key else _nullable(column)
        for column in table.source.columns
    ]
    source = msgspec.structs.replace(table.source, columns=tuple(gaps))
    return msgspec.structs.replace(table, source=source)


def _nullable(column: SourceColumn) -> SourceColumn:
    return msgspec.structs.replace(column, nullable=True)
