"""The stream of a server's binary log: a thread that reads events from a connection, assembles them
and hands the items to the event loop through a bounded buffer.

The driver only connects and authenticates. Packets are read here, many with one system call: the
driver's own way takes longer than decoding the rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headwater import limits
from headwater.capture.mysql.assembly import Assembler
from headwater.capture.mysql.connection import (
    BINLOG_ERROR,
    Address,
    connect,
    interrupt,
    query,
    translated,
    translation,
)
from headwater.capture.mysql.positions import GtidSet, Position
from headwater.capture.mysql.wire import events
from headwater.capture.mysql.wire.events import Header
from headwater.capture.source import Item
from headwater.errors import HeadwaterError, SourceUnavailable

if TYPE_CHECKING:
    from pymysql.connections import Connection

HEARTBEAT_SECONDS = 0.5
SILENCE_SECONDS = 30.0
"""Without even a heartbeat for this long, the connection is taken for lost."""

PROGRESS_SECONDS = 0.5
_RECEIVE_BYTES = 262_144
_DUMP, _DUMP_GTID = 0x12, 0x1E
_NON_BLOCK, _THROUGH_GTID = 0x01, 0x04


class Handover:
    """Items from a thread to an event loop. The thread waits while the loop has not taken
    enough."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._changed = threading.Condition()
        self._ready = asyncio.Event()
        self._items = list[Item]()
        self._rows = self._bytes = 0
        self._error: BaseException | None = None
        self._closed = False

    def put(self, items: list[Item], rows: int, size: int) -> bool:
        """False when the reader has gone."""
        with self._changed:
            while self._is_full() and not self._closed:
                self._changed.wait()
            if self._closed:
                return False
            self._items += items
            self._rows += rows
            self._bytes += size
        self._wake()
        return True

    def _is_full(self) -> bool:
        return bool(self._items) and (
            self._rows >= limits.SOURCE_PART_CHANGES
            or self._bytes >= limits.SOURCE_PART_BYTES
            or len(self._items) >= limits.SOURCE_PART_CHANGES
        )

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self._ready.set)

    async def take(self) -> list[Item]:
        """What there is, at least one item. Raises the thread's error after its last item."""
        while True:
            with self._changed:
                items, self._items = self._items, []
                self._rows = self._bytes = 0
                self._changed.notify()
                if not items and self._error is not None:
                    raise self._error
                if not items:
                    self._ready.clear()
            if items:
                return items
            await self._ready.wait()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items = []
            self._changed.notify()

    @property
    def closed(self) -> bool:
        return self._closed


class Packets:
    """Packets of a connection, read with large reads. A payload of 2²⁴-1 bytes continues in the
    next packet."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._data = b""
        self._place = 0
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def take(self) -> bytes | None:
        """The next payload, if it was received."""
        place, data, parts = self._place, self._data, list[bytes]()
        while True:
            if len(data) - place < 4:
                return None
            size = data[place] | data[place + 1] << 8 | data[place + 2] << 16
            end = place + 4 + size
            if len(data) < end:
                return None
            parts.append(data[place + 4 : end])
            place = end
            if size < 0xFFFFFF:
                self._place = place
                return parts[0] if len(parts) == 1 else b"".join(parts)

    def is_idle(self) -> bool:
        """Whether nothing waits to be received."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return False
        return not self._poll.poll(0)

    def receive(self) -> None:
        """Wait for bytes. What a large packet lacks is read at once, not piece by piece."""
        rest = self._data[self._place :]
        parts, missing = [rest], self._missing(rest)
        while True:
            received = self._socket.recv(max(_RECEIVE_BYTES, min(missing, 1 << 22)))
            if not received:
                raise EOFError("the server closed it")
            parts.append(received)
            missing -= len(received)
            if missing <= 0:
                break
        self._data, self._place = b"".join(parts), 0

    def _missing(self, rest: bytes) -> int:
        if len(rest) < 4:
            return 0
        return (rest[0] | rest[1] << 8 | rest[2] << 16) + 4 - len(rest)


class BinlogStream:
    """One connection that reads the binary log. `run` blocks until it is closed or fails."""

    def __init__(self, address: Address, server_id: int, handover: Handover) -> None:
        self._address = address
        self._server_id = server_id
        self._handover = handover
        self._connection: Connection[Any] | None = None
        self._checksums = False
        self._lock = threading.Lock()

    def run(self, prepare: Callable[[], tuple[Position, bool, Assembler]]) -> None:
        """In a thread. `prepare` decides how to resume, which asks the server."""
        try:
            with translated(self._address):
                position, by_gtid, assembler = prepare()
                connection = self._open()
                request_dump(connection, position, self._server_id, by_gtid=by_gtid)
                connected: Any = connection
                self._read(Packets(connected._sock), assembler)
        except HeadwaterError as error:
            self._handover.fail(error)
        except Exception as error:
            # A bug, or bytes that no server should send: the runner must not wait for ever.
            self._handover.fail(error)

    def _open(self) -> Connection[Any]:
        connection = connect(self._address, read_timeout=SILENCE_SECONDS)
        with self._lock:
            self._connection = connection
        if self._handover.closed:
            self.close()
        self._checksums = prepare_session(connection)
        return connection

    def close(self) -> None:
        """End `run` at once, from any thread."""
        with self._lock:
            connection = self._connection
        if connection is not None:
            interrupt(connection)

    def finish(self) -> None:
        """After `run`: end the session at the server, which would notice only at its next event."""
        if self._connection is None:
            return
        number = self._connection.thread_id()
        self._connection._force_close()
        with contextlib.suppress(Exception), connect(self._address) as other:
            query(other, f"kill {int(number)}")

    def _read(self, packets: Packets, assembler: Assembler) -> None:
        reported = time.monotonic()
        while not self._handover.closed:
            payload = packets.take()
            if payload is not None:
                self._event(payload, assembler)
                if assembler.weight >= limits.SOURCE_PART_CHANGES and not self._hand(assembler):
                    return
                continue
            now = time.monotonic()
            if now - reported >= PROGRESS_SECONDS or packets.is_idle():
                assembler.progress()
                reported = now
            if assembler.items and not self._hand(assembler):
                return
            packets.receive()

    def _hand(self, assembler: Assembler) -> bool:
        items, rows, size = assembler.items, assembler.weight, assembler.bytes
        assembler.items, assembler.weight, assembler.bytes = [], 0, 0
        return self._handover.put(items, rows, size)

    def _event(self, payload: bytes, assembler: Assembler) -> None:
        if payload[0] == 0xFF:
            raise _server_error(self._address, payload)
        if payload[0] == 0xFE and len(payload) < 9:
            raise SourceUnavailable(f"{self._address.host} ended the binary log's stream")
        header = Header(*events.HEADER.unpack_from(payload, 1))
        end = len(payload)
        if header.type == events.FORMAT:
            self._checksums = events.has_checksums(payload)
        if self._checksums:
            end -= events.CHECKSUM_SIZE
            if header.end and not events.is_intact(payload[1:]):
                raise SourceUnavailable(f"{self._address.host} sent an event with a wrong checksum")
        assembler.feed(header, payload[1 + events.HEADER_SIZE : end])


def prepare_session(connection: Connection[Any]) -> bool:
    """Settings of a session that will read the binary log; whether events have checksums."""
    heartbeat = int(HEARTBEAT_SECONDS * 1_000_000_000)
    query(connection, f"set @master_heartbeat_period = {heartbeat}")
    query(connection, f"set @source_heartbeat_period = {heartbeat}")
    query(connection, "set @master_binlog_checksum = @@global.binlog_checksum")
    query(connection, "set @source_binlog_checksum = @@global.binlog_checksum")
    query(connection, "set @mariadb_slave_capability = 4")
    ((checksum,),) = query(connection, "select @@global.binlog_checksum")
    return str(checksum) != "NONE"


def request_dump(
    connection: Connection[Any],
    position: Position,
    server_id: int,
    *,
    by_gtid: bool,
    blocking: bool = True,
) -> None:
    flags = 0 if blocking else _NON_BLOCK
    if by_gtid and position.dialect == "mysql":
        _send(connection, _dump_by_gtid(position, server_id, flags))
        return
    file, offset = position.file, position.offset
    if by_gtid:
        with connection.cursor() as cursor:
            cursor.execute("set @slave_connect_state = %s", (position.gtids,))
        query(connection, "set @slave_gtid_strict_mode = 1")
        query(connection, "set @slave_gtid_ignore_duplicates = 0")
        file, offset = "", 4
    body = struct.pack("<BIHI", _DUMP, offset & 0xFFFFFFFF, flags, server_id) + file.encode()
    _send(connection, body)


def _dump_by_gtid(position: Position, server_id: int, flags: int) -> bytes:
    gtids = GtidSet.parse(position.gtids).encoded()
    head = struct.pack("<BHII", _DUMP_GTID, flags | _THROUGH_GTID, server_id, 0)
    return head + struct.pack("<QI", 4, len(gtids)) + gtids


def _send(connection: Any, body: bytes) -> None:
    connection._write_bytes(struct.pack("<I", len(body)) + body)


def may_dump(connection: Connection[Any], position: Position, server_id: int) -> str | None:
    """Why the user may not read the binary log, if so. Reads nothing of it."""
    prepare_session(connection)
    request_dump(connection, position, server_id, by_gtid=False, blocking=False)
    opened: Any = connection
    packets = Packets(opened._sock)
    while (payload := packets.take()) is None:
        packets.receive()
    if payload[0] != 0xFF:
        return None
    code, message = _error(payload)
    return None if code == BINLOG_ERROR else message


def _server_error(address: Address, payload: bytes) -> HeadwaterError:
    from pymysql.err import OperationalError

    return translation(address, OperationalError(*_error(payload)))


def _error(payload: bytes) -> tuple[int, str]:
    (code,) = struct.unpack_from("<H", payload, 1)
    text = payload[3:].decode("utf-8", "replace")
    return code, text[6:] if text.startswith("#") else text
