"""Values that no test with a server writes: the formats of old tables. The others are compared with
queries in tests/integration/capture/mysql."""

from __future__ import annotations

import struct

import pytest

from headwater.capture.mysql.types import Shape
from headwater.capture.mysql.wire import table_map as wire
from headwater.capture.mysql.wire.columns import reader
from headwater.capture.mysql.wire.events import WireColumn


@pytest.mark.parametrize(
    ("type", "data", "expected"),
    [
        (wire.TIME, (83_59_59).to_bytes(3, "little"), "83:59:59"),
        (wire.TIME, (-1_00_01).to_bytes(3, "little", signed=True), "-01:00:01"),
        (wire.DATETIME, struct.pack("<Q", 2024_02_29_10_20_30), "2024-02-29 10:20:30"),
        (wire.DATETIME, struct.pack("<Q", 0), None),
        (wire.TIMESTAMP, struct.pack("<I", 1_700_000_000), "2023-11-14 22:13:20+00"),
        (wire.TIMESTAMP, struct.pack("<I", 0), None),
        (wire.TIMESTAMP2, struct.pack(">I", 2**32 - 1), "2106-02-07 06:28:15+00"),
        (wire.VARCHAR_COMPRESSED, b"\2ab", "\\x6162"),
    ],
)
def test_old_formats(type: int, data: bytes, expected: str | None) -> None:
    column = WireColumn(type, 0, True, "c")
    kind = "unsupported" if type == wire.VARCHAR_COMPRESSED else "int"
    read = reader(column, Shape("c", kind), {})  # type: ignore[arg-type]
    assert read(b"." + data + b".", 1) == (expected, 1 + len(data))


def test_unknown_type() -> None:
    with pytest.raises(ValueError, match="unknown type 99"):
        reader(WireColumn(99, 0, True, "c"), Shape("c", "int"), {})
