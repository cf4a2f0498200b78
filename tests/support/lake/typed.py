"""Typed tables read by other programs than Headwater, and the truth to compare them with."""

from __future__ import annotations

import json
import struct
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Literal, NamedTuple

import duckdb
import polars as pl
from deltalake import DeltaTable

from headwater.model import Position
from tests.support.lake.truth import Database

Row = dict[str, Any]

FORMATS = "set timezone = 'UTC'; set datestyle = 'ISO'; set intervalstyle = 'iso_8601'"


class Truth(NamedTuple):
    """A table as it was: each value as PostgreSQL prints it, by the row's id."""

    position: Position
    at: datetime
    rows: dict[str, Row]


def truth(database: Database, table: str) -> Truth:
    database.execute(FORMATS.encode())
    with database.transaction():
        database.execute("set transaction isolation level repeatable read")
        ((log, snapshot),) = database.execute(
            "select headwater.log_id(), pg_current_snapshot()::text"
        ).fetchall()
        names = database.execute(
            "select attname, format_type(atttypid, null) from pg_attribute"
            " where attrelid = %s::regclass and attnum > 0 and not attisdropped order by attnum",
            [table],
        ).fetchall()
        columns = ", ".join(_text(name, kind) for name, kind in names)
        rows = database.execute(f"select {columns} from {table}".encode()).fetchall()
        ((at,),) = database.execute("select clock_timestamp()").fetchall()
    found = [dict(zip((name for name, _ in names), row, strict=True)) for row in rows]
    return Truth(Position.of_snapshot(log, snapshot), at, {row["id"]: row for row in found})


def _text(name: str, kind: str) -> str:
    column = '"{}"'.format(name.replace('"', '""'))
    if kind in ("json[]", "jsonb[]"):
        # The elements as JSON texts, if it has one dimension.
        texts = (
            f"(select json_agg(e::text order by n) from unnest({column}) with ordinality u(e, n))"
        )
        return (
            f"case when array_ndims({column}) = 1 then {texts} #>> '{{}}'"
            f" else to_json({column}) #>> '{{}}' end"
        )
    return f"{column}::text" if kind in ("json", "jsonb") else f"to_json({column}) #>> '{{}}'"


def read(
    path: str, engine: Literal["duckdb", "polars"], query: str = "select * from history"
) -> list[Row]:
    """The rows of a Delta table, with the columns' names in PostgreSQL; Headwater's own columns
    have theirs. DuckDB executes the query."""
    table = DeltaTable(path)
    reals = {f.name for f in table.schema().fields if "float" in str(f.type.to_json())}
    names = {
        f.name: f.metadata.get("headwater.column", f"!{f.name}") for f in table.schema().fields
    }
    if not table.file_uris():
        return []
    if engine == "polars":
        rows = pl.read_delta(path).to_dicts()
    else:
        with duckdb.connect() as connection:
            connection.execute("set timezone = 'UTC'")
            found = connection.execute(
                "with history as (select * from read_parquet(?, hive_partitioning = true,"
                f" union_by_name = true)) {query}",
                [table.file_uris()],
            )
            columns = [each[0] for each in found.description or []]
            rows = [dict(zip(columns, row, strict=True)) for row in found.fetchall()]
            for row in rows:  # the name of a folder, which only Delta's schema makes a boolean
                if "_is_current" in row:
                    row["_is_current"] = row["_is_current"] in (True, "true")
    return [
        {names[name]: _reals(value) if name in reals else value for name, value in row.items()}
        for row in rows
    ]


class Real(float):
    """A number of four bytes. Programs return it as one of eight."""


def _reals(value: Any) -> Any:
    if isinstance(value, list):
        return [_reals(each) for each in value]
    return None if value is None else Real(value)


def state_at(history: list[Row], position: Position) -> list[Row] | None:
    """The rows at a position according to a history; None where it says that it does not know."""
    bases = {Position.parse(row["!_snapshot"]) for row in history if row["!_snapshot"]}
    before = [base for base in bases if position.covers(base)]
    if not before:
        return None
    base = max(before, key=lambda each: sum(each.covers(other) for other in before))
    era = [row for row in history if row["!_snapshot"] == str(base)]
    for row in era:
        if row["!_op"] == "unknown" and (row["!_xid"] is None or position.contains(row["!_xid"])):
            return None
    return [
        row
        for row in era
        if row["!_op"] != "unknown"
        and (row["!_xid"] is None or position.contains(row["!_xid"]))
        and not (row["!_end_xid"] is not None and position.contains(row["!_end_xid"]))
    ]


def state_at_time(history: list[Row], at: datetime) -> list[Row] | None:
    valid = [
        row
        for row in history
        if (row["!_valid_from"] is None or row["!_valid_from"] <= at)
        and (row["!_valid_to"] is None or at < row["!_valid_to"])
    ]
    return None if any(row["!_op"] == "unknown" for row in valid) else valid


def expect(rows: list[Row], expected: dict[str, Row], story: str) -> None:
    found = {str(row["id"]): row for row in rows}
    assert len(found) == len(rows), story
    assert found.keys() == expected.keys(), story
    for key, row in expected.items():
        for name, text in row.items():
            value = found[key][name]
            assert same(value, text), f"{story}: row {key}, {name}: {value!r} is not {text!r}"


def same(value: Any, text: str | None) -> bool:
    """Whether a value in the lake is what PostgreSQL prints."""
    if value is None or text is None:
        # JSON's null is NULL in the lake.
        return value is None and text in (None, "null")
    match value:
        case bool():
            return text == ("true" if value else "false")
        case float():
            return _same_float(value, float(text))
        case int() | Decimal():
            return Decimal(text) == value
        case datetime():
            expected = datetime.fromisoformat(text)
            if expected.tzinfo is None:
                return expected == value.replace(tzinfo=None)
            return expected == (value if value.tzinfo else value.replace(tzinfo=UTC))
        case date():
            return value.isoformat() == text
        case bytes():
            return text == f"\\x{value.hex()}"
        case list():
            items = json.loads(text, parse_float=str, parse_int=str)
            return len(items) == len(value) and all(map(_same_item, value, items))
    return value == text or _same_number(value, text) or _same_json(value, text)


def _same_item(value: Any, item: Any) -> bool:
    if isinstance(item, dict):  # a row, which the lake has as JSON
        return bool(json.loads(value, parse_float=str, parse_int=str) == item)
    return same(value, str(item).lower() if isinstance(item, bool) else item)


def _same_float(value: float, expected: float) -> bool:
    if value != value or expected != expected:
        return value != value and expected != expected
    if isinstance(value, Real):
        return struct.pack("f", value) == struct.pack("f", expected)
    return repr(value) == repr(expected)


def _same_number(value: str, text: str) -> bool:
    """A numeric that became text has lost the zeros at its end."""
    try:
        return Decimal(value) == Decimal(text)
    except ArithmeticError:
        return False


def _same_json(value: str, text: str) -> bool:
    """So do the elements of arrays. Those of an array of JSON are texts in the truth."""
    try:
        if value[:1] != "[":
            return False
        found, items = json.loads(value), json.loads(text)
        return bool(found == items) or found == [each and json.loads(each) for each in items]
    except (ValueError, TypeError):
        return False
