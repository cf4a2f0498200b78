"""What `headwater watch` shows: lines, and which rows are marked for how long."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from rich.console import Console

from headwater.client.state.rows import RowsBatch
from headwater.commands.watch import (
    _WATCH_HIGHLIGHT_SECONDS,
    ChangeMarks,
    batch_as_json,
    batch_lines,
    rows_view,
)
from headwater.model import Delta, Enter, Leave, Match, Move, Reset, Unmatch, Update

ROW = {"id": 1, "note": "a\nb", "paid": None}
ENTER = Enter((1,), ROW, 0, (1,))


def batch(*deltas: Delta) -> RowsBatch:
    return RowsBatch(deltas, "ab-1:1:", datetime(2026, 1, 31, 12, tzinfo=UTC))


LINES: list[tuple[Delta, list[str]]] = [
    (ENTER, ["enter   1  id=1 note=a⏎b paid=∅"]),
    (Leave((1, "x"), 0), ["leave   1,x"]),
    (Move((1,), {"id": 1}, 3, 0, (1,)), ["move    1  id=1"]),
    (Update((1,), {"id": 1}, 0, (1,)), ["update  1  id=1"]),
    (Match((1,), {"id": 1}), ["match   1  id=1"]),
    (Unmatch((1,)), ["unmatch 1"]),
    (Reset((ENTER,)), ["reset", "enter   1  id=1 note=a⏎b paid=∅"]),
]


@pytest.mark.parametrize(("delta", "lines"), LINES)
def test_a_line_for_each_delta(delta: Delta, lines: list[str]) -> None:
    assert batch_lines(batch(delta)) == lines


def test_json() -> None:
    assert batch_as_json(batch(Leave((1,), 0))) == (
        '{"deltas":[{"delta":"leave","key":[1],"index":0}],'
        '"position":"ab-1:1:","at":"2026-01-31T12:00:00Z"}'
    )


def test_changed_rows_are_marked_for_a_moment() -> None:
    marks = ChangeMarks()
    marks.note(batch(Reset((ENTER,))), 0.0)
    assert (marks.styles(0.0), marks.fades_in(0.0)) == ({}, None)
    marks.note(batch(Enter((2,), {}, 0, ()), Update((1,), {}, 0, ())), 10.0)
    assert marks.styles(10.0) == {(2,): "green", (1,): "yellow"}
    # A row that has just come stays green, also when it changes.
    marks.note(batch(Move((2,), {}, 0, 1, ())), 10.5)
    assert marks.styles(10.5) == {(2,): "green", (1,): "yellow"}
    assert marks.fades_in(10.5) == _WATCH_HIGHLIGHT_SECONDS - 0.5
    assert marks.styles(10.0 + _WATCH_HIGHLIGHT_SECONDS) == {}


def test_a_later_snapshot_marks_nothing() -> None:
    marks = ChangeMarks()
    marks.note(batch(Reset()), 0.0)
    marks.note(batch(Enter((2,), {}, 0, ())), 1.0)
    marks.note(batch(Reset((ENTER,)), Match((9,), {})), 1.1)
    assert marks.styles(1.1) == {}


def test_the_table() -> None:
    console = Console(width=60, color_system=None)
    with console.capture() as captured:
        console.print(rows_view("orders", [((1,), ROW)], {(1,): "green"}, "reconnecting …"))
        console.print(rows_view("orders", [], {}, ""))
    assert [line.rstrip() for line in captured.get().splitlines()] == [
        "id  note  paid",
        "1   a⏎b   ∅",
        "orders · 1 row · reconnecting …",
        "orders · 0 rows",
    ]
