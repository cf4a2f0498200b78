"""Files of `events` are joined while a stream writes, and no row, batch or offset is lost. DuckDB
and Polars read the table to judge."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from headwater.errors import PipelineError
from headwater.pipeline.compaction import choice, rewrite, tables
from headwater.pipeline.lake import delta
from headwater.pipeline.lake.events import STORED_EVENTS
from headwater.pipeline.lake.parquet import write_batches
from headwater.pipeline.lake.stored_files import stored_files
from tests.support.generators.sizes import first_seed, size
from tests.support.lake.event_stream import Stream, append

ROUNDS = size("compactions", 3, large=300)


def no_spark() -> Any:
    raise AssertionError("these files are small")


@pytest.mark.parametrize("seed", range(first_seed(1), first_seed(1) + ROUNDS))
def test_nothing_is_lost(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the stream commits, and another process compacts, between write and commit."""
    rng, stream = random.Random(seed), Stream(tmp_path / "events", seed)
    monkeypatch.setattr(choice, "FILES_MAX", 4)
    replace = rewrite._replace

    def after_others(*given: Any) -> None:
        for _ in range(rng.randrange(3)):
            stream.append()
        replace(*given)

    monkeypatch.setattr(rewrite, "_replace", after_others)
    for _ in range(12):
        for _ in range(rng.randrange(6)):
            stream.append(relations=rng.choice((range(1, 9), range(3, 4))))
        rewrite.join_small(stream.path, no_spark, all_days=rng.random() < 0.2)
        if rng.random() < 0.2:
            delta.create(stream.path, STORED_EVENTS).vacuum(
                0, dry_run=False, enforce_retention_duration=False,
                commit_properties=delta.carrying(DeltaTable(stream.path)))  # fmt: skip
        stream.check()


def test_tables_are_apart(tmp_path: Path) -> None:
    """The events of a table are in few parts of few files, whatever the others write."""
    stream = Stream(tmp_path / "events", 5)
    while len(stream.rows) < 600:
        stream.append()
    before = len(DeltaTable(stream.path).file_uris())
    replaced = rewrite.join_small(stream.path, no_spark, all_days=True)
    stream.check()
    files = DeltaTable(stream.path).file_uris()
    assert (replaced, len(files)) == (before, 3)
    for file in files:
        rows = pq.read_table(file, columns=["relation", "seq"], partitioning=None).to_pylist()
        assert rows == sorted(rows, key=lambda row: (row["relation"], row["seq"]))
    assert rewrite.join_small(stream.path, no_spark, all_days=True) == 0


@pytest.mark.parametrize("is_fresh", [True, False])
def test_files_that_another_process_joined(
    is_fresh: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second commit is refused, also where it is based on the version before the first. Its
    files are removed."""
    stream = Stream(tmp_path / "events", 5)
    while len(stream.rows) < 100:
        stream.append()
    late = DeltaTable(stream.path)
    found = stored_files(late)
    day = [file for file in found if file.day == found[0].day]
    rewrite.join_small(stream.path, no_spark, all_days=True)
    present = len(list(tmp_path.rglob("*.parquet")))
    if not is_fresh:
        monkeypatch.setattr(DeltaTable, "update_incremental", lambda self: None)
    with pytest.raises(PipelineError, match="could not be joined"):
        rewrite.join(late, day, no_spark)
    assert len(list(tmp_path.rglob("*.parquet"))) == present
    stream.check()


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_file_that_lacks_rows_is_not_committed(
    is_seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the driver does not see what tasks on another machine have written."""
    stream = Stream(tmp_path / "events", 5)
    while len(stream.rows) < 100:
        stream.append()
    read = rewrite._read
    monkeypatch.setattr(rewrite, "_read", lambda *given: _rows(read(*given)).slice(1))
    if not is_seen:
        monkeypatch.setattr(rewrite, "write_batches", write_elsewhere)
    with pytest.raises(PipelineError, match="Nothing was committed"):
        rewrite.join_small(stream.path, no_spark, all_days=True)
    stream.check()


def write_elsewhere(path: str, *given: Any, **named: Any) -> list[AddAction]:
    return write_batches(f"{path}.elsewhere", *given, **named)


def _rows(read: pa.Table | None) -> pa.Table:
    assert read is not None
    return read


@pytest.mark.parametrize("place", ["joined", "replaced"])
def test_a_kill(place: str, tmp_path: Path) -> None:
    stream = Stream(tmp_path / "events", 5)
    while len(stream.rows) < 100:
        stream.append()
    script = (
        "import sys; from headwater.pipeline.compaction.rewrite import join_small;"
        " join_small(sys.argv[1], lambda: None, all_days=True)"
    )
    environment = os.environ | {"HEADWATER_FAILPOINT": f"{place}:2"}
    killed = subprocess.run(
        [sys.executable, "-c", script, stream.path], env=environment, timeout=60, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    stream.check()
    stream.append()
    rewrite.join_small(stream.path, no_spark, all_days=True)
    stream.check()
    assert len(DeltaTable(stream.path).file_uris()) == 3


def test_other_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of which each commit adds one row stays in few files."""
    monkeypatch.setattr(choice, "FILES_MAX", 4)
    path, rows = f"{tmp_path}/snapshots/list", pa.table({"number": [1]})
    delta.create(path, rows.schema)
    joined: list[tables.Joined] = []
    for _ in range(9):
        append(path, rows)
        joined += tables.join_due(str(tmp_path), no_spark, lambda: False)
    assert joined[0] == tables.Joined("snapshots/list", 3)
    assert len(DeltaTable(path).file_uris()) < 5
    assert pl.read_delta(path).height == 9
