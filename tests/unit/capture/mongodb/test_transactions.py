"""Events become transactions: which belong together, and in which parts they pass."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from headwater import limits
from headwater.capture.mongodb.positions import Position
from headwater.capture.mongodb.transactions import Assembler, Change, Event, runs
from headwater.capture.source import Item, Progress, RowChanges, TransactionPart

AT = datetime(2026, 1, 1, tzinfo=UTC)


def event(time: int, number: int = 0, transaction: Any = None) -> Event:
    token = {"_data": f"8200000000{time:08X}2B042C0100{number:02X}"}
    return Event(token, (0, time), transaction, AT)


def insert(key: int | str) -> Change:
    return Change("orders", "insert", (str(key),))


def assembled(*events: tuple[Event, list[Change]], complete: bool = True) -> list[Item]:
    assembler, items = Assembler(), list[Item]()
    for each, changes in events:
        items += [*assembler.begin(each), *assembler.add(changes)]
    return [*items, *assembler.end(complete=complete)]


def positions(items: list[Item]) -> list[tuple[int, bool] | None]:
    found = [getattr(item, "position", None) for item in items]
    parsed = [Position.parse(text) if text else None for text in found]
    return [(each.time[1], each.complete) if each else None for each in parsed]


def test_events_of_different_times_are_transactions_of_their_own() -> None:
    items = assembled((event(1), [insert(1)]), (event(2), [insert(2)]))
    assert positions(items) == [(1, True), (2, True)]
    assert all(isinstance(item, TransactionPart) and item.committed_at == AT for item in items)


def test_events_of_one_transaction_are_together_whatever_their_times() -> None:
    items = assembled(
        (event(1, 0, "t"), [insert(1)]),
        (event(1, 1, "t"), [insert(2)]),
        (event(2, 0, "t"), [insert(3)]),
        (event(3, 0, "u"), [insert(4)]),
    )
    assert positions(items) == [(2, True), (3, True)]
    assert [item.changes for item in items if isinstance(item, TransactionPart)] == [
        [RowChanges("orders", "insert", [("1",), ("2",), ("3",)])],
        [RowChanges("orders", "insert", [("4",)])],
    ]


def test_events_of_one_time_are_together() -> None:
    assert positions(assembled((event(1), [insert(1)]), (event(1, 1), [insert(2)]))) == [(1, True)]


def test_a_transaction_without_rows_is_progress() -> None:
    (item,) = assembled((event(1), []), complete=False)
    assert isinstance(item, Progress)
    assert positions([item]) == [(1, False)]


def test_nothing_open_is_nothing() -> None:
    assert assembled() == []


@pytest.mark.parametrize("bound", ["rows", "bytes"])
def test_a_large_transaction_passes_in_parts(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "SOURCE_PART_CHANGES" if bound == "rows" else "SOURCE_PART_BYTES"
    monkeypatch.setattr(limits, name, 2 if bound == "rows" else 250)
    items = assembled(*[(event(1, n, "t"), [insert(n)]) for n in range(5)], (event(2), [insert(9)]))
    assert positions(items) == [None, None, (1, True), (2, True)]
    keys = [
        row[0]
        for i in items
        if isinstance(i, TransactionPart)
        for c in i.changes
        for row in c.after
    ]
    assert keys == ["0", "1", "2", "3", "4", "9"]


def test_a_row_larger_than_a_part_is_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SOURCE_PART_BYTES", 150)
    items = assembled(*[(event(1, n, "t"), [insert("x" * 300)]) for n in range(2)])
    assert positions(items) == [None, (1, True)]


def test_a_last_event_without_rows_ends_a_transaction_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "SOURCE_PART_CHANGES", 1)
    items = assembled(
        (event(1, 0, "t"), [insert(1)]), (event(1, 1, "t"), [insert(2)]), (event(1, 2, "t"), [])
    )
    assert positions(items) == [None, (1, True)]


def test_runs_have_one_table_and_one_operation() -> None:
    gone = Change("orders", "delete", None, ("1",))
    changes = [insert(1), insert(2), gone, Change("orders", "truncate"), insert(3)]
    assert list(runs(changes)) == [
        RowChanges("orders", "insert", [("1",), ("2",)]),
        RowChanges("orders", "delete", [], [("1",)]),
        RowChanges("orders", "truncate", []),
        RowChanges("orders", "insert", [("3",)]),
    ]


def test_an_update_may_know_the_row_before() -> None:
    changes = [Change("o", "update", ("1",), ("0",)), Change("o", "update", ("2",))]
    assert list(runs(changes)) == [RowChanges("o", "update", [("1",), ("2",)], [("0",), None])]
