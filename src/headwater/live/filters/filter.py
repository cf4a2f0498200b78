"""Conditions on the rows of one table: the tree, and its Python and JSON forms.

    >>> from headwater.live.filters.filter import c
    >>> where = (c.region == 7) & (c.status.in_("open", "held") | ~c.note.is_null())
    >>> to_json(where)  # doctest: +NORMALIZE_WHITESPACE
    {'and': [['region', '=', 7],
             {'or': [['status', 'in', ['open', 'held']], ['note', 'is not null']]}]}

There are four conditions and three groups. `not in` is NOT of IN, and `between` is two comparisons.
The meaning is that of SQL, with three-valued logic. Columns and values are checked against a table
in `check`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from headwater import limits
from headwater.errors import InvalidQuery
from headwater.model import Value

Operator: TypeAlias = Literal["=", "!=", "<", "<=", ">", ">="]

NEGATED: dict[Operator, Operator] = {
    "=": "!=", "!=": "=", "<": ">=", ">=": "<", ">": "<=", "<=": ">",
}  # fmt: skip
"""The operator that is true exactly if the other is false. Neither is true for NULL."""


class _Node(msgspec.Struct, frozen=True):
    def __and__(self, other: Filter) -> And:
        return And((*_parts(And, self), *_parts(And, other)))

    def __or__(self, other: Filter) -> Or:
        return Or((*_parts(Or, self), *_parts(Or, other)))

    def __invert__(self) -> Filter:
        return self.part if isinstance(self, Not) else Not(self)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        raise TypeError("a filter has no truth value: combine filters with &, | and ~")


class Compare(_Node, frozen=True):
    column: str
    operator: Operator
    value: Value


class In(_Node, frozen=True):
    """True if any value equals; else unknown if the column or any value is NULL; else false."""

    column: str
    values: tuple[Value, ...]


class Like(_Node, frozen=True):
    """LIKE, or ILIKE where `fold`. `%` any text, `_` one character, backslash escapes."""

    column: str
    pattern: str
    fold: bool = False


class IsNull(_Node, frozen=True):
    column: str


class And(_Node, frozen=True):
    """Without parts: true."""

    parts: tuple[Filter, ...] = ()


class Or(_Node, frozen=True):
    """Without parts: false."""

    parts: tuple[Filter, ...] = ()


class Not(_Node, frozen=True):
    part: Filter


Condition: TypeAlias = Compare | In | Like | IsNull
Filter: TypeAlias = Condition | And | Or | Not

EVERYTHING = And()


def _parts(group: type[And] | type[Or], node: Any) -> tuple[Filter, ...]:
    return node.parts if isinstance(node, group) else (node,)


def conditions(where: Filter) -> Iterator[Condition]:
    """Every condition, from left to right."""
    match where:
        case And(parts) | Or(parts):
            for part in parts:
                yield from conditions(part)
        case Not(part):
            yield from conditions(part)
        case _:
            yield where


def depth(where: Filter) -> int:
    """How many levels a filter has; a lone condition has one."""
    match where:
        case And(parts) | Or(parts):
            return 1 + max(map(depth, parts), default=0)
        case Not(part):
            return 1 + depth(part)
        case _:
            return 1


# ------------------------------------------------------------------------ from Python


class ColumnName:
    """A column in a Python expression; its operators make conditions."""

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __eq__(self, value: Value) -> Compare:  # type: ignore[override]
        return Compare(self._name, "=", value)

    def __ne__(self, value: Value) -> Compare:  # type: ignore[override]
        return Compare(self._name, "!=", value)

    def __lt__(self, value: Value) -> Compare:
        return Compare(self._name, "<", value)

    def __le__(self, value: Value) -> Compare:
        return Compare(self._name, "<=", value)

    def __gt__(self, value: Value) -> Compare:
        return Compare(self._name, ">", value)

    def __ge__(self, value: Value) -> Compare:
        return Compare(self._name, ">=", value)

    def in_(self, *values: Value) -> In:
        return In(self._name, values)

    def not_in(self, *values: Value) -> Not:
        return Not(In(self._name, values))

    def between(self, low: Value, high: Value) -> And:
        return And((Compare(self._name, ">=", low), Compare(self._name, "<=", high)))

    def like(self, pattern: str) -> Like:
        return Like(self._name, pattern)

    def ilike(self, pattern: str) -> Like:
        return Like(self._name, pattern, fold=True)

    def is_null(self) -> IsNull:
        return IsNull(self._name)

    def is_not_null(self) -> Not:
        return Not(IsNull(self._name))


class Columns:
    """`c.region`, or `c["a name that Python cannot spell"]`."""

    def __getattr__(self, name: str) -> ColumnName:
        return ColumnName(name)

    def __getitem__(self, name: str) -> ColumnName:
        return ColumnName(name)


c = Columns()


# ------------------------------------------------------------------------ from and to JSON


def from_json(value: Any, path: str = "where") -> Filter:
    """Read the JSON form; InvalidQuery names the place that is wrong.

    >>> from_json([["region", "=", 7], {"not": ["note", "is null"]}])
    And(parts=(Compare(column='region', operator='=', value=7), Not(part=IsNull(column='note'))))
    """
    return _JsonReader().read(value, path, limits.FILTER_DEPTH_MAX)


class _JsonReader:
    """Reads one filter, and stops as soon as it is too large."""

    def __init__(self) -> None:
        self._conditions = self._groups = 0

    def read(self, value: Any, path: str, depth: int) -> Filter:
        if depth == 0:
            raise InvalidQuery(f"nested deeper than {limits.FILTER_DEPTH_MAX}", path=path)
        match value:
            case [str(), *_]:
                self._conditions += 1
                if self._conditions > limits.FILTER_CONDITIONS_MAX:
                    raise too_large(f"{limits.FILTER_CONDITIONS_MAX} conditions", path)
                return _read_condition(value, path)
            case list() | tuple():
                return And(self._parts(value, path, depth))
            case {"and": list(parts), **rest} if not rest:
                return And(self._parts(parts, path, depth))
            case {"or": list(parts), **rest} if not rest:
                return Or(self._parts(parts, f"{path}.or", depth))
            case {"not": part, **rest} if not rest:
                return Not(self.read(part, f"{path}.not", depth - 1))
        raise InvalidQuery(
            'expected [column, operator, value], {"and": […]}, {"or": […]} or {"not": …}', path=path
        )

    def _parts(self, parts: Iterable[Any], path: str, depth: int) -> tuple[Filter, ...]:
        self._groups += 1
        if self._groups > limits.FILTER_GROUPS_MAX:
            raise too_large(f"{limits.FILTER_GROUPS_MAX} groups", path)
        return tuple(self.read(part, f"{path}[{i}]", depth - 1) for i, part in enumerate(parts))


def too_large(bound: str, path: str) -> InvalidQuery:
    return InvalidQuery(
        f"more than {bound}", path=path, hint="Ask for less in one query, or in several queries."
    )


def _read_condition(value: Any, path: str) -> Filter:
    match value:
        case [str(column), "is null"]:
            return IsNull(column)
        case [str(column), "is not null"]:
            return Not(IsNull(column))
        case [str(column), "=" | "!=" | "<" | "<=" | ">" | ">=" as operator, operand]:
            return Compare(column, operator, operand)
        case [str(column), "in", list(values)]:
            return In(column, tuple(values))
        case [str(column), "not in", list(values)]:
            return Not(In(column, tuple(values)))
        case [str(column), "between", [low, high]]:
            return ColumnName(column).between(low, high)
        case [str(column), "like" | "ilike" as operator, str(pattern)]:
            return Like(column, pattern, fold=operator == "ilike")
        case [str(column), "not like" | "not ilike" as operator, str(pattern)]:
            return Not(Like(column, pattern, fold=operator == "not ilike"))
    raise _wrong_condition(value, path)


_OPERANDS = {
    **dict.fromkeys(get_args(Operator), "a value"),
    **dict.fromkeys(("in", "not in"), "a list of values"),
    "between": "a list of two values",
    **dict.fromkeys(("like", "not like", "ilike", "not ilike"), "a pattern"),
    **dict.fromkeys(("is null", "is not null"), "no value"),
}


def _wrong_condition(value: Any, path: str) -> InvalidQuery:
    operator = value[1] if len(value) > 1 else None
    if isinstance(operator, str) and operator in _OPERANDS:
        return InvalidQuery(f"{operator!r} takes {_OPERANDS[operator]}", path=f"{path}.value")
    return InvalidQuery(
        f"unknown operator {operator!r:.100}",
        path=f"{path}.operator",
        hint=f"Operators are: {', '.join(_OPERANDS)}.",
    )


def to_json(where: Filter) -> Any:
    """The JSON form; values stay typed, which msgspec then writes."""
    match where:
        case Compare(column, operator, value):
            return [column, operator, value]
        case In(column, values):
            return [column, "in", list(values)]
        case Like(column, pattern, fold):
            return [column, "ilike" if fold else "like", pattern]
        case IsNull(column):
            return [column, "is null"]
        case Not(In() | Like() | IsNull() as part):
            column, operator, *operand = to_json(part)
            return [column, _NEGATED_NAME[operator], *operand]
        case Not(part):
            return {"not": to_json(part)}
        case And(parts):
            return {"and": [to_json(part) for part in parts]}
        case Or(parts):
            return {"or": [to_json(part) for part in parts]}


_NEGATED_NAME = {
    "in": "not in",
    "like": "not like",
    "ilike": "not ilike",
    "is null": "is not null",
}


# ------------------------------------------------------------------------ canonical form


def canonical(where: Filter) -> Filter:
    """The same filter in the form that equal filters share: groups flat, parts sorted, once each.

    >>> a, b = c.a == 1, c.b == 2
    >>> canonical(b & (a & b)) == canonical(~~a & b)
    True
    """
    match where:
        case And(parts):
            return _canonical_group(And, parts)
        case Or(parts):
            return _canonical_group(Or, parts)
        case Not(Not(part)):
            return canonical(part)
        case Not(part):
            return Not(canonical(part))
        case In(column, values):
            return In(column, tuple(sorted(dict.fromkeys(values), key=_encoded)))
        case _:
            return where


def _canonical_group(group: type[And] | type[Or], parts: tuple[Filter, ...]) -> Filter:
    flat: dict[Filter, None] = {}
    for part in map(canonical, parts):
        flat.update(dict.fromkeys(_parts(group, part)))
    return next(iter(flat)) if len(flat) == 1 else group(tuple(sorted(flat, key=_encoded_filter)))


def _encoded(value: Value) -> bytes:
    return msgspec.json.encode(value)


def _encoded_filter(where: Filter) -> bytes:
    return msgspec.json.encode(to_json(where))
