"""Which transactions a position contains, in Arrow."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

from headwater.model import Position
from headwater.pipeline.lake.moments import contained_arrow

XIDS = [3, 5, 6, 7, 9, 10]


@pytest.mark.parametrize("position", [Position("a", 5, 9, (5, 7)), Position("a", 9, 9)], ids=str)
def test_contained_in_arrays_and_fields(position: Position) -> None:
    table = pa.table({"xid": pa.array(XIDS, pa.int64())})
    expected = [xid for xid in XIDS if position.contains(xid)]
    rows = table.filter(contained_arrow(position, table["xid"]))
    assert rows["xid"].to_pylist() == expected
    rows = ds.dataset(table).to_table(filter=contained_arrow(position, pc.field("xid")))
    assert rows["xid"].to_pylist() == expected
