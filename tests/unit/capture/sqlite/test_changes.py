"""Queue rows become changes: existence before a window follows from what its rows say."""

from __future__ import annotations

import pytest

from headwater.capture.source import UNCHANGED, RowChanges
from headwater.capture.sqlite.changes import (
    Images,
    Misfits,
    QueueRow,
    RowReader,
    changes_of,
    cut,
    step,
)
from headwater.capture.sqlite.shapes import Shape, UniqueIndex

SHAPE = Shape(
    "t", ("k", "v"), ("INTEGER", "TEXT"), ("bigint", "text"), ("k",),
    (UniqueIndex(("k",), ("BINARY",)),), ("k", "v"),
)  # fmt: skip

Said = tuple[str, int | None, int | None, str | None]


def changes(*said: Said) -> list[tuple[str, list[object], list[object]]]:
    """Of rows (operation, key before, key after, value)."""
    misfits, images = Misfits(), Images()
    reader = RowReader("t", SHAPE, SHAPE, misfits)
    rows = [
        QueueRow(i, 1.0, 1, op, (old,), (new, value), (), 8)
        for i, (op, old, new, value) in enumerate(said)
    ]
    steps = [found for row in rows if (found := step(reader, row, images, misfits))]
    return [_plain(change) for change in changes_of(steps)]


def _plain(change: RowChanges) -> tuple[str, list[object], list[object]]:
    return change.op, list(change.before), list(change.after)


INSERTED: tuple[str, list[object], list[object]] = ("insert", [], [("1", "a")])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([("i", None, 1, "a")], [INSERTED]),
        ([("b", 1, 1, "a"), ("u", 1, 1, "b")], [("update", [("1", "a")], [("1", "b")])]),
        ([("u", 1, 1, "b")], [("update", [None], [("1", "b")])]),
        ([("b", 1, 1, "a"), ("d", 1, None, None)], [("delete", [("1", "a")], [])]),
        ([("d", 1, None, None)], [("delete", [("1", UNCHANGED)], [])]),
        # A key changes, and the old one is in use again.
        ([("u", 1, 2, "a")], [("update", [("1", UNCHANGED)], [("2", "a")])]),
        # INSERT OR REPLACE, with the key and with another unique value.
        ([("b", 1, 1, "a"), ("i", 1, 1, "b")], [("update", [("1", "a")], [("1", "b")])]),
        ([("v", 2, None, None), ("i", None, 1, "a")],
         [("delete", [("2", UNCHANGED)], []), INSERTED]),
        # Another trigger updates the row before its insert is written.
        ([("b", 1, 1, "a"), ("u", 1, 1, "b"), ("i", None, 1, "b")],
         [("insert", [], [("1", "b")]), ("update", [None], [("1", "b")])]),
        # Another trigger deletes it.
        ([("b", 1, 1, "a"), ("d", 1, None, None), ("g", 1, None, None)], []),
        # Another trigger inserts the row again that is deleted.
        ([("i", None, 1, "a"), ("d", 1, None, None), ("s", None, 1, "a")],
         [("update", [None], [("1", "a")]), ("delete", [("1", UNCHANGED)], []), INSERTED]),
        # A cascade changes the row under its new key first.
        ([("u", 2, 2, "b"), ("u", 1, 2, "b")],
         [("insert", [], [("2", "b")]), ("delete", [("1", UNCHANGED)], []),
          ("update", [None], [("2", "b")])]),
        # A key that is NULL is not in the mirror.
        ([("g", None, None, None)], []),
        ([("u", 1, None, "a")], [("delete", [("1", UNCHANGED)], [])]),
        # The first row of the queue.
        ([("a", None, None, None)], []),
    ],
)  # fmt: skip
def test_what_rows_say(said: list[Said], expected: list[object]) -> None:
    assert changes(*said) == expected


def test_misfits_are_counted() -> None:
    misfits = Misfits()
    reader = RowReader("t", SHAPE, SHAPE, misfits)
    assert reader.row((1, b"bytes")) == ("1", None)
    assert reader.key(("x",)) is None
    misfits.count_row("t")
    warning = misfits.warning() or ""
    assert "1 values of t.v are not text" in warning
    assert "1 rows of t have a key" in warning


def test_older_images_get_the_columns_of_now() -> None:
    newer = Shape(
        "t", ("k", "w", "v"), ("INTEGER", "TEXT", "TEXT"), ("bigint", "text", "text"), ("k",),
        SHAPE.uniques, ("k", "w", "v"),
    )  # fmt: skip
    assert RowReader("t", SHAPE, newer, Misfits()).row((1, "a")) == ("1", None, "a")


def rows(*times: float) -> list[QueueRow]:
    return [QueueRow(i, at, 1, "i", (), (), (1, i), 0) for i, at in enumerate(times)]


def test_a_window_ends_between_statements() -> None:
    assert cut(rows(1.0, 1.0, 2.0, 2.0, 2.0), 4) == 2 or cut(rows(1.0, 1.0, 2.0, 3.0, 3.0), 4) == 3


def test_a_window_of_one_statement_does_not_divide_a_key() -> None:
    same = [QueueRow(i, 1.0, 1, "i", (), (), (1, i // 3), 0) for i in range(300)]
    end = cut(same, 200)
    assert end % 3 == 0
    assert 100 < end <= 200


def test_images_are_bounded() -> None:
    images = Images()
    for i in range(2000):
        images.put("t", (str(i),), (str(i),), 100_000)
    assert images.take("t", ("0",)) is None
    assert images.take("t", ("1999",)) == ("1999",)
