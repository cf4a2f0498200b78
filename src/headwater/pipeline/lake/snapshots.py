"""Snapshots: the rows of a table at a position, from which its state at other moments is computed.

The first snapshot is read from the database (`snapshots.table_reads`), because the log lacks rows
from before capture. Later ones are computed from the snapshot before and the events since. Rows are
images, as in the events, each with the shape it was written under. A snapshot exists once it is in
the list, which is written last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from headwater.model import Position
from headwater.pipeline.lake import delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROWS = pa.schema(
    [
        pa.field("relation", pa.int64(), nullable=False),
        pa.field("snapshot", pa.int64(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("image", pa.string(), nullable=False),
        pa.field("shape", pa.int64(), nullable=False),
    ]
)
"""A row of a snapshot."""

PARTITIONS = ("relation", "snapshot")

LIST = pa.schema(
    [
        pa.field("relation", pa.int64(), nullable=False),
        pa.field("snapshot", pa.int64(), nullable=False),
        pa.field("position", pa.string(), nullable=False),
        pa.field("taken_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("shape", pa.int64(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
        pa.field("origin", pa.string(), nullable=False),
        pa.field("mark", pa.string()),
        pa.field("altered_in", pa.int64()),
        pa.field("explained", pa.string()),
    ]
)


class TableSnapshot(msgspec.Struct, frozen=True):
    """A snapshot of a table: it has exactly the transactions of `position`."""

    relation: int
    snapshot: int
    position: Position
    taken_at: datetime
    shape: int
    rows: int
    origin: Literal["table", "events", "truncate"]
    mark: str | None = None
    """The mark of the catalog for the table, of a snapshot from the database."""
    altered_in: int | None = None
    """The last transaction that altered the table before that; None if it may be altered still."""
    explained: tuple[int, ...] = ()
    """The `seq` of resets before it that need not be considered: by comparison with the snapshot
    before them it is known that no row changed, or when rows changed (a gap)."""


class Places(msgspec.Struct, frozen=True):
    """The paths of the Delta tables that snapshots use."""

    rows: str
    list: str
    shapes: str
    unfinished: str


def load(places: Places, relation: int | None = None) -> list[TableSnapshot]:
    """The snapshots of the lake, or those of one table, the oldest first. Of a list with very many
    rows, only those of the table become Python objects."""
    table = delta.open_table(places.list)
    if table is None:
        return []
    where = "true" if relation is None else f"relation = {relation}"
    found = [_snapshot(row) for row in delta.rows_of_table(table, LIST, where)]
    return sorted(found, key=lambda snapshot: (snapshot.taken_at, snapshot.snapshot))


def last_shapes(places: Places) -> dict[int, int]:
    """The shape of the last snapshot of each table."""
    table = delta.open_table(places.list)
    if table is None:
        return {}
    found = delta.select(
        "select relation, last_value(shape order by taken_at, snapshot) as shape from stored"
        " group by relation",
        stored=table,
    )
    return {row["relation"]: row["shape"] for row in found}


def _snapshot(row: dict[str, Any]) -> TableSnapshot:
    position = Position.parse(row["position"])
    explained = msgspec.json.decode(row["explained"] or "[]", type=tuple[int, ...])
    return TableSnapshot(**(row | {"position": position, "explained": explained}))


def write_frame(
    places: Places,
    snapshot: TableSnapshot,
    rows: DataFrame,
    accept: Callable[[TableSnapshot], TableSnapshot] = lambda written: written,
) -> TableSnapshot:
    """Write a snapshot and count its rows, which have the columns `key`, `image` and `shape`. They
    do not pass through the driver. `accept` is called before the snapshot is added to the list, and
    may raise."""
    from pyspark.sql import functions as f

    create(places)
    ids = {"relation": snapshot.relation, "snapshot": snapshot.snapshot}
    marks = [f.lit(value).cast("long").alias(name) for name, value in ids.items()]
    files = delta.append_frame(
        places.rows, rows.select(*marks, "key", "image", "shape"), blooms=True
    )
    counted = sum(msgspec.json.decode(file.stats)["numRecords"] for file in files)
    made = accept(msgspec.structs.replace(snapshot, rows=counted))
    add_to_list(places, [made])
    return made


def create(places: Places) -> None:
    delta.create(places.rows, ROWS, PARTITIONS)
    delta.create(places.list, LIST)


def add_to_list(places: Places, made: Sequence[TableSnapshot]) -> None:
    """Add snapshots to the list in one commit: from then on they exist."""
    rows = [
        msgspec.structs.asdict(each)
        | {
            "position": str(each.position),
            "explained": msgspec.json.encode(each.explained).decode() if each.explained else None,
        }
        for each in made
    ]
    write_deltalake(places.list, pa.Table.from_pylist(rows, LIST), mode="append")


def number_of(at: datetime) -> int:
    """The number of a snapshot of that time: microseconds since 1970."""
    return int(at.timestamp() * 1_000_000)


def remove(places: Places, gone: Collection[TableSnapshot] = ()) -> None:
    """Delete snapshots: first from the list, then their rows, each in one commit. Rows of snapshots
    that were never finished are deleted, too, a day after the last of them was written: younger
    ones may be of a snapshot that another process is about to add to the list."""
    table = delta.open_table(places.list)
    if table is None:
        return
    wanted = {(each.relation, each.snapshot) for each in gone}
    _delete(table, wanted)
    # The rows before the list: what is added to it in between has its rows already.
    rows = DeltaTable(places.rows)
    written = _last_written(rows)
    found = delta.select("select relation, snapshot from listed", listed=DeltaTable(places.list))
    listed = {(row["relation"], row["snapshot"]) for row in found}
    young = number_of(datetime.now(UTC) - timedelta(days=1)) // 1000
    unlisted = {
        pair
        for pair, millis in written.items()
        if pair not in listed and (pair in wanted or millis < young)
    }
    _delete(rows, unlisted)


def _last_written(rows: DeltaTable) -> dict[tuple[int, int], int]:
    """When the last file of each snapshot was written, in milliseconds since 1970."""
    files = pa.table(rows.get_add_actions(flatten=True))
    names = ("partition.relation", "partition.snapshot", "modification_time")
    columns = [files.column(name).to_pylist() for name in names] if files.num_rows else ([], [], [])
    found: dict[tuple[int, int], int] = {}
    for relation, snapshot, millis in zip(*columns, strict=True):
        pair = relation, snapshot
        found[pair] = max(millis, found.get(pair, 0))
    return found


def _delete(table: DeltaTable, pairs: Collection[tuple[int, int]]) -> None:
    """Delete what a table has of snapshots, each given by its relation and number."""
    if pairs:
        texts = ", ".join(f"'{relation}-{snapshot}'" for relation, snapshot in pairs)
        # One flat list: an `or` for each of thousands would be an expression as deep.
        pair = "cast(relation as string) || '-' || cast(snapshot as string)"
        table.delete(f"{pair} in ({texts})")
