"""Checks tables and rights of live queries again, because the log does not show when they change.

The log does not show that a role lost a right, that a policy was altered, or that a table used by a
policy has changed. So once a period every table is looked up and every right is checked again; a
lost right ends its subscriptions. Guarded views are read again beside the flushes, spread over the
period. Their subscribers are sent something only if the result differs.
"""

from __future__ import annotations

import asyncio
import logging

from headwater.errors import CaptureError, Forbidden, HeadwaterError, Unavailable
from headwater.hub.live_views.registry import LiveViews
from headwater.hub.live_views.view import LiveView
from headwater.hub.live_views.visibility import guarded
from headwater.hub.reading.row_security import scope_of
from headwater.hub.reading.tables import KnownTable, Tables

logger = logging.getLogger(__name__)


async def recheck(views: LiveViews, tables: Tables, seconds: float) -> None:
    """Check every table and every right; then read guarded views, spread over this many seconds."""
    by_name: dict[str, list[LiveView]] = {}
    for view in views:
        by_name.setdefault(view.request.table, []).append(view)
    for name, its in by_name.items():
        try:
            await _recheck_table(views, tables, name, its)
        except Unavailable:
            raise
        except Exception:
            logger.exception("the rights of live queries on %s could not be checked again", name)
    secured = [view for view in views if guarded(view)]
    for view in secured:
        if not view.removed and view.live:
            views.open(view, quiet=True)
        await asyncio.sleep(seconds / len(secured))


async def _recheck_table(views: LiveViews, tables: Tables, name: str, its: list[LiveView]) -> None:
    try:
        known = await tables.find(name)
    except CaptureError as error:
        await _end_if_dropped(views, tables, its, error)
        return
    for view in its:
        if not view.removed:
            await _recheck_view(views, tables, view, known)


async def _end_if_dropped(
    views: LiveViews, tables: Tables, its: list[LiveView], error: HeadwaterError
) -> None:
    """Subscriptions of a table that is disabled, but still exists, continue."""
    for view in its:
        exists = await tables.ask("select from pg_class where oid = %s", (view.known.table.oid,))
        if not exists and not view.removed:
            views.fail_all(view, error)


async def _recheck_view(
    views: LiveViews, tables: Tables, view: LiveView, known: KnownTable
) -> None:
    if (known.table.id, known.secured) != (view.known.table.id, view.known.secured):
        views.reopen(view)
        return
    for access in {each.access.role: each.access for each in view.subscribers}.values():
        try:
            scope = await scope_of(tables, known, view.query, access)
        except Forbidden as error:
            for subscription in list(view.subscribers):
                if subscription.access.role == access.role:
                    subscription.fail(error)
            continue
        if scope is not None and view.scope is not None and scope.checked != view.scope.checked:
            views.reopen(view)
            return
