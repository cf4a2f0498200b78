"""The shapes of a lake with many tables: a request decodes those of its own table only."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headwater.model import Column, Table
from headwater.pipeline.lake import shapes

AT = datetime(2026, 1, 1, tzinfo=UTC)


def test_only_the_shapes_of_the_table_are_decoded(tmp_path: Path) -> None:
    path = str(tmp_path / "shapes")
    columns = (Column("id", "integer", "integer"),)
    rows = [
        shapes.row_of(Table(1, "public", "old", columns, ("id",), 7), AT),
        shapes.row_of(Table(2, "sales", "orders", columns, ("id",), 7), AT + timedelta(days=1)),
        shapes.row_of(Table(3, "public", "orders", columns, ("id",), 8), AT)
        | {"columns": "unreadable"},
    ]
    assert shapes.save(path, rows) == 3
    assert shapes.save(path, rows) == 0
    for named in ("old", "public.old", "sales.orders", '"sales"."orders"', 7):
        assert [each.table.id for each in shapes.load(path, named)] == [1, 2]
    assert shapes.load(path, "sales.old") == []
    with pytest.raises(ValueError, match="malformed"):
        shapes.load(path, "orders")
