"""The benchmarks run with their smallest sizes, so that they keep working. Their figures prove
nothing."""

from __future__ import annotations

import pytest

from benchmarks import (
    capture,
    fanout,
    gateway,
    groups,
    hostile,
    live,
    loop,
    queries,
    reader,
    topics,
    wal_writers,
)
from benchmarks.streaming import has_nchan


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
    ],
)
def test_runs(module: object, lines: int) -> None:
    results = module.run(tiny=True)  # type: ignore[attr-defined]
    assert len(results) == lines
    assert all(result.value for result in results)


def test_live_benchmarks_do_their_work() -> None:
    results = live.run(live.TINY)
    assert len(results) == 9
    assert all(result.nanoseconds > 0 and result.checksum > 0 for result in results)


def test_inputs_that_keep_the_loop_busy() -> None:
    results = loop.run(tiny=True)
    assert len(results) == len({result.name for result in results}) > 20
