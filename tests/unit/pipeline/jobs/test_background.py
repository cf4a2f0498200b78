"""Jobs beside the streams: an error of one does not affect the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event

import pyarrow as pa

from headwater.errors import HeadwaterError, PipelineError
from headwater.pipeline.job_thread import JobThread
from headwater.pipeline.jobs.background import BackgroundJobs
from headwater.pipeline.stream.progress import StreamProgress

STEPS = ["start", "note", "work", "progress", "request_stop", "stop"]


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

    @property
    def failure(self) -> HeadwaterError | None:
        return PipelineError("work failed") if self._fails else None

    def request_stop(self) -> None:
        self._call("request_stop")

    def stop(self, seconds: float) -> None:
        self._call("stop")


def test_a_job_that_fails_does_not_stop_the_others() -> None:
    listed = [RecordedJob(fails=True), RecordedJob(), RecordedJob(is_used=False)]
    jobs = BackgroundJobs(listed)
    jobs.start()
    jobs.note(pa.table({}))
    jobs.work()
    assert [each.name for each in jobs.progress()] == ["recorded"]
    assert str(jobs.failure) == "work failed"
    jobs.stop(time.monotonic())
    assert [job.called for job in listed] == [STEPS, STEPS, STEPS]


def test_all_jobs_are_asked_to_stop_before_one_is_waited_for() -> None:
    """A job that waits for another one to stop would otherwise take the time of both."""
    begun = [Event(), Event()]
    threads: list[JobThread] = []
    ended: list[int] = []

    def step(number: int) -> Callable[[JobThread], None]:
        def wait(run: JobThread) -> None:
            begun[number].set()
            while not (threads[0].is_stopping and threads[1].is_stopping):
                pass
            ended.append(number)

        return wait

    threads += [JobThread(f"job {n}", step(n)) for n in range(2)]
    jobs = BackgroundJobs(threads)
    jobs.start()
    assert all(each.wait(30) for each in begun)
    jobs.stop(time.monotonic() + 60)
    assert sorted(ended) == [0, 1]
