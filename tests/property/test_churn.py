"""Under constant change a window stays exact, and asks the database a bounded number of times."""

from __future__ import annotations

import datetime as dt
import random
from bisect import insort
from collections.abc import Callable
from typing import Any

import pytest

from headwater.client.state.replica import Replica
from headwater.live.needs import Outcome, Refill
from headwater.live.order import OrderBy
from headwater.live.query import BoundQuery, LiveQuery
from headwater.live.state.window import Window, cushion_for
from headwater.model import Change, Column, Row, Table

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
TABLE = Table(
    1, "public", "t", (Column("id", "integer", "integer"), Column("score", "integer", "integer")),
    ("id",),
)  # fmt: skip
LIMIT = 20
EVENTS = 10_000


class Model:
    """The table, in the simplest form that answers a refill: a sorted list of (-score, id)."""

    def __init__(self, scores: dict[int, int]) -> None:
        self.scores = scores
        self.order = sorted((-score, id) for id, score in scores.items())

    def set(self, id: int, score: int | None) -> Change:
        before, after = self._row(id, self.scores.get(id)), self._row(id, score)
        if before is not None:
            self.order.remove((-before["score"], id))
            del self.scores[id]
        if score is not None:
            insort(self.order, (-score, id))
            self.scores[id] = score
        op: Any = "insert" if before is None else "delete" if after is None else "update"
        return Change(0, 0, NOW, TABLE, op, (id,), before, after)

    def rows(self) -> list[Row]:
        return [{"id": id, "score": -score} for score, id in self.order]

    def after(self, need: Refill) -> list[Row]:
        bound = None if need.after is None else (-need.after[0], need.after[1])
        behind = [place for place in self.order if bound is None or place > bound]
        return [{"id": id, "score": -score} for score, id in behind[: need.count]]

    @staticmethod
    def _row(id: int, score: int | None) -> Row | None:
        return None if score is None else {"id": id, "score": score}


def anywhere(model: Model, rng: random.Random) -> Change:
    id = rng.randrange(600)
    return model.set(id, None if id in model.scores and rng.random() < 0.5 else rng.randrange(1000))


def at_the_top(model: Model, rng: random.Random) -> Change:
    """The worst case: every event removes the first row, or adds a row at the end."""
    _, first = model.order[0]
    return model.set(first, model.scores[model.order[-1][1]] - 1)


def into_the_window(model: Model, rng: random.Random) -> Change:
    _, id = rng.choice(model.order[: LIMIT * 2])
    return model.set(id, model.scores[id] + rng.randint(-30, 30))


@pytest.mark.parametrize(
    ("event", "refills_allowed"),
    [
        (anywhere, 40),
        (into_the_window, 600),
        (at_the_top, EVENTS // (cushion_for(LIMIT) + 1) + 1),
    ],
)
def test_refills_are_bounded_and_the_window_exact(
    event: Callable[[Model, random.Random], Change], refills_allowed: int
) -> None:
    rng = random.Random(3)
    model = Model({id: rng.randrange(1000) for id in range(500)})
    query = BoundQuery(LiveQuery("t", order=(OrderBy("score", desc=True),), limit=LIMIT), TABLE)
    window, replica = Window(query), Replica()
    outcome = Outcome((), window.needs)
    for _ in range(EVENTS):
        while True:
            replica.apply(outcome.deltas)
            if not outcome.needs:
                break
            (need,) = outcome.needs
            assert isinstance(need, Refill)
            assert need.count <= LIMIT + cushion_for(LIMIT)
            outcome = window.answer(need, model.after(need))
        assert window.rows == replica.rows == model.rows()[:LIMIT]
        assert window.bytes == window.buffered * query.layout.size((0, 0))
        outcome = window.apply([event(model, rng)])
    print(f"{event.__name__}: {window.refills} refills in {EVENTS:,} events")
    assert window.refills <= refills_allowed
