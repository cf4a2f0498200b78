"""What the job of snapshots does where no snapshots are wanted."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from headwater.errors import DatabaseError
from headwater.pipeline.job_thread import JobThread
from headwater.pipeline.jobs import snapshot_job
from headwater.pipeline.jobs.snapshot_job import SnapshotJob
from headwater.pipeline.reading.lake import Lake


def test_batches_do_not_collect_where_old_events_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a run that succeeds forgets them, unless they were taken."""

    def fail(url: str) -> None:
        raise DatabaseError("the database cannot be reached")

    monkeypatch.setattr(snapshot_job, "captured", fail)
    lake = Lake(str(tmp_path))
    thread = JobThread(
        "snapshots", SnapshotJob(lake, "", events_max=0, retention=timedelta(days=1)).step
    )
    for number in range(3):
        thread.note(pa.table({"number": [number]}))
        thread.work()
        assert isinstance(thread.failure, DatabaseError)
        assert thread.contents() == []
