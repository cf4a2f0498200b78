"""The router never leaves out a query that the change would touch."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal
from typing import Any

import pytest

from headwater.live.filters.check import check
from headwater.live.filters.compile import Matches, compile_filter
from headwater.live.filters.filter import Filter, from_json
from headwater.live.intervals import Intervals
from headwater.live.needs import Undecided
from headwater.live.router import Router
from headwater.model import Change, Column, Row, Table

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
TABLE = Table(
    1,
    "public",
    "assets",
    (
        Column("id", "bigint", "bigint"),
        Column("region", "integer", "integer"),
        Column("price", "numeric", "numeric"),
        Column("name", "text", "text", "C"),
        Column("title", "text", "text", "de-x-icu"),
        Column("code", "character", "character(4)", "C"),
        Column("seen", "timestamp with time zone", "timestamptz"),
        Column("mood", "public.mood", "public.mood", enum=True),
    ),
    ("id",),
)
VALUES: dict[str, list[Any]] = {
    "region": list(range(20)),
    "price": [*map(Decimal, range(10)), Decimal("NaN"), Decimal("2.5"), Decimal("Infinity")],
    "name": ["", "a", "ab", "abc", "b", "B", "asset-1", "asset-2", "é", "\U0010ffff"],
    "title": ["", "a", "A", "ä", "z"],
    "code": ["a   ", "ab  ", "b   "],
    "seen": [NOW + dt.timedelta(hours=hours) for hours in range(8)] + ["infinity"],
    "mood": ["sad", "ok", "happy"],
}
PATTERNS = ["a%", "asset-%", "%b", "_", "ab_", "\U0010ffff%", ""]


def some_filter(rng: random.Random, depth: int = 3) -> Any:
    if depth and rng.random() < 0.6:
        parts = [some_filter(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return rng.choice(({"and": parts}, {"and": parts}, {"or": parts}, {"not": parts[0]}))
    column = rng.choice(list(VALUES))
    value = rng.choice(VALUES[column])
    choices: list[list[Any]] = [
        [column, rng.choice(("=", "=", "=", "!=", "<", "<=", ">", ">=")), value],
        [column, rng.choice(("in", "not in")), [value, rng.choice((*VALUES[column], None))]],
        [column, rng.choice(("is null", "is not null"))],
    ]
    if column in ("name", "title", "code"):
        choices.append([column, rng.choice(("like", "ilike", "not like")), rng.choice(PATTERNS)])
    return rng.choice(choices)


def some_row(rng: random.Random) -> Row:
    return {"id": 1, **{name: rng.choice((*values, None)) for name, values in VALUES.items()}}


def touched(matches: Matches, row: Row | None) -> bool:
    """Where memory is undecided, test_filters asks the database whether the router was right."""
    try:
        return row is not None and matches(row)
    except Undecided:
        return False


def some_change(rng: random.Random) -> Change:
    before, after = rng.choice((None, some_row(rng))), rng.choice((None, some_row(rng)))
    if before is not None and after is not None and rng.random() < 0.5:
        after = {**before, "region": after["region"]}
    op: Any = "insert" if before is None else "delete" if after is None else "update"
    return Change(0, 0, NOW, TABLE, op, (1,), before, after)


@pytest.mark.parametrize("seed", range(5))
def test_no_query_is_left_out(seed: int) -> None:
    rng = random.Random(seed)
    router: Router[int] = Router()
    filters: dict[int, Filter] = {}
    for item in range(1_000):
        filters[item] = check(from_json(some_filter(rng)), TABLE)
        router.add(item, filters[item], TABLE)
    for item in rng.sample(range(1_000), 300):
        router.remove(item)
        del filters[item]
    compiled = {item: compile_filter(where, TABLE) for item, where in filters.items()}
    visited = 0
    for _ in range(200):
        change = some_change(rng)
        found = router.candidates(change)
        visited += len(found)
        assert found <= filters.keys()
        for item in filters.keys() - found:
            assert not touched(compiled[item], change.before), filters[item]
            assert not touched(compiled[item], change.after), filters[item]
    assert visited < 200 * len(filters) * 0.8, "the index excludes hardly anything"
    for item in filters:
        router.remove(item)
    assert router.candidates(some_change(rng)) == set()


@pytest.mark.parametrize(
    ("op", "before"),
    [
        ("truncate", None),
        ("reset", None),
        ("update", None),
        ("delete", None),
        ("delete", {"id": 1}),
    ],
)
def test_without_the_image_every_query_is_visited(op: Any, before: Row | None) -> None:
    router: Router[str] = Router()
    router.add("equality", check(from_json(["region", "=", 7]), TABLE), TABLE)
    router.add("range", check(from_json(["price", ">", 7]), TABLE), TABLE)
    change = Change(0, 0, NOW, TABLE, op, (1,), before, None)
    assert router.candidates(change) == {"equality", "range"}


def test_intervals_find_what_a_scan_finds() -> None:
    rng = random.Random(7)
    intervals: Intervals[int] = Intervals()
    held: dict[int, tuple[int, int]] = {}
    for item in range(3_000):
        if held and rng.random() < 0.4:
            gone = rng.choice(list(held)[:50])
            low, high = held.pop(gone)
            intervals.remove((low,), (high,), gone)
        else:
            low = rng.randint(0, 100)
            held[item] = (low, low + rng.randint(0, 20))
            intervals.add((held[item][0],), (held[item][1],), item)
        point = rng.randint(0, 120)
        found = set[int]().union(*intervals.containing((point,)))
        assert found == {i for i, (low, high) in held.items() if low <= point <= high}
