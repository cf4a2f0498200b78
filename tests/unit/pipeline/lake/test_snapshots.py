"""The list of snapshots in a lake with many tables, and the removal of snapshots."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.transaction import AddAction

from headwater.model import Position
from headwater.pipeline.lake import delta, snapshots
from headwater.pipeline.lake.parquet import write_batches
from headwater.pipeline.lake.snapshots import Places, TableSnapshot

AT = datetime(2026, 1, 1, tzinfo=UTC)


def places(folder: Path) -> Places:
    return Places(*(f"{folder}/{name}" for name in Places.__struct_fields__))


def listed(relation: int, number: int, position: str = "a-10:10:") -> dict[str, object]:
    at = AT + timedelta(days=number)
    names = snapshots.LIST.names
    return dict(zip(names, (relation, number, position, at, 1, 5, "table"), strict=False))


def test_only_the_snapshots_of_the_table_are_decoded(tmp_path: Path) -> None:
    there = places(tmp_path)
    snapshots.create(there)
    for rows in (
        [listed(7, 2), listed(8, 3, "unreadable")],
        [listed(9, 4, "unreadable"), listed(7, 1)],
    ):
        write_deltalake(there.list, pa.Table.from_pylist(rows, snapshots.LIST), mode="append")
    assert [each.snapshot for each in snapshots.load(there, 7)] == [1, 2]
    assert snapshots.load(there, 6) == []
    assert snapshots.last_shapes(there) == {7: 1, 8: 1, 9: 1}
    with pytest.raises(ValueError, match="unreadable"):
        snapshots.load(there)


def taken(relation: int, number: int) -> TableSnapshot:
    return TableSnapshot(relation, number, Position("a", 10, 10), AT, 1, 1, "table")


def write_rows(there: Places, made: TableSnapshot, *ages: timedelta) -> list[AddAction]:
    """A file of each age for a snapshot."""
    values = [[made.relation], [made.snapshot], ["k"], ["{}"], [1]]
    rows = pa.record_batch(values, schema=snapshots.ROWS)
    found = []
    for age in ages:
        millis = snapshots.number_of(datetime.now(UTC) - age) // 1000
        (file,) = write_batches(there.rows, snapshots.ROWS, [rows], snapshots.PARTITIONS)
        found.append(
            AddAction(file.path, file.size, file.partition_values, millis, True, file.stats)
        )
    return found


def rows_in(there: Places) -> list[tuple[int, int]]:
    """The snapshots with rows, once for each file."""
    rows = delta.select("select * from stored", stored=DeltaTable(there.rows))
    return sorted((row["relation"], row["snapshot"]) for row in rows)


@pytest.mark.parametrize("seed", range(8))
def test_rows_that_no_snapshot_needs_are_removed(seed: int, tmp_path: Path) -> None:
    """Those of removed snapshots, and old ones that are not in the list: the snapshot was never
    finished. The number of a snapshot is from its beginning, which may be days ago while its last
    rows are being written."""
    chance, there = random.Random(seed), places(tmp_path)
    snapshots.create(there)
    listed, gone, files, staying = [], [], list[AddAction](), list[tuple[int, int]]()
    for number in range(40):
        made = taken(number % 7, chance.choice([number, snapshots.number_of(AT) + number]))
        ages = [
            timedelta(hours=chance.choice([0, 20, 30, 900])) for _ in range(chance.randint(1, 3))
        ]
        files += write_rows(there, made, *ages)
        is_listed, is_gone = chance.random() < 0.5, chance.random() < 0.3
        listed += [made] if is_listed else []
        gone += [made] if is_gone else []
        if not is_gone and (is_listed or min(ages) < timedelta(days=1)):
            staying += [(made.relation, made.snapshot)] * len(ages)
    delta.add(DeltaTable(there.rows), files)
    snapshots.add_to_list(there, listed)
    # More than an expression can be deep.
    snapshots.remove(there, [*gone, *(taken(9, number) for number in range(5_000))])
    assert rows_in(there) == sorted(staying)
    assert {(each.relation, each.snapshot) for each in snapshots.load(there)} == {
        (each.relation, each.snapshot) for each in listed if each not in gone
    }
    # One commit of each for all of them.
    assert (DeltaTable(there.list).version(), DeltaTable(there.rows).version()) == (2, 2)
    snapshots.remove(there)
    assert (DeltaTable(there.list).version(), DeltaTable(there.rows).version()) == (2, 2)


def test_nothing_is_removed_from_a_lake_without_snapshots(tmp_path: Path) -> None:
    snapshots.remove(places(tmp_path))
    snapshots.create(places(tmp_path))
    snapshots.remove(places(tmp_path), [taken(1, 1)])
    assert snapshots.load(places(tmp_path)) == []
