"""Compiles a filter into a Python function of a row: true exactly if SQL's WHERE is true.

Every node has two expressions: one for true, one for false. NULL is neither. NOT swaps them, and
AND and OR mirror each other. So three-valued logic costs nothing when the function runs. A
condition that memory cannot decide, or a value that Python cannot compare, raises `Undecided`, but
only if the result for the row depends on it.

The source is compiled once for each form of filter: queries that differ only in constants share it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias, assert_never

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
    conditions,
)
from headwater.live.filters.like import fold_guard, lowers_to_ascii, reads_whole_text, test_of
from headwater.live.kinds import Kind
from headwater.live.needs import Undecided, undecided
from headwater.model import Column, Row, Table, Value

_LIKE_TEXT_CHARS_MAX = 2_000_000
"""Characters of one row that all patterns of a filter read in memory together. For a longer text,
the database decides."""


Matches: TypeAlias = Callable[[Row], bool]

_PYTHON: dict[Operator, str] = {
    "=": "==", "!=": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">=",
}  # fmt: skip


def compile_filter(where: Filter, table: Table) -> Matches:
    """The function for a checked filter. It raises Undecided if the database must decide."""
    writer = _SourceWriter(where, table)
    source = writer.true(where)
    names = "".join(f"k{i}," for i in range(len(writer.constants)))
    return _factory(_SOURCE.format(names=names, source=source))(*writer.constants)  # type: ignore[no-any-return]


# If Python cannot compare a value, the database must.
_SOURCE = """
def make({names}):
    def matches(row):
        try:
            return {source}
        except Undecided:
            raise
        except Exception as error:
            raise Undecided from error
    return matches
"""


@lru_cache(maxsize=1024)
def _factory(source: str) -> Callable[..., Any]:
    names = dict(_NAMES)
    exec(source, names)
    return names["make"]  # type: ignore[no-any-return]


_NAMES: dict[str, Any] = {
    **kinds.NAMES,
    "Undecided": Undecided,
    "undecided": undecided,
    "lowers_to_ascii": lowers_to_ascii,
}


class _SourceWriter:
    """Writes the source; constants are numbered, and passed beside it."""

    def __init__(self, where: Filter, table: Table) -> None:
        self._columns = {column.name: column for column in table.columns}
        patterns = sum(isinstance(each, Like) for each in conditions(where))
        self._text_chars_max = _LIKE_TEXT_CHARS_MAX // max(1, patterns)
        self.constants: list[Any] = []

    def true(self, where: Filter) -> str:
        match where:
            case And(parts):
                return self._all([self.true(part) for part in parts])
            case Or(parts):
                return self._any([self.true(part) for part in parts])
            case Not(part):
                return self.false(part)
            case Compare(column, operator, value):
                return self._compare(column, operator, value)
            case In(column, values):
                return self._in(column, values)
            case Like(column, pattern, fold):
                return self._like(column, pattern, fold, "{}")
            case IsNull(column):
                return self._null(column, "is None")
            case _:
                assert_never(where)

    def false(self, where: Filter) -> str:
        match where:
            case And(parts):
                return self._any([self.false(part) for part in parts])
            case Or(parts):
                return self._all([self.false(part) for part in parts])
            case Not(part):
                return self.true(part)
            case Compare(column, operator, value):
                return self._compare(column, NEGATED[operator], value)
            case In(column, values):
                return self._not_in(column, values)
            case Like(column, pattern, fold):
                return self._like(column, pattern, fold, "not ({})")
            case IsNull(column):
                return self._null(column, "is not None")
            case _:
                assert_never(where)

    def _all(self, parts: list[str]) -> str:
        return " and ".join(f"({part})" for part in _decidable_first(parts)) or "True"

    def _any(self, parts: list[str]) -> str:
        return " or ".join(f"({part})" for part in _decidable_first(parts)) or "False"

    def _constant(self, value: Any) -> str:
        self.constants.append(value)
        return f"k{len(self.constants) - 1}"

    def _kind(self, column: str) -> Kind:
        return kinds.kind_of(self._columns[column])

    def _null(self, column: str, test: str) -> str:
        doubt = self._kind(column).null_doubt
        if not doubt:
            return f"row[{column!r}] {test}"
        return f"undecided() if {doubt.format(v=f'(v := row[{column!r}])')} else v {test}"

    def _compare(self, column: str, operator: Operator, value: Value) -> str:
        kind = self._kind(column)
        if not (kind.equates if operator in ("=", "!=") else kind.orders):
            return _present(column, "undecided()")
        constant = kind.to_comparable(value)
        if constant != constant:
            return _present(column, _COMPARE_WITH_NAN[operator])
        name = self._constant(constant)
        if kind.comparable == "{v}" and operator == "=":
            return f"row[{column!r}] == {name}"
        test = f"{kind.comparable.format(v='v')} {_PYTHON[operator]} {name}"
        if kind.nan and operator in _FALSE_FOR_NAN:
            test = f"v == v and {test}"
        elif kind.nan and operator in _TRUE_FOR_NAN:
            test = f"(v != v or {test})"
        return _present(column, test)

    def _in(self, column: str, values: tuple[Value, ...]) -> str:
        if not values:
            return "False"
        return self._membership(column, values, "in", "or v != v")

    def _not_in(self, column: str, values: tuple[Value, ...]) -> str:
        if not values:
            return "True"
        if None in values:
            return "False"
        return self._membership(column, values, "not in", "and v == v")

    def _membership(
        self, column: str, values: tuple[Value, ...], operator: str, if_nan_listed: str
    ) -> str:
        kind = self._kind(column)
        if not kind.equates:
            return _present(column, "undecided()")
        constants = [kind.to_comparable(value) for value in values if value is not None]
        name = self._constant(frozenset(k for k in constants if k == k))
        test = f"{kind.comparable.format(v='v')} {operator} {name}"
        if any(k != k for k in constants):
            test = f"({test} {if_nan_listed})"
        return _present(column, test)

    def _like(self, column: str, pattern: str, fold: bool, form: str) -> str:
        if not self._kind(column).equates:
            return _present(column, "undecided()")
        if fold:
            return self._ilike(self._columns[column], pattern, form)
        return _present(column, self._like_test(pattern, form, lower=""))

    def _ilike(self, column: Column, pattern: str, form: str) -> str:
        guard = fold_guard(column, pattern)
        if guard is None:
            return _present(column.name, "undecided()")
        test = self._like_test(pattern.lower(), form, guard.format(v="v"), lower=".lower()")
        return _present(column.name, test)

    def _like_test(self, pattern: str, form: str, guard: str = "", *, lower: str) -> str:
        template, constant = test_of(pattern)
        test = form.format(template.format(v="v", k=self._constant(constant), lower=lower))
        test = f"{guard} and {test}" if guard else test
        if not reads_whole_text(template):
            return test
        return f"(len(v) <= {self._constant(self._text_chars_max)} or undecided()) and {test}"


# NaN equals itself and is above every number, so only these hold for a NaN in the row.
_TRUE_FOR_NAN = (">", ">=")
_FALSE_FOR_NAN = ("<", "<=")
_COMPARE_WITH_NAN: dict[Operator, str] = {
    "=": "v != v", "!=": "v == v", "<": "v == v", "<=": "True", ">": "False", ">=": "v != v",
}  # fmt: skip


def _present(column: str, test: str) -> str:
    return f"(v := row[{column!r}]) is not None and {test}"


def _decidable_first(parts: list[str]) -> list[str]:
    return sorted(parts, key=lambda part: "undecided()" in part)
