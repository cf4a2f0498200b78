"""Compares tables with the lake on a schedule, in a thread of its own (`job_thread`). It is
reported as the stream `reconcile`; drift is its error, until the table is repaired or found to be
equal.
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta

import msgspec

from headwater import limits
from headwater.metrics import PipelineMetrics
from headwater.pipeline.job_thread import JobThread
from headwater.pipeline.lake import delta, snapshots
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.reconcile import drift, tables
from headwater.pipeline.reconcile.drift import TableOutcome
from headwater.pipeline.stream.owner import owner_name
from headwater.pipeline.stream.progress import Reports, StreamProgress

log = logging.getLogger(__name__)

NAME = "reconcile"
"""Its name in the pipeline's progress."""


class ReconcileJob:
    """Compares each table that the lake has once in each period; without one, it only reports what
    `headwater pipeline reconcile` has found. `step` is what a `JobThread` runs."""

    def __init__(
        self, lake: Lake, url: str, period: timedelta | None, metrics: PipelineMetrics
    ) -> None:
        self._lake = lake
        self._url = url
        self._period = period
        self._metrics = metrics
        self._next = self._remove_at = 0.0
        self._version: int | None = None
        self._known: dict[str, TableOutcome] = {}

    def step(self, run: JobThread) -> None:
        run.contents()
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + limits.RECONCILE_CHECK_SECONDS
        captured = tables.captured(self._url)
        known = self._outcomes()
        due = self._due(captured, known)
        for number, (relation, label) in enumerate(due):
            run.report(task=f"comparing {label}", task_done=number, task_total=len(due))
            for found in tables.reconcile(self._lake, self._url, [(relation, label)]):
                known[label] = found
                run.count(found.rows or 0)
                run.report(position=found.position)
                if found.is_open:
                    log.warning("Table %s differs from the lake: %s", label, text(found))
            if run.is_stopping:
                break
        run.report(task=None, task_done=None, task_total=None)
        present = [known[label] for _, label in captured if label in known]
        run.warn(*summary(present))
        for each in present:
            differing = 0 if each.repaired else each.differing
            self._metrics.drift_rows.labels(each.table).set(differing)
            self._metrics.compared_timestamp_seconds.labels(each.table).set(each.at.timestamp())
        if time.monotonic() >= self._remove_at:
            self._remove_at = time.monotonic() + limits.LAKE_VACUUM_SECONDS
            drift.remove_old(self._lake.drift_path, timedelta(days=limits.RECONCILE_OUTCOMES_DAYS))

    def _outcomes(self) -> dict[str, TableOutcome]:
        """The last outcome of each table. Read again only when there are other ones."""
        table = delta.open_table(self._lake.drift_path)
        version = None if table is None else table.version()
        if version != self._version:
            self._known = {each.table: each for each in drift.last(self._lake.drift_path)}
            self._version = version
        return self._known

    def _due(
        self, captured: list[tuple[int, str]], known: dict[str, TableOutcome]
    ) -> list[tuple[int, str]]:
        if self._period is None:
            return []
        since = datetime.now(UTC) - self._period
        in_lake = {each.relation for each in snapshots.load(self._lake.places)}
        return [
            (relation, label)
            for relation, label in captured
            if relation in in_lake and (label not in known or known[label].at < since)
        ]


def summary(outcomes: list[TableOutcome]) -> tuple[str | None, datetime | None]:
    """The tables that need attention, in a line, and since when that is known."""
    found = [each for each in outcomes if each.is_open]
    if not found:
        return None, None
    lines = (f"{each.table}: {text(each)}" for each in found)
    return "; ".join(lines), min(each.at for each in found)


def text(found: TableOutcome) -> str:
    """An outcome in words.

    >>> text(TableOutcome(datetime.now(UTC), 7, "orders", "drift", missing=2, different=1))
    '2 rows missing in the lake, 1 different'
    """
    kinds = {
        "missing": "missing in the lake",
        "extra": "only in the lake",
        "different": "different",
    }
    counts = [(getattr(found, name), words) for name, words in kinds.items()]
    parts = [f"{count:,} {words}" for count, words in counts if count]
    if parts:
        number, _, rest = parts[0].partition(" ")
        parts[0] = f"{number} {'row' if number == '1' else 'rows'} {rest}"
    elif found.outcome == "equal":
        parts = [f"equal, {found.rows or 0:,} rows"]
    repaired = "repaired by a new snapshot" if found.repaired else ""
    return "; ".join(filter(None, (", ".join(parts), found.error or "", repaired)))


def report(url: str, outcomes: list[TableOutcome]) -> None:
    """Write outcomes to `headwater.pipeline`, for a lake that no pipeline writes now."""
    error, at = summary(outcomes)
    rows = sum(each.rows or 0 for each in outcomes)
    position = outcomes[-1].position if outcomes else None
    found = StreamProgress(NAME, "stopped", owner_name(), position=position, changes=rows)
    with closing(Reports(url)) as reports:
        reports.write([msgspec.structs.replace(found, error=error, error_at=at)])
