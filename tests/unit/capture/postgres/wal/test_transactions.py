"""Messages become runs of rows, in parts that are bounded."""

from __future__ import annotations

from datetime import UTC, datetime

from headwater.capture.postgres.wal.pgoutput import (
    Delete,
    Insert,
    Relation,
    RelationColumn,
    RowMessage,
    Truncate,
    Update,
)
from headwater.capture.postgres.wal.transactions import Layout, PartBuilder, truncated
from headwater.capture.source import (
    UNCHANGED,
    RowChanges,
    SourceColumn,
    SourceTable,
    TransactionPart,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RELATION = Relation(
    9, "public", "t", "d", tuple(RelationColumn(n, 25, -1, n == "id") for n in ("id", "a", "b"))
)


def table(*columns: str) -> SourceTable:
    return SourceTable("t", "t", tuple(SourceColumn(name, "text") for name in columns), ("id",))


ALL = Layout(RELATION, table("id", "a", "b"))
SOME = Layout(RELATION, table("b", "id"))


def folded(
    layout: Layout, *changes: RowMessage, rows: int = 100, size: int = 10
) -> list[TransactionPart]:
    builder = PartBuilder(rows, 100)
    parts = [part for change in changes if (part := builder.add(layout, change, size))]
    return [*parts, builder.finish("p", NOW)]


def test_changes_of_one_kind_are_one_run() -> None:
    (part,) = folded(
        ALL,
        Insert(9, ("1", "x", None)),
        Insert(9, ("2", "y", None)),
        Update(9, None, None, ("1", "z", UNCHANGED)),
        Delete(9, ("2", None, None), None),
    )
    assert part == TransactionPart(
        [
            RowChanges("t", "insert", [("1", "x", None), ("2", "y", None)]),
            RowChanges("t", "update", [("1", "z", UNCHANGED)]),
            RowChanges("t", "delete", (), [("2", UNCHANGED, UNCHANGED)]),
        ],
        "p",
        NOW,
    )


def test_columns_that_are_left_out() -> None:
    (part,) = folded(
        SOME,
        Insert(9, ("1", "x", None)),
        Update(9, ("1", None, None), None, ("2", "x", "w")),
        Update(9, None, None, ("2", "y", "v")),
    )
    assert part.changes == [
        RowChanges("t", "insert", [(None, "1")]),
        RowChanges("t", "update", [("w", "2"), ("v", "2")], [(UNCHANGED, "1"), None]),
    ]


def test_with_the_whole_old_row_an_untouched_value_is_known() -> None:
    old = ("1", "x", "large")
    (part,) = folded(ALL, Update(9, None, old, ("1", "y", UNCHANGED)), Delete(9, None, old))
    assert part.changes == [
        RowChanges("t", "update", [("1", "y", "large")], [old]),
        RowChanges("t", "delete", (), [old]),
    ]


def test_parts_are_bounded_in_rows_and_in_bytes() -> None:
    inserts = [Insert(9, (str(i), None, None)) for i in range(5)]
    by_rows = folded(ALL, *inserts, rows=2)
    assert [len(part.changes[0].after) for part in by_rows] == [2, 2, 1]
    assert [part.position for part in by_rows] == [None, None, "p"]
    by_bytes = folded(ALL, *inserts, size=40)
    assert [len(part.changes[0].after) for part in by_bytes] == [2, 2, 1]
    one_larger = folded(ALL, *inserts, size=400)
    assert [len(part.changes[0].after) for part in one_larger] == [1] * 5


def test_a_truncate_names_each_captured_table_once() -> None:
    message = Truncate((9, 10, 9, 11), False, False)
    assert list(truncated(message, {9: ALL, 10: None})) == ["t"]
    builder = PartBuilder()
    builder.add(ALL, Insert(9, ("1", None, None)), 1)
    builder.truncate(iter(["t"]), 1)
    builder.add(ALL, Insert(9, ("2", None, None)), 1)
    assert [change.op for change in builder.part().changes] == ["insert", "truncate", "insert"]
