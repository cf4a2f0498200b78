"""Copies of a table taken at known positions, and the state of the lake to compare with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import write_deltalake
from psycopg.rows import dict_row

from headwater.model import Position
from headwater.pipeline.lake import delta, shapes, snapshots
from headwater.pipeline.lake.events import STORED_EVENTS, event_rows, last_offset
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.reading.resolver import LakePaths
from headwater.pipeline.snapshots.database_snapshot import database_snapshot
from headwater.pipeline.stream import worker
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.planning import Planner
from tests.support.lake.event_stream import append

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Database = psycopg.Connection[tuple[Any, ...]]


class Copy(NamedTuple):
    """A table as it was."""

    position: Position
    at: datetime
    rows: list[dict[str, Any]]


@contextmanager
def opened(url: str) -> Iterator[Database]:
    with psycopg.connect(url, autocommit=True, options="-c timezone=UTC") as database:
        yield database


def copy(database: Database, table: str) -> Copy:
    """The table in one snapshot of the database, with its position."""
    with database.transaction(), database.cursor(row_factory=dict_row) as cursor:
        cursor.execute("set transaction isolation level repeatable read")
        cursor.execute("select headwater.log_id() as log, pg_current_snapshot()::text as snapshot")
        found = cursor.fetchone()
        assert found is not None
        rows = cursor.execute(f"select * from {table}".encode()).fetchall()
        now = cursor.execute("select clock_timestamp() as at").fetchone()
        assert now is not None
    return Copy(Position.of_snapshot(found["log"], found["snapshot"]), now["at"], in_order(rows))


def position(database: Database) -> Position:
    """That of now."""
    row = database.execute("select headwater.log_id(), pg_current_snapshot()::text").fetchone()
    assert row is not None
    return Position.of_snapshot(*row)


def fill(lake: Lake, url: str) -> None:
    """Bring the lake up to date, as the stream does."""
    known = delta.create(lake.events_path, STORED_EVENTS, ["day"])
    shapes.record(lake.shapes_path, url)
    until = _now(url)
    source = lake.spark.read.format("headwater").option("url", url)
    events = source.option("until", str(until)).load().toArrow()
    day = pc.cast(events.column("committed_at"), pa.date32())
    rows = events.append_column(pa.field("day", pa.date32(), nullable=False), day).cast(
        STORED_EVENTS
    )
    in_lake = set(known.to_pyarrow_table(columns=["seq"]).column("seq").to_pylist())
    is_new = [seq not in in_lake for seq in rows.column("seq").to_pylist()]
    new = rows.filter(pa.array(is_new, pa.bool_()))
    offset = msgspec.json.encode(Offset(until).to_dict()).decode()
    append(lake.events_path, new, offset)


def take_in(root: str, url: str) -> None:
    """Bring the lake up to date without Spark."""
    paths = LakePaths(root)
    delta.create(paths.events, STORED_EVENTS, ["day"])
    with closing(Planner(url)) as planner:
        begin = last_offset(paths.events) or Offset(planner.beginning())
        end = planner.latest(begin, None)
        shapes.record(paths.shapes, url)
        parts = planner.parts(begin, end)
    rows = [event_rows(batch) for part in parts for batch in worker.read(part)]
    offset = msgspec.json.encode(end.to_dict()).decode()
    append(paths.events, pa.Table.from_batches(rows, STORED_EVENTS), offset)


def take_snapshot(root: str, url: str, relation: int) -> None:
    """Make a snapshot of a small table without Spark."""
    places = LakePaths(root).snapshots
    with database_snapshot(url, (relation,)) as now:
        table = now.tables[relation].table
        number = snapshots.number_of(now.at)
        rows = [
            (relation, number, key, image, table.id)
            for keys, images in now.rows(relation, 1_000)
            for key, image in zip(keys, images, strict=True)
        ]
    shapes.save(places.shapes, [shapes.row_of(table, now.at)])
    snapshots.create(places)
    named = [dict(zip(snapshots.ROWS.names, row, strict=True)) for row in rows]
    write_deltalake(places.rows, pa.Table.from_pylist(named, snapshots.ROWS), mode="append")
    made = TableSnapshot(relation, number, now.position, now.at, table.id, len(rows), "table")
    snapshots.add_to_list(places, [made])


def _now(url: str) -> Position:
    planner = Planner(url)
    try:
        return planner.now()
    finally:
        planner.close()


def rows_of(frame: DataFrame) -> list[dict[str, Any]]:
    return in_order(frame.toArrow().to_pylist())


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: repr(list(row.values())[0:1]))


def lake_at(folder: Any, spark: SparkSession) -> Lake:
    return Lake(str(folder / "lake"), spark)
