"""The catalog's and the table map's words for a column lead to the same type of the mirror."""

from __future__ import annotations

import pytest

from headwater.capture.mysql.types import Shape, from_catalog, from_wire, mirror_type
from headwater.capture.mysql.wire import table_map as wire
from headwater.capture.mysql.wire.events import WireColumn

CASES = [
    ("tinyint(4)", "smallint"),
    ("tinyint(3) unsigned", "smallint"),
    ("smallint(5) unsigned zerofill", "integer"),
    ("mediumint(9)", "integer"),
    ("int", "integer"),
    ("int unsigned", "bigint"),
    ("bigint(20)", "bigint"),
    ("bigint(20) unsigned", "numeric(20)"),
    ("decimal(12,2)", "numeric(12,2)"),
    ("decimal(5,0) unsigned", "numeric(5,0)"),
    ("float(10,2)", "real"),
    ("double", "double precision"),
    ("bit(1)", "boolean"),
    ("bit(64)", "bit(64)"),
    ("year(4)", "smallint"),
    ("time(6)", "interval"),
    ("datetime(6)", "timestamp"),
    ("timestamp", "timestamptz"),
    ("varchar(10)", "text"),
    ("enum('unsigned','(5)')", "text"),
    ("varbinary(16)", "bytea"),
    ("multipolygon", "bytea"),
    ("inet6", "inet"),
    ("json", "jsonb"),
    ("vector(5)", None),
    ("varchar(20) /*M!100301 COMPRESSED*/", None),
    ("datetime /* mariadb-5.3 */", None),
]


@pytest.mark.parametrize(("declared", "expected"), CASES)
def test_catalog(declared: str, expected: str | None) -> None:
    assert mirror_type(from_catalog("c", declared, None, nullable=True)) == expected


def test_members() -> None:
    shape = from_catalog("c", "enum('a','it''s','b,c','')", "utf8mb4", nullable=True)
    assert shape.members == ("a", "it's", "b,c", "")


def test_booleans() -> None:
    for declared, kind in (("tinyint(1)", "boolean"), ("tinyint(1) unsigned", "tinyint")):
        assert from_catalog("c", declared, None, nullable=True, booleans=True).kind == kind
    assert from_catalog("c", "tinyint(1)", None, nullable=True).kind == "tinyint"


def _from_wire(column: WireColumn, hint: Shape | None = None) -> Shape:
    return from_wire(column, hint, lambda collation: "utf8mb4", lambda data, charset: data.decode())


@pytest.mark.parametrize(
    ("column", "hint", "expected"),
    [
        (WireColumn(wire.LONG, 0, True, "c", True), None, "bigint"),
        (WireColumn(wire.NEWDECIMAL, 12 << 8 | 2, True, "c", False), None, "numeric(12,2)"),
        (WireColumn(wire.BIT, 1 << 8 | 1, True, "c"), None, "bit(9)"),
        (WireColumn(wire.BLOB, 4, True, "c", False, 63), None, "bytea"),
        (WireColumn(wire.BLOB, 4, True, "c", False, 45), None, "text"),
        (WireColumn(wire.BLOB, 4, True, "c", False, 45), Shape("c", "json"), "jsonb"),
        (WireColumn(wire.LONG, 4, True, "c", False), Shape("c", "json"), "integer"),
        (WireColumn(wire.STRING, 16, True, "c", False, 63), Shape("c", "uuid"), "uuid"),
        (WireColumn(wire.STRING, 16, True, "c", False, 63), None, "bytea"),
        (WireColumn(wire.TINY, 0, True, "c", False), Shape("c", "boolean"), "boolean"),
        (WireColumn(wire.JSON, 4, True, "c"), None, "jsonb"),
        (WireColumn(wire.VARCHAR_COMPRESSED, 4, True, "c"), None, None),
        # Without metadata, the catalog says what it is, as long as the types fit.
        (WireColumn(wire.LONG, 0, True), Shape("c", "int", unsigned=True), "bigint"),
        (WireColumn(wire.LONG, 0, True), Shape("c", "text"), None),
        (WireColumn(wire.LONG, 0, True), None, None),
    ],
)
def test_table_map(column: WireColumn, hint: Shape | None, expected: str | None) -> None:
    assert mirror_type(_from_wire(column, hint)) == expected
