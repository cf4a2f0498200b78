"""The columns of a mirror, and the rows that documents become."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from headwater.capture.mongodb.columns import Layout, at_path, outermost
from headwater.capture.source import UNCHANGED, TableSpec
from headwater.errors import SourceRefused

ORDERS = TableSpec("orders", types={"status": "text", "total.amount": "numeric"})


def test_a_document_becomes_a_row() -> None:
    layout = Layout(ORDERS)
    assert [column.name for column in layout.table.columns] == [
        "_id",
        "doc",
        "status",
        "total_amount",
    ]
    assert layout.table.key == ("_id",)
    row = layout.row({"_id": 7, "status": "open", "total": {"amount": 1.5}})
    assert row == ("7", '{"_id":7,"status":"open","total":{"amount":1.5}}', "open", "1.5")
    assert layout.key(row) == ("7",)


def test_missing_and_null_values_are_null() -> None:
    assert Layout(ORDERS).row({"_id": 7, "status": None, "total": 3})[2:] == (None, None)


def test_a_deleted_row_has_only_its_key() -> None:
    assert Layout(ORDERS).key_row("a") == ("a", UNCHANGED, UNCHANGED, UNCHANGED)


def test_a_value_that_does_not_fit_is_null_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layout = Layout(ORDERS)
    with caplog.at_level(logging.WARNING):
        rows = [layout.row({"_id": i, "total": {"amount": "much"}}) for i in range(3)]
    assert [row[3] for row in rows] == [None] * 3
    assert layout.misfits == {"total.amount": 3}
    assert len(caplog.records) == 1
    assert "much" not in caplog.text


@pytest.mark.parametrize(
    ("path", "value"),
    [("a.b", 1), ("c.0", 2), ("c.1.d", 3), ("c.9", None), ("a.b.e", None), ("c.d", None)],
)
def test_paths(path: str, value: Any) -> None:
    assert at_path({"a": {"b": 1}, "c": [2, {"d": 3}]}, path.split(".")) == value


def test_paths_inside_others_are_dropped() -> None:
    assert outermost(["a.b", "ab", "a", "a"]) == ["ab", "a"]


@pytest.mark.parametrize(
    ("restriction", "columns", "projection"),
    [
        ({}, ["status", "total_amount"], None),
        ({"exclude": ("total", "note")}, ["status"], {"total": 0, "note": 0}),
        ({"exclude": ("total.amount",)}, ["status"], {"total.amount": 0}),
        ({"columns": ("total", "total.tax")}, ["total_amount"], {"_id": 1, "total": 1}),
        ({"columns": ()}, [], {"_id": 1}),
    ],
)
def test_fields_left_out(restriction: Any, columns: list[str], projection: Any) -> None:
    layout = Layout(TableSpec("orders", types=ORDERS.types, **restriction))
    assert [column.name for column in layout.table.columns][2:] == columns
    assert layout.projection() == projection


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TableSpec("o", types={"a.b": "text", "a_b": "text"}), "two columns .* a_b"),
        (TableSpec("o", types={"doc": "text"}), "two columns .* doc"),
        (TableSpec("o", types={"_id": "text"}), "two columns .* _id"),
        (TableSpec("o", types={"a": "inet"}), "a cannot have the type 'inet'"),
        (TableSpec("o", types={"a..b": "text"}), "not the path of a field"),
        (TableSpec("o", types={"$a": "text"}), "not the path of a field"),
        (TableSpec("o", types={"é" * 40: "text"}), "too long"),
        (TableSpec("o", exclude=("_id",)), "_id cannot be left out"),
        (TableSpec("o", exclude=("a",), columns=("b",)), "both columns and exclude"),
        (TableSpec("o" * 64), "too long for a table"),
    ],
)
def test_definitions_that_are_refused(spec: TableSpec, message: str) -> None:
    with pytest.raises(SourceRefused, match=message) as caught:
        Layout(spec)
    assert caught.value.hint


def test_the_mirror_of_a_name_with_dots() -> None:
    assert Layout(TableSpec("sales.orders")).table.target == "sales_orders"
    assert Layout(TableSpec("sales.orders", target="orders")).table.target == "orders"
