"""The metrics of a pipeline's streams, after reports that are known."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
import pytest

from headwater.errors import HeadwaterError
from headwater.metrics import PipelineMetrics
from headwater.pipeline.stream.owner import owner_name
from headwater.pipeline.stream.progress import STATES, Reports, StreamProgress

EVENTS = StreamProgress("events", "starting", owner_name())
VIEW = StreamProgress("view.sales", "running", owner_name())


class Reported:
    """A pipeline that reports, and its metrics."""

    def __init__(self, url: str) -> None:
        self._metrics = PipelineMetrics()
        self.reports = Reports(url, self._metrics)

    def write(self, **fields: object) -> None:
        self.reports.write([msgspec.structs.replace(EVENTS, **fields), VIEW])

    def value(self, metric: str, stream: str = "events", **labels: str) -> float | None:
        return self._metrics.registry.get_sample_value(
            f"headwater_pipeline_{metric}", {"stream": stream, **labels}
        )

    def states(self, stream: str = "events") -> dict[str, float | None]:
        return {state: self.value("state", stream, state=state) for state in STATES}


@pytest.fixture
def reported(url: str) -> Iterator[Reported]:
    reported = Reported(url)
    yield reported
    reported.reports.close()


def only(state: str) -> dict[str, float]:
    return {each: float(each == state) for each in STATES}


def test_the_state_and_the_error_of_a_stream(reported: Reported) -> None:
    """Each state is 1 while the stream is in it, and the error as long as it reports one."""
    assert reported.states() == dict.fromkeys(STATES)
    for state, error, up in (
        ("starting", None, 0),
        ("running", None, 1),
        ("waiting", "the disk is full", 0),  # it will be started again
        ("running", "the disk is full", 1),  # until a batch is done
        ("running", None, 1),
        ("failed", "the log was trimmed", 0),
        ("stopped", None, 0),
    ):
        reported.write(state=state, error=error)
        assert reported.states() == only(state)
        assert (reported.value("error"), reported.value("up")) == (error is not None, up)
        assert (reported.states("view.sales"), reported.value("error", "view.sales")) == (
            only("running"),
            0,
        )


def test_counts_and_rates(reported: Reported) -> None:
    reported.write(
        state="running",
        changes=70,
        input_rate=3.5,
        processed_rate=12.5,
        restarts=2,
        behind_changes=9,
        behind_seconds=1.25,
    )
    expected = {
        "changes": 70, "input_rate": 3.5, "processed_rate": 12.5, "restarts": 2,
        "behind_changes": 9, "behind_seconds": 1.25,
    }  # fmt: skip
    assert {name: reported.value(name) for name in expected} == expected
    # How far behind it is could not be counted: the last numbers stay.
    reported.write(state="running", changes=80)
    assert {name: reported.value(name) for name in expected} == {
        "changes": 80, "input_rate": 0, "processed_rate": 0, "restarts": 0,
        "behind_changes": 9, "behind_seconds": 1.25,
    }  # fmt: skip
    reported.write(state="running", behind_changes=0, behind_seconds=0.0)
    assert (reported.value("behind_changes"), reported.value("behind_seconds")) == (0, 0)


def test_without_the_database_the_metrics_are_those_of_now(url: str, reported: Reported) -> None:
    """They are what is left to see the pipeline by."""
    reported.write(state="running")
    reported.reports.close()
    reported.reports._url = re.sub(r"/test_\d+\?", "/no_such_database?", url)
    waiting = [
        msgspec.structs.replace(each, state="waiting", error="the database is gone")
        for each in (EVENTS, VIEW)
    ]
    with pytest.raises(HeadwaterError, match="no_such_database"):
        reported.reports.write(waiting)
    for stream in waiting:
        assert reported.states(stream.name) == only("waiting")
        assert reported.value("error", stream.name) == 1
