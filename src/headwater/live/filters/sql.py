"""Writes a filter as SQL: identifiers quoted, every value bound.

Placeholders are psycopg's `%s`. A constant is cast to its column's type, so that PostgreSQL
compares the same values as memory; if only PostgreSQL knows the type, it infers it from the column.
Types and operators have their schema: without it, PostgreSQL might choose one that a user made.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import assert_never

from headwater.live import kinds
from headwater.live.filters.filter import And, Compare, Filter, In, IsNull, Like, Not, Or
from headwater.model import Column, Table, Value


@dataclass(frozen=True, slots=True)
class Sql:
    """SQL text and the values for its placeholders, in order."""

    text: str
    values: tuple[Value, ...] = ()

    def __add__(self, other: Sql) -> Sql:
        return Sql(self.text + other.text, self.values + other.values)

    def wrapped(self, before: str, after: str) -> Sql:
        return Sql(before + self.text + after, self.values)


def join(separator: str, parts: Iterable[Sql]) -> Sql:
    listed = list(parts)
    return Sql(
        separator.join(part.text for part in listed),
        tuple(value for part in listed for value in part.values),
    )


def identifier(name: str) -> str:
    """Quoted, and with psycopg's placeholder sign doubled.

    >>> print(identifier('50% "off'))
    "50%% ""off"
    """
    return '"' + name.replace('"', '""').replace("%", "%%") + '"'


def filter_sql(where: Filter, table: Table) -> Sql:
    """The condition of a checked filter.

    >>> from headwater.live.filters.filter import c
    >>> from headwater.model import Column
    >>> orders = Table(1, "public", "orders", (Column("region", "integer", "integer"),), ())
    >>> filter_sql((c.region > 3) | c.region.is_null(), orders)
    Sql(text='("region" operator(pg_catalog.>) %s::bigint or "region" is null)', values=(3,))
    """
    return _SqlWriter(table).node(where)


class _SqlWriter:
    def __init__(self, table: Table) -> None:
        self._columns = {column.name: column for column in table.columns}

    def node(self, where: Filter) -> Sql:
        match where:
            case And(()):
                return Sql("true")
            case Or(()) | In(_, ()):
                return Sql("false")
            case And(parts):
                return join(" and ", map(self.node, parts)).wrapped("(", ")")
            case Or(parts):
                return join(" or ", map(self.node, parts)).wrapped("(", ")")
            case Not(part):
                return self.node(part).wrapped("not (", ")")
            case Compare(column, operator, value):
                sign = "<>" if operator == "!=" else operator
                return compare(self._columns[column], sign, value)
            case In(column, values):
                return one_of(self._columns[column], values)
            case Like(column, pattern, fold):
                name = "~~*" if fold else "~~"  # the operators of ILIKE and LIKE
                like = f"{identifier(column)} operator(pg_catalog.{name}) %s::pg_catalog.text"
                return Sql(like, (pattern,))
            case IsNull(column):
                return Sql(f"{identifier(column)} is null")
            case _:
                assert_never(where)


def compare(column: Column, sign: str, value: Value) -> Sql:
    """A column compared with a constant; the sign is SQL's own."""
    constant = _constant(column, value)
    return Sql(f"{identifier(column.name)} {column.operator(sign)} ") + constant


def one_of(column: Column, values: Sequence[Value]) -> Sql:
    """Whether a column equals one of the constants, of which there is at least one. Not `in`, which
    cannot name the operator."""
    if not kinds.kind_of(column).cast:  # the type of an array could not be inferred
        return join(" or ", (compare(column, "=", value) for value in values)).wrapped("(", ")")
    listed = join(", ", (_constant(column, value) for value in values))
    return listed.wrapped(f"{identifier(column.name)} {column.operator('=')} any (array[", "])")


def _constant(column: Column, value: Value) -> Sql:
    cast = kinds.kind_of(column).cast or enum_type(column)
    if cast == "bigint" and (isinstance(value, Decimal) or not _fits_bigint(value)):
        cast = "numeric"
    return Sql(f"%s::{cast}" if cast else "%s", (value,))


def enum_type(column: Column) -> str:
    """The type of a column, if it is an enumeration; else empty. A constant is cast to it.
    Otherwise PostgreSQL would use an implicit cast to text that the type's owner made, and call it
    with our rights.

    >>> enum_type(Column("mood", "public.mood", "public.mood", enum=True))
    'public.mood'
    """
    return column.type.replace("%", "%%") if column.enum else ""


def _fits_bigint(value: Value) -> bool:
    return value is None or -(2**63) <= value < 2**63
