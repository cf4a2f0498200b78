"""Views: which queries share one, and which changes each gets."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from headwater.client.state.replica import Replica
from headwater.live.filters.filter import c
from headwater.live.needs import Check, Outcome, Refill
from headwater.live.order import OrderBy
from headwater.live.query import BoundQuery, LiveQuery
from headwater.live.state.streamed import _STREAMED_PAGE_ROWS
from headwater.live.view import View, Views
from headwater.model import Change, Column, Match, Reset, Row, Table, Unmatch, Update

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
TABLE = Table(
    1,
    "public",
    "t",
    (
        Column("id", "integer", "integer"),
        Column("region", "integer", "integer"),
        Column("name", "text", "text", "C"),
        Column("doc", "jsonb", "jsonb"),
    ),
    ("id",),
)


def row(id: int, region: int, name: str = "") -> Row:
    return {"id": id, "region": region, "name": name, "doc": {"unhashable": []}}


def change(before: Row | None, after: Row | None) -> Change:
    op: Any = "insert" if before is None else "delete" if after is None else "update"
    return Change(0, 0, NOW, TABLE, op, ((after or before or {})["id"],), before, after)


def in_region(region: int, **options: Any) -> BoundQuery:
    return BoundQuery(LiveQuery("t", c.region == region, **options), TABLE)


def apply(views: Views[View], changes: list[Change]) -> list[tuple[View, Outcome]]:
    return [(view, view.state.apply(steps)) for view, steps in views.touched(changes).items()]


def test_identical_queries_share_a_view_within_a_scope() -> None:
    views = Views(View)
    one = views.find(in_region(7), "tenant 1")
    assert views.find(in_region(7), "tenant 1") is one
    assert views.find(in_region(7), "tenant 2") is not one
    assert views.find(in_region(8), "tenant 1") is not one
    assert len(views) == 3
    views.remove(one)
    assert len(views) == 2


def test_a_transaction_reaches_the_views_it_touches() -> None:
    views = Views(View)
    opened = {region: views.find(in_region(region), None) for region in range(5)}
    for view in opened.values():
        view.state.answer(view.state.needs[0], ())
    moved = change(row(1, 2), row(1, 3))
    assert {view for view, _ in apply(views, [moved])} == {opened[2], opened[3]}
    assert apply(views, [change(None, row(2, 99))]) == []


def test_a_query_may_ask_for_null_in_a_column_that_cannot_be_compared() -> None:
    views = Views(View)
    for where in (c.doc.is_null(), c.doc.is_not_null()):
        view = views.find(BoundQuery(LiveQuery("t", where), TABLE), None)
        view.state.answer(view.state.needs[0], ())
    ((touched, outcome),) = apply(views, [change(None, row(1, 1))])
    assert (touched, len(outcome.deltas)) == (view, 1)


def test_streamed_follows_membership() -> None:
    views = Views(View)
    view = views.find(in_region(7, mode="streamed"), None)
    replica = Replica()
    (need,) = view.state.needs
    assert need == Refill(None, _STREAMED_PAGE_ROWS)
    outcome = view.state.answer(need, [row(1, 7)])
    assert outcome == Outcome((Reset(), Match((1,), row(1, 7))))
    replica.apply(outcome.deltas)
    steps: list[tuple[list[Change], tuple[Any, ...]]] = [
        ([change(None, row(2, 7))], (Match((2,), row(2, 7)),)),
        ([change(row(2, 7), row(2, 7, "x"))], (Update((2,), row(2, 7, "x")),)),
        ([change(row(2, 7, "x"), row(2, 7, "x"))], ()),
        ([change(row(2, 7, "x"), row(2, 8))], (Unmatch((2,)),)),
        ([change(None, row(3, 7)), change(row(3, 7), None)], ()),
        ([change(row(1, 7), None)], (Unmatch((1,)),)),
    ]
    for changes, deltas in steps:
        ((_, outcome),) = apply(views, changes)
        assert outcome == Outcome(deltas)
        replica.apply(outcome.deltas)
    assert replica.rows == []


@pytest.mark.parametrize("answer", [[row(1, 0, "É")], []])
def test_streamed_asks_what_memory_cannot_decide(answer: list[Row]) -> None:
    views = Views(View)
    query = BoundQuery(LiveQuery("t", c.name.ilike("é"), mode="streamed"), TABLE)
    view = views.find(query, None)
    view.state.answer(view.state.needs[0], [])
    ((_, outcome),) = apply(views, [change(None, row(1, 0, "É"))])
    assert outcome == Outcome((), (Check(((1,),)),))
    outcome = view.state.answer(outcome.needs[0], answer)
    assert outcome == Outcome(tuple(Match((1,), row) for row in answer))


def test_streamed_reads_pages_and_starts_again_when_overtaken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headwater.live.state.streamed._STREAMED_PAGE_ROWS", 2)
    views = Views(View)
    view = views.find(in_region(7, mode="streamed"), None)
    outcome = view.state.answer(view.state.needs[0], [row(1, 7), row(2, 7)])
    assert outcome.needs == (Refill((2,), 2),)
    ((_, outcome),) = apply(views, [change(None, row(0, 7))])
    assert outcome.needs == (Refill(None, 2),)
    view.state.answer(outcome.needs[0], [row(0, 7), row(1, 7)])
    assert view.state.answer(view.state.needs[0], [row(2, 7)]).needs == ()
    assert OrderBy("id") in view.query.order.by
