"""Each part of the hub fails when a backlog is skipped: afterwards every client equals the
database, and the handlers of the application were called with every change or with a gap."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from headwater import limits
from headwater.database import Connection
from headwater.hub.feeds.change_events import ChangeEvents
from headwater.hub.feeds.registry import FeedRegistry
from headwater.hub.feeds.subscription import FeedSubscription
from headwater.hub.hub import Hub
from headwater.hub.live_views.registry import LiveViews
from headwater.hub.reactive import group as group_module
from headwater.hub.reactive.registry import ReactiveQueries
from headwater.hub.topics.registry import TopicRegistry
from headwater.hub.topics.subscription import TopicSubscription
from headwater.log import reconnect
from headwater.log.reading import reader as reader_module
from headwater.queries.analysis.analyst import Analyst
from headwater.queries.events import ChangeEvent, Events, GapEvent
from tests.simulation.test_faults import Faults, Stage, Unforeseen, create_tables
from tests.support.log_probe import run

PARTS: tuple[tuple[type, str], ...] = (
    (TopicRegistry, "skipped"), (TopicSubscription, "fell_behind"), (LiveViews, "skipped"),
    (LiveViews, "reshape"), (LiveViews, "read_again"), (ReactiveQueries, "skipped"),
    (ReactiveQueries, "_altered"), (ReactiveQueries, "_touch"), (Analyst, "forget"),
    (FeedRegistry, "skipped"),
    (FeedSubscription, "fell_behind"), (ChangeEvents, "skipped"),
)  # fmt: skip


class Handlers:
    """What the handlers of an application were called with."""

    def __init__(self) -> None:
        self.events = Events()
        self.changes: list[ChangeEvent] = []
        self.gaps: list[GapEvent] = []
        self._notified = asyncio.Event()
        self.events.on("change", self._changed)
        self.events.on("gap", self._missed)

    def _changed(self, event: ChangeEvent) -> None:
        if event.operation == "update":
            self.changes.append(event)
        self._notified.set()

    def _missed(self, event: GapEvent) -> None:
        self.gaps.append(event)
        self._notified.set()

    async def until_called(self, count: int) -> None:
        """With this many changes, or with a gap."""
        async with asyncio.timeout(30):
            while len(self.changes) < count and not self.gaps:
                self._notified.clear()
                await self._notified.wait()


def fail_once(patch: pytest.MonkeyPatch, owner: type, name: str, *, after: bool) -> list[str]:
    """The next call raises, before or after it has done its work. Returns what has failed."""
    original, failed = getattr(owner, name), list[str]()

    def failing(*args: Any, **options: Any) -> Any:
        if failed:
            return original(*args, **options)
        failed.append(name)
        if after:
            original(*args, **options)
        raise Unforeseen(name)

    patch.setattr(owner, name, failing)
    return failed


@pytest.mark.parametrize("after", [False, True])
async def test_every_client_equals_the_database_after_a_skip_that_failed_in_part(
    url: str, connection: Connection, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnect, "RECONNECT_SECONDS", (0.01, 0.05))
    monkeypatch.setattr(limits, "RECONNECT_SECONDS", (0.01, 0.05))
    monkeypatch.setattr(group_module, "_RETRY_FIRST", 0.01)
    monkeypatch.setattr(reader_module, "_LOG_PAGE_CHANGES", 10)
    await create_tables(connection)
    handlers = Handlers()
    async with Hub(url, events=handlers.events) as hub:
        stage = Stage(hub, connection, Faults(random.Random(1), url))
        stage.open()
        await stage.agree()
        for number, (owner, name) in enumerate(PARTS):
            handlers.changes.clear()
            handlers.gaps.clear()
            with pytest.MonkeyPatch.context() as patch:
                failed = fail_once(patch, owner, name, after=after)
                # The shape changes too: everything about the table is looked up again.
                await run(
                    connection,
                    "begin",
                    f"alter table orders add column c{number} int",
                    "update orders set amount = (amount + 1) % 9, region = (region + 1) % 3",
                    "commit",
                )
                try:
                    await stage.agree()
                    await handlers.until_called(20)
                except BaseException as error:
                    error.add_note(f"after {owner.__name__}.{name} failed: {failed}")
                    raise
                assert failed, f"{owner.__name__}.{name} was not called"
            assert len(handlers.changes) == 20 or (owner is ChangeEvents and handlers.gaps), name
    assert [client.fault for client in stage.clients if client.fault] == []
