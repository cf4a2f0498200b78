"""The list of snapshots in a lake with many tables: a request decodes the rows of its own table
only."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from headwater.pipeline.lake import snapshots
from headwater.pipeline.lake.snapshots import Places

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
