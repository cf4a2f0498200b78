"""Keeps the typed tables up to date while the events stream runs: a step of a `JobThread`.

The events sink reports which tables each batch changed. What no event says (a gap, a snapshot of
another shape) is looked for in each round, where the lake has another version of their lists. After
a start, the tables with changes since their last commit are found by one query. A table that fails,
or needs a snapshot first, does not affect the others, and is tried again in the next round.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from headwater import limits
from headwater.errors import PipelineError
from headwater.model import Position, Table
from headwater.pipeline.lake import delta, gaps, maintenance, retention, shapes, snapshots
from headwater.pipeline.lake.gaps import LakeGap
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.spark_errors import explain
from headwater.pipeline.tables import eras, requests
from headwater.pipeline.tables.catalog import Catalog
from headwater.pipeline.tables.choice import Choice, by_relation, present_tables
from headwater.pipeline.tables.columns import shows_hidden
from headwater.pipeline.tables.layout import CURRENT, HISTORY, Progress, folder
from headwater.pipeline.tables.requests import TableRequest
from headwater.pipeline.tables.typed_table import TypedTable

if TYPE_CHECKING:
    from headwater.pipeline.job_thread import JobThread

log = logging.getLogger(__name__)

_RENEWED_AFTER = timedelta(hours=20)
"""A table without changes for this long gets a commit with the present position."""

NAME = "tables"
"""Its name in the pipeline's progress."""


class TablesJob:
    """Merges what is due, at most once in `seconds`."""

    def __init__(self, lake: Lake, choice: Choice, *, once: bool = False) -> None:
        self._lake = lake
        self._choice = choice
        self._seconds = 0.0 if once else choice.seconds
        self._catalog = None if choice.catalog is None else Catalog(choice.catalog)
        self._due: set[int] = set()
        self._next_at = time.monotonic() + self._seconds
        self._examine_at = 0.0
        self._tables: dict[int, Table] = {}
        self._shapes: dict[int, list[Table]] = {}
        self._requests: dict[str, TableRequest] = {}
        self._versions: list[int | None] = []
        self._gaps: set[LakeGap] = set()
        self._last_shapes: dict[int, int] = {}

    def step(self, thread: JobThread) -> None:
        for contents in thread.contents():
            self._due.update(contents.column("relation").unique().to_pylist())
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + self._seconds
        reached = self._lake.reached()
        if reached is None:
            return
        self._find_due(reached)
        self._due.intersection_update(self._chosen())
        for relation in sorted(self._due):  # it is due until it succeeds
            thread.attempt(lambda: self._advance(thread, relation, reached))  # noqa: B023
        thread.report(position=str(reached))

    def _chosen(self) -> Collection[int]:
        if not self._tables.keys() >= self._due:
            self._load_tables()
        return [relation for relation, table in self._tables.items() if self._wants(table)]

    def _load_tables(self) -> None:
        known = shapes.load(self._lake.shapes_path)
        self._tables, self._shapes = present_tables(known), by_relation(known)

    def _wants(self, table: Table) -> bool:
        return self._choice.includes(table)

    def _find_due(self, reached: Position) -> None:
        """Add the tables that are due without a change; after a start, and once a day, look at the
        whole lake."""
        if time.monotonic() < self._examine_at:
            self._due |= self._ended()
            self._due |= self._requested()
            return
        # First: what comes meanwhile is found in the next round.
        self._ended()
        self._requests = requests.stored(self._lake.root)
        self._load_tables()
        wanted = [table for table in self._tables.values() if self._wants(table)]
        for table in wanted:
            for which in (HISTORY, CURRENT):
                maintenance.clean_stage(f"{self._lake.root}/{folder(table)}/{which}")
        self._due.update(self._behind(wanted, reached))
        self._examine_at = time.monotonic() + limits.LAKE_VACUUM_SECONDS

    def _ended(self) -> set[int]:
        """Tables with another gap, or another shape in their last snapshot, than at the last look:
        their eras end, and perhaps no event says so."""
        lists = self._lake.gaps_path, self._lake.places.list
        versions = [
            None if each is None else each.version() for each in map(delta.open_table, lists)
        ]
        if versions == self._versions:
            return set()
        found = set(gaps.every(self._lake.gaps_path))
        last = snapshots.last_shapes(self._lake.places)
        missing = {gap.relation for gap in found - self._gaps}
        others = {each for each, shape in last.items() if self._last_shapes.get(each) != shape}
        self._versions, self._gaps, self._last_shapes = versions, found, last
        of_all = last.keys() if None in missing else ()
        return {each for each in missing if each is not None} | others | {*of_all}

    def _requested(self) -> set[int]:
        """Tables for which there is another request than in the round before."""
        before, self._requests = self._requests, requests.stored(self._lake.root)
        other = {name for name, each in self._requests.items() if before.get(name) != each}
        return {table.oid for table in self._tables.values() if folder(table) in other}

    def _advance(self, thread: JobThread, relation: int, reached: Position) -> None:
        known = by_relation(shapes.load(self._lake.shapes_path, relation))[relation]
        self._tables[relation] = table = known[-1]
        request = requests.load(self._lake.root, table)
        if request.paused or not self._wants(table):  # it may have been renamed
            return  # and looked at in the next round
        try:
            found = TypedTable(
                self._lake,
                relation,
                self._choice.options(known),
                fill=request.fill,
                is_stopping=lambda: thread.is_stopping,
            )
            done = found.advance(reached)
            if self._catalog is not None and done.changes:
                root = f"{self._lake.root}/{folder(table)}"
                among = filter(self._wants, self._tables.values())
                self._catalog.register(self._lake.spark, root, table, among)
        except Exception as error:
            raise _of_table(table, error) from error
        thread.count(done.changes)
        if done.waits is None:
            self._due.discard(relation)
        else:
            log.info("The typed tables of %s wait: %s", table.label, done.waits)

    # -------------------------------------------------------------------- after a start

    def _behind(self, tables: Collection[Table], reached: Position) -> Iterable[int]:
        """The tables that lack changes, whose era is over, or whose options or requests are other
        ones."""
        known = dict[int, Progress]()
        missed = defaultdict[int | None, list[LakeGap]](list)
        for gap in gaps.every(self._lake.gaps_path):
            missed[gap.relation].append(gap)
        taken = defaultdict[int, list[TableSnapshot]](list)
        for each in snapshots.load(self._lake.places):
            taken[each.relation].append(each)
        floor = retention.load(self._lake.root)
        for table in tables:
            found = self._progress(table)
            own = [*missed[None], *missed[table.oid]]
            if not found or any(
                each.relation != table.oid
                or eras.is_over(each, reached, own, floor, taken[table.oid])
                for each in found
            ):
                yield table.oid
            else:
                known[table.oid] = found[-1]
        changed = self._changed(known) if known else set()
        for table in tables:
            progress = known.get(table.oid)
            if progress is None:
                continue
            if table.oid in changed:
                yield table.oid
            elif (
                datetime.now(UTC) - progress.at > _RENEWED_AFTER
                # It may be later: an era begins with a snapshot from the database.
                and reached.covers(progress.position)
            ):
                self._renew(table, progress, reached)

    def _renew(self, table: Table, progress: Progress, reached: Position) -> None:
        """Commit that a table without changes is exact at the present position too. Otherwise its
        next merge would look through all events since its last change."""
        for which in (HISTORY, CURRENT):
            stored = delta.open_table(f"{self._lake.root}/{folder(table)}/{which}")
            known = None if stored is None else Progress.of(stored)
            if stored is not None and known is not None and known.position == progress.position:
                renewed = msgspec.structs.replace(known, position=reached, at=datetime.now(UTC))
                delta.note(stored, {delta.OFFSET: renewed.text()})

    def _progress(self, table: Table) -> Sequence[Progress]:
        """Those of both of its tables; none where they differ, or something else is due."""
        root = f"{self._lake.root}/{folder(table)}"
        found = [delta.open_table(f"{root}/{which}") for which in (HISTORY, CURRENT)]
        history, current = (None if each is None else Progress.of(each) for each in found)
        if history is None or current is None or history.position != current.position:
            return ()
        request = requests.load(self._lake.root, table)
        options = self._choice.options(self._shapes[table.oid])
        stored = [pa.schema(each.schema().to_arrow()) for each in found if each is not None]
        is_due = (
            history.fill != request.fill
            or history.options != options.fingerprint()
            or any(shows_hidden(each, options) for each in stored)
        )
        return () if is_due or request.paused else (history, current)

    def _changed(self, known: dict[int, Progress]) -> set[int]:
        """The tables with a change that their progress lacks."""
        found = self._lake.counted_after({each: known[each].position for each in known})
        return set(found.column("relation").to_pylist())


def _of_table(table: Table, error: Exception) -> PipelineError:
    found = explain(error, "their merge")
    return PipelineError(
        f"the typed tables of {table.label}: {found}", hint=found.hint, retryable=True
    )
