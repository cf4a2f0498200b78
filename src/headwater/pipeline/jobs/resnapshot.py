"""Continues a lake at the present position, where the log no longer has the changes that the lake
lacks.

The lake keeps its data. First a gap is recorded, then the streams are set to the present position,
then a snapshot of every captured table is read: later changes are exact again. After an
interruption all steps are repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import psycopg

from headwater.database import connect_blocking, translated
from headwater.errors import CaptureError
from headwater.model import Position
from headwater.pipeline.files import FileLocation
from headwater.pipeline.lake import delta, events, gaps, snapshots
from headwater.pipeline.lake.events import STORED_EVENTS
from headwater.pipeline.lake.gaps import LakeGap
from headwater.pipeline.reading.changes import inside_sql
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.stream.checkpoints import LakeLock
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.planning import Planner


class ResnapshotResult(msgspec.Struct, frozen=True):
    """A table of which a snapshot was made; `error` if that failed."""

    table: str
    rows: int = 0
    position: str | None = None
    error: str | None = None


def resnapshot(lake: Lake, url: str) -> Iterator[LakeGap | ResnapshotResult]:
    """Continue at the present position. Yields the gap, if there is one, then each table.
    PipelineError while a pipeline writes to the lake."""
    with LakeLock(lake.root):
        gap = continue_at_present(lake, url)
        if gap is not None:
            yield gap
        for name in _captured(url):
            yield _taken(lake, url, name)


def continue_at_present(lake: Lake, url: str) -> LakeGap | None:
    """Record the gap up to the present position, if the lake has events, and let the streams
    continue there. The caller holds the lock of the lake."""
    table = delta.create(lake.events_path, STORED_EVENTS, ["day"])
    reached = events.last_offset(lake.events_path)
    present, at = _now(url, None if reached is None else reached.position)
    gap = None
    if reached is not None:
        gap = LakeGap(reached.position, present, _last_time(lake, reached.position), at)
        gaps.add(lake.gaps_path, gap)
    delta.note(table, {"offset": msgspec.json.encode(Offset(present).to_dict()).decode()})
    FileLocation.of(lake.root).remove("_checkpoints")
    return gap


def _taken(lake: Lake, url: str, name: str) -> ResnapshotResult:
    try:
        taken = lake.snapshot(url, name)
    except CaptureError as error:
        return ResnapshotResult(name, error=str(error))
    return ResnapshotResult(name, taken.rows, str(taken.position))


def _now(url: str, reached: Position | None) -> tuple[Position, datetime]:
    """The present position, and a time after everything in it. If the database was restored to an
    earlier state, the log gets a new name first: the lake identifies transactions by log and
    id."""
    planner = Planner(url)
    try:
        if reached is not None and planner.is_replaced(reached):
            planner.rename_log()
        position = planner.now()
    finally:
        planner.close()
    with translated(url), _connected(url) as database:
        row = database.execute("select clock_timestamp()").fetchone()
    assert row is not None
    return position, row[0].astimezone(UTC)


def _captured(url: str) -> list[str]:
    with translated(url), _connected(url) as database:
        return [name for (name,) in database.execute(_CAPTURED).fetchall()]


def _connected(url: str) -> psycopg.Connection[tuple[Any, ...]]:
    return connect_blocking(url, purpose="pipeline")


def _last_time(lake: Lake, reached: Position) -> datetime:
    """The time of the last event, snapshot or gap in the lake that the position contains."""
    taken = snapshots.load(lake.places)
    known = [each.taken_at for each in taken if reached.covers(each.position)]
    known += (gap.until_at for gap in gaps.load(lake.gaps_path) if reached.covers(gap.until))
    table = delta.open_table(lake.events_path)
    if table is not None:
        question = f"select max(committed_at) as at from events where {inside_sql(reached)}"
        (last,) = delta.select(question, events=table)
        known += [last["at"].astimezone(UTC)] if last["at"] is not None else []
    return max(known, default=datetime(1970, 1, 1, tzinfo=UTC))


_CAPTURED = """
    select t.relid::regclass::text from headwater.tables t join pg_class c on c.oid = t.relid
    where t.enabled and t.schema_name <> 'headwater' order by 1
"""
