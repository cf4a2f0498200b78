"""Which PostgreSQL type a column of the mirror has, from the catalog's or the binary log's words.

`Shape` is a column without the words of either. A shape from a table map lacks what the binary log
does not say (whether a `longtext` is JSON, a `binary(16)` a UUID): the catalog's shape of the same
name is then the hint.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from headwater.capture.mysql.wire import table_map as wire
from headwater.capture.mysql.wire.events import WireColumn

Kind: TypeAlias = Literal[
    "tinyint", "smallint", "mediumint", "int", "bigint", "decimal", "float", "double", "bit",
    "boolean", "date", "datetime", "timestamp", "time", "year", "char", "text", "binary", "blob",
    "enum", "set", "json", "geometry", "uuid", "inet4", "inet6", "unsupported",
]  # fmt: skip


class Shape(msgspec.Struct, frozen=True):
    """A column of the source. `size` is digits, bytes, bits or digits of a second, whatever the
    kind needs. `charset` is the source's name of it; empty for bytes. `members` are of an enum or
    set."""

    name: str
    kind: Kind
    unsigned: bool = False
    size: int = 0
    scale: int = 0
    charset: str = ""
    members: tuple[str, ...] = ()
    nullable: bool = True
    declared: str = ""


_INTEGERS = {
    "tinyint": ("smallint", "smallint"),
    "smallint": ("smallint", "integer"),
    "mediumint": ("integer", "integer"),
    "int": ("integer", "bigint"),
    "bigint": ("bigint", "numeric(20)"),
}
_OTHERS = {
    "float": "real", "double": "double precision", "boolean": "boolean", "date": "date",
    "datetime": "timestamp", "timestamp": "timestamptz", "time": "interval", "year": "smallint",
    "char": "text", "text": "text", "binary": "bytea", "blob": "bytea", "enum": "text",
    "set": "text", "json": "jsonb", "geometry": "bytea", "uuid": "uuid", "inet4": "inet",
    "inet6": "inet",
}  # fmt: skip

MAYBE_ZERO = frozenset(("date", "datetime", "timestamp"))
"""Kinds with values such as 0000-00-00, which PostgreSQL does not have: they become NULL."""


def mirror_type(shape: Shape) -> str | None:
    """PostgreSQL's type, or None if there is none.

    >>> mirror_type(Shape("a", "bigint", unsigned=True)), mirror_type(Shape("b", "bit", size=3))
    ('numeric(20)', 'bit(3)')
    """
    if shape.kind in _INTEGERS:
        return _INTEGERS[shape.kind][shape.unsigned]
    if shape.kind == "decimal":
        return f"numeric({shape.size},{shape.scale})"
    if shape.kind == "bit":
        return "boolean" if shape.size == 1 else f"bit({shape.size})"
    return _OTHERS.get(shape.kind)


# ------------------------------------------------------------------------ from the catalog

_GEOMETRIES = frozenset((
    "geometry", "point", "linestring", "polygon", "multipoint", "multilinestring", "multipolygon",
    "geometrycollection", "geomcollection",
))  # fmt: skip
_CATALOG: dict[str, Kind] = {
    "integer": "int", "dec": "decimal", "numeric": "decimal", "real": "double", "varchar": "text",
    "tinytext": "text", "mediumtext": "text", "longtext": "text", "varbinary": "blob",
    "tinyblob": "blob", "mediumblob": "blob", "longblob": "blob",
}  # fmt: skip
_KNOWN = frozenset(_INTEGERS) | frozenset(_OTHERS) | {"decimal", "bit"}


def from_catalog(
    name: str,
    type: str,
    charset: str | None,
    *,
    nullable: bool,
    is_json: bool = False,
    booleans: bool = False,
) -> Shape:
    """`type` is the catalog's COLUMN_TYPE.

    >>> shape = from_catalog("n", "decimal(12,2) unsigned", None, nullable=False)
    >>> shape.kind, shape.size, shape.scale, shape.unsigned
    ('decimal', 12, 2, True)
    """
    lower = type.lower()
    base = re.match(r"\w*", lower)[0]  # type: ignore[index]
    kind: Kind = _CATALOG.get(base) or (base if base in _KNOWN else "unsupported")  # type: ignore[assignment]
    if base in _GEOMETRIES:
        kind = "geometry"
    if is_json and kind == "text":
        kind = "json"
    if ("compressed" in lower.partition("*/")[0] and "/*" in lower) or "mariadb-5.3" in lower:
        kind = "unsupported"
    if booleans and re.match(r"tinyint\(1\)(?! unsigned)", lower):
        kind = "boolean"
    numbers = [int(n) for n in re.findall(r"\d+", re.match(r"\w*(\([\d, ]*\))?", lower)[0])]  # type: ignore[index]
    if base.startswith("inet"):
        numbers = []
    members = _members(type) if kind in ("enum", "set") else ()
    size, scale = (*numbers, 0, 0)[:2]
    if kind == "decimal" and not numbers:
        size = 10
    return Shape(
        name, kind, "unsigned" in lower.partition("(")[2] + lower, size or (kind == "bit"), scale,
        charset or "", members, nullable, type,
    )  # fmt: skip


def _members(type: str) -> tuple[str, ...]:
    """The members of `enum('a','it''s')`, in their order.

    >>> _members("enum('a','it''s')")
    ('a', "it's")
    """
    found = re.findall(r"'((?:[^']|'')*)'", type)
    return tuple(member.replace("''", "'") for member in found)


# ------------------------------------------------------------------------ from a table map

_NUMBERS: dict[int, Kind] = {
    wire.TINY: "tinyint", wire.SHORT: "smallint", wire.INT24: "mediumint", wire.LONG: "int",
    wire.LONGLONG: "bigint",
}  # fmt: skip
_TIMES: dict[int, Kind] = {
    wire.FLOAT: "float", wire.DOUBLE: "double", wire.DATE: "date", wire.NEWDATE: "date",
    wire.DATETIME: "datetime", wire.DATETIME2: "datetime", wire.TIMESTAMP: "timestamp",
    wire.TIMESTAMP2: "timestamp", wire.TIME: "time", wire.TIME2: "time", wire.YEAR: "year",
    wire.JSON: "json", wire.GEOMETRY: "geometry",
}  # fmt: skip
_STRINGS = frozenset((
    wire.VARCHAR, wire.VAR_STRING, wire.BLOB, wire.TINY_BLOB, wire.MEDIUM_BLOB, wire.LONG_BLOB,
    wire.STRING,
))  # fmt: skip
_FIXED: dict[str, int] = {"uuid": 16, "inet6": 16, "inet4": 4}
_BINARY_COLLATION = 63


def from_wire(
    column: WireColumn,
    hint: Shape | None,
    charset_of: Callable[[int], str],
    decode: Callable[[bytes, str], str],
) -> Shape:
    """The shape of a column in a table map with metadata. Without metadata it is the hint's, or
    unsupported where the types differ."""
    name = column.name if column.name is not None else (hint.name if hint else "")
    kind = _kind_on_wire(column)
    if column.name is None:
        return hint if hint is not None and _fits(kind, hint) else Shape(name, "unsupported")
    collation = column.collation
    charset = "" if collation in (None, _BINARY_COLLATION) else charset_of(collation or 0)
    if hint is not None and _fits(kind, hint) and hint.kind in _ONLY_HINTED:
        kind = hint.kind
        charset = charset or hint.charset
    size, scale = _sizes(column, kind)
    members = tuple(decode(member, charset) for member in column.members or ())
    return Shape(
        name, kind, bool(column.unsigned), size, scale, charset, members, column.nullable,
        hint.declared if hint else "",
    )  # fmt: skip


_ONLY_HINTED = frozenset(("json", "uuid", "inet4", "inet6", "boolean"))


def _kind_on_wire(column: WireColumn) -> Kind:
    type, binary = column.type, column.collation == _BINARY_COLLATION
    if type in _NUMBERS:
        return _NUMBERS[type]
    if type in _TIMES:
        return _TIMES[type]
    if type in _STRINGS:
        fixed = type == wire.STRING
        return ("binary" if fixed else "blob") if binary else ("char" if fixed else "text")
    others: dict[int, Kind] = {
        wire.NEWDECIMAL: "decimal", wire.BIT: "bit", wire.ENUM: "enum", wire.SET: "set",
    }  # fmt: skip
    return others.get(type, "unsupported")


_SAME_ON_WIRE = {
    "json": frozenset(("text", "json", "blob")),
    "uuid": frozenset(("binary", "char")),
    "inet6": frozenset(("binary", "char")),
    "inet4": frozenset(("binary", "char")),
    "boolean": frozenset(("tinyint",)),
    "blob": frozenset(("blob", "text")),
    "binary": frozenset(("binary", "char")),
}


def _fits(kind: Kind, hint: Shape) -> bool:
    """Whether a column of the hint's kind may be written as this one."""
    return kind == hint.kind or kind in _SAME_ON_WIRE.get(hint.kind, ())


def _sizes(column: WireColumn, kind: Kind) -> tuple[int, int]:
    if kind == "decimal":
        return column.meta >> 8, column.meta & 0xFF
    if kind == "bit":
        return (column.meta >> 8) * 8 + (column.meta & 0xFF), 0
    return _FIXED.get(kind, column.meta), 0
