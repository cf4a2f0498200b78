"""Spark's Java ends while a pipeline runs: it is started again; nothing is lost or doubled."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from headwater.pipeline.lake.events import last_offset
from headwater.pipeline.reading.lake import Lake
from tests.support.lake.processes import free_port, headwater, running
from tests.support.lake.tables import execute, in_lake, logged, make_orders

pytestmark = pytest.mark.timeout(300)

ROWS = "insert into orders select i, i / 4.0, 'n' || i from generate_series({}, {}) i"

STATE = "select state, restarts, error from headwater.pipeline where name = 'events'"


def java_of(pid: int) -> int:
    """The Java that a process has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [each for each in children if Path(f"/proc/{each}/comm").read_text() == "java\n"]
    return int(found[0])


def test_a_spark_that_is_killed_is_started_again(url: str, tmp_path: Path) -> None:
    make_orders(url)
    lake, port = Lake(str(tmp_path / "lake")), free_port()
    execute(url, ROWS.format(1, 20))
    with running(url, lake.root, tmp_path / "log", "--metrics-port", str(port)) as pipeline:
        pipeline.until(lambda: last_offset(lake.events_path) and in_lake(lake) == logged(url))
        os.kill(java_of(pipeline.process.pid), signal.SIGKILL)
        execute(url, ROWS.format(21, 40))
        pipeline.until(lambda: "was killed (signal 9)" in pipeline.log.read_text())
        # Meanwhile the error can be seen.
        pipeline.until(lambda: "was killed" in str(execute(url, STATE)))
        pipeline.until(lambda: in_lake(lake) == logged(url))
        assert "Spark is started again" in pipeline.log.read_text()
        assert "Traceback" not in pipeline.log.read_text(), pipeline.log.read_text()
        pipeline.until(lambda: execute(url, STATE) == [("running", 1, None)])
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
        assert 'headwater_pipeline_restarts{stream="events"} 1.0' in metrics
        # Without Spark and without Python nothing can report the end.
        pipeline.process.kill()
        pipeline.process.wait()
        status = json.loads(headwater("status", "--url", url, "--json").stdout)
        (events,) = (each for each in status["pipeline"] if each["name"] == "events")
        assert events["state"] == "not running"
        assert f"process {pipeline.process.pid}" in events["error"]


def test_a_run_that_ends_by_itself_fails_with_spark(url: str, tmp_path: Path) -> None:
    """`--once` has no time to wait: its exit code says that it did not write everything."""
    make_orders(url)
    lake = Lake(str(tmp_path / "lake"))
    with running(url, lake.root, tmp_path / "log", "--once", "--json") as pipeline:
        pipeline.until(lambda: (tmp_path / "lake/_checkpoints").exists())
        os.kill(java_of(pipeline.process.pid), signal.SIGKILL)
        assert pipeline.process.wait(100) == 1
        last = json.loads(pipeline.log.read_text().splitlines()[-1])
        assert "Spark's Java was killed (signal 9)" in last["error"]["message"]
