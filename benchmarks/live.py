"""Benchmarks of the live-query core: `python -m benchmarks.live [--large]`.

Seeded, so that every run does the same work; the checksum beside each time shows that it did. Times
are the best of several rounds, because the machine is shared.
"""

from __future__ import annotations

import argparse
import datetime as dt
import gc
import random
import tracemalloc
from collections.abc import Callable, Iterator
from time import perf_counter_ns
from typing import Any, NamedTuple

from headwater import c
from headwater.live.filters.check import check
from headwater.live.filters.compile import compile_filter
from headwater.live.needs import Refill
from headwater.live.order import OrderBy
from headwater.live.query import BoundQuery, LiveQuery
from headwater.live.state.window import Window
from headwater.live.view import View, Views
from headwater.model import Change, Column, Row, Table

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
ASSETS = Table(
    1,
    "public",
    "assets",
    (
        Column("id", "bigint", "bigint"),
        Column("region", "integer", "integer"),
        Column("status", "text", "text", "C"),
        Column("temp", "integer", "integer"),
        Column("name", "text", "text", "C"),
    ),
    ("id",),
)


class Result(NamedTuple):
    what: str
    nanoseconds: float
    target: float | None
    checksum: int
    unit: str = "ns"


class Size(NamedTuple):
    """How much work a run does."""

    repeats: int
    rounds: int
    queries: tuple[int, ...]


SMALL = Size(repeats=2_000, rounds=5, queries=(1_000, 10_000))
LARGE = Size(repeats=20_000, rounds=9, queries=(1_000, 10_000, 100_000))
TINY = Size(repeats=20, rounds=1, queries=(20,))


def asset(id: int, *, region: int = 7, temp: int = 60, status: str = "active") -> Row:
    return {"id": id, "region": region, "status": status, "temp": temp, "name": f"asset-{id}"}


def change(op: Any, before: Row | None, after: Row | None) -> Change:
    key = ((after or before or {})["id"],)
    return Change(0, 0, NOW, ASSETS, op, key, before, after)


def best(size: Size, work: Callable[[], int], events: int) -> tuple[float, int]:
    """Nanoseconds an event in the best round, and the checksum that every round must give."""
    times, checksums = [], set()
    gc.collect()
    gc.disable()
    try:
        for _ in range(size.rounds):
            start = perf_counter_ns()
            checksums.add(work())
            times.append((perf_counter_ns() - start) / events)
    finally:
        gc.enable()
    (checksum,) = checksums
    return min(times), checksum


# ------------------------------------------------------------------------ filters


def filter_three_conditions(size: Size) -> Iterator[Result]:
    where = (c.status == "active") & (c.temp > 50) & c.name.ilike("asset-%")
    matches = compile_filter(check(where, ASSETS), ASSETS)
    rows = [asset(id) for id in range(size.repeats)]

    def work() -> int:
        matched = 0
        for row in rows:
            if matches(row):
                matched += 1
        return matched

    yield Result("filter of three conditions, matching", *_with(best(size, work, len(rows)), 100))


def _with(measured: tuple[float, int], target: float | None) -> tuple[float, float | None, int]:
    return measured[0], target, measured[1]


# ------------------------------------------------------------------------ windows


def filled(limit: int, rows: list[Row]) -> Window:
    """A window over these rows, hottest first, that has its answer."""
    query = LiveQuery("assets", c.region == 7, (OrderBy("temp", desc=True),), limit)
    window = Window(BoundQuery(query, ASSETS))
    (need,) = window.needs
    assert isinstance(need, Refill)
    ordered = sorted(rows, key=lambda row: (-row["temp"], row["id"]))
    window.answer(need, ordered[: need.count])
    return window


def window_updates(size: Size) -> Iterator[Result]:
    for limit, target in ((10, 180), (100, 290), (1_000, 600)):
        rng = random.Random(limit)
        rows = [asset(id, temp=id * 2) for id in range(limit)]
        window = filled(limit, rows)
        changes = []
        for i in range(size.repeats // 2):
            row = rows[rng.randrange(limit)]
            other = {**row, "name": f"renamed-{i}"}
            changes += [[change("update", row, other)], [change("update", other, row)]]

        def work(window: Window = window, changes: list[list[Change]] = changes) -> int:
            apply = window.apply
            count = 0
            for each in changes:
                count += len(apply(each).deltas)
            return count

        measured = best(size, work, len(changes))
        yield Result(f"update in a window of {limit:,}, in place", *_with(measured, target))


def window_churn(size: Size) -> Iterator[Result]:
    """Rows come and go at random places of a window of 100."""
    rng = random.Random(100)
    rows = [asset(id, temp=id * 10) for id in range(100)]
    window = filled(100, rows)
    changes = []
    for i in range(size.repeats // 2):
        row = asset(1_000 + i, temp=rng.randrange(1_000))
        changes += [[change("insert", None, row)], [change("delete", row, None)]]

    def work() -> int:
        count = 0
        for each in changes:
            count += len(window.apply(each).deltas)
        return count

    measured = best(size, work, len(changes))
    yield Result("enter/leave churn in a window of 100", *_with(measured, 600))


# ------------------------------------------------------------------------ many queries


def views_of(count: int, where: Callable[[int], Any]) -> Views[View]:
    views = Views(View)
    for i in range(count):
        query = BoundQuery(LiveQuery("assets", where(i), (OrderBy("temp"),), 20), ASSETS)
        view = views.find(query, "tenant")
        (need,) = view.state.needs
        view.state.answer(need, ())
    return views


def apply(views: Views[View], changes: list[Change]) -> int:
    """The number of views that a transaction touches, once they have it."""
    touched = views.touched(changes)
    for view, steps in touched.items():
        view.state.apply(steps)
    return len(touched)


def many_queries(size: Size) -> Iterator[Result]:
    shapes: dict[str, Callable[[int], Any]] = {
        "equality": lambda i: (c.region == i) & (c.temp > 5),
        "a range": lambda i: c.region.between(i * 10, i * 10 + 8),
    }
    for name, where in shapes.items():
        for count in size.queries:
            views = views_of(count, where)
            changes = _one_match(count, size, 1 if name == "equality" else 10)

            def work(views: Views[View] = views, changes: list[list[Change]] = changes) -> int:
                total = 0
                for each in changes:
                    total += apply(views, each)
                return total

            measured = best(size, work, len(changes))
            label = f"one change, {count:,} queries by {name}, one match"
            yield Result(label, *_with(measured, 20_000))


def _one_match(count: int, size: Size, spread: int) -> list[list[Change]]:
    """Inserts and deletes, so that the windows are as they were after every round."""
    rng = random.Random(count)
    changes = []
    for i in range(size.repeats // 4):
        row = asset(i, region=rng.randrange(count) * spread)
        changes += [[change("insert", None, row)], [change("delete", row, None)]]
    return changes


def shared_view(size: Size) -> Iterator[Result]:
    count = size.queries[-1] if len(size.queries) < 3 else size.queries[1]
    views = Views(View)
    query = BoundQuery(LiveQuery("assets", c.region == 7, (OrderBy("temp"),), 20), ASSETS)
    view = views.find(query, "tenant")
    view.subscribers.update(range(count))
    (need,) = view.state.needs
    view.state.answer(need, [asset(1)])
    one, other = asset(1), asset(1, status="idle")
    changes = [
        [change("update", other if i % 2 else one, one if i % 2 else other)]
        for i in range(size.repeats)
    ]

    def work() -> int:
        return sum(apply(views, each) for each in changes)

    measured = best(size, work, len(changes))
    yield Result(f"one change, {count:,} subscribers of one query", *_with(measured, None))


def memory(size: Size) -> Iterator[Result]:
    """Bytes a distinct query takes, its index entry and its rows included."""
    count = size.queries[0]
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    views = Views(View)
    for i in range(count):
        query = BoundQuery(LiveQuery("assets", c.region == i, (OrderBy("temp"),), 20), ASSETS)
        view = views.find(query, "tenant")
        (need,) = view.state.needs
        assert isinstance(need, Refill)
        rows = [asset(i * 100 + n, region=i, temp=n) for n in range(need.count)]
        view.state.answer(need, rows)
        del rows
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    bytes_each = (after - before) / count
    yield Result("memory of a query with a window of 20", bytes_each, 9 * 1024, len(views), "bytes")


BENCHMARKS = (
    filter_three_conditions, window_updates, window_churn, many_queries, shared_view, memory,
)  # fmt: skip


def run(size: Size) -> list[Result]:
    return [result for benchmark in BENCHMARKS for result in benchmark(size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="full size: 100,000 queries")
    size = LARGE if parser.parse_args().large else SMALL
    print(f"{'':52} {'measured':>14} {'target':>10} {'ratio':>6}  checksum")
    for result in run(size):
        target = "" if result.target is None else f"{result.target:,.0f}"
        ratio = "" if result.target is None else f"{result.nanoseconds / result.target:.2f}"
        measured = f"{result.nanoseconds:,.0f} {result.unit}"
        print(f"{result.what:52} {measured:>14} {target:>10} {ratio:>6}  {result.checksum}")


if __name__ == "__main__":
    main()
