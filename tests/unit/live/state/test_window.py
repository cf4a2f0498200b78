"""Windows as sentences: the rows in it, the change, the deltas, and what is asked for."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pytest

from headwater.client.state.replica import Replica
from headwater.live.filters.filter import c
from headwater.live.needs import Order, Outcome, Refill
from headwater.live.order import OrderBy
from headwater.live.query import BoundQuery, LiveQuery
from headwater.live.state.window import Window
from headwater.model import Change, Column, Delta, Enter, Leave, Move, Reset, Row, Table, Update

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
SCORES = Table(
    1,
    "public",
    "scores",
    (
        Column("id", "text", "text", "C"),
        Column("score", "integer", "integer"),
        Column("note", "text", "text", "C"),
        Column("mood", "public.mood", "mood", enum=True),
    ),
    ("id",),
)


def row(id: str, score: int | None, note: str = "", mood: str | None = None) -> Row:
    return {"id": id, "score": score, "note": note, "mood": mood}


def put(id: str, score: int | None, note: str = "", mood: str | None = None) -> Change:
    return Change(0, 0, NOW, SCORES, "update", (id,), None, row(id, score, note, mood))


def delete(id: str) -> Change:
    return Change(0, 0, NOW, SCORES, "delete", (id,), row(id, 0), None)


def truncate() -> Change:
    return Change(0, 0, NOW, SCORES, "truncate")


def reset() -> Change:
    return Change(0, 0, NOW, SCORES, "reset")


def window(
    scores: Mapping[str, int | None],
    *,
    limit: int = 3,
    cushion: int = 1,
    more: bool = False,
    **query: Any,
) -> Window:
    """The highest scores first. `more` says that the table has further rows."""
    order = query.pop("order", (OrderBy("score", desc=True),))
    asked = LiveQuery("scores", order=order, limit=limit, **query)
    made = Window(BoundQuery(asked, SCORES), cushion=cushion)
    (need,) = made.needs
    assert need == Refill(made._query.after, limit + cushion)
    assert more == (len(scores) == limit + cushion)
    made.answer(need, [row(id, score) for id, score in scores.items()])
    return made


def as_text(deltas: tuple[Delta, ...]) -> list[str]:
    def text_of(delta: Delta) -> str:
        match delta:
            case Enter(key, _, index):
                return f"{key[0]} enters at {index}"
            case Leave(key, index):
                return f"{key[0]} leaves from {index}"
            case Move(key, _, source, index):
                return f"{key[0]} moves from {source} to {index}"
            case Update(key, _, index):
                return f"{key[0]} changes at {index}"
            case Reset(rows):
                return "now: " + "".join(enter.key[0] for enter in rows)
        raise AssertionError(delta)

    return [text_of(delta) for delta in deltas]


FULL = {"a": 90, "b": 80, "c": 70, "d": 60}

ONE_ROW: list[tuple[str, Change, list[str]]] = [
    ("a row changes in place", put("b", 80, "new"), ["b changes at 1"]),
    ("… or not at all", put("b", 80), []),
    ("… or only its score", put("b", 81), ["b changes at 1"]),
    ("a row moves up", put("c", 95), ["c moves from 2 to 0"]),
    ("a row moves down", put("a", 75), ["a moves from 0 to 1"]),
    ("a row moves to the end", put("a", 65), ["a moves from 0 to 2"]),
    ("a row moves beyond what is known", put("a", 10), ["a leaves from 0", "d enters at 2"]),
    ("a row moves in", put("d", 85), ["c leaves from 2", "d enters at 1"]),
    ("a row arrives in a full window", put("x", 85), ["c leaves from 2", "x enters at 1"]),
    ("a row arrives at its end", put("x", 70), []),
    ("… and wins the tie by its key", put("B", 70), ["c leaves from 2", "B enters at 2"]),
    ("a row arrives in the cushion", put("x", 65), []),
    ("a row arrives beyond what is known", put("x", 5), []),
    ("an unknown row goes", delete("x"), []),
    ("a row of the cushion goes", delete("d"), []),
    ("a row goes", delete("a"), ["a leaves from 0", "d enters at 2"]),
    (
        "NULL comes first in a descending order",
        put("x", None),
        ["c leaves from 2", "x enters at 0"],
    ),
]


@pytest.mark.parametrize(
    ("change", "deltas"), [each[1:] for each in ONE_ROW], ids=[each[0] for each in ONE_ROW]
)
def test_one_row(change: Change, deltas: list[str]) -> None:
    made = window(FULL, more=True)
    outcome = made.apply([change])
    assert as_text(outcome.deltas) == deltas
    assert outcome.needs == ()


MANY_ROWS: list[tuple[str, list[Change], list[str]]] = [
    ("what is undone is not sent", [put("x", 95), delete("x")], []),
    ("the last word counts", [put("b", 80, "one"), put("b", 80, "two")], ["b changes at 1"]),
    ("a row passes through", [put("a", 65), put("a", 90)], []),
    ("no row flickers", [delete("a"), put("x", 99)], ["a leaves from 0", "x enters at 0"]),
    ("two swap places", [put("a", 80), put("b", 90)], ["b moves from 1 to 0", "a changes at 1"]),
    ("a key changes", [delete("a"), put("A", 90)], ["a leaves from 0", "A enters at 0"]),
    ("leaves go from the back",
     [put("x", 99), put("y", 98)], ["c leaves from 2", "b leaves from 1", "x enters at 0",
                                    "y enters at 1"]),
    ("everything goes", [truncate()], ["c leaves from 2", "b leaves from 1", "a leaves from 0"]),
    ("everything goes, one comes back", [truncate(), put("b", 1)],
     ["c leaves from 2", "a leaves from 0", "b changes at 0"]),
    ("everything is new", [truncate(), put("z", 1)],
     ["c leaves from 2", "b leaves from 1", "a leaves from 0", "z enters at 0"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "deltas"), [each[1:] for each in MANY_ROWS], ids=[each[0] for each in MANY_ROWS]
)
def test_a_transaction_sends_its_net_effect(changes: list[Change], deltas: list[str]) -> None:
    made = window(FULL, more=True)
    replica = Replica()
    replica.apply([made.snapshot()])
    outcome = made.apply(changes)
    assert as_text(outcome.deltas) == deltas
    replica.apply(outcome.deltas)
    assert replica.rows == made.rows


def test_a_bulk_load_takes_no_longer_than_its_rows() -> None:
    made = window({"a": 0})
    started = time.perf_counter()
    outcome = made.apply([put(f"x{n}", n) for n in range(50_000)])
    assert time.perf_counter() - started < 5
    assert as_text(outcome.deltas) == [
        "a leaves from 0", "x49999 enters at 0", "x49998 enters at 1", "x49997 enters at 2",
    ]  # fmt: skip
    assert made.buffered == 4


def test_a_window_that_runs_short_asks_for_rows_after_its_last_known_row() -> None:
    made = window(FULL, more=True)
    made.apply([delete("d")])
    outcome = made.apply([delete("a")])
    assert as_text(outcome.deltas) == ["a leaves from 0"]
    # It still knows that nothing stands between c and where d stood.
    assert outcome.needs == (Refill((60, "d"), 2),)
    outcome = made.answer(outcome.needs[0], [row("e", 50), row("f", 40)])
    assert as_text(outcome.deltas) == ["e enters at 2"]
    assert (made.complete, outcome.needs) == (False, ())


def test_a_need_stays_until_it_is_answered() -> None:
    made = window(FULL, more=True)
    made.apply([delete("a"), delete("b")])
    (need,) = made.apply([put("c", 70, "new")]).needs
    assert need == Refill((60, "d"), 2)
    outcome = made.answer(need, [])
    assert (made.complete, outcome) == (True, Outcome())


def test_only_a_complete_window_grows_at_its_tail() -> None:
    complete = window({"a": 90, "b": 80})
    assert as_text(complete.apply([put("x", 5)]).deltas) == ["x enters at 2"]
    incomplete = window(FULL, more=True)
    incomplete.apply([delete("d")])
    assert incomplete.apply([put("x", 5)]) == Outcome()
    assert incomplete.apply([put("y", 65)]) == Outcome()
    assert [each["id"] for each in incomplete.buffer] == ["a", "b", "c", "y"]


def test_a_reset_is_announced_even_when_nothing_is_left() -> None:
    made = window(FULL, more=True)
    outcome = made.apply([put("x", 95), reset(), put("y", 99)])
    assert outcome == Outcome((), (Refill(None, 4),))
    assert as_text(made.answer(outcome.needs[0], []).deltas) == ["now: "]


def test_the_filter_decides_which_rows_are_in() -> None:
    made = window({"a": 90}, where=c.note != "hidden")
    assert as_text(made.apply([put("b", 95, "hidden")]).deltas) == []
    assert as_text(made.apply([put("b", 95, "shown")]).deltas) == ["b enters at 0"]
    assert as_text(made.apply([put("b", 95, "hidden")]).deltas) == ["b leaves from 0"]


def test_a_change_outside_the_selected_columns_is_no_delta() -> None:
    made = window({"a": 90, "b": 80}, columns=("note",))
    assert made.apply([put("a", 91)]).deltas == ()
    assert made.apply([put("a", 92), put("b", 81)]).deltas == ()
    (update,) = made.apply([put("a", 93, "new")]).deltas
    assert update == Update(("a",), {"id": "a", "note": "new"}, 0, (93, "a"))


def test_a_cursor_hides_what_is_before_it() -> None:
    made = window({"c": 70}, after=(80, "b"))
    assert made.apply([put("x", 90), put("b", 80), put("a", 80)]).deltas == ()
    assert as_text(made.apply([put("bb", 80)]).deltas) == ["bb enters at 0"]


def by_mood(scores: dict[str, str]) -> Window:
    made = Window(
        BoundQuery(LiveQuery("scores", order=(OrderBy("mood"),), limit=2), SCORES), cushion=1
    )
    (need,) = made.needs
    made.answer(need, [row(id, 0, mood=mood) for id, mood in scores.items()])
    return made


def test_the_database_orders_what_memory_cannot() -> None:
    made = by_mood({"a": "sad", "b": "ok", "d": "happy"})
    assert as_text(made.apply([put("b", 5, mood="ok")]).deltas) == ["b changes at 1"]
    outcome = made.apply([put("b", 5, mood="sad")])
    assert outcome == Outcome((), (Order((("a",), ("b",), ("d",)), ("happy", "d")),))
    # Until the answer comes, further changes are added to the question.
    (need,) = made.apply([delete("a")]).needs
    answer = [row("b", 5, mood="sad"), row("d", 0, mood="happy")]
    assert as_text(made.answer(need, answer).deltas) == [
        "a leaves from 0", "b changes at 0", "d enters at 1",
    ]  # fmt: skip


def test_the_database_is_only_asked_about_ties() -> None:
    made = window({"a": 90, "b": 80}, order=(OrderBy("score", desc=True), OrderBy("mood")))
    assert as_text(made.apply([put("x", 85, mood="ok")]).deltas) == ["x enters at 1"]
    assert as_text(made.apply([put("x", 95, mood="ok")]).deltas) == ["x moves from 1 to 0"]
    assert made.apply([put("y", 5), put("z", 5)]).needs != ()
    assert made.answer(made.needs[0], [row("x", 95), row("a", 90), row("b", 80)]).needs == ()
    assert made.apply([put("y", 80, mood="sad")]).needs == (
        Order((("x",), ("a",), ("b",), ("y",)), None),
    )


def test_the_database_filters_only_the_keys_that_memory_cannot() -> None:
    made = window({"a": 90, "b": 80}, where=c.note.ilike("É%"))
    outcome = made.apply([put("x", 85, "été")])
    assert outcome.needs == (Order((("x",),), None),)
    outcome = made.answer(outcome.needs[0], [row("x", 85, "été")])
    assert as_text(outcome.deltas) == ["x enters at 1"]


def test_too_many_undecided_rows_read_the_window_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.limits.WINDOW_ASK_KEYS_MAX", 2)
    made = by_mood({"a": "sad", "b": "ok", "d": "happy"})
    outcome = made.apply([put(id, 0, mood="ok") for id in "wxyz"])
    assert outcome.needs == (Refill(None, 3),)
    answer = [row("a", 0, mood="sad"), row("b", 0, mood="ok"), row("d", 0, mood="ok")]
    assert as_text(made.answer(outcome.needs[0], answer).deltas) == ["now: ab"]


def test_a_numeric_that_only_prints_differently_is_an_update() -> None:
    table = Table(
        1, "public", "t", (Column("id", "integer", "integer"), Column("n", "numeric", "numeric"),
                           Column("doc", "jsonb", "jsonb")), ("id",),
    )  # fmt: skip
    made = Window(BoundQuery(LiveQuery("t"), table))
    made.answer(made.needs[0], [{"id": 1, "n": Decimal("1.0"), "doc": {"a": 1}}])
    rows: list[Row] = [
        {"id": 1, "n": Decimal("1.0"), "doc": {"a": 1}},
        {"id": 1, "n": Decimal("1.00"), "doc": {"a": 1}},
        {"id": 1, "n": Decimal("1.00"), "doc": {"a": True}},
    ]
    said = [made.apply([Change(0, 0, NOW, table, "update", (1,), None, r)]).deltas for r in rows]
    assert [len(deltas) for deltas in said] == [0, 1, 1]
