"""Explains how a live query is served: its place in the router, its first read, the index for it.

To find out whether an index can serve a query, the planner is asked with table scans and sorts
disabled: on a small table it would otherwise prefer a table scan to any index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import psycopg

from headwater.database import Connection
from headwater.errors import Forbidden
from headwater.hub.hub import Hub
from headwater.hub.subscriptions.subscriber import Access
from headwater.live.filters.filter import EVERYTHING
from headwater.live.filters.sql import Sql
from headwater.live.filters.terms import HIGHEST, LOWEST, Between, Equal, Term, terms
from headwater.live.order import OrderBy
from headwater.live.query import BoundQuery, LiveQuery
from headwater.live.statements import statement
from headwater.live.view import new_state


class Filed(msgspec.Struct, frozen=True):
    """A term that the router files a query under."""

    index: str
    """`equality`, a hash map; or `range`, an interval structure."""
    column: str
    text: str


class QueryPlan(msgspec.Struct, frozen=True):
    """What the planner would do now."""

    scan: str
    sorts: bool
    rows: float
    cost: float


class Explained(msgspec.Struct, frozen=True):
    """`filed` is None if every change of the table is checked. `index` is an index that could serve
    the first read; `serves_filter` and `serves_order` say for which part; `suggestion` is an index
    that would serve both."""

    table: str
    key: tuple[str, ...]
    mode: str
    filed: list[Filed] | None
    sql: str
    values: list[str]
    plan: QueryPlan
    index: str | None
    serves_filter: bool
    serves_order: bool
    suggestion: str | None


async def explain(hub: Hub, connection: Connection, query: LiveQuery) -> Explained:
    """Raises the errors of a subscription, except those about the subscriber's rights: no row is
    read."""
    _, bound, known = await hub.live_views.check(query, Access())
    (need, *_) = new_state(bound).needs
    first = statement(bound, need)
    try:
        now, best = await _plans(connection, first)
    except psycopg.errors.InsufficientPrivilege as error:
        if not known.secured:
            raise
        raise Forbidden(
            f"{known.table.label} is guarded by row-level security: how it is read depends on"
            " the policies for a user's role",
            hint="Explain the statement in PostgreSQL, as that role.",
        ) from error
    nodes = list(_nodes(best))
    index = next((node["Index Name"] for node in nodes if "Index Name" in node), None)
    serves_order = not any("Sort" in node["Node Type"] for node in nodes)
    filters = bound.where != EVERYTHING
    serves_filter = index is not None and not any("Filter" in node for node in nodes)
    filed = terms(bound.where, bound.table)
    is_served = (serves_filter or not filters) and serves_order
    return Explained(
        known.table.label,
        known.table.key,
        bound.mode,
        None if filed is None else [_filed(term) for term in filed],
        *_shown(first),
        _read(now),
        index,
        serves_filter or not filters,
        serves_order,
        None if is_served else await _suggestion(connection, bound, filed),
    )


def _filed(term: Term) -> Filed:
    match term:
        case Equal(column, value):
            text = f"{column} is null" if value is None else f"{column} = {value}"
            return Filed("equality", column, text)
        case Between(column, low, high):
            parts = [column]
            if low != LOWEST:
                parts.insert(0, f"{low[1]} ≤")
            if high != HIGHEST:
                parts.append(f"≤ {high[1]}")
            return Filed("range", column, " ".join(parts))


def _shown(sql: Sql) -> tuple[str, list[str]]:
    """The statement with numbered placeholders, and the values."""
    text = sql.text
    for number in range(1, len(sql.values) + 1):
        text = text.replace("%s", f"${number}", 1)
    # Easier to read: the executed statement names the schema of every operator.
    text = _OPERATOR.sub(r"\1", text.replace("%%", "%"))
    return text, [str(value) for value in sql.values]


_OPERATOR = re.compile(r"operator\(pg_catalog\.([^)]+)\)")


async def _plans(connection: Connection, sql: Sql) -> tuple[dict[str, Any], dict[str, Any]]:
    """The plan of the first read now, and with table scans disabled.

    The planner may call functions of the table's owner that are declared constant: in an index, a
    statistics object, a policy. They would run with our rights, so the transaction is read only and
    policies are not planned.
    """
    async with connection.transaction(force_rollback=True):
        await connection.execute("set transaction read only")
        await connection.execute("set local row_security = off")
        now = await _plan(connection, sql)
        await connection.execute("set local enable_seqscan = off")
        await connection.execute("set local enable_sort = off")
        return now, await _plan(connection, sql)


async def _plan(connection: Connection, sql: Sql) -> dict[str, Any]:
    async with psycopg.AsyncClientCursor(connection) as cursor:
        await cursor.execute(f"explain (format json) {sql.text}".encode(), sql.values)
        row = await cursor.fetchone()
    assert row is not None
    plan: dict[str, Any] = row[0][0]["Plan"]
    return plan


def _nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


def _read(plan: dict[str, Any]) -> QueryPlan:
    nodes = list(_nodes(plan))
    scans = [node for node in nodes if "Scan" in node["Node Type"]]
    names = [
        f"{node['Node Type']} {node.get('Index Name', '')}".strip() for node in scans or nodes[:1]
    ]
    return QueryPlan(
        ", ".join(dict.fromkeys(names)),
        any("Sort" in node["Node Type"] for node in nodes),
        plan["Plan Rows"],
        plan["Total Cost"],
    )


async def _suggestion(
    connection: Connection, query: BoundQuery, filed: tuple[Term, ...] | None
) -> str:
    """An index that begins with the columns of equality conditions and continues with the order.
    The column of a range is last: before the order, the index could not serve the order."""
    order = {by.column: by for by in query.order.by}
    equal = [term.column for term in filed or () if isinstance(term, Equal)]
    ranged = [term.column for term in filed or () if isinstance(term, Between)]
    first = [OrderBy(column) for column in dict.fromkeys(equal) if column not in order]
    last = [OrderBy(column) for column in dict.fromkeys(ranged) if column not in order]
    table = query.table
    path = [table.name] if table.schema == "public" else [table.schema, table.name]
    columns = [*first, *order.values(), *last]
    names = await _quoted(connection, [*path, *(by.column for by in columns)])
    listed = [
        str(msgspec.structs.replace(by, column=name))
        for by, name in zip(columns, names[len(path) :], strict=True)
    ]
    return f"create index on {'.'.join(names[: len(path)])} ({', '.join(listed)})"


async def _quoted(connection: Connection, names: list[str]) -> list[str]:
    """Names with quotes where PostgreSQL requires them: it knows its keywords."""
    cursor = await connection.execute(
        "select quote_ident(name) from unnest(%s::text[]) with ordinality given (name, place)"
        " order by place",
        (names,),
    )
    return [name for (name,) in await cursor.fetchall()]
