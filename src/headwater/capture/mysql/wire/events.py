"""The events of a binary log, from bytes: headers, and the bodies of events other than rows.

An event is a header of 19 bytes, a body and, where the server adds one, a checksum of 4 bytes. The
bodies given to these functions have neither header nor checksum. Rows are in `rows`.
"""

from __future__ import annotations

import struct
import zlib
from datetime import UTC, datetime
from typing import NamedTuple
from uuid import UUID

QUERY, STOP, ROTATE, FORMAT, XID = 2, 3, 4, 15, 16
LOAD_QUERY, TABLE_MAP, HEARTBEAT, HEARTBEAT_2 = 18, 19, 27, 41
WRITE_1, UPDATE_1, DELETE_1, WRITE_2, UPDATE_2, DELETE_2 = 23, 24, 25, 30, 31, 32
INCIDENT, GTID, ANONYMOUS_GTID, XA_PREPARE, PARTIAL_UPDATE = 26, 33, 34, 38, 39
PAYLOAD, TAGGED_GTID = 40, 42
MARIADB_GTID = 162
QUERY_COMPRESSED = 165
COMPRESSED_ROWS = {166: WRITE_1, 167: UPDATE_1, 168: DELETE_1, 169: WRITE_2, 170: UPDATE_2,
                   171: DELETE_2}  # fmt: skip
ROWS = {
    WRITE_1: "insert", UPDATE_1: "update", DELETE_1: "delete",
    WRITE_2: "insert", UPDATE_2: "update", DELETE_2: "delete",
}  # fmt: skip
WITH_EXTRA_DATA = frozenset((WRITE_2, UPDATE_2, DELETE_2))

HEADER = struct.Struct("<IBIIIH")
HEADER_SIZE = 19
CHECKSUM_SIZE = 4

FL_STANDALONE, FL_DDL, FL_PREPARED_XA, FL_COMPLETED_XA = 1, 32, 64, 128


class Header(NamedTuple):
    """`end` is the low 32 bits of the offset after the event; 0 for one that is not in the file."""

    timestamp: int
    type: int
    server_id: int
    size: int
    end: int
    flags: int


class Query(NamedTuple):
    schema: str
    statement: str


class Gtid(NamedTuple):
    """`server` is a UUID, or `domain-server` on MariaDB. `alone` says that the next event is the
    whole transaction."""

    server: str
    number: int
    alone: bool = False
    prepared: bool = False
    committed_at: datetime | None = None


class WireColumn(NamedTuple):
    """A column in a table map. `type` is the real one (enum and set, not string). `members` are of
    an enum or set, in the column's character set. None where the server sent no metadata."""

    type: int
    meta: int
    nullable: bool
    name: str | None = None
    unsigned: bool | None = None
    collation: int | None = None
    members: tuple[bytes, ...] | None = None


class TableMap(NamedTuple):
    schema: str
    table: str
    columns: tuple[WireColumn, ...]
    key: tuple[int, ...] | None


def is_intact(event: bytes | memoryview) -> bool:
    """Whether the checksum at the end of an event is right."""
    expected = int.from_bytes(event[-CHECKSUM_SIZE:], "little")
    return zlib.crc32(event[:-CHECKSUM_SIZE]) == expected


def has_checksums(body: bytes) -> bool:
    """From the body of a format description, whose last byte before its checksum says so."""
    return len(body) > 5 and body[-5] == 1


def read_rotate(body: bytes) -> tuple[str, int]:
    (offset,) = struct.unpack_from("<Q", body)
    return text(body[8:]), offset


def read_query(body: bytes, *, compressed: bool = False) -> Query:
    _, _, schema_size, _, variables_size = struct.unpack_from("<IIBHH", body)
    start = 13 + variables_size
    schema = text(body[start : start + schema_size])
    statement = body[start + schema_size + 1 :]
    return Query(schema, text(uncompressed(statement) if compressed else statement))


def text(value: bytes) -> str:
    """Statements are in the character set of the client that sent them, mostly UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def uncompressed(value: bytes) -> bytes:
    """MariaDB's: a byte with the number of bytes of the size, the size, and zlib's data."""
    size_bytes = value[0] & 0x07
    return zlib.decompress(value[1 + size_bytes :])


def read_mysql_gtid(body: bytes) -> Gtid:
    (number,) = struct.unpack_from("<q", body, 17)
    server = str(UUID(bytes=bytes(body[1:17])))
    return Gtid(server, number, committed_at=_commit_time(body))


def _commit_time(body: bytes) -> datetime | None:
    """Since MySQL 8 the event has the microsecond of the commit, after two logical clocks."""
    if len(body) < 49 or body[25] != 2:
        return None
    micros = int.from_bytes(body[42:49], "little") & ((1 << 55) - 1)
    return datetime.fromtimestamp(micros // 1_000_000, UTC).replace(microsecond=micros % 1_000_000)


def read_mariadb_gtid(body: bytes, server_id: int) -> Gtid:
    number, domain, flags = struct.unpack_from("<QIB", body)
    return Gtid(
        f"{domain}-{server_id}", number, bool(flags & FL_STANDALONE), bool(flags & FL_PREPARED_XA)
    )


def is_one_phase(body: bytes) -> bool:
    """Whether a prepared XA transaction is committed by the same event."""
    return bool(body) and body[0] != 0


def read_payload(body: bytes) -> list[bytes]:
    """The events inside a compressed transaction of MySQL; they have headers, but no checksums."""
    import zstandard

    place, algorithm, data = 0, 255, b""
    while place < len(body):
        field, place = length(body, place)
        if field == 0:
            break
        size, place = length(body, place)
        if field == 2:
            algorithm, _ = length(body, place)
        place += size
    data = bytes(body[place:])
    if algorithm == 0:
        data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return list(_events_in(data))


def _events_in(data: bytes) -> list[bytes]:
    events, place = list[bytes](), 0
    while place + HEADER_SIZE <= len(data):
        size = HEADER.unpack_from(data, place)[3]
        events.append(data[place : place + size])
        place += size
    return events


def length(data: bytes, place: int) -> tuple[int, int]:
    """A number of one, three, four or nine bytes, and the place after it.

    >>> length(bytes([252, 1, 1]), 0)
    (257, 3)
    """
    first = data[place]
    if first < 251:
        return first, place + 1
    size = {252: 2, 253: 3, 254: 8}[first]
    end = place + 1 + size
    return int.from_bytes(data[place + 1 : end], "little"), end
