"""Tables are vacuumed one by one: one that fails delays no other, and the job stops between two."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from headwater import limits
from headwater.pipeline.job_thread import JobThread
from headwater.pipeline.jobs.vacuum_job import VacuumJob
from headwater.pipeline.lake import delta, maintenance
from headwater.pipeline.lake.maintenance import Vacuumed

NAMES = ["audit", "events", "gaps", "shapes"]


class Run:
    """The job over a lake, when it is due. `failing` are tables that cannot be vacuumed; the
    pipeline is stopped at the table `last`."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.failing: set[str] = set()
        self.last = ""
        self.done: list[str] = []
        self._vacuum = maintenance.vacuum_table
        patch.setattr(maintenance, "vacuum_table", self._recorded)
        patch.setattr(limits, "LAKE_VACUUM_SECONDS", 0.0)
        self.thread = JobThread("vacuum", VacuumJob(str(root), timedelta(days=7)).step)
        patch.setattr(limits, "LAKE_VACUUM_SECONDS", 3600.0)
        for name in NAMES:
            delta.create(f"{root}/{name}", pa.schema([("id", pa.int64())]))

    def _recorded(self, root: str, name: str, keep: timedelta) -> Vacuumed:
        if name == self.last:
            self.thread.request_stop()
        if name in self.failing:
            raise OSError("the disk is full")
        self.done.append(name)
        return self._vacuum(root, name, keep)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def test_a_table_that_fails_delays_no_other(run: Run) -> None:
    """Only it is tried again, and then the job waits for the next day."""
    run.failing = {"events"}
    run.thread.work()
    assert run.done == ["audit", "gaps", "shapes"]
    assert str(run.thread.failure) == "job vacuum failed: the disk is full"
    run.failing.clear()
    for _ in "12":
        run.thread.work()
    assert (run.done, run.thread.failure) == (["audit", "gaps", "shapes", "events"], None)


def test_a_table_that_was_removed_meanwhile(run: Run, tmp_path: Path) -> None:
    run.failing = {"gaps"}
    run.thread.work()
    (tmp_path / "gaps").rename(tmp_path / "_removed")
    run.failing.clear()
    run.thread.work()
    assert run.thread.failure is None


def test_it_stops_between_two_tables(run: Run) -> None:
    run.last = "events"
    run.thread.work()
    assert (run.done, run.thread.failure) == (["audit", "events"], None)
