"""The thread of a job: woken by batches, tried again after failures, stopped between two parts."""

from __future__ import annotations

from queue import Queue
from threading import Event, Thread

import pyarrow as pa
import pytest

from headwater import limits
from headwater.pipeline.job_thread import JobThread

WAIT = 30.0


def batch(number: int) -> pa.Table:
    return pa.table({"number": [number]})


def numbers(tables: list[pa.Table]) -> list[int]:
    return [value for table in tables for value in table["number"].to_pylist()]


def test_a_batch_wakes_the_step() -> None:
    seen: Queue[list[int]] = Queue()
    job = JobThread("counting", lambda run: seen.put(numbers(run.contents())), seconds=3600)
    job.start()
    assert seen.get(timeout=WAIT) == []
    job.note(batch(1))
    assert seen.get(timeout=WAIT) == [1]
    job.stop()
    progress = job.progress()
    assert progress is not None
    assert (progress.name, progress.state, progress.error) == ("counting", "stopped", None)


def test_the_contents_of_many_batches_are_merged() -> None:
    """While a step takes long, they must not need more and more memory."""
    merged: list[int] = []

    def merge(contents: pa.Table) -> pa.Table:
        merged.append(contents.num_rows)
        return batch(sum(numbers([contents])))

    seen: list[int] = []
    job = JobThread("counting", lambda run: seen.extend(numbers(run.contents())), merge=merge)
    for _ in range(250):
        job.note(batch(1))
    job.work()
    assert sum(seen) == 250
    assert len(seen) < 100
    assert merged == [100, 100]


def test_time_wakes_the_step() -> None:
    seen: Queue[int] = Queue()
    job = JobThread("counting", lambda run: seen.put(1), seconds=0.01)
    job.start()
    for _ in range(3):
        seen.get(timeout=WAIT)
    job.stop()


def test_a_failure_is_reported_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches of a failed run are there again; those that were taken are not."""
    monkeypatch.setattr(limits, "PIPELINE_RESTART_SECONDS", (0.01, 0.02))
    seen: Queue[list[int]] = Queue()
    failing = Event()
    failing.set()

    def step(run: JobThread) -> None:
        if failing.is_set():
            failing.clear()
            raise ValueError("the disk is full")
        seen.put(numbers(run.contents()))

    job = JobThread("counting", step, seconds=3600)
    job.note(batch(1))
    job.work()
    progress = job.progress()
    assert progress is not None
    assert (progress.state, progress.restarts) == ("waiting", 1)
    assert progress.error == "job counting failed: the disk is full"
    job.start()
    assert seen.get(timeout=WAIT) == [1]
    job.stop()


def test_a_part_that_fails_does_not_affect_the_others() -> None:
    done: list[int] = []

    def part(number: int) -> None:
        if number == 1:
            raise ValueError("no")
        done.append(number)

    def step(run: JobThread) -> None:
        assert [run.attempt(lambda: part(n)) for n in range(3)] == [True, False, True]  # noqa: B023
        run.count(2)

    job = JobThread("counting", step)
    job.work()
    progress = job.progress()
    assert progress is not None
    assert (done, progress.changes, progress.state) == ([0, 2], 2, "waiting")


def test_it_stops_between_two_parts() -> None:
    begun, may_end = Event(), Event()
    done: list[int] = []

    def step(run: JobThread) -> None:
        def first() -> None:
            begun.set()
            may_end.wait(WAIT)
            done.append(1)

        run.attempt(first)
        run.attempt(lambda: done.append(2))

    job = JobThread("counting", step)
    job.start()
    assert begun.wait(WAIT)
    stopper = Thread(target=job.stop)
    stopper.start()
    while not job.is_stopping:
        pass
    may_end.set()
    stopper.join(WAIT)
    assert done == [1]
