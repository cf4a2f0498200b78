"""A pipeline without streams: how it ends."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from headwater import limits
from headwater.pipeline.job_thread import JobThread
from headwater.pipeline.jobs.background import BackgroundJobs
from headwater.pipeline.jobs.pipeline import Pipeline
from headwater.pipeline.jobs.plan import PipelinePlan
from headwater.pipeline.reading.lake import Lake

WAIT = 30.0


def test_a_job_that_does_not_end_is_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run with `once`, a time after `stop`."""
    monkeypatch.setattr(limits, "PIPELINE_STOP_SECONDS", 0.0)
    stop, may_end, ended = Event(), Event(), Event()

    def step(run: JobThread) -> None:
        stop.set()
        may_end.wait(WAIT)
        ended.set()

    nothing: Any = None
    reports: Any = SimpleNamespace(write=lambda _: None)
    pipeline = Pipeline(nothing, PipelinePlan("", Lake(str(tmp_path)), jobs=(), once=True), reports)
    pipeline._background = BackgroundJobs([JobThread("endless", step)])
    assert pipeline.run(stop) == []
    assert not ended.is_set()
    may_end.set()
    assert ended.wait(WAIT)
