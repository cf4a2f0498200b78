"""The row predicate of a statement, from its text as the database prints it. May find fewer
conditions; never too many.

`find` parses one plain SELECT over inner joins. For each table, it returns the conditions of WHERE
and ON that use only that table, and that memory decides exactly as the database does. A row counts
only if it meets all of them, so leaving a condition out only makes more rows count. Values of
parameters are filled in later, by `bind`. An unknown form is ignored, and is never an error: the
parser is not the database's own, and may not know everything that the database prints.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

import msgspec
import sqlglot
from sqlglot import exp

from headwater.errors import InvalidQuery
from headwater.live import kinds
from headwater.live.filters.check import check
from headwater.live.filters.filter import And, Compare, Filter, In, IsNull, Like, Not, Operator, Or
from headwater.model import Column, Table

Name: TypeAlias = tuple[str, str]
"""A relation's schema and name."""


class StatementParameter(msgspec.Struct, frozen=True):
    """Stands in a filter for a value that is known when the statement is executed. `type` is the
    parameter's type, or that of its elements where it is a list."""

    number: int
    type: str

    def __str__(self) -> str:
        return f"${self.number}"


# ------------------------------------------------------------------------ finding


def find(
    printed: str,
    tables: Mapping[Name, Table],
    parameters: Sequence[str] = (),
    *,
    moments: bool = True,
) -> dict[Name, tuple[Filter, ...]]:
    """The conditions on the rows of each table, as far as they are known.

    `tables` are those of interest, by the names they are printed with, and `parameters` the types
    of the parameters. Without `moments`, dates and times in the text do not count: those of words
    like `today` are printed as of now.

    >>> columns = (Column("region", "integer", "integer"),)
    >>> orders = Table(1, "public", "orders", columns, ("region",))
    >>> printed = "SELECT 1 FROM public.orders WHERE (orders.region = $1)"
    >>> find(printed, {("public", "orders"): orders}, ["integer"])
    ... # doctest: +NORMALIZE_WHITESPACE
    {('public', 'orders'): (Compare(column='region', operator='=',
                                    value=StatementParameter(number=1, type='integer')),)}
    """
    try:
        return _Select(printed, tables, parameters, moments).conditions()
    except Exception:  # any error of the parser, which is a library's: no predicate
        return {}


class _NotUnderstood(Exception):
    pass


class _Value(NamedTuple):
    type: str
    value: Any


class _Named(NamedTuple):
    relation: Name
    column: Column
    type: str


class _Select:
    """One statement, and the tables of its aliases."""

    def __init__(
        self, printed: str, tables: Mapping[Name, Table], parameters: Sequence[str], moments: bool
    ) -> None:
        self._tables = tables
        self._parameters = parameters
        self._moments = moments
        self._relations: dict[str, Name] = {}
        self._on: list[exp.Expression] = []
        text = printed.strip().removeprefix("BEGIN ATOMIC").removesuffix("END").strip()
        if not text.startswith("SELECT"):
            raise _NotUnderstood
        (self._tree,) = (each for each in sqlglot.parse(text, read="postgres") if each is not None)

    def conditions(self) -> dict[Name, tuple[Filter, ...]]:
        self._read_from()
        found: dict[Name, list[Filter]] = {}
        where = self._tree.args.get("where")
        for whole in [*self._on, *([where.this] if where else [])]:
            for part in _conjuncts(whole):
                try:
                    relation, condition = self._condition(part)
                except _NotUnderstood:
                    continue
                found.setdefault(relation, []).append(condition)
        names = list(self._relations.values())
        return {name: tuple(found[name]) for name in found if names.count(name) == 1}

    # ---- FROM

    def _read_from(self) -> None:
        tree = self._tree
        others = (exp.With, exp.CTE, exp.SetOperation, exp.Lateral, exp.Values, exp.Unnest)
        if type(tree) is not exp.Select or len(list(tree.find_all(exp.Select))) != 1:
            raise _NotUnderstood
        if tree.find(*others) is not None or tree.args.get("laterals"):
            raise _NotUnderstood
        first = tree.args.get("from_") or tree.args.get("from")
        if first is None:
            raise _NotUnderstood
        self._read_relation(first.this)
        self._read_joins(tree.args.get("joins"))

    def _read_relation(self, node: exp.Expression) -> None:
        match node:
            case exp.Subquery() | exp.Paren():
                _only(node, "this", "joins")
                self._read_relation(node.this)
            case exp.Table(this=exp.Identifier(this=str(name))):
                _only(node, "this", "db", "alias", "joins", "only")
                alias = node.args.get("alias")
                if alias is not None:
                    _only(alias, "this")  # a list of columns would give them other names
                known_as = name if alias is None else alias.this.this
                if known_as in self._relations:
                    raise _NotUnderstood
                schema = node.args.get("db")
                self._relations[known_as] = (schema.this if schema else "pg_catalog", name)
            case _:
                raise _NotUnderstood
        self._read_joins(node.args.get("joins"))

    def _read_joins(self, joins: list[exp.Expression] | None) -> None:
        for join in joins or ():
            _only(join, "this", "on", "using", "kind")
            if join.args.get("kind") not in (None, "", "CROSS", "INNER"):
                raise _NotUnderstood
            self._read_relation(join.this)
            if join.args.get("on") is not None:
                self._on.append(join.args["on"])

    # ---- conditions

    def _condition(self, node: exp.Expression) -> tuple[Name, Filter]:
        relations: set[Name] = set()
        condition = self._filter(node, relations.add, whole=False)
        (relation,) = relations if len(relations) == 1 else (None,)
        if relation is None:
            raise _NotUnderstood
        return relation, condition

    def _filter(
        self, node: exp.Expression, mentions: Callable[[Name], None], *, whole: bool
    ) -> Filter:
        """The condition. Without `whole`, parts of AND may be left out."""
        match node:
            case exp.Paren():
                return self._filter(node.this, mentions, whole=whole)
            case exp.And():
                return And(tuple(self._parts(_conjuncts(node), mentions, whole=whole)))
            case exp.Or():
                parts = _flat(node, exp.Or)
                return Or(tuple(self._filter(part, mentions, whole=whole) for part in parts))
            case exp.Not():
                return Not(self._filter(node.this, mentions, whole=True))
            case exp.Is():
                return self._is(node, mentions)
            case exp.Like() | exp.ILike():
                return self._like(node, mentions)
            case exp.Column():
                column = self._column(node)
                _same(column.type, "boolean")
                mentions(column.relation)
                return Compare(column.column.name, "=", True)
            case exp.Binary():
                return self._compare(node, mentions)
        raise _NotUnderstood

    def _parts(
        self, nodes: Iterator[exp.Expression], mentions: Callable[[Name], None], *, whole: bool
    ) -> Iterator[Filter]:
        understood = 0
        for node in nodes:
            relations: set[Name] = set()
            try:
                condition = self._filter(node, relations.add, whole=whole)
            except _NotUnderstood:
                if whole:
                    raise
                continue
            understood += 1
            for relation in relations:
                mentions(relation)
            yield condition
        if not understood:
            raise _NotUnderstood

    def _is(self, node: exp.Expression, mentions: Callable[[Name], None]) -> Filter:
        _only(node, "this", "expression", "negate")
        column = self._column(node.this)
        mentions(column.relation)
        name = column.column.name
        condition: Filter
        match node.expression:
            case exp.Null():
                condition = IsNull(name)
            case exp.Boolean(this=bool(value)):
                _same(column.type, "boolean")
                condition = And((Not(IsNull(name)), Compare(name, "=", value)))
            case _:
                raise _NotUnderstood
        return Not(condition) if node.args.get("negate") else condition

    def _like(self, node: exp.Expression, mentions: Callable[[Name], None]) -> Filter:
        _only(node, "this", "expression", "negate")
        column, value = self._column(node.this), self._value(node.expression)
        if column.type not in _TEXTS or value.type not in _TEXTS:
            raise _NotUnderstood
        mentions(column.relation)
        name = column.column.name
        if value.value is None:
            return _unknown(name)
        condition = Like(name, value.value, fold=isinstance(node, exp.ILike))
        return Not(condition) if node.args.get("negate") else condition

    def _compare(self, node: exp.Expression, mentions: Callable[[Name], None]) -> Filter:
        _only(node, "this", "expression")
        operator = _OPERATORS.get(type(node))
        if operator is None:
            raise _NotUnderstood
        left, right = _bare(node.this), _bare(node.expression)
        if operator == "=" and isinstance(right, exp.Any):
            _only(right, "this")
            return self._in(left, right.this, mentions)
        if operator == "!=" and isinstance(right, exp.Anonymous) and right.this == "ALL":
            (array,) = right.expressions
            return Not(self._in(left, array, mentions))
        if operator == "!=" and isinstance(right, exp.All):
            _only(right, "this")
            return Not(self._in(left, right.this, mentions))
        try:
            column, value = self._column(left), self._value(right)
        except _NotUnderstood:
            column, value, operator = self._column(right), self._value(left), _MIRRORED[operator]
        _comparable(column.type, value.type)
        mentions(column.relation)
        if value.value is None:
            return _unknown(column.column.name)
        return Compare(column.column.name, operator, value.value)

    def _in(
        self, left: exp.Expression, array: exp.Expression, mentions: Callable[[Name], None]
    ) -> Filter:
        column = self._column(left)
        type_, values = self._array(array)
        _comparable(column.type, type_)
        mentions(column.relation)
        # A lone parameter stands for all values, until it is bound.
        return In(column.column.name, values)

    def _array(self, node: exp.Expression) -> tuple[str, Any]:
        node = _bare(node)
        match node:
            case exp.Parameter():
                number = int(node.this.this)
                type_ = self._parameters[number - 1]
                if not type_.endswith("[]"):
                    raise _NotUnderstood
                element = type_.removesuffix("[]")
                return element, StatementParameter(number, element)
            case exp.Array():
                values = [self._value(each) for each in node.expressions]
                types = {value.type for value in values}
                (type_,) = types if len(types) == 1 else ("",)
                return type_, tuple(value.value for value in values)
            case exp.Cast(to=exp.DataType(this=exp.DataType.Type.ARRAY, expressions=[element])):
                type_, values_ = self._array(node.this)
                target = _type_name(element)
                if not _keeps_value(type_, target):
                    raise _NotUnderstood
                return target, values_
        raise _NotUnderstood

    def _column(self, node: exp.Expression) -> _Named:
        node = _bare(node)
        if isinstance(node, exp.Cast):
            _only(node, "this", "to", "_type")
            inner = self._column(node.this)
            # As varchar is compared; a domain, which may be declared over it, is not taken.
            if _type_name(node.to) != "text" or not inner.column.declared.startswith(_VARCHAR):
                raise _NotUnderstood
            return inner._replace(type="text")
        if not isinstance(node, exp.Column) or not isinstance(node.this, exp.Identifier):
            raise _NotUnderstood
        _only(node, "this", "table")
        relation = self._relation(node.args.get("table"))
        for column in self._tables[relation].columns:
            if column.name == node.this.this:
                return _Named(relation, column, _type_of(column))
        raise _NotUnderstood

    def _relation(self, qualifier: exp.Expression | None) -> Name:
        if qualifier is None and len(self._relations) == 1:
            (relation,) = self._relations.values()
        elif isinstance(qualifier, exp.Identifier) and qualifier.this in self._relations:
            relation = self._relations[qualifier.this]
        else:
            raise _NotUnderstood
        if relation not in self._tables:
            raise _NotUnderstood
        return relation

    def _value(self, node: exp.Expression) -> _Value:
        node = _bare(node)
        match node:
            case exp.Parameter(this=exp.Literal(this=str(digits))):
                type_ = self._parameters[int(digits) - 1]
                return _Value(type_, StatementParameter(int(digits), type_))
            case exp.Boolean(this=bool(truth)):
                return _Value("boolean", truth)
            case exp.Literal(this=str(text), is_string=False):
                if text.isdecimal():
                    return _Value("integer", int(text))
                return _Value("numeric", Decimal(text))
            case exp.Cast():
                _only(node, "this", "to", "_type")
                return self._cast(_bare(node.this), _type_name(node.to))
        raise _NotUnderstood

    def _cast(self, node: exp.Expression, target: str) -> _Value:
        if isinstance(node, exp.Null):
            return _Value(target, None)
        if isinstance(node, exp.Literal) and node.is_string:
            if target in _MOMENTS and not self._moments:
                raise _NotUnderstood
            return _Value(target, int(node.this) if target in _INTEGERS else node.this)
        inner = self._value(node)
        if not _keeps_value(inner.type, target):
            raise _NotUnderstood
        return _Value(target, inner.value)


# ------------------------------------------------------------------------ types and small parts

_INTEGERS = frozenset({"smallint", "integer", "bigint"})
_TEXTS = frozenset({"text", "character varying"})
_MOMENTS = frozenset(
    {
        "date", "timestamp with time zone", "timestamp without time zone", "time without time zone",
    }
)  # fmt: skip
_VARCHAR = ("character varying", "text")

_TYPE_NAMES = {
    "SMALLINT": "smallint",
    "INT": "integer",
    "BIGINT": "bigint",
    "DECIMAL": "numeric",
    "REAL": "real",
    "DOUBLE PRECISION": "double precision",
    "BOOLEAN": "boolean",
    "TEXT": "text",
    "VARCHAR": "character varying",
    "DATE": "date",
    "TIMESTAMPTZ": "timestamp with time zone",
    "TIMESTAMP": "timestamp without time zone",
    "UUID": "uuid",
    "BYTEA": "bytea",
}

_OPERATORS: dict[type[exp.Expression], Operator] = {
    exp.EQ: "=", exp.NEQ: "!=", exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">=",
}  # fmt: skip
_MIRRORED: dict[Operator, Operator] = {
    "=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<=",
}  # fmt: skip


def _type_name(node: exp.DataType) -> str:
    """The name of the type in the catalog. Types with a length or a precision are not supported."""
    text = node.sql(dialect="postgres")
    if node.this == exp.DataType.Type.USERDEFINED:
        return text
    if text not in _TYPE_NAMES:
        raise _NotUnderstood
    return _TYPE_NAMES[text]


def _type_of(column: Column) -> str:
    """The column's type, if the database prints no cast for it and memory can compare it."""
    plain = column.declared.split("(")[0].strip() == column.type.split("(")[0].strip()
    if not (plain or column.declared.startswith(("timestamp", "time"))):
        raise _NotUnderstood  # a domain
    if not kinds.kind_of(column).equates:
        raise _NotUnderstood
    return column.type


def _comparable(column: str, value: str) -> None:
    """Whether the database compares the two types as memory does: without rounding either."""
    same = column == value and column not in ("character", "bpchar", "name")
    if not (same or {column, value} <= _INTEGERS or {column, value} <= _TEXTS):
        raise _NotUnderstood


def _same(column: str, wanted: str) -> None:
    if column != wanted:
        raise _NotUnderstood


def _keeps_value(source: str, target: str) -> bool:
    """Whether a cast changes no value (it may fail)."""
    return (
        source == target
        or {source, target} <= _INTEGERS
        or {source, target} <= _TEXTS
        or (source in _INTEGERS and target == "numeric")
    )


def _unknown(column: str) -> Filter:
    """A comparison with NULL: neither true nor false, for any row."""
    return In(column, (None,))


def _only(node: exp.Expression, *allowed: str) -> None:
    """Raise if the node has other parts than these: a later parser may add some."""
    for name, value in node.args.items():
        if name not in allowed and value not in (None, False, [], ""):
            raise _NotUnderstood


def _bare(node: exp.Expression) -> exp.Expression:
    while isinstance(node, exp.Paren):
        node = node.this
    return node


def _flat(node: exp.Expression, group: type[exp.Expression]) -> Iterator[exp.Expression]:
    node = _bare(node)
    if isinstance(node, group):
        yield from _flat(node.args["this"], group)
        yield from _flat(node.args["expression"], group)
    else:
        yield node


def _conjuncts(node: exp.Expression) -> Iterator[exp.Expression]:
    return _flat(node, exp.And)


# ------------------------------------------------------------------------ binding


def bind(conditions: Sequence[Filter], table: Table, values: Sequence[Any]) -> Filter:
    """The conditions with the values of an execution, checked. A condition is left out if memory
    does not read its value as the database does.

    >>> region = Compare("region", "=", StatementParameter(1, "integer"))
    >>> columns = (Column("region", "integer", "integer"),)
    >>> orders = Table(1, "public", "orders", columns, ("region",))
    >>> bind([region], orders, [7]), bind([region], orders, [object()])
    (Compare(column='region', operator='=', value=7), And(parts=()))
    """
    bound = []
    for condition in conditions:
        try:
            bound.append(check(_bound(condition, values), table))
        except (_NotUnderstood, InvalidQuery):
            continue
    if len(bound) == 1:
        return bound[0]
    try:
        return check(And(tuple(bound)), table)
    except InvalidQuery:  # too many of them for a filter
        return And()


def _bound(where: Filter, values: Sequence[Any]) -> Filter:
    match where:
        case And(parts):
            return And(tuple(_bound(part, values) for part in parts))
        case Or(parts):
            return Or(tuple(_bound(part, values) for part in parts))
        case Not(part):
            return Not(_bound(part, values))
        case Compare(column, operator, value):
            found = _value(value, values)
            return _unknown(column) if found is None else Compare(column, operator, found)
        case Like(column, pattern, fold):
            found = _value(pattern, values)
            return _unknown(column) if found is None else Like(column, found, fold)
        case In(column, listed):
            return In(column, _listed(listed, values))
        case IsNull():
            return where


def _listed(listed: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    if not isinstance(listed, StatementParameter):
        return tuple(_value(each, values) for each in listed)
    if listed.number > len(values):
        raise _NotUnderstood
    given = values[listed.number - 1]
    if given is None:
        return (None,)
    if type(given) not in (list, tuple):
        raise _NotUnderstood
    return tuple(_usable(listed.type, each) for each in given)


def _value(value: Any, values: Sequence[Any]) -> Any:
    if not isinstance(value, StatementParameter):
        return value
    if value.number > len(values):
        raise _NotUnderstood
    return _usable(value.type, values[value.number - 1])


def _usable(type_: str, value: Any) -> Any:
    """The value, if the driver sends exactly what memory compares with. A subclass may be sent as
    something else, and a time as a text is read by the rules of the session."""
    if value is None:
        return None
    if type(value) not in _PYTHON_TYPES.get(type_, (str,)):
        raise _NotUnderstood
    if type(value) is Decimal and value.is_snan():
        raise _NotUnderstood
    if type(value) is dt.datetime and (value.tzinfo is None) != (type_ == _NAIVE):
        raise _NotUnderstood
    return value


_NAIVE = "timestamp without time zone"
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(_INTEGERS, (int, str)),
    "numeric": (int, Decimal, str),
    "real": (float,),
    "double precision": (float,),
    "boolean": (bool,),
    "date": (dt.date,),
    "timestamp with time zone": (dt.datetime,),
    _NAIVE: (dt.datetime,),
    "time without time zone": (dt.time,),
    "uuid": (UUID, str),
    "bytea": (bytes,),
}
