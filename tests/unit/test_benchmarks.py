"""The benchmarks run, at a size that takes no time, so that they do not rot."""

from __future__ import annotations

from benchmarks import live, loop


def test_live_benchmarks_do_their_work() -> None:
    results = live.run(live.TINY)
    assert len(results) == 9
    assert all(result.nanoseconds > 0 and result.checksum > 0 for result in results)


def test_inputs_that_keep_the_loop_busy() -> None:
    results = loop.run(tiny=True)
    assert len(results) == len({result.name for result in results}) > 20
