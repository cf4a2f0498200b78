"""What a predicate makes of changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headwater.capture.mirror.runs import (
    Delete,
    Insert,
    Recopy,
    Rekey,
    Run,
    Truncate,
    Update,
)
from headwater.capture.mirror.statements import MirrorColumn
from headwater.capture.mirror.tables import Mirror
from headwater.capture.running.filters import RowFilter, check_predicate
from headwater.capture.source import UNCHANGED, SourceColumn, SourceTable
from headwater.errors import SourceRefused

U = UNCHANGED
COLUMNS = {"id": "int8", "amount": '"numeric"', "region": "text", "note": "text"}
TABLE = SourceTable(
    "orders", "orders", tuple(SourceColumn(name, "text") for name in COLUMNS), ("id",)
)
MIRROR = Mirror(
    "shop",
    "shop",
    16400,
    "live",
    TABLE,
    columns=tuple(MirrorColumn(name, f"pg_catalog.{type_}") for name, type_ in COLUMNS.items()),
)
FILTER = RowFilter(MIRROR, [["amount", ">=", 100], ["region", "=", "north"]])

LARGE, SMALL = ("1", "100.00", "north", "x"), ("2", "99.99", "north", "x")


@pytest.mark.parametrize(
    ("run", "runs"),
    [
        (Insert([LARGE, SMALL]), [Insert([LARGE])]),
        (Insert([SMALL]), []),
        (Insert([("1", None, "north", "x")]), []),
        (Update([LARGE, SMALL], (1, 2, 3)), [Delete([("2",)]), Insert([LARGE])]),
        # The row may not be here yet, and its note is not known: it must be looked for.
        (Update([("1", "100", "north", U)], (1, 2)), [Rekey(("1",), ("1", "100", "north", U))]),
        # Nothing that the predicate reads has changed.
        (Update([("1", U, U, "y")], (3,)), [Update([("1", U, U, "y")], (3,))]),
        # Half of what it reads is not known.
        (Update([("1", "100", U, "y")], (1, 3)), [Recopy()]),
        (Rekey(("7",), LARGE), [Rekey(("7",), LARGE)]),
        (Rekey(("7",), SMALL), [Delete([("7",)])]),
        (Delete([("7",)]), [Delete([("7",)])]),
        (Truncate(), [Truncate()]),
    ],
)
def test_runs_are_filtered(run: Run, runs: Sequence[Run]) -> None:
    assert list(FILTER(run)) == runs


def test_a_predicate_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SourceRefused, match="predicate of table orders is wrong"):
        RowFilter(MIRROR, ["nothing", "=", 1])


def test_a_value_that_cannot_be_read_is_not_guessed() -> None:
    with pytest.raises(SourceRefused, match="cannot be decided"):
        FILTER(Insert([("1", "much", "north", "x")]))


ORDERS = SourceTable(
    "orders",
    "orders",
    (
        SourceColumn("id", "bigint", nullable=False),
        SourceColumn("total", "numeric(12,2)"),
        SourceColumn("name", "varchar(80)"),
        SourceColumn("at", "timestamp(6) with time zone"),
    ),
    ("id",),
)


@pytest.mark.parametrize(
    "where",
    [
        [["total", ">", 5], ["name", "=", "x"]],
        [["at", ">=", "2026-01-01T00:00:00Z"]],
        [["name", "like", "a%"]],
    ],
)
def test_a_predicate_that_fits_a_described_table(where: Any) -> None:
    check_predicate(ORDERS, where)


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ([["nope", "=", 1]], "nope"),
        ([["total", ">", "many"]], "many"),
        ([["at", ">", "yesterday"]], "yesterday"),
    ],
)
def test_a_predicate_that_does_not_fit_a_described_table(where: Any, reason: str) -> None:
    with pytest.raises(SourceRefused, match=f"the predicate of table orders is wrong.*{reason}"):
        check_predicate(ORDERS, where)
