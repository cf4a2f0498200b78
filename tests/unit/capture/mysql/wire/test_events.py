"""Bodies of events, from bytes."""

from __future__ import annotations

import struct
import zlib
from datetime import UTC, datetime
from uuid import UUID

import pytest
import zstandard

from headwater.capture.mysql.wire import events
from headwater.capture.mysql.wire.events import Gtid, Query

SERVER = "3e11fa47-71ca-11e1-9e33-c80aa9429562"


def _query(schema: bytes, statement: bytes, variables: bytes = b"\0" * 5) -> bytes:
    head = struct.pack("<IIBHH", 1, 0, len(schema), 0, len(variables))
    return head + variables + schema + b"\0" + statement


def test_query() -> None:
    assert events.read_query(_query(b"shop", b"BEGIN")) == Query("shop", "BEGIN")
    assert events.read_query(_query("é".encode(), b"drop table \xe9")) == Query("é", "drop table é")
    packed = b"\x84" + struct.pack(">I", 5) + zlib.compress(b"BEGIN")
    assert events.read_query(_query(b"s", packed), compressed=True) == Query("s", "BEGIN")


def test_gtids() -> None:
    body = b"\0" + UUID(SERVER).bytes + struct.pack("<q", 77)
    assert events.read_mysql_gtid(body) == Gtid(SERVER, 77)
    clocks = b"\x02" + b"\0" * 16
    micros = 1_700_000_000_123_456
    later = body + clocks + micros.to_bytes(7, "little")
    moment = datetime.fromtimestamp(1_700_000_000, UTC).replace(microsecond=123456)
    assert events.read_mysql_gtid(later).committed_at == moment
    original = body + clocks + (micros | 1 << 55).to_bytes(7, "little") + b"\0" * 7
    assert events.read_mysql_gtid(original).committed_at == moment
    mariadb = struct.pack("<QIB", 9, 3, events.FL_STANDALONE | events.FL_DDL)
    assert events.read_mariadb_gtid(mariadb, 5) == Gtid("3-5", 9, alone=True)


def test_rotate() -> None:
    assert events.read_rotate(struct.pack("<Q", 4) + b"binlog.000002") == ("binlog.000002", 4)


def _event(type: int, body: bytes) -> bytes:
    return events.HEADER.pack(1, type, 1, events.HEADER_SIZE + len(body), 0, 0) + body


@pytest.mark.parametrize("compressed", [True, False])
def test_payload(compressed: bool) -> None:
    inner = [_event(events.QUERY, _query(b"s", b"BEGIN")), _event(events.XID, b"\1" * 8)]
    data = b"".join(inner)
    packed = zstandard.compress(data) if compressed else data
    fields = bytes([2, 1, 0 if compressed else 253])[:3]
    if not compressed:
        fields = bytes([2, 3, 252, 255, 0])
    body = fields + bytes([1, 1, len(packed) % 250, 0]) + packed
    assert events.read_payload(body) == inner


def test_checksums() -> None:
    event = _event(events.XID, b"\1" * 8)
    whole = event + struct.pack("<I", zlib.crc32(event))
    assert events.is_intact(whole)
    assert not events.is_intact(b"\2" + whole[1:])
    assert events.has_checksums(b"....." + b"\1" + b"crc!")
    assert not events.has_checksums(b"....." + b"\0" + b"crc!")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x05", (5, 1)),
        (b"\xfa", (250, 1)),
        (b"\xfc\x01\x01", (257, 3)),
        (b"\xfd\x01\x01\x01", (65793, 4)),
        (b"\xfe" + b"\1" + b"\0" * 7, (1, 9)),
    ],
)
def test_lengths(data: bytes, expected: tuple[int, int]) -> None:
    assert events.length(data, 0) == expected
