"""Writes messages of pgoutput, for tests of what reads them."""

from __future__ import annotations

import struct

from headwater.capture.source import UNCHANGED, SourceRow


def row(values: SourceRow) -> bytes:
    data = struct.pack(">H", len(values))
    for value in values:
        if value is None:
            data += b"n"
        elif value is UNCHANGED:
            data += b"u"
        else:
            text = str(value).encode()
            data += b"t" + struct.pack(">I", len(text)) + text
    return data


def _xid(xid: int) -> bytes:
    return struct.pack(">I", xid) if xid else b""


def begin(lsn: int, xid: int, time: int = 0) -> bytes:
    return b"B" + struct.pack(">QqI", lsn, time, xid)


def commit(lsn: int, end: int, time: int = 0) -> bytes:
    return b"C\0" + struct.pack(">QQq", lsn, end, time)


def insert(relation: int, new: SourceRow, xid: int = 0) -> bytes:
    return b"I" + _xid(xid) + struct.pack(">I", relation) + b"N" + row(new)


def update(
    relation: int, new: SourceRow, *, key: SourceRow = (), old: SourceRow = (), xid: int = 0
) -> bytes:
    before = b"K" + row(key) if key else b"O" + row(old) if old else b""
    return b"U" + _xid(xid) + struct.pack(">I", relation) + before + b"N" + row(new)


def delete(relation: int, *, key: SourceRow = (), old: SourceRow = (), xid: int = 0) -> bytes:
    before = b"K" + row(key) if key else b"O" + row(old)
    return b"D" + _xid(xid) + struct.pack(">I", relation) + before


def truncate(*relations: int, options: int = 0, xid: int = 0) -> bytes:
    listed = b"".join(struct.pack(">I", relation) for relation in relations)
    return b"T" + _xid(xid) + struct.pack(">IB", len(relations), options) + listed


def relation(
    oid: int, name: str, columns: dict[str, int], *, key: tuple[str, ...] = ("id",),
    schema: str = "public", identity: str = "d", xid: int = 0,
) -> bytes:  # fmt: skip
    """`columns` are names and types."""
    data = b"R" + _xid(xid) + struct.pack(">I", oid) + schema.encode() + b"\0" + name.encode()
    data += b"\0" + identity.encode() + struct.pack(">H", len(columns))
    for column, type_ in columns.items():
        data += bytes([column in key]) + column.encode() + b"\0" + struct.pack(">Ii", type_, -1)
    return data


def stream_start(xid: int, first: bool = True) -> bytes:
    return b"S" + struct.pack(">IB", xid, first)


STREAM_STOP = b"E"


def stream_commit(xid: int, lsn: int, end: int, time: int = 0) -> bytes:
    return b"c" + struct.pack(">IBQQq", xid, 0, lsn, end, time)


def stream_abort(xid: int, subxid: int) -> bytes:
    return b"A" + struct.pack(">II", xid, subxid)
