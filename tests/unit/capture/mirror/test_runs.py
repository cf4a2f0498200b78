"""Consecutive changes that one statement applies, and where a run must end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headwater.capture.mirror.runs import (
    Delete,
    Insert,
    Rekey,
    Run,
    Splitter,
    Truncate,
    Update,
    tables_of,
)
from headwater.capture.source import UNCHANGED, RowChanges, SourceRow

SPLITTER = Splitter((0,), (1, 2))
U = UNCHANGED


def row(key: str, name: str = "a", note: str = "b") -> SourceRow:
    return key, name, note


@pytest.mark.parametrize(
    ("change", "runs"),
    [
        (RowChanges("t", "insert", [row("1"), row("2")]), [Insert([row("1"), row("2")])]),
        (
            RowChanges("t", "insert", [row("1"), row("1")]),
            [Insert([row("1")]), Insert([row("1")])],
        ),
        (RowChanges("t", "delete", (), [("1", U, U), row("2")]), [Delete([("1",), ("2",)])]),
        (RowChanges("t", "truncate"), [Truncate()]),
        (
            RowChanges("t", "update", [row("1"), row("2")]),
            [Update([row("1"), row("2")], (1, 2))],
        ),
        # A key that repeats: each version is a change of its own.
        (
            RowChanges("t", "update", [row("1", "x"), row("2"), row("1", "y")]),
            [Update([row("1", "x"), row("2")], (1, 2)), Update([row("1", "y")], (1, 2))],
        ),
        # Rows that carry other columns.
        (
            RowChanges("t", "update", [row("1"), ("2", "x", U), ("3", "x", U)]),
            [Update([row("1")], (1, 2)), Update([("2", "x", U), ("3", "x", U)], (1,))],
        ),
        # A changed key is alone, and takes from the row before what the new one left out.
        (
            RowChanges(
                "t",
                "update",
                [row("1"), ("5", "x", U), row("3")],
                [None, row("2", note="old"), row("3")],
            ),
            [
                Update([row("1")], (1, 2)),
                Rekey(("2",), ("5", "x", "old")),
                Update([row("3")], (1, 2)),
            ],
        ),
    ],
)
def test_runs(change: RowChanges, runs: Sequence[Run]) -> None:
    assert list(SPLITTER.runs([change])) == runs


def test_consecutive_changes_of_a_table_are_together() -> None:
    one, two = RowChanges("a", "insert", [row("1")]), RowChanges("a", "insert", [row("2")])
    other, gone = RowChanges("b", "insert", [row("1")]), RowChanges("a", "truncate")
    assert list(tables_of([one, two, other, one, gone])) == [
        ("a", [one, two]), ("b", [other]), ("a", [one]), ("a", [gone]),
    ]  # fmt: skip
    assert list(SPLITTER.runs([one, two])) == [Insert([row("1"), row("2")])]
