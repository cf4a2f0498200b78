"""The way out where the log no longer reaches back to the lake: begin anew, and say what is lost.

The lake keeps what it has. A gap is written down, then the streams begin at the present position,
then every captured table is read as it is: what comes after is exact again. Each step may be
repeated; whoever is interrupted does all of it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import psycopg
import pyarrow.compute as pc

from headwater.database import connect_blocking, translated
from headwater.errors import CaptureError
from headwater.model import Position
from headwater.pipeline import delta, events, gaps, snapshots
from headwater.pipeline.checkpoints import LakeLock
from headwater.pipeline.files import Place
from headwater.pipeline.gaps import Gap
from headwater.pipeline.lake import STORED, Lake
from headwater.pipeline.offsets import Offset
from headwater.pipeline.planning import Planner


class Renewed(msgspec.Struct, frozen=True):
    """A table that was read anew; `error` where it could not be."""

    table: str
    rows: int = 0
    position: str | None = None
    error: str | None = None


def resnapshot(lake: Lake, url: str) -> Iterator[Gap | Renewed]:
    """Begin anew. First comes the gap, if there is one, then each table. PipelineError while a
    pipeline writes to the lake."""
    with LakeLock(lake.root):
        table = delta.create(lake.events_path, STORED, ["day"])
        reached = events.last_offset(lake)
        present, at = _now(url, None if reached is None else reached.position)
        if reached is not None:
            gap = Gap(reached.position, present, _last_time(lake, reached.position), at)
            gaps.add(lake.gaps_path, gap)
            yield gap
        # From here on the lake itself says that it goes on from the present position.
        delta.note(table, {"offset": msgspec.json.encode(Offset(present).to_dict()).decode()})
        Place.of(lake.root).remove("_checkpoints")
        for name in _captured(url):
            yield _taken(lake, url, name)


def _taken(lake: Lake, url: str, name: str) -> Renewed:
    try:
        taken = lake.snapshot(url, name)
    except CaptureError as error:
        return Renewed(name, error=str(error))
    return Renewed(name, taken.rows, str(taken.position))


def _now(url: str, reached: Position | None) -> tuple[Position, datetime]:
    """The present position, and a time by which everything in it had happened. Where the history
    that the lake holds was replaced by another one, the log gets another name first: the lake tells
    transactions apart by log and id."""
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
    """The time of the last thing that the lake knows of, with all that came before."""
    taken = snapshots.load(lake.places)
    known = [each.taken_at for each in taken if reached.covers(each.position)]
    known += (gap.until_at for gap in gaps.load(lake.gaps_path) if reached.covers(gap.until))
    contained = (pc.field("xid") < reached.xmax) & ~pc.field("xid").isin(list(reached.xip))
    table = delta.open_table(lake.events_path)
    if table is not None:
        found = table.to_pyarrow_dataset().to_table(columns=["committed_at"], filter=contained)
        last = pc.max(found["committed_at"]).as_py()
        known += [last.astimezone(UTC)] if last is not None else []
    return max(known, default=datetime(1970, 1, 1, tzinfo=UTC))


_CAPTURED = """
    select t.relid::regclass::text from headwater.tables t join pg_class c on c.oid = t.relid
    where t.enabled and t.schema_name <> 'headwater' order by 1
"""
