"""Leaves out rows that the predicate of a definition does not match, for sources that cannot do it
themselves.

Only the columns of the predicate are decoded. A row that begins to match is written, and one that
no longer matches is deleted, whether or not it is there. Where the change does not carry enough to
decide, the table is copied again: a wrong row is never written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

from headwater.capture.mirror.runs import (
    Delete,
    Insert,
    Recopy,
    Rekey,
    Run,
    Truncate,
    Update,
)
from headwater.capture.mirror.statements import MirrorColumn
from headwater.capture.mirror.tables import Mirror
from headwater.capture.mirror.writers import FilterRuns
from headwater.capture.source import (
    UNCHANGED,
    Source,
    SourceColumn,
    SourceDefinition,
    SourceRow,
    SourceTable,
)
from headwater.errors import InvalidQuery, SourceRefused
from headwater.live.filters.check import check
from headwater.live.filters.compile import Matches, compile_filter
from headwater.live.filters.filter import Filter, conditions, from_json
from headwater.live.needs import Undecided
from headwater.model import Column, Table


def row_filter(source: Source, definition: SourceDefinition, mirror: Mirror) -> FilterRuns | None:
    """The filter of a table's changes; None if there is nothing to leave out here."""
    where = next((t.where for t in definition.tables if t.name == mirror.name), None)
    if where is None or source.filters_rows:
        return None
    return RowFilter(mirror, where)


def check_predicate(table: SourceTable, where: Any) -> None:
    """SourceRefused if a table cannot have this predicate, before it has a mirror."""
    _checked(table.name, where, _table("", table, table.columns))


def _checked(name: str, where: Any, table: Table) -> Filter:
    try:
        return check(from_json(where), table)
    except InvalidQuery as error:
        raise SourceRefused(
            f"the predicate of table {name} is wrong: {error}", hint=error.hint
        ) from error


class RowFilter:
    """Filters the changes of one table."""

    def __init__(self, mirror: Mirror, where: Any) -> None:
        table = _table(mirror.schema, mirror.description, mirror.columns)
        checked = _checked(mirror.name, where, table)
        names = {condition.column for condition in conditions(checked)}
        self._name = mirror.name
        self._matches: Matches = compile_filter(checked, table)
        self._columns = [
            (i, column.name, _DECODERS[column.type])
            for i, column in enumerate(table.columns)
            if column.name in names
        ]
        self._key = mirror.statements().key

    def __call__(self, run: Run) -> Sequence[Run]:
        match run:
            case Insert(rows):
                matching = [row for row in rows if self._is_wanted(row)]
                return [Insert(matching)] if matching else []
            case Update(rows):
                return self._updates(run, rows)
            case Rekey(key, row):
                wanted = self._decide(row)
                return [Delete([key])] if wanted is False else [run]
            case Delete() | Truncate() | Recopy():
                return [run]

    def _updates(self, run: Update, rows: Sequence[SourceRow]) -> list[Run]:
        carried = {*run.columns, *self._key}
        known = [i in carried for i, _, _ in self._columns]
        if not any(known):
            return [run]
        if not all(known):
            return [Recopy()]
        wanted = [row for row in rows if self._is_wanted(row)]
        others = [self._key_of(row) for row in rows if not self._is_wanted(row)]
        runs: list[Run] = [Delete(others)] if others else []
        if not wanted:
            return runs
        if any(UNCHANGED in row for row in wanted):
            return runs + [Rekey(self._key_of(row), row) for row in wanted]
        return [*runs, Insert(wanted)]

    def _key_of(self, row: SourceRow) -> tuple[str, ...]:
        return tuple([row[i] for i in self._key])  # type: ignore[misc]

    def _decide(self, row: SourceRow) -> bool | None:
        """None if the change does not say it."""
        if any(row[i] is UNCHANGED for i, _, _ in self._columns):
            return None
        return self._is_wanted(row)

    def _is_wanted(self, row: SourceRow) -> bool:
        values: dict[str, Any] = {}
        try:
            for i, name, decode in self._columns:
                cell = row[i]
                values[name] = None if cell is None else decode(cell)
            return self._matches(values)
        except (Undecided, ValueError, ArithmeticError) as error:
            raise SourceRefused(
                f"the predicate of table {self._name} cannot be decided for a row",
                hint="Use a simpler predicate: comparisons of numbers, texts, dates and booleans.",
            ) from error


def _table(
    schema: str, described: SourceTable, columns: Sequence[MirrorColumn | SourceColumn]
) -> Table:
    typed = tuple(
        Column(
            column.name,
            _canonical(column.type),
            column.type,
            "C" if _is_text(column.type) else None,
        )
        for column in columns
    )
    return Table(0, schema, described.target, typed, described.key)


_CANONICAL = {
    "decimal": "numeric", "int": "integer", "char": "character",
    "int2": "smallint", "int4": "integer", "int8": "bigint", "float4": "real",
    "float8": "double precision", "bool": "boolean", "varchar": "character varying",
    "bpchar": "character", "timestamptz": "timestamp with time zone",
    "timestamp": "timestamp without time zone", "time": "time without time zone",
}  # fmt: skip


def _canonical(type_: str) -> str:
    """As PostgreSQL prints it, without its length.

    >>> _canonical("pg_catalog.int8"), _canonical("timestamp(6) with time zone")
    ('bigint', 'timestamp with time zone')
    """
    name = _LENGTH.sub("", type_.removeprefix("pg_catalog.").strip('"'))
    return _CANONICAL.get(name, name)


_LENGTH = re.compile(r"\s*\([\d, -]*\)")


def _is_text(type_: str) -> bool:
    return _canonical(type_) in ("text", "character varying", "character", "name")


def _boolean(text: str) -> bool:
    if text.lower() in ("t", "true", "1", "on", "yes"):
        return True
    if text.lower() in ("f", "false", "0", "off", "no"):
        return False
    raise ValueError(text)


def _undecodable(text: str) -> Any:
    raise ValueError(text)


class _Decoders(dict[str, Callable[[Any], Any]]):
    def __missing__(self, type_: str) -> Callable[[Any], Any]:
        return _undecodable


_DECODERS = _Decoders(
    {
        "smallint": int,
        "integer": int,
        "bigint": int,
        "numeric": Decimal,
        "real": float,
        "double precision": float,
        "boolean": _boolean,
        "text": str,
        "character varying": str,
        "character": str,
        "name": str,
        "uuid": UUID,
        "date": date.fromisoformat,
        "time without time zone": time.fromisoformat,
        "timestamp without time zone": datetime.fromisoformat,
        "timestamp with time zone": datetime.fromisoformat,
    }
)
