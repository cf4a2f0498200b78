"""Jobs beside the streams: an error of one does not affect the others."""

from __future__ import annotations

import pyarrow as pa

from headwater.pipeline.jobs.background import BackgroundJobs
from headwater.pipeline.stream.progress import StreamProgress

STEPS = ["start", "note", "work", "progress", "stop"]


class RecordedJob:
    """Records what is called. With `fails` every call raises."""

    def __init__(self, *, fails: bool = False, is_used: bool = True) -> None:
        self.called: list[str] = []
        self._fails = fails
        self._is_used = is_used

    def _call(self, name: str) -> None:
        self.called.append(name)
        if self._fails:
            raise ValueError(f"{name} failed")

    def start(self) -> None:
        self._call("start")

    def note(self, contents: pa.Table) -> None:
        self._call("note")

    def work(self) -> None:
        self._call("work")

    def progress(self) -> StreamProgress | None:
        self._call("progress")
        return StreamProgress("recorded", "running", "a test") if self._is_used else None

    def stop(self) -> None:
        self._call("stop")


def test_a_job_that_fails_does_not_stop_the_others() -> None:
    listed = [RecordedJob(fails=True), RecordedJob(), RecordedJob(is_used=False)]
    jobs = BackgroundJobs(listed)
    jobs.start()
    jobs.note(pa.table({}))
    jobs.work()
    assert [each.name for each in jobs.progress()] == ["recorded"]
    jobs.stop()
    assert [job.called for job in listed] == [STEPS, STEPS, STEPS]
