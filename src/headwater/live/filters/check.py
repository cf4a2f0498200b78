"""Checks a filter against a table and gives its constants the types of their columns.

After this, every column exists and may be used, every constant can be compared with its column, and
every pattern is valid. Errors have the path of the part that is wrong: `where[2].value`.
"""

from __future__ import annotations

from collections.abc import Collection
from decimal import Decimal
from typing import Any, assert_never

from headwater import limits
from headwater.errors import InvalidQuery
from headwater.live import kinds
from headwater.live.columns import unusable_column
from headwater.live.filters.filter import (
    And,
    Compare,
    Filter,
    In,
    IsNull,
    Like,
    Not,
    Or,
    conditions,
    depth,
    too_large,
)
from headwater.live.filters.like import tokens
from headwater.live.kinds import Kind
from headwater.model import Column, Table, Value


def check(
    where: Filter,
    table: Table,
    *,
    filterable: Collection[str] | None = None,
    path: str = "where",
) -> Filter:
    """The filter with typed constants, or InvalidQuery. `filterable` limits the columns."""
    columns = {column.name: column for column in table.columns}
    allowed = columns if filterable is None else {n: columns[n] for n in filterable if n in columns}
    if sum(1 for _ in conditions(where)) > limits.FILTER_CONDITIONS_MAX:
        raise too_large(f"{limits.FILTER_CONDITIONS_MAX} conditions", path)
    if sum(len(each.values) for each in conditions(where) if isinstance(each, In)) > (
        limits.FILTER_VALUES_TOTAL_MAX
    ):
        raise too_large(f"{limits.FILTER_VALUES_TOTAL_MAX:,} values", path)
    if sum(len(each.pattern) for each in conditions(where) if isinstance(each, Like)) > (
        limits.FILTER_PATTERNS_CHARS_MAX
    ):
        bound = f"{limits.FILTER_PATTERNS_CHARS_MAX:,} characters in all patterns together"
        raise too_large(bound, path)
    if depth(where) > limits.FILTER_DEPTH_MAX:
        raise InvalidQuery(f"nested deeper than {limits.FILTER_DEPTH_MAX}", path=path)
    return _Check(table, allowed).node(where, path)


class _Check:
    def __init__(self, table: Table, columns: dict[str, Column]) -> None:
        self._table = table
        self._columns = columns

    def node(self, where: Filter, path: str) -> Filter:
        match where:
            case And(parts):
                return And(self._parts(parts, path))
            case Or(parts):
                return Or(self._parts(parts, f"{path}.or"))
            case Not(In() | Like() | IsNull() as part):
                return Not(self.node(part, path))
            case Not(part):
                return Not(self.node(part, f"{path}.not"))
            case Compare(column, operator, value):
                return Compare(column, operator, self._value(column, value, path))
            case In(column, values):
                return In(column, self._values(column, values, path))
            case Like(column, pattern, fold):
                return Like(column, self._pattern(column, pattern, path), fold)
            case IsNull(column):
                self._kind(column, path)
                return where
            case _:
                assert_never(where)

    def _parts(self, parts: tuple[Filter, ...], path: str) -> tuple[Filter, ...]:
        return tuple(self.node(part, f"{path}[{i}]") for i, part in enumerate(parts))

    def _kind(self, name: str, path: str) -> Kind:
        column = self._columns.get(name)
        if column is None:
            raise unusable_column(
                self._table, name, self._columns, path=f"{path}.column", use="filterable"
            )
        return kinds.kind_of(column)

    def _comparable(self, name: str, path: str) -> Kind:
        kind = self._kind(name, path)
        if not kinds.compares(self._columns[name]):
            raise InvalidQuery(
                f"{name!r} is {self._columns[name].declared}, which cannot be compared",
                path=path,
                hint="Only 'is null' and 'is not null' apply to it.",
            )
        return kind

    def _value(self, name: str, value: Any, path: str) -> Value:
        kind = self._comparable(name, path)
        if value is None:
            raise InvalidQuery(
                "a comparison with null is never true",
                path=f"{path}.value",
                hint="Use 'is null' or 'is not null'.",
            )
        return _read(kind, value, f"{path}.value")

    def _values(self, name: str, values: tuple[Any, ...], path: str) -> tuple[Value, ...]:
        kind = self._comparable(name, path)
        if len(values) > limits.FILTER_VALUES_MAX:
            raise too_large(f"{limits.FILTER_VALUES_MAX:,} values", f"{path}.value")
        found = tuple(
            None if value is None else _read(kind, value, f"{path}.value[{i}]")
            for i, value in enumerate(values)
        )
        _check_hashes(found, f"{path}.value")
        return found

    def _pattern(self, name: str, pattern: Any, path: str) -> str:
        kind = self._kind(name, path)
        if not kind.text:
            raise InvalidQuery(
                f"{name!r} is {self._columns[name].declared}; like applies to text only", path=path
            )
        text: str = _read(kind, pattern, f"{path}.value")
        if len(text) > limits.FILTER_PATTERN_CHARS_MAX:
            raise InvalidQuery(
                f"a pattern of {len(text):,} characters; at most"
                f" {limits.FILTER_PATTERN_CHARS_MAX:,} are allowed",
                path=f"{path}.value",
                hint="Compare the whole text with '=', or look for a shorter part of it.",
            )
        try:
            tokens(text)
        except ValueError as error:
            raise InvalidQuery(str(error), path=f"{path}.value") from None
        return text


def _check_hashes(values: tuple[Value, ...], path: str) -> None:
    """Refuse many numbers with the same hash: looking one up among them would take long."""
    numbers = {str(value): hash(value) for value in values if isinstance(value, int | Decimal)}
    if len(numbers) - len(set(numbers.values())) > limits.FILTER_HASHES_MAX:
        raise InvalidQuery(
            f"more than {limits.FILTER_HASHES_MAX} numbers with the same hash",
            path=path,
            hint="Ask for them with 'between', or in several queries.",
        )


def _read(kind: Kind, value: Any, path: str) -> Value:
    try:
        return kinds.read(kind, value)
    except ValueError as error:
        raise InvalidQuery(str(error), path=path) from None
