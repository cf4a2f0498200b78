"""Searches the log, newest changes first, up to a time limit.

The log has no index by table or key: a search reads its changes in steps, from the newest
transaction back. At the time limit the result has the place it reached (`before`), from which
another search continues.
"""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any

import msgspec
from psycopg import sql

from headwater.database import Connection
from headwater.errors import CaptureError, InvalidQuery
from headwater.limits import (
    ADMIN_IMAGE_CHARS_MAX,
    ADMIN_LOG_BYTES_MAX,
    ADMIN_LOG_ROWS_MAX,
    ADMIN_SECONDS_MAX,
)
from headwater.model import Origin

_ADMIN_LOG_STEP_ROWS_MIN = 50
"""The fewest changes that a search reads in one step, if rows are large."""

_ADMIN_LOG_STEP_ROWS = 500
"""Changes that a search reads in its first step."""

_ADMIN_LOG_STEP_ROWS_MAX = 20_000
"""The most changes that a search reads in one step, if rows are small."""


_CODES = {"insert": "I", "update": "U", "delete": "D", "truncate": "T", "reset": "R"}
_OPS = {code: op for op, code in _CODES.items()}


class Search(msgspec.Struct, frozen=True):
    """The criteria of a search. `key` is the key of a row as people write it, `7` or `7,2026`;
    `text` is searched in the whole row, without regard to case; `before` is the cursor of an
    earlier result."""

    table: str | None = None
    op: str | None = None
    key: str | None = None
    user: str | None = None
    text: str | None = None
    before: str | None = None
    limit: int = 100


class Logged(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change in the log. Images of rows that are too large to be shown are left out."""

    cursor: str
    at: datetime
    table: str
    op: str
    key: msgspec.Raw | None = None
    before: msgspec.Raw | None = None
    after: msgspec.Raw | None = None
    changed: list[str] | None = None
    user: str | None = None
    function: str | None = None
    trace: str | None = None
    cut: bool = False
    origin: Origin | None = None


class SearchResult(msgspec.Struct, frozen=True):
    """The changes that match. With `before` there is more to search: `searched_to` is the time that
    the search reached."""

    changes: list[Logged]
    scanned: int
    before: str | None
    searched_to: datetime | None


async def search(connection: Connection, criteria: Search) -> SearchResult:
    """The newest changes that match. InvalidQuery for invalid criteria, CaptureError for a table
    that the log does not have."""
    if not 1 <= criteria.limit <= ADMIN_LOG_ROWS_MAX:
        raise InvalidQuery(f"expected 1 to {ADMIN_LOG_ROWS_MAX}", path="limit")
    conditions, values = await _conditions(connection, criteria)
    found: list[Logged] = []
    upper, scanned = _cursor(criteria.before), 0
    bytes_left, step = ADMIN_LOG_BYTES_MAX, _ADMIN_LOG_STEP_ROWS
    until = time.monotonic() + ADMIN_SECONDS_MAX
    while True:
        began = time.monotonic()
        lower, at, count = await _step(connection, upper, step)
        scanned += count
        values |= {"upper": upper, "lower": lower, "limit": criteria.limit - len(found)}
        bounds = [_BELOW] if upper else []
        where = sql.SQL(" and ").join([*bounds, *([_ABOVE] if lower else []), *conditions])
        cursor = await connection.execute(_FOUND.format(where=where, **_IMAGES), _flat(values))
        for row in await cursor.fetchall():
            found.append(_logged(*row))
            bytes_left -= _size(found[-1])
            if bytes_left <= 0:
                break
        if bytes_left <= 0 or len(found) == criteria.limit:
            return SearchResult(found, scanned, found[-1].cursor, found[-1].at)
        if lower is None:
            return SearchResult(found, scanned, None, None)
        upper, now = lower, time.monotonic()
        if now > until:
            return SearchResult(found, scanned, f"{upper[0]}.{upper[1]}", at)
        step = next_step(step, now - began)


def next_step(step: int, seconds: float) -> int:
    """How many changes to read in the next step, given the time that the last one took: the sizes
    of rows differ widely.

    >>> next_step(500, 0.1), next_step(500, 0.5), next_step(500, 2.0), next_step(60, 2.0)
    (1000, 500, 125, 50)
    """
    if seconds < 0.25:
        return min(step * 2, _ADMIN_LOG_STEP_ROWS_MAX)
    return max(step // 4, _ADMIN_LOG_STEP_ROWS_MIN) if seconds > 1 else step


def _size(logged: Logged) -> int:
    images = (logged.key, logged.before, logged.after)
    return sum(len(bytes(image)) for image in images if image is not None)


Mark = tuple[int, int]
"""A place in the log: a transaction id and the number of a change."""


async def _step(
    connection: Connection, upper: Mark | None, rows: int
) -> tuple[Mark | None, datetime | None, int]:
    """Where the next step ends (None for the end of the log), the time of the change there, and the
    most changes that it reads."""
    where = _BELOW if upper else sql.SQL("true")
    values = _flat({"upper": upper, "offset": rows - 1})
    cursor = await connection.execute(_STEP.format(where=where), values)
    row = await cursor.fetchone()
    if row is not None:
        return (int(row[0]), row[1]), row[2], rows
    cursor = await connection.execute(_REST.format(where=where), values)
    rest = await cursor.fetchone()
    assert rest is not None
    return None, None, rest[0]


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    flat = dict(values)
    for name in ("upper", "lower"):
        mark = flat.pop(name, None)
        if mark is not None:
            flat |= {f"{name}_xid": str(mark[0]), f"{name}_seq": mark[1]}
    return flat


def _cursor(text: str | None) -> Mark | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,19})\.(\d{1,18})", text)
    if match is None:
        raise InvalidQuery(
            f"{text!r:.100} is not a cursor", path="before", hint="Use `before` of an answer."
        )
    return int(match[1]), int(match[2])


async def _conditions(
    connection: Connection, criteria: Search
) -> tuple[list[sql.Composable], dict[str, Any]]:
    conditions: list[sql.Composable] = []
    values: dict[str, Any] = {"cut": ADMIN_IMAGE_CHARS_MAX}
    if criteria.table is None:
        conditions.append(sql.SQL("s.schema_name <> 'headwater'"))
    else:
        conditions.append(sql.SQL("l.shape = any(%(shapes)s)"))
        values["shapes"] = await _shapes(connection, criteria.table)
    if criteria.op is not None:
        if criteria.op not in _CODES:
            raise InvalidQuery(
                f"there is no operation {criteria.op!r:.100}",
                path="op",
                hint=f"Use: {', '.join(_CODES)}.",
            )
        conditions.append(sql.SQL("l.op = %(op)s"))
        values["op"] = _CODES[criteria.op]
    if criteria.user is not None:
        conditions.append(sql.SQL("l.user_id = %(user)s"))
        values["user"] = criteria.user
    if criteria.key is not None:
        conditions.append(_KEY)
        parts = criteria.key.split(",")
        values |= {"key": [criteria.key], "parts": parts, "times": [as_logged(p) for p in parts]}
    if criteria.text is not None:
        conditions.append(_TEXT)
        values["text"] = criteria.text
    return conditions, values


def as_logged(text: str) -> str:
    """A time as the log writes it: feeds and browsers write all digits, and `Z`. Any other text is
    returned unchanged.

    >>> as_logged("2026-11-15T10:00:00.120000Z"), as_logged("Z")
    ('2026-11-15T10:00:00.12+00:00', 'Z')
    """
    match = _TIME.fullmatch(text)
    if match is None:
        return text
    fraction = (match["fraction"] or "").rstrip("0")
    zone = match["zone"] and "+00:00"
    return f"{match['whole']}{fraction and '.'}{fraction}{zone or ''}"


_TIME = re.compile(
    r"(?P<whole>\d{4,}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.(?P<fraction>\d+))?(?P<zone>Z|\+00:00)?"
)


async def _shapes(connection: Connection, name: str) -> list[int]:
    cursor = await connection.execute(_SHAPES, {"name": name})
    shapes = [id for (id,) in await cursor.fetchall()]
    if not shapes:
        raise CaptureError(
            f"the log has no table {name!r:.100}",
            hint=f"A table is in the log once it is enabled: headwater enable {name:.100}",
        )
    return shapes


def _logged(
    xid: str,
    seq: int,
    at: datetime,
    schema: str,
    table: str,
    op: str,
    key: str | None,
    before: str | None,
    after: str | None,
    changed: list[str] | None,
    user: str | None,
    function: str | None,
    trace: str | None,
    cut: bool,
    source: str | None,
    position: str | None,
    committed_at: datetime | None,
) -> Logged:
    return Logged(
        f"{xid}.{seq}",
        at,
        table if schema == "public" else f"{schema}.{table}",
        _OPS[op],
        _raw(key),
        _raw(before),
        _raw(after),
        changed,
        user,
        function,
        trace,
        cut,
        None if source is None else Origin(source, position, committed_at),
    )


def _raw(text: str | None) -> msgspec.Raw | None:
    """JSON that is not decoded, so that numbers keep their digits."""
    return None if text is None else msgspec.Raw(text.encode())


_BELOW = sql.SQL("(l.xid, l.seq) < (%(upper_xid)s::xid8, %(upper_seq)s)")
_ABOVE = sql.SQL("(l.xid, l.seq) >= (%(lower_xid)s::xid8, %(lower_seq)s)")

_STEP = sql.SQL("""
    select l.xid::text, l.seq, l.at from headwater.log l where {where}
    order by l.xid desc, l.seq desc offset %(offset)s limit 1
""")
_REST = sql.SQL("select count(*) from headwater.log l where {where}")

# A value of type json may contain an escaped NUL, and then PostgreSQL cannot read its fields.
_IMAGES = {
    name: sql.SQL(
        r"case when strpos({image}::text, '\u0000') = 0 then {image}"
        r" else replace({image}::text, '\u0000', '\ufffd')::json end"
    ).format(image=sql.Identifier("l", name))
    for name in ("before", "after")
}

_FOUND = sql.SQL("""
    select l.xid::text, l.seq, l.at, s.schema_name, s.table_name,
           l.op::text,
           case when l.op in ('I', 'U', 'D')
                then headwater.key_of(coalesce(i.after, i.before), s.key)::text end,
           case when length(l.before::text) <= %(cut)s then l.before::text end,
           case when length(l.after::text) <= %(cut)s then l.after::text end,
           case when l.op = 'U' then headwater.changed_columns(i.before, i.after) end,
           nullif(l.user_id, ''), nullif(l.function_name, ''), nullif(l.trace_id, ''),
           greatest(length(l.before::text), length(l.after::text)) > %(cut)s is true,
           o.source, o.position, o.committed_at
    from headwater.log l
    cross join lateral (select * from headwater.shapes where id = l.shape limit 1) s
    cross join lateral (select {before}, {after}) i (before, after)
    left join headwater.source_transactions o on o.xid = l.xid
    where {where}
    order by l.xid desc, l.seq desc limit %(limit)s
""")

_KEY = sql.SQL("""(
    select given.key in (%(key)s::text[], %(parts)s::text[], %(times)s::text[])
    from (select array(
      select value from json_each_text(headwater.key_of(coalesce(i.after, i.before), s.key)))
    ) given (key))""")

_TEXT = sql.SQL("""(
    strpos(lower(l.after::text), lower(%(text)s)) > 0
    or strpos(lower(l.before::text), lower(%(text)s)) > 0)""")

_SHAPES = """
    select distinct id from headwater.shapes
    where relid = headwater.find_table(%(name)s)::oid
       or case when schema_name = 'public' then table_name
               else schema_name || '.' || table_name end = %(name)s
"""
