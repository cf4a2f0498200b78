"""Orders rows as the database does, if that is possible in memory.

A row's sort key is a tuple that Python compares exactly as PostgreSQL compares the rows: NULLs
first or last as the query says, NaN above every number, DESC by a value that compares in reverse.
The primary key comes last, so that no two rows are equal. A column may have an order that memory
cannot reproduce (another collation than C, an enumeration, an unknown type). From that column on,
the sort key has only a rank from the database: `exact` is false, and rows that are equal before it
must be read in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from headwater import limits
from headwater.errors import InvalidQuery
from headwater.live import kinds
from headwater.live.columns import unusable_column
from headwater.live.filters.sql import Sql, compare, identifier, join
from headwater.live.kinds import Kind
from headwater.live.needs import Unplaced
from headwater.model import Column, Cursor, Row, Table, Value

SortKey: TypeAlias = tuple[Any, ...]


class OrderBy(msgspec.Struct, frozen=True):
    """One column of an order. The default of `nulls` is PostgreSQL's: last, or first with DESC.

    >>> OrderBy.parse("price desc nulls last")
    OrderBy(column='price', desc=True, nulls='last')
    """

    column: str
    desc: bool = False
    nulls: Literal["first", "last"] | None = None

    @classmethod
    def parse(cls, text: str) -> OrderBy:
        """Read `column [asc|desc] [nulls first|last]`."""
        match = _ORDER_BY.fullmatch(text)
        assert match is not None  # the pattern fits every text
        nulls: Any = match["nulls"]
        return cls(match["column"], match["direction"] == "desc", nulls)

    @classmethod
    def from_json(cls, value: str | list[str], *, path: str) -> OrderBy:
        """Read the text, or the same as a list, which also names columns that look like one."""
        if isinstance(value, str):
            return cls.parse(value)
        column, *words = value or [""]
        # The column is left out, so that only the words after it are read.
        spec = _ORDER_BY.fullmatch(" ".join(["", *words]))
        if spec is None or spec["column"]:
            raise InvalidQuery(
                f"expected [column, direction, nulls], got {value!r:.100}",
                path=path,
                hint='For example ["price", "desc", "nulls last"].',
            )
        return cls(column, spec["direction"] == "desc", spec["nulls"])  # type: ignore[arg-type]

    def to_json(self) -> list[str]:
        words = [self.column]
        words += ["desc"] if self.desc else []
        return words + ([f"nulls {self.nulls}"] if self.nulls else [])

    def __str__(self) -> str:
        nulls = f" nulls {self.nulls}" if self.nulls else ""
        return f"{self.column}{' desc' if self.desc else ''}{nulls}"

    @property
    def nulls_first(self) -> bool:
        return self.desc if self.nulls is None else self.nulls == "first"


_ORDER_BY = re.compile(
    r"(?P<column>.*?)(?: (?P<direction>asc|desc))?(?: nulls (?P<nulls>first|last))?", re.DOTALL
)


def check_order(
    given: tuple[OrderBy, ...],
    table: Table,
    *,
    sortable: Collection[str] | None = None,
    path: str = "order",
) -> tuple[OrderBy, ...]:
    """The whole order, primary key appended; InvalidQuery where a column does not fit."""
    if len(given) > limits.ORDER_COLUMNS_MAX:
        raise InvalidQuery(f"more than {limits.ORDER_COLUMNS_MAX} columns", path=path)
    columns = {column.name: column for column in table.columns}
    allowed = [name for name in columns if sortable is None or name in (*sortable, *table.key)]
    for i, by in enumerate(given):
        if by.column not in allowed:
            raise unusable_column(table, by.column, allowed, path=f"{path}[{i}]", use="sortable")
        if not kinds.compares(columns[by.column]):
            declared = columns[by.column].declared
            raise InvalidQuery(f"{declared} cannot be ordered", path=f"{path}[{i}]")
    # The second use of a column has no effect.
    first: dict[str, OrderBy] = {}
    for by in (*given, *map(OrderBy, table.key)):
        first.setdefault(by.column, by)
    return tuple(first.values())


class Ordering:
    """An order, compiled for a table."""

    __slots__ = ("_columns", "_kinds", "_never_null", "by", "cursor", "exact")

    by: tuple[OrderBy, ...]
    exact: bool
    """Whether memory reproduces the whole order."""
    cursor: Callable[[Row], Cursor]
    """The row's values of the order's columns."""

    def __init__(self, by: tuple[OrderBy, ...], table: Table, *, ranked: bool = False) -> None:
        """With `ranked`, only the database decides the order, for any columns."""
        of_name = {column.name: column for column in table.columns}
        self.by = by
        self._columns = tuple(of_name[each.column] for each in by)
        self._kinds = tuple(map(kinds.kind_of, self._columns))
        if ranked:
            self._kinds = tuple(replace(kind, orders=False) for kind in self._kinds)
        self.exact = all(kind.orders for kind in self._kinds)
        self.cursor = _cursor(tuple(each.column for each in by))
        self._never_null = frozenset(table.key)

    def key(self, cursor: Cursor) -> SortKey:
        """The sort key of a row with this cursor, without a rank."""
        row = {by.column: value for by, value in zip(self.by, cursor, strict=True)}
        made = self.entries(())
        return made.make(row)[: made.width if self.exact else made.width - 1]

    def entries(self, held: tuple[str, ...]) -> Entries:
        """The function from rows to entries: the sort key, followed by the held values that it does
        not contain."""
        return _entries(self.by, self._kinds, self._never_null, held)

    def read_cursor(self, values: Any, path: str = "after") -> Cursor:
        """A cursor from JSON or Python, typed; InvalidQuery where it does not fit."""
        if not isinstance(values, list | tuple) or len(values) != len(self.by):
            names = ", ".join(by.column for by in self.by)
            raise InvalidQuery(f"expected {len(self.by)} values: {names}", path=path)
        return tuple(
            self._read(by, kind, value, f"{path}[{i}]")
            for i, (by, kind, value) in enumerate(zip(self.by, self._kinds, values, strict=True))
        )

    def _read(self, by: OrderBy, kind: Kind, value: Any, path: str) -> Value:
        if value is None and by.column not in self._never_null:
            return None
        try:
            return kinds.read(kind, value)
        except ValueError as error:
            raise InvalidQuery(str(error), path=path) from None

    def sql(self) -> Sql:
        """The ORDER BY list."""
        return Sql(", ".join(map(_order_by_sql, self.by)))

    def after_sql(self, cursor: Cursor) -> Sql:
        """True for the rows that come after the cursor; false or NULL for the others."""
        condition = Sql("false")
        for by, of, value in reversed(list(zip(self.by, self._columns, cursor, strict=True))):
            same = _same_sql(of, value)
            later = self._later_sql(by, of, value)
            tied = join(" and ", (same, condition)).wrapped("(", ")")
            condition = join(" or ", (later, tied)).wrapped("(", ")")
        return join(" and ", (*self._bound_sql(cursor[0]), condition)).wrapped("(", ")")

    def _later_sql(self, by: OrderBy, of: Column, value: Value) -> Sql:
        column = identifier(by.column)
        if value is None:
            return Sql(f"{column} is not null" if by.nulls_first else "false")
        later = compare(of, "<" if by.desc else ">", value)
        if by.nulls_first or by.column in self._never_null:
            return later
        return later.wrapped("(", f" or {column} is null)")

    def _bound_sql(self, value: Value) -> list[Sql]:
        """The condition on the first column, if it is a simple range that an index can use."""
        by = self.by[0]
        if value is None or not (by.nulls_first or by.column in self._never_null):
            return []
        return [compare(self._columns[0], "<=" if by.desc else ">=", value)]


@lru_cache(maxsize=1024)
def ordering(by: tuple[OrderBy, ...], table: Table) -> Ordering:
    """Queries of the same order share it."""
    return Ordering(by, table)


# ------------------------------------------------------------------------ SQL


def _order_by_sql(by: OrderBy) -> str:
    nulls = f" nulls {by.nulls}" if by.nulls and by.nulls_first != by.desc else ""
    return f"{identifier(by.column)}{' desc' if by.desc else ''}{nulls}"


def _same_sql(of: Column, value: Value) -> Sql:
    if value is None:
        return Sql(f"{identifier(of.name)} is null")
    return compare(of, "=", value)


# ------------------------------------------------------------------------ sort keys


def _cursor(columns: tuple[str, ...]) -> Callable[[Row], Cursor]:
    if len(columns) == 1:
        (column,) = columns
        return lambda row: (row[column],)
    return itemgetter(*columns)


class Entries(NamedTuple):
    """A function from rows to entries, the length of their sort key, and where columns are."""

    make: Callable[..., SortKey]
    """Makes the entry of a row; with its rank if the database decides the order."""
    width: int
    places: dict[str, int]


_ENTRY = """
def entry(row, rank=0):
    try:
        {body}
    except Exception as error:
        raise Unplaced from error
"""


@lru_cache(maxsize=1024)
def _entries(
    order: tuple[OrderBy, ...],
    of_column: tuple[Kind, ...],
    never_null: frozenset[str],
    held: tuple[str, ...],
) -> Entries:
    lines: list[str] = []
    elements: list[str] = []
    places: dict[str, int] = {}
    variables: dict[str, str] = {}
    names: dict[str, Any] = {**kinds.NAMES, "Unplaced": Unplaced}
    for i, (by, kind) in enumerate(zip(order, of_column, strict=True)):
        if not kind.orders:
            elements.append("rank")
            break
        lines.append(f"v{i} = row[{by.column!r}]")
        variables[by.column] = f"v{i}"
        value = _directed(kind, by, f"v{i}")
        if by.column in never_null and not kind.nan:
            if value == f"v{i}":
                places[by.column] = len(elements)
            elements.append(value)
        elif kind.null is not None:
            # The kind has values beyond all others, which stand for NULL without a flag.
            names[f"null{i}"] = kind.null[0 if by.nulls_first else 1]
            elements.append(f"null{i} if v{i} is None else {value}")
        else:
            lines.append(f"f{i} = {_flag(kind, by, f'v{i}')}")
            elements += [f"f{i}", f"{value} if f{i} == 0 else 0"]
    width = len(elements)
    for name in held:
        if name not in places:
            places[name] = len(elements)
            elements.append(variables.get(name, f"row[{name!r}]"))
    body = "\n        ".join((*lines, f"return ({', '.join(elements)},)"))
    exec(_ENTRY.format(body=body), names)
    return Entries(names["entry"], width, places)


def _directed(kind: Kind, by: OrderBy, name: str) -> str:
    comparable = kind.comparable.format(v=name)
    return kind.reverse.format(v=comparable) if by.desc else comparable


def _flag(kind: Kind, by: OrderBy, name: str) -> str:
    """0 for ordinary values; below or above it for NULL, and, nearer to the values, for NaN."""
    null = -2 if by.nulls_first else 2
    ordinary = f"(0 if {name} == {name} else {-1 if by.desc else 1})" if kind.nan else "0"
    return f"{null} if {name} is None else {ordinary}"
