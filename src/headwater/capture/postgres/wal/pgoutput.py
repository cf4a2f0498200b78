"""Decodes the messages of `pgoutput`, PostgreSQL's plugin for logical replication, version 2.

It is pure: bytes in, messages out. libpq has already found where each message begins and ends.
Values are text, as the server prints them; NULL is None, and a value that the change did not touch
and that the server did not read (TOAST) is `UNCHANGED`. Between `StreamStart` and `StreamStop` the
messages belong to a transaction that has not committed yet, and have the id of their transaction or
subtransaction as `xid`; elsewhere `xid` is 0. A log sequence number (LSN) is a number of bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

import msgspec

from headwater.capture.source import UNCHANGED, Cell

Row: TypeAlias = tuple[Cell, ...]
"""One value for each column of the relation."""


class MalformedMessage(ValueError):
    """The bytes are not a message that this module knows."""


class Begin(msgspec.Struct, frozen=True):
    """A transaction, whose changes follow. `commit_lsn` is where its commit record begins."""

    commit_lsn: int
    committed_at: datetime
    xid: int


class Commit(msgspec.Struct, frozen=True):
    """The end of the transaction. Replication that begins at `end_lsn` does not repeat it."""

    commit_lsn: int
    end_lsn: int
    committed_at: datetime


class Origin(msgspec.Struct, frozen=True):
    """The transaction was replicated from another server."""

    lsn: int
    name: str


class RelationColumn(msgspec.Struct, frozen=True):
    """`key` says that the column belongs to the replica identity."""

    name: str
    type_oid: int
    modifier: int
    key: bool


class Relation(msgspec.Struct, frozen=True):
    """A table as it is for the changes that follow. `identity` is `d` (primary key), `i` (an
    index), `f` (all columns) or `n` (nothing)."""

    oid: int
    schema: str
    name: str
    identity: str
    columns: tuple[RelationColumn, ...]
    xid: int = 0


class TypeName(msgspec.Struct, frozen=True):
    """The name of a type that is not built in."""

    oid: int
    schema: str
    name: str
    xid: int = 0


class Insert(msgspec.Struct, frozen=True, gc=False):
    relation: int
    new: Row
    xid: int = 0


class Update(msgspec.Struct, frozen=True, gc=False):
    """`key` has the old values of the replica identity if they changed, and NULL in all other
    columns; `old` is the whole old row, under REPLICA IDENTITY FULL. At most one is not None."""

    relation: int
    key: Row | None
    old: Row | None
    new: Row
    xid: int = 0


class Delete(msgspec.Struct, frozen=True, gc=False):
    """As for an update; exactly one of `key` and `old` is not None."""

    relation: int
    key: Row | None
    old: Row | None
    xid: int = 0


class Truncate(msgspec.Struct, frozen=True):
    relations: tuple[int, ...]
    cascade: bool
    restart_identity: bool
    xid: int = 0


class LogicalMessage(msgspec.Struct, frozen=True):
    """From `pg_logical_emit_message`."""

    transactional: bool
    lsn: int
    prefix: str
    content: bytes
    xid: int = 0


class StreamStart(msgspec.Struct, frozen=True):
    """Changes of this transaction follow, which is still running. `first` says that none came
    before."""

    xid: int
    first: bool


class StreamStop(msgspec.Struct, frozen=True):
    """The server pauses the running transaction; others may follow."""


class StreamCommit(msgspec.Struct, frozen=True):
    """A transaction whose changes were streamed has committed."""

    xid: int
    commit_lsn: int
    end_lsn: int
    committed_at: datetime


class StreamAbort(msgspec.Struct, frozen=True):
    """A streamed transaction, or only its subtransaction `subxid`, was rolled back."""

    xid: int
    subxid: int


RowMessage: TypeAlias = Insert | Update | Delete
StreamMessage: TypeAlias = StreamStart | StreamStop | StreamCommit | StreamAbort
Message: TypeAlias = (
    Begin | Commit | Origin | Relation | TypeName | RowMessage | Truncate | LogicalMessage
    | StreamMessage
)  # fmt: skip


class Decoder:
    """Decodes the messages of one replication connection, in their order: whether a message has an
    `xid` depends on the messages before it."""

    def __init__(self) -> None:
        self._streamed = False

    def decode(self, data: bytes) -> Message:
        message = decode(data, streamed=self._streamed)
        if isinstance(message, StreamStart):
            self._streamed = True
        elif isinstance(message, StreamStop):
            self._streamed = False
        return message


def decode(data: bytes, *, streamed: bool = False) -> Message:
    """One message. `streamed` says that it came between `StreamStart` and `StreamStop`.

    >>> decode(bytes.fromhex("49 00004001 4e 0002 74 00000001 37 6e"))
    Insert(relation=16385, new=('7', None), xid=0)
    """
    try:
        message, end = _READERS[data[0]](data, streamed)
    except KeyError:
        raise MalformedMessage(f"unknown message of pgoutput: {data[:1]!r}") from None
    except (IndexError, ValueError, struct.error) as error:
        raise MalformedMessage(f"malformed message of pgoutput: {data[:40]!r}") from error
    if end != len(data):
        raise MalformedMessage(f"a message of pgoutput has another length: {data[:40]!r}")
    return message


# ------------------------------------------------------------------------ rows

_TEXT, _NULL, _SAME = b"t"[0], b"n"[0], b"u"[0]
_OLD, _KEY, _NEW = b"O"[0], b"K"[0], b"N"[0]
_u32 = struct.Struct(">I").unpack_from
_count = struct.Struct(">H").unpack_from
_two = struct.Struct(">II").unpack_from


def _row(data: bytes, at: int) -> tuple[Row, int]:
    """The values from there on, and where they end. A value that is cut off makes the end lie
    beyond the data, which `decode` refuses."""
    cells: list[Cell] = []
    add = cells.append
    (count,) = _count(data, at)
    at += 2
    for _ in range(count):
        kind = data[at]
        if kind == _TEXT:
            begin = at + 5
            at = begin + _u32(data, at + 1)[0]
            add(data[begin:at].decode())
        elif kind == _NULL:
            add(None)
            at += 1
        elif kind == _SAME:
            add(UNCHANGED)
            at += 1
        else:
            raise ValueError("a value in another format than text")
    return tuple(cells), at


def _insert(data: bytes, streamed: bool) -> tuple[Insert, int]:
    if streamed:
        xid, relation = _two(data, 1)
        new, at = _row(data, _after(data, 9, _NEW))
        return Insert(relation, new, xid), at
    new, at = _row(data, _after(data, 5, _NEW))
    return Insert(_u32(data, 1)[0], new), at


def _update(data: bytes, streamed: bool) -> tuple[Update, int]:
    xid, relation, at = _whose(data, streamed)
    key, old, at = _old_row(data, at)
    new, at = _row(data, _after(data, at, _NEW))
    return Update(relation, key, old, new, xid), at


def _delete(data: bytes, streamed: bool) -> tuple[Delete, int]:
    xid, relation, at = _whose(data, streamed)
    key, old, end = _old_row(data, at)
    if end == at:
        raise ValueError("a delete without a row")
    return Delete(relation, key, old, xid), end


def _whose(data: bytes, streamed: bool) -> tuple[int, int, int]:
    """The transaction, the relation, and where the rest begins."""
    if streamed:
        xid, relation = _two(data, 1)
        return xid, relation, 9
    return 0, _u32(data, 1)[0], 5


def _old_row(data: bytes, at: int) -> tuple[Row | None, Row | None, int]:
    if data[at] == _KEY:
        key, at = _row(data, at + 1)
        return key, None, at
    if data[at] == _OLD:
        old, at = _row(data, at + 1)
        return None, old, at
    return None, None, at


def _after(data: bytes, at: int, letter: int) -> int:
    if data[at] != letter:
        raise ValueError("another kind of row")
    return at + 1


# ------------------------------------------------------------------------ everything else


class _Fields:
    """Reads fields one after the other, where speed does not matter."""

    def __init__(self, data: bytes, streamed: bool) -> None:
        self._data = data
        self.at = 1
        self.xid = self.number("I") if streamed else 0

    def number(self, code: str) -> int:
        layout = struct.Struct(">" + code)
        (value,) = layout.unpack_from(self._data, self.at)
        self.at += layout.size
        return int(value)

    def text(self) -> str:
        end = self._data.index(b"\0", self.at)
        value = self._data[self.at : end].decode()
        self.at = end + 1
        return value

    def letter(self) -> str:
        return chr(self.number("B"))

    def time(self) -> datetime:
        return _EPOCH + timedelta(microseconds=self.number("q"))

    def rest(self, size: int) -> bytes:
        begin = self.at
        self.at += size
        return self._data[begin : self.at]


_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


def _begin(data: bytes, _: bool) -> tuple[Begin, int]:
    fields = _Fields(data, False)
    return Begin(fields.number("Q"), fields.time(), fields.number("I")), fields.at


def _commit(data: bytes, _: bool) -> tuple[Commit, int]:
    fields = _Fields(data, False)
    fields.number("B")
    return Commit(fields.number("Q"), fields.number("Q"), fields.time()), fields.at


def _origin(data: bytes, _: bool) -> tuple[Origin, int]:
    fields = _Fields(data, False)
    return Origin(fields.number("Q"), fields.text()), fields.at


def _relation(data: bytes, streamed: bool) -> tuple[Relation, int]:
    fields = _Fields(data, streamed)
    oid, schema, name = fields.number("I"), fields.text(), fields.text()
    identity, count = fields.letter(), fields.number("H")
    columns = tuple(_column(fields) for _ in range(count))
    # The server leaves the name of its own schema out.
    return Relation(oid, schema or "pg_catalog", name, identity, columns, fields.xid), fields.at


def _column(fields: _Fields) -> RelationColumn:
    key = bool(fields.number("B") & 1)
    return RelationColumn(fields.text(), fields.number("I"), fields.number("i"), key)


def _type(data: bytes, streamed: bool) -> tuple[TypeName, int]:
    fields = _Fields(data, streamed)
    oid = fields.number("I")
    schema = fields.text() or "pg_catalog"
    return TypeName(oid, schema, fields.text(), fields.xid), fields.at


def _truncate(data: bytes, streamed: bool) -> tuple[Truncate, int]:
    fields = _Fields(data, streamed)
    count, options = fields.number("I"), fields.number("B")
    relations = tuple(fields.number("I") for _ in range(count))
    return Truncate(relations, bool(options & 1), bool(options & 2), fields.xid), fields.at


def _message(data: bytes, streamed: bool) -> tuple[LogicalMessage, int]:
    fields = _Fields(data, streamed)
    transactional, lsn = bool(fields.number("B") & 1), fields.number("Q")
    prefix = fields.text()
    content = fields.rest(fields.number("I"))
    return LogicalMessage(transactional, lsn, prefix, content, fields.xid), fields.at


def _stream_start(data: bytes, _: bool) -> tuple[StreamStart, int]:
    fields = _Fields(data, False)
    return StreamStart(fields.number("I"), fields.number("B") == 1), fields.at


def _stream_stop(_: bytes, __: bool) -> tuple[StreamStop, int]:
    return StreamStop(), 1


def _stream_commit(data: bytes, _: bool) -> tuple[StreamCommit, int]:
    fields = _Fields(data, False)
    xid = fields.number("I")
    fields.number("B")
    return StreamCommit(xid, fields.number("Q"), fields.number("Q"), fields.time()), fields.at


def _stream_abort(data: bytes, _: bool) -> tuple[StreamAbort, int]:
    fields = _Fields(data, False)
    return StreamAbort(fields.number("I"), fields.number("I")), fields.at


_READERS: dict[int, Callable[[bytes, bool], tuple[Message, int]]] = {
    ord("B"): _begin,
    ord("C"): _commit,
    ord("O"): _origin,
    ord("R"): _relation,
    ord("Y"): _type,
    ord("I"): _insert,
    ord("U"): _update,
    ord("D"): _delete,
    ord("T"): _truncate,
    ord("M"): _message,
    ord("S"): _stream_start,
    ord("E"): _stream_stop,
    ord("c"): _stream_commit,
    ord("A"): _stream_abort,
}


# ------------------------------------------------------------------------ positions


def print_lsn(lsn: int) -> str:
    """As PostgreSQL writes it.

    >>> print_lsn(0x1_016B3748)
    '1/16B3748'
    """
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """
    >>> parse_lsn("1/16B3748") == 0x1_016B3748
    True
    """
    high, _, low = text.partition("/")
    return int(high, 16) << 32 | int(low, 16)
