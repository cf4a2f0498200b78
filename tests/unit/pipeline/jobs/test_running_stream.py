"""A stream without its Spark: progress, whenever it is looked at, and how its sink is closed. The
reports stand in for Spark's, whose times no test can choose."""

from __future__ import annotations

import random
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from headwater.errors import PipelineError
from headwater.pipeline.jobs.plan import JOBS, PipelinePlan, StreamJob
from headwater.pipeline.jobs.running_stream import RunningStream
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.stream.sink import StreamSink


class Reports:
    """What a streaming query has reported so far."""

    def __init__(self, second: int) -> None:
        self.second = second
        self.recentProgress: list[dict[str, Any]] = []

    @property
    def lastProgress(self) -> dict[str, Any] | None:  # noqa: N802
        return self.recentProgress[-1] if self.recentProgress else None

    def add(self, batch: int, rows: int | None) -> None:
        """Of a batch, or, without rows, that there was none: under the number of the next."""
        second = self.second
        self.second += 1
        done = {} if rows is None else {"addBatch": 100}
        self.recentProgress.append(
            {
                "timestamp": f"2026-01-01T10:{second // 60:02}:{second % 60:02}.000Z",
                "batchId": batch,
                "numInputRows": 1,
                "durationMs": {"triggerExecution": 100, **done},
                "sources": [],
            }
        )


def no_sink(*_: object) -> Any:
    raise PipelineError("the table cannot be written")


@pytest.mark.parametrize("seed", range(30))
def test_every_batch_counts_whenever_it_is_looked_at(seed: int, tmp_path: Path) -> None:
    """Also over restarts, after which batches are numbered from 0 again."""
    chance, job = random.Random(seed), StreamJob("events", no_sink)
    stream = RunningStream(None, PipelinePlan("", Lake(str(tmp_path))), job)  # type: ignore[arg-type]
    reports, batch, total = Reports(0), 0, 0
    for _ in range(60):
        match chance.choice(("batch", "batch", "idle", "look", "look", "restart")):
            case "batch":
                rows = chance.randint(1, 9)
                reports.add(batch, rows)
                stream._taken[batch] = rows
                batch, total = batch + 1, total + rows
            case "idle":
                reports.add(batch, None)
            case "look":
                stream._note_progress(reports)  # type: ignore[arg-type]
                assert stream.progress().changes == total
            case "restart":
                with pytest.raises(PipelineError):
                    stream._start()
                reports, batch = Reports(reports.second), 0


class Closing(StreamSink):
    """A sink that takes long to close."""

    def __init__(self, may_close: Event) -> None:
        self.seconds: float | None = None
        self.is_closed = False
        self._may_close = may_close

    def close(self, seconds: float = 0) -> None:
        self.seconds = seconds
        self._may_close.wait(10)
        self.is_closed = True


def test_a_stream_that_fails_closes_its_sink_beside_the_others(tmp_path: Path) -> None:
    """The pipeline supervises the others meanwhile. The stream starts again after that."""
    may_close, closed_before = Event(), list[bool]()
    sink = Closing(may_close)

    def started(*_: Any) -> StreamSink:
        closed_before.append(sink.is_closed)
        raise PipelineError("once is enough")

    plan = PipelinePlan("", Lake(str(tmp_path)))
    stream = RunningStream(None, plan, StreamJob("slow", started))  # type: ignore[arg-type]
    stream._sink = sink
    stream._failed(PipelineError("a failure", retryable=True))
    assert not sink.is_closed
    stream._start_at = 0.0
    stream.look()
    may_close.set()
    while stream.state != "failed":
        stream.look()
    assert closed_before == [True]


def test_a_sink_is_closed_in_the_time_that_is_left(tmp_path: Path) -> None:
    may_close = Event()
    may_close.set()
    sink = Closing(may_close)
    stream = RunningStream(None, PipelinePlan("", Lake(str(tmp_path))), JOBS[0])  # type: ignore[arg-type]
    stream._sink = sink
    stream.stop(5.0)
    assert sink.is_closed
    assert sink.seconds is not None
    assert sink.seconds <= 5.0
