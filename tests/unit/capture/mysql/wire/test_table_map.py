"""Table maps, with and without metadata, of both dialects."""

from __future__ import annotations

from headwater.capture.mysql.wire import table_map as wire
from headwater.capture.mysql.wire.events import WireColumn
from headwater.capture.mysql.wire.table_map import read_table_map

HEAD = b"\x05\0\0\0\0\0" + b"\1\0" + b"\4shop\0" + b"\1t\0"


def _field(number: int, data: bytes) -> bytes:
    return bytes([number, len(data)]) + data


def test_without_metadata() -> None:
    types = bytes([wire.LONG, wire.VARCHAR, wire.NEWDECIMAL, wire.STRING, wire.STRING])
    metas = bytes([44, 1]) + bytes([12, 2]) + bytes([wire.ENUM, 1]) + bytes([0xEE, 0x58])
    body = HEAD + bytes([5]) + types + bytes([len(metas)]) + metas + bytes([0b00110])
    found = read_table_map(body, mariadb=False)
    assert (found.schema, found.table, found.key) == ("shop", "t", None)
    assert found.columns == (
        WireColumn(wire.LONG, 0, False),
        WireColumn(wire.VARCHAR, 300, True),
        WireColumn(wire.NEWDECIMAL, 12 << 8 | 2, True),
        WireColumn(wire.ENUM, 1, False),
        # A char(…) of 344 bytes: two bits of its length are in the byte of the type.
        WireColumn(wire.STRING, 0x158, False),
    )


def test_with_metadata() -> None:
    types = bytes([wire.LONG, wire.YEAR, wire.TINY, wire.VARCHAR, wire.BLOB, wire.STRING])
    metas = bytes([20, 0]) + bytes([2]) + bytes([wire.SET, 1])
    metadata = (
        _field(1, bytes([0b11000000]))
        + _field(2, bytes([45, 1, 63]))
        + _field(4, b"\1a\1b\1c\1d\1e\2\xc3\xa9")
        + _field(5, bytes([2]) + b"\1x\1y")
        + _field(8, bytes([0, 3]))
        + _field(10, bytes([8]))
    )
    body = HEAD + bytes([6]) + types + bytes([len(metas)]) + metas + bytes([0]) + metadata
    found = read_table_map(body, mariadb=True)
    assert found.key == (0, 3)
    assert [c.name for c in found.columns] == ["a", "b", "c", "d", "e", "é"]
    assert [c.unsigned for c in found.columns] == [True, True, False, False, False, False]
    assert [c.collation for c in found.columns] == [None, None, None, 45, 63, 8]
    assert found.columns[5].members == (b"x", b"y")


def test_a_collation_for_each_column_and_a_key_with_prefixes() -> None:
    types = bytes([wire.VARCHAR, wire.VARCHAR])
    metadata = _field(3, bytes([45, 8])) + _field(4, b"\1a\1b") + _field(9, bytes([1, 10]))
    body = HEAD + bytes([2]) + types + bytes([4, 20, 0, 20, 0]) + bytes([0]) + metadata
    found = read_table_map(body, mariadb=False)
    assert [c.collation for c in found.columns] == [45, 8]
    assert found.key == (1,)
