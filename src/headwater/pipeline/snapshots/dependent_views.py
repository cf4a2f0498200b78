"""Lets the streaming views of a table be built again, where its rows changed without changes in the
log. A view reads the log, so it lacks these.

A build reads the database. So it may be requested as soon as the database has the rows, before the
lake says what was lost: after a crash in between, a build too many is requested.
"""

from __future__ import annotations

from headwater.database import connect_blocking, translated


def rebuild(url: str, relation: int) -> None:
    """Request a build of every view that reads the table. A build that has begun before does not
    count (`ViewStore.swap`): also that of a new view, whose tables are not known before its end."""
    with translated(url), connect_blocking(url, purpose="pipeline") as database:
        database.execute(_REBUILD, {"relation": relation})


_REBUILD = """
    update headwater.views v
    set state = case v.state when 'new' then 'new' else 'due' end, changed_at = clock_timestamp()
    where v.state = 'new' or exists (
      select from jsonb_each(v.tables::jsonb) t where t.value ->> 'oid' = %(relation)s::text)
"""
