"""The SQL for each of the `needs`, with bound values.

All statements return whole rows of the table, and all are bounded: a page by its count, the others
by their keys.
"""

from __future__ import annotations

from typing import assert_never

from headwater.live.filters.sql import Sql, compare, filter_sql, identifier, join, one_of
from headwater.live.needs import Check, Need, Order, Refill
from headwater.live.query import BoundQuery
from headwater.model import Cursor, Key, Table


def statement(query: BoundQuery, need: Need) -> Sql:
    """The statement whose rows answer a need."""
    match need:
        case Refill(after, count):
            return page(query, after, count)
        case Order(keys, until):
            return by_keys(query, keys, until)
        case Check(keys):
            return by_keys(query, keys, None)
        case _:
            assert_never(need)


def page(query: BoundQuery, after: Cursor | None, count: int) -> Sql:
    """The first `count` rows of the query's order, after the cursor if there is one."""
    conditions = [filter_sql(query.where, query.table)]
    if after is not None:
        conditions.append(query.order.after_sql(after))
    return _select(query, conditions) + Sql(" limit %s", (count,))


def by_keys(query: BoundQuery, keys: tuple[Key, ...], until: Cursor | None) -> Sql:
    """The rows with these keys that match and are not after `until`, in the query's order."""
    conditions = [_keys_sql(query.table, keys), filter_sql(query.where, query.table)]
    if query.after is not None:
        conditions.append(query.order.after_sql(query.after))
    if until is not None:
        conditions.append(query.order.after_sql(until).wrapped("", " is not true"))
    return _select(query, conditions)


def select_keys(table: Table, keys: tuple[Key, ...], *, whole: bool = True) -> Sql:
    """The rows with these keys, without a filter, in any order; or only their keys."""
    names = None if whole else table.key
    return Sql(_from(table, names)) + _keys_sql(table, keys).wrapped(" where ", "")


def _select(query: BoundQuery, conditions: list[Sql]) -> Sql:
    where = join(" and ", conditions).wrapped(" where ", " order by ")
    return Sql(_from(query.table)) + where + query.order.sql()


def _from(table: Table, names: tuple[str, ...] | None = None) -> str:
    columns = names or tuple(column.name for column in table.columns)
    listed = ", ".join(map(identifier, columns))
    return f"select {listed} from {identifier(table.schema)}.{identifier(table.name)}"


def _keys_sql(table: Table, keys: tuple[Key, ...]) -> Sql:
    of_name = {column.name: column for column in table.columns}
    columns = [of_name[name] for name in table.key]
    if not keys:
        return Sql("false")
    if len(columns) == 1:
        return one_of(columns[0], [value for (value,) in keys])
    same = [
        join(
            " and ",
            (compare(column, "=", value) for column, value in zip(columns, key, strict=True)),
        )
        for key in keys
    ]
    return join(" or ", (each.wrapped("(", ")") for each in same)).wrapped("(", ")")
