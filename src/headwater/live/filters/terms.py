"""Index terms: necessary conditions of a filter, in a form that can be looked up.

A filter is true only for rows that meet at least one of its terms. `None` means any row. Terms may
be too wide, never too narrow: bounds are inclusive, and of a conjunction only the part with the
fewest expected rows is used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias, assert_never

from headwater.live import kinds
from headwater.live.filters.filter import (
    NEGATED,
    And,
    Compare,
    Filter,
    In,
    IsNull,
    Like,
    Not,
    Operator,
    Or,
)
from headwater.live.filters.like import prefix
from headwater.model import Table, Value


class Equal(NamedTuple):
    """The column's comparable value is this one; None for NULL."""

    column: str
    value: Any


class Between(NamedTuple):
    """The column's comparable value lies between the bounds, which are `bound(…)` or open."""

    column: str
    low: tuple[Any, ...]
    high: tuple[Any, ...]


Term: TypeAlias = Equal | Between
Terms: TypeAlias = tuple[Term, ...] | None

LOWEST = (0,)
HIGHEST = (2,)


def bound(value: Any) -> tuple[Any, ...]:
    """A value as a bound, between LOWEST and HIGHEST. NaN is above every number.

    >>> LOWEST < bound(5) < bound(float("inf")) < bound(float("nan")) == HIGHEST
    True
    """
    return (1, value) if value == value else HIGHEST


def terms(where: Filter, table: Table) -> Terms:
    """The terms of a checked filter."""
    return _Reader(table).of(where, True)


class _Reader:
    def __init__(self, table: Table) -> None:
        self._kinds = {column.name: kinds.kind_of(column) for column in table.columns}

    def of(self, where: Filter, truth: bool) -> Terms:
        """Terms for the rows for which the filter is true, or false."""
        match where:
            case And(parts):
                found = [self.of(part, truth) for part in parts]
                return _narrowest(found) if truth else _union(found)
            case Or(parts):
                found = [self.of(part, truth) for part in parts]
                return _union(found) if truth else _narrowest(found)
            case Not(part):
                return self.of(part, not truth)
            case Compare(column, operator, value):
                return self._compare(column, operator if truth else NEGATED[operator], value)
            case In(column, values):
                return self._in(column, values) if truth else None
            case Like(column, pattern, fold):
                return self._like(column, pattern) if truth and not fold else None
            case IsNull(column):
                return (Equal(column, None),) if truth else None
            case _:
                assert_never(where)

    def _compare(self, column: str, operator: Operator, value: Value) -> Terms:
        kind = self._kinds[column]
        usable = kind.equates if operator == "=" else kind.orders
        constant = kind.to_comparable(value) if usable else None
        if not usable or operator == "!=" or constant != constant:
            return None
        match operator:
            case "=":
                return (Equal(column, constant),)
            case "<" | "<=":
                return (Between(column, LOWEST, bound(constant)),)
            case _:
                return (Between(column, bound(constant), HIGHEST),)

    def _in(self, column: str, values: tuple[Value, ...]) -> Terms:
        kind = self._kinds[column]
        if not kind.equates:
            return None
        constants = {kind.to_comparable(value) for value in values if value is not None}
        if any(constant != constant for constant in constants):
            return None
        return tuple(Equal(column, constant) for constant in constants)

    def _like(self, column: str, pattern: str) -> Terms:
        """Every match begins with the literal prefix, so it sorts from there to the next one."""
        kind, start = self._kinds[column], prefix(pattern)
        if not start or not kind.equates or kind.comparable != "{v}" or start[-1] == "\U0010ffff":
            return None
        return (Between(column, bound(start), bound(start[:-1] + chr(ord(start[-1]) + 1))),)


def _union(found: Iterable[Terms]) -> Terms:
    union: list[Term] = []
    for each in found:
        if each is None:
            return None
        union.extend(each)
    return tuple(dict.fromkeys(union))


def _narrowest(found: list[Terms]) -> Terms:
    usable = [each for each in found if each is not None]
    merged = _intersect([each[0] for each in usable if len(each) == 1])
    return min([*usable, *merged], key=_width, default=None)


def _intersect(found: list[Term]) -> list[tuple[Term]]:
    """`a > 1 and a < 5` is one range, which is narrower than both."""
    ranges: dict[str, Between] = {}
    for term in found:
        if isinstance(term, Between):
            other = ranges.get(term.column, term)
            low, high = max(term.low, other.low), min(term.high, other.high)
            ranges[term.column] = Between(term.column, low, high)
    return [(term,) for term in ranges.values()]


def _width(terms: tuple[Term, ...]) -> int:
    """A rough estimate of the number of rows, to compare terms."""
    return sum(_width_of(term) for term in terms)


def _width_of(term: Term) -> int:
    match term:
        case Equal(_, None):
            return 100
        case Equal():
            return 1
        case Between(_, low, high):
            return 10_000 if low == LOWEST or high == HIGHEST else 2_000
