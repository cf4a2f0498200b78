"""What is committed to a Delta table, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from headwater.errors import PipelineError
from headwater.pipeline.lake import delta
from headwater.pipeline.lake.parquet import write_files
from tests.support.lake.event_stream import append

ROWS = pa.table({"seq": pa.array([1, 2, 3], pa.int64())})


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"), [(Path.unlink, "does not exist"), (cut, r"has \d+ bytes, not")]
)
def test_files_that_are_not_there_are_not_committed(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    """As where the tasks of another machine write to a folder of their own."""
    path = str(tmp_path / "a lake")
    table = delta.create(path, ROWS.schema)
    files = [*write_files(path, ROWS, []), *write_files(path, ROWS, [])]
    damage(Path(path, files[1].path))
    with pytest.raises(PipelineError, match=f"wrote 2 files.*found 1: .*{message}"):
        delta.append_files(table, files, after=None, metadata={})
    assert DeltaTable(path).version() == 0
    delta.append_files(table, files[:1], after=None, metadata={})
    assert DeltaTable(path).to_pyarrow_dataset().count_rows() == ROWS.num_rows


def test_the_offset_is_that_of_the_version_that_was_opened(tmp_path: Path) -> None:
    """A reader that takes the offset of a later commit misses the changes of that commit."""
    path = str(tmp_path / "größe 100%" / "events")
    delta.create(path, ROWS.schema)
    for batch in (1, 2):
        append(path, ROWS, f"o{batch}")
    opened = DeltaTable(path)
    append(path, ROWS, "o3")
    assert [delta.offset_of(DeltaTable(path, version=each)) for each in range(4)] == [
        None, "o1", "o2", "o3",
    ]  # fmt: skip
    assert delta.offset_of(opened) == "o2"
    # Files are joined: the offset stays, also for a version of before.
    table = DeltaTable(path)
    table.optimize.compact(commit_properties=delta.carrying(table))
    assert delta.offset_of(DeltaTable(path)) == "o3"
    assert delta.offset_of(DeltaTable(path, version=2)) == "o2"
