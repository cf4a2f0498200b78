"""A live query, as a subscriber requests it and as it is checked against its table.

`LiveQuery` is the request, from the wire or from Python. `BoundQuery` is checked and compiled: its
columns exist, its constants are typed, the primary key ends its order. Queries with the same
meaning have the same `canonical` bytes and share a view.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec

from headwater import limits
from headwater.errors import ConfigError, InvalidQuery
from headwater.live import kinds
from headwater.live.columns import unusable_column
from headwater.live.filters.check import check
from headwater.live.filters.compile import Matches, compile_filter
from headwater.live.filters.filter import EVERYTHING, Filter, canonical, from_json, to_json
from headwater.live.order import OrderBy, Ordering, check_order, ordering
from headwater.live.state.layout import Layout, at, layout
from headwater.model import Cursor, Key, Row, Table, Value

Mode: TypeAlias = Literal["maintained", "streamed"]


class LiveQuery(msgspec.Struct, frozen=True):
    """`after` is a cursor: the result begins after it. Without `columns`, all are selected. Without
    `limit`, it is the default, or the limit of the table if that is less."""

    table: str
    where: Filter = EVERYTHING
    order: tuple[OrderBy, ...] = ()
    limit: int | None = None
    after: tuple[Value, ...] | None = None
    columns: tuple[str, ...] | None = None
    mode: Mode = "maintained"

    @classmethod
    def from_json(cls, value: Any) -> LiveQuery:
        """Read the JSON form, an object; InvalidQuery names the place that is wrong."""
        if not isinstance(value, dict):
            raise InvalidQuery("a live query is an object")
        try:
            shape = msgspec.convert(value, _Shape, strict=True)
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at `$.")
            raise InvalidQuery(message.lower(), path=path.rstrip("`")) from None
        if len(shape.order) > limits.ORDER_COLUMNS_MAX:
            raise InvalidQuery(f"more than {limits.ORDER_COLUMNS_MAX} columns", path="order")
        return cls(
            table=shape.table,
            where=from_json(shape.where),
            order=tuple(
                OrderBy.from_json(by, path=f"order[{i}]") for i, by in enumerate(shape.order)
            ),
            limit=shape.limit,
            after=None if shape.after is None else tuple(shape.after),
            columns=shape.columns,
            mode=shape.mode,
        )

    def to_json(self) -> dict[str, Any]:
        """The JSON form, without defaults."""
        whole = {
            "table": self.table,
            "where": to_json(self.where),
            "order": [by.to_json() for by in self.order],
            "limit": self.limit,
            "after": None if self.after is None else list(self.after),
            "columns": None if self.columns is None else list(self.columns),
            "mode": self.mode,
        }
        return {name: value for name, value in whole.items() if value != _DEFAULT.get(name)}


class _Shape(msgspec.Struct, forbid_unknown_fields=True):
    table: str
    where: Any = ()
    order: list[str | list[str]] = []
    limit: int | None = None
    after: list[Any] | None = None
    columns: tuple[str, ...] | None = None
    mode: Mode = "maintained"


_DEFAULT: dict[str, Any] = {
    "where": to_json(EVERYTHING),
    "order": [],
    "limit": None,
    "after": None,
    "columns": None,
    "mode": "maintained",
}


class Rules(msgspec.Struct, frozen=True):
    """What a table lets live queries use; None means every column."""

    filterable: frozenset[str] | None = None
    sortable: frozenset[str] | None = None
    limit_max: int = limits.WINDOW_ROWS_MAX

    def check(self, table: Table) -> None:
        """Raise ConfigError for rules that do not fit the table."""
        names = [column.name for column in table.columns]
        for kind, columns in (("filterable", self.filterable), ("sortable", self.sortable)):
            if unknown := sorted((columns or frozenset()) - set(names)):
                name = unknown[0]
                raise ConfigError(
                    f"the virtual column {name!r:.100} of {table.label} is not captured, and is"
                    f" declared as {kind}"
                    if name in table.virtual
                    else f"table {table.label} has no column {name!r:.100}, and is declared with"
                    f" it as {kind}",
                    hint=f"Columns are: {', '.join(names)}.",
                )


class BoundQuery:
    """A live query that was checked against its table, and compiled."""

    __slots__ = (
        "after", "canonical", "columns", "key_of", "layout", "limit", "matches", "mode", "order",
        "select", "table", "where",
    )  # fmt: skip

    table: Table
    where: Filter
    order: Ordering
    limit: int
    after: Cursor | None
    columns: tuple[str, ...] | None
    """The columns that a subscriber gets, including the primary key; None for all."""
    mode: Mode
    canonical: bytes
    matches: Matches
    key_of: Callable[[Row], Key]
    select: Callable[[Row], Row] | None
    """Selects `columns` of a row; None if all are selected."""
    layout: Layout
    """How a window stores the rows."""

    def __init__(self, query: LiveQuery, table: Table, rules: Rules = Rules()) -> None:  # noqa: B008
        if not table.key:
            raise InvalidQuery(f"{table.label} has no primary key", path="table")
        _check_key(table)
        usual = min(limits.WINDOW_ROWS_DEFAULT, rules.limit_max)
        self.limit = usual if query.limit is None else query.limit
        if query.mode != "streamed" and not 1 <= self.limit <= rules.limit_max:
            raise InvalidQuery(f"expected 1 to {rules.limit_max:,}", path="limit")
        if query.mode == "streamed" and (query.order or query.after is not None):
            raise InvalidQuery("a streamed query has no order and no cursor", path="mode")
        self.table = table
        self.where = canonical(check(query.where, table, filterable=rules.filterable))
        self.order = ordering(check_order(query.order, table, sortable=rules.sortable), table)
        self.after = None if query.after is None else self.order.read_cursor(query.after)
        self.columns = _check_columns(query.columns, table)
        self.mode = query.mode
        self.matches = compile_filter(self.where, table)
        self.key_of = at(*table.key)
        self.layout = layout(self.order.by, table, self.columns)
        self.select = None if self.columns is None else _selection(self.columns)
        self.canonical = self._canonical()

    def ranked(self) -> BoundQuery:
        """The same query, but only the database decides its order."""
        other = self._copy()
        other.order = Ordering(self.order.by, self.table, ranked=True)
        other.layout = Layout(other.order, self.table, self.columns)
        return other

    def _copy(self) -> BoundQuery:
        other: BoundQuery = object.__new__(BoundQuery)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def _canonical(self) -> bytes:
        streamed = self.mode == "streamed"
        return msgspec.json.encode(
            (
                (self.table.schema, self.table.name),
                _distinct_floats(to_json(self.where)),
                [(by.column, by.desc, by.nulls_first) for by in self.order.by],
                None if streamed else self.limit,
                None if streamed or self.after is None else _distinct_floats(list(self.after)),
                None if self.columns is None else sorted(self.columns),
                self.mode,
            )
        )


def _distinct_floats(value: Any) -> Any:
    """NaN and infinities as text: JSON would write null for all of them."""
    match value:
        case float() if not math.isfinite(value):
            return {"float": repr(value)}
        case list():
            return [_distinct_floats(item) for item in value]
        case dict():
            return {name: _distinct_floats(item) for name, item in value.items()}
    return value


def _check_key(table: Table) -> None:
    """Keys must be hashable, which lists and JSON values are not."""
    for column in table.columns:
        if column.name in table.key and not kinds.compares(column):
            raise InvalidQuery(
                f"{table.label}: its primary key has {column.name}, of type {column.declared}",
                path="table",
                hint="A live query needs a key of plain values, not of arrays, JSON or types"
                " with several values.",
            )


def _check_columns(columns: tuple[str, ...] | None, table: Table) -> tuple[str, ...] | None:
    """The columns in the table's order with its primary key; None if that is all of them."""
    if columns is None:
        return None
    names = [column.name for column in table.columns]
    if len(columns) > len(names):
        raise InvalidQuery(
            f"{len(columns):,} columns of a table that has {len(names)}",
            path="columns",
            hint="Name each column once, or leave them out for all.",
        )
    known, asked = frozenset(names), frozenset(columns)
    for i, name in enumerate(columns):
        if name not in known:
            raise unusable_column(table, name, names, path=f"columns[{i}]")
    selected = tuple(name for name in names if name in asked or name in table.key)
    return None if len(selected) == len(names) else selected


def _selection(columns: tuple[str, ...]) -> Callable[[Row], Row]:
    return lambda row: {name: row[name] for name in columns}
