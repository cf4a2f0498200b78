"""How PostgreSQL finds the changes between two positions: which form of the condition uses which
index. What the conditions select is tested in tests/property/test_between.py."""

from __future__ import annotations

import re

import pytest
from psycopg import AsyncClientCursor

from headwater.database import Connection
from headwater.log import between
from headwater.log.reading import reader as reader_module
from headwater.log.reading.reader import LogReader
from headwater.model import Position

SINCE = Position("a", 700, 710, (700, 705))
UNTIL = Position("a", 790, 800, (790,))


@pytest.mark.parametrize(
    ("statement", "conditions"),
    [
        (
            reader_module._rows_since((0, 1), between.since_ranges(SINCE)),
            {"(xid >= 710)", "(xid = ANY ({700,705}))"},
        ),
        (
            reader_module._SEQ_BOUNDS,
            {"((xid >= 710) AND (xid < 800))", "((xid = ANY ({700,705})) AND (xid < 800))"},
        ),
        (reader_module._PAGE, {"((seq >= 1) AND (seq <= 9))"}),
    ],
    ids=["read", "bounds", "page"],
)
async def test_index_conditions(
    connection: Connection, statement: str, conditions: set[str]
) -> None:
    await LogReader.open(connection)
    # Statistics of an empty log would let one scan of the whole index look as good.
    await connection.execute("set enable_indexscan = off")
    await connection.execute("set enable_indexonlyscan = off")
    values = between.parameters(SINCE, UNTIL) | {"first": 1, "last": 9, "limit": 9}
    cursor = AsyncClientCursor(connection)
    await cursor.execute(f"explain (costs off) {statement}".encode(), values)
    plan = "\n".join(line for (line,) in await cursor.fetchall())
    assert not re.search(r"Seq Scan on log_\d", plan)
    found = re.findall(r"Index Cond: (.*)", re.sub(r"::\w+(\[\])?|'", "", plan))
    assert {each for each in found if "xid" in each or "seq" in each} == conditions
