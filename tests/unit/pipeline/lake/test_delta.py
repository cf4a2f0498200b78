"""The offset that a version of a Delta table has."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable

from headwater.pipeline.lake import delta

ROWS = pa.table({"seq": pa.array([1], pa.int64())})


def test_the_offset_is_that_of_the_version_that_was_opened(tmp_path: Path) -> None:
    """A reader that takes the offset of a later commit misses the changes of that commit."""
    path = str(tmp_path / "größe 100%" / "events")
    delta.create(path, ROWS.schema)
    for batch in (1, 2):
        delta.append(path, ROWS, app_id="a", batch_id=batch, metadata={"offset": f"o{batch}"})
    opened = DeltaTable(path)
    delta.append(path, ROWS, app_id="a", batch_id=3, metadata={"offset": "o3"})
    assert [delta.offset_of(DeltaTable(path, version=each)) for each in range(4)] == [
        None, "o1", "o2", "o3",
    ]  # fmt: skip
    assert delta.offset_of(opened) == "o2"
    # Files are joined: the offset stays, also for a version of before.
    table = DeltaTable(path)
    table.optimize.compact(commit_properties=delta.carrying(table))
    assert delta.offset_of(DeltaTable(path)) == "o3"
    assert delta.offset_of(DeltaTable(path, version=2)) == "o2"
