"""Looks again, now and then, at what nobody announces: rights, policies, and altered tables.

No change in the log says that a role lost a right, that a policy was altered, or that the table it
consults was. So every table with subscriptions is looked up again once a period and every right
asked for again; a right that is gone ends the subscriptions that rest on it. Guarded views are read
again beside the flushes, spread over the period, and their subscribers hear of it only where the
result differs.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from headwater.errors import CaptureError, Forbidden, HeadwaterError, Unavailable
from headwater.hub.live import LiveView
from headwater.hub.tables import KnownTable
from headwater.hub.visibility import guarded, scope_of

if TYPE_CHECKING:
    from headwater.hub.hub import Hub

logger = logging.getLogger(__name__)


async def recheck_for_ever(hub: Hub, seconds: float) -> None:
    """One round after the other, each as long as the period."""
    while True:
        await asyncio.sleep(seconds / 2)
        try:
            await recheck(hub)
        except Unavailable:
            continue  # there is nothing to see; the next round comes
        except Exception:
            logger.exception("rights could not be looked at again")
        views = [view for view in hub.lives.views if guarded(view)]
        for view in views:
            if not view.removed and view.live:
                hub.lives.open(view, quiet=True)
            await asyncio.sleep(seconds / 2 / len(views))
        if not views:
            await asyncio.sleep(seconds / 2)


async def recheck(hub: Hub) -> None:
    """Look at every table and every right once."""
    by_name: dict[str, list[LiveView]] = {}
    for view in hub.lives.views:
        by_name.setdefault(view.wish.table, []).append(view)
    for name, views in by_name.items():
        try:
            known = await hub.tables.find(name)
        except CaptureError as error:
            await _is_it_gone(hub, views, error)
            continue
        for view in views:
            if not view.removed:
                await _recheck_view(hub, view, known)
    await hub.groups.recheck()
    await hub.topics.recheck()
    for feed in list(hub.feeds):
        for subscription in list(feed.subscribers):
            for oid in list(feed.tables):
                await hub.feeds.admit(subscription, oid)


async def _is_it_gone(hub: Hub, views: list[LiveView], error: HeadwaterError) -> None:
    """A table that is only disabled keeps its subscriptions; they go on when it is enabled."""
    for view in views:
        exists = await hub.tables.ask(
            "select from pg_class where oid = %s", (view.known.table.oid,)
        )
        if not exists and not view.removed:
            hub.lives.fail_all(view, error)


async def _recheck_view(hub: Hub, view: LiveView, known: KnownTable) -> None:
    if (known.table.id, known.secured) != (view.known.table.id, view.known.secured):
        hub.lives.reopen(view)
        return
    for access in {each.access.role: each.access for each in view.subscribers}.values():
        try:
            scope = await scope_of(hub.tables, known, view.query, access)
        except Forbidden as error:
            for subscription in list(view.subscribers):
                if subscription.access.role == access.role:
                    subscription.fail(error)
            continue
        if scope is not None and view.scope is not None and scope.checked != view.scope.checked:
            hub.lives.reopen(view)
            return
