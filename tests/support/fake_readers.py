"""What parts of the hub read with, without a database: from the rows of a `FakeDatabase`.

Rows are read as they are when a flush lends its snapshot. They arrive later, after a number of
turns of the event loop that the test's seed decides: flushes come meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import psycopg

from headwater.hub.live_views.background import BackgroundQueries, Unit
from headwater.hub.live_views.delivery import Delivery, Flushed
from headwater.hub.live_views.initial_snapshots import InitialSnapshots
from headwater.hub.live_views.registry import LiveViews
from headwater.hub.live_views.view import InitialSnapshot, LiveView
from headwater.hub.reactive.execution import Execution, ExecutionOutcome
from headwater.hub.reactive.group import FlushMoment, QueryGroup
from headwater.hub.reactive.placement import Placement
from headwater.hub.reading.snapshot_pool import Export
from headwater.hub.reading.tables import KnownTable
from headwater.hub.resources import Resources
from headwater.hub.topics.rows import Found
from headwater.live.filters.filter import Compare
from headwater.live.needs import Check, Need, Order, Refill
from headwater.live.query import BoundQuery
from headwater.live.state.streamed import Streamed
from headwater.log.waking.listener import NotifyListener
from headwater.model import Key, Position, Row
from headwater.queries.analysis.statements import Read
from headwater.settings import Settings
from tests.support.fake_flush import THINGS, FakeDatabase


class LateAnswers:
    """Calls functions after a number of turns of the event loop."""

    def __init__(self, chance: Random, turns_max: int = 60) -> None:
        self._chance = chance
        self._turns_max = turns_max
        self._tasks: set[asyncio.Task[None]] = set()

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def call(self, function: Callable[[], None]) -> None:
        task = asyncio.create_task(self._call(function))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _call(self, function: Callable[[], None]) -> None:
        for _ in range(self._chance.randrange(self._turns_max)):
            await asyncio.sleep(0)
        function()

    def forget(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()


# ------------------------------------------------------------------------ live views


def answer(database: FakeDatabase, query: BoundQuery, need: Need) -> Sequence[Row]:
    """What the statement of a need returns."""
    layout, order = query.layout, query.order
    rows = [row for row in database.rows[query.table.name].values() if query.matches(row)]
    rows.sort(key=layout.sort)

    def is_after(row: Row, cursor: Any) -> bool:
        return layout.sort(row)[: layout.width] > order.key(cursor)

    match need:
        case Refill(after, count):
            return [row for row in rows if after is None or is_after(row, after)][:count]
        case Order(keys, until):
            rows = [row for row in rows if until is None or not is_after(row, until)]
            return [row for row in rows if query.key_of(row) in keys]
        case Check(keys):
            return [row for row in rows if query.key_of(row) in keys]


class FakeSnapshots(InitialSnapshots):
    """First results, from the rows of the database."""

    def __init__(
        self,
        database: FakeDatabase,
        late: LateAnswers,
        url: str,
        changed: Callable[[], None],
        failed: Callable[[InitialSnapshot, Exception], None],
        *,
        question_url: str | None = None,
    ) -> None:
        super().__init__(url, changed, failed, question_url=question_url)
        self._database = database
        self._late = late
        self._wanted: list[InitialSnapshot] = []

    @property
    def can_start(self) -> bool:
        return bool(self._wanted)

    def want(self, snapshot: InitialSnapshot) -> None:
        self._wanted.append(snapshot)
        self._changed()

    async def start(self, export: Export, position: Position) -> None:
        wanted, self._wanted = self._wanted, []
        for snapshot in wanted:
            if snapshot.wanted:
                snapshot.start(position, 1)
                await self._answer(snapshot)
            else:
                snapshot.drop()

    async def _answer(self, snapshot: InitialSnapshot) -> None:
        first = True
        while snapshot.state.needs:
            (need,) = snapshot.state.needs
            rows = answer(self._database, snapshot.view.query, need)
            outcome = snapshot.state.answer(need, rows)
            await self._send(snapshot, outcome.deltas, first=first, more=bool(outcome.needs))
            first = False
        state = snapshot.state

        def arrive() -> None:
            if snapshot.state is state:  # otherwise it has begun again
                snapshot.arrived = True
                self.arrived.append(snapshot)
                self._changed()

        self._late.call(arrive)

    def restart(self) -> None:
        self._wanted.clear()
        self._late.forget()
        self.arrived.clear()


class FakeBackground(BackgroundQueries):
    """Answers what views need at once, within the flush."""

    def __init__(
        self,
        database: FakeDatabase,
        resources: Resources,
        flushes: Any,
        views: LiveViews,
        delivery: Delivery,
    ) -> None:
        super().__init__(resources, flushes, views, delivery)
        self._database = database

    def expect(self, view: LiveView) -> None: ...

    async def start(self, units: Sequence[Unit], export: Export, flushed: Flushed) -> list[Unit]:
        for step in (step for unit in units for step in unit.steps):
            while (need := step.need) is not None:
                if isinstance(step.state, Streamed) and isinstance(need, Refill):
                    step.error = psycopg.errors.QueryCanceled("to be read beside the flush")
                else:
                    step.answer(need, answer(self._database, step.view.query, need))
        return list(units)


# ------------------------------------------------------------------------ reactive queries


class FakePlacement(Placement):
    """Executes queries over `things` with an argument `least`: the rows whose n is no less."""

    def __init__(
        self,
        database: FakeDatabase,
        late: LateAnswers,
        url: str,
        settings: Settings,
        changed: Callable[[], None],
        execution: Execution,
    ) -> None:
        super().__init__(url, settings, changed, execution)
        self._database = database
        self._late = late
        self._changed = changed
        self._wanted: list[QueryGroup] = []
        self._running: dict[QueryGroup, int] = {}
        self.executed = 0

    @property
    def can_start(self) -> bool:
        return bool(self._wanted)

    @property
    def oldest(self) -> int | None:
        return min(self._running.values(), default=None)

    def want(self, group: QueryGroup) -> None:
        self._wanted.append(group)
        self._changed()

    async def start(self, export: Export, moment: FlushMoment) -> None:
        wanted, self._wanted = self._wanted, []
        for group in wanted:
            group.state = "running"
            self._running[group] = moment.flush
            self._late.call(self._executed(group, moment))

    def _executed(self, group: QueryGroup, moment: FlushMoment) -> Callable[[], None]:
        self.executed += 1
        least = group.arguments.values["least"]
        rows = [row for row in self._database.rows["things"].values() if row["n"] >= least]
        outcome = ExecutionOutcome(
            moment,
            group.reason,
            value=group.query.encode(sorted(rows, key=lambda row: row["id"])),
            reads=(Read(THINGS, where=Compare("n", ">=", least)),),
        )

        def finish() -> None:
            del self._running[group]
            self._execution.finished(group, outcome)

        return finish

    def restart(self) -> None:
        self._wanted.clear()
        self._running.clear()
        self._late.forget()


# ------------------------------------------------------------------------ topics


class FakeListener(NotifyListener):
    """Listens to every channel at once."""

    def __init__(self) -> None:
        super().__init__("postgresql://nowhere", lambda: None)

    async def settled(self) -> None: ...


class FakeRows:
    """Reads rows by their keys, from the rows of the database."""

    def __init__(self, database: FakeDatabase) -> None:
        self._database = database

    async def fetch(
        self, connection: Any, wanted: Sequence[tuple[KnownTable, Sequence[Key]]]
    ) -> tuple[list[Found], int]:
        found: list[Found] = [
            {
                key: row
                for key in keys
                if (row := self._database.rows[known.table.name].get(key[0])) is not None
            }
            for known, keys in wanted
        ]
        return found, len(found)
