"""Reads a logical replication slot: the messages in their order, and confirmations back.

Everything happens on the event loop over libpq's non-blocking calls; no call waits for the network
outside `await`. A timer sends the confirmed position once a second, also while no task reads, so
the server neither ends the connection of a slow reader nor keeps its log longer than needed. Each
of these also asks the server how far it has read, so on a busy server whose changes are of other
tables the position still advances. What the messages mean is in `pgoutput`.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import TypeAlias

import msgspec
import psycopg
from psycopg import pq

from headwater.capture.postgres.wal.connecting import error_of, open_walsender, translate
from headwater.capture.postgres.wal.pgoutput import Decoder, Message, print_lsn
from headwater.database import Connection
from headwater.errors import SourceUnavailable

STATUS_SECONDS = 1.0
"""How often the server is sent the confirmed position and asked for its own."""

CONFIRM_SECONDS = 0.1
"""Confirmations that follow each other more quickly are sent together."""

RECEIVE_MESSAGES = 1_000
RECEIVE_BYTES = 1_000_000
"""Of the messages that one call returns; a single one may be larger."""

SLOT_RELEASE_SECONDS = 5.0
"""How long a slot may still be in use by a connection that has just ended."""


class Data(msgspec.Struct, frozen=True, gc=False):
    """A message of pgoutput. `lsn` is where its record begins in the log."""

    lsn: int
    payload: bytes


class Keepalive(msgspec.Struct, frozen=True):
    """The server has read its log up to here, and sent every transaction that committed before.
    Inside a transaction it says nothing about that transaction."""

    end_lsn: int


Received: TypeAlias = Data | Keepalive


class ReplicationStream:
    """One connection that reads one slot. Made by `open_stream`; closed by `close`."""

    def __init__(self, connection: Connection, url: str) -> None:
        self._connection = connection
        self._pgconn = connection.pgconn
        self._url = url
        self._confirmed = 0  # the server ignores it
        self._sent = 0
        self._sent_at = 0.0
        self._asked = False
        self._waiting: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def confirmed(self) -> int:
        return self._confirmed

    async def begin(self, command: str) -> None:
        """Send START_REPLICATION and wait until the server streams. Raises the driver's errors."""
        self._pgconn.nonblocking = 1
        self._pgconn.send_query(command.encode())
        while self._pgconn.flush():
            await self._ready(writing=True)
        while self._pgconn.is_busy():
            await self._ready()
            self._pgconn.consume_input()
        result = self._pgconn.get_result()
        if result is None:
            raise psycopg.OperationalError("the server closed the connection")
        if result.status != pq.ExecStatus.COPY_BOTH:
            raise error_of(result)
        self._heartbeat = asyncio.create_task(self._beat())

    async def receive(self) -> Sequence[Received]:
        """At least one item, as soon as there is one. Raises `SourceUnavailable` when the
        connection ends. A cancelled call loses nothing."""
        try:
            await asyncio.sleep(0)  # a stream that never pauses must not stop other tasks
            while not (items := self._drain()):
                self._pgconn.consume_input()
                if items := self._drain():
                    break
                await self._ready()
            return items
        except psycopg.Error as error:
            raise self._ended(error) from error

    async def messages(self) -> AsyncIterator[tuple[int, Message | Keepalive]]:
        """The decoded messages, each with its LSN."""
        decoder = Decoder()
        while True:
            for item in await self.receive():
                if isinstance(item, Keepalive):
                    yield item.end_lsn, item
                else:
                    yield item.lsn, decoder.decode(item.payload)

    def confirm(self, lsn: int, *, at_once: bool = False) -> None:
        """Everything up to here is durable; the server may forget it. Sent soon, or at once."""
        if lsn <= self._confirmed:
            return
        self._confirmed = lsn
        if at_once and not self._closed:
            self._send_status(ask=False)
        elif self._timer is None and not self._closed:
            delay = max(0.0, self._sent_at + CONFIRM_SECONDS - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._send_soon)

    async def close(self) -> None:
        """Send the last confirmation and end the connection."""
        if self._closed:
            return
        if self._confirmed > self._sent:
            self._send_status(ask=False)
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            with suppress(asyncio.CancelledError):
                await self._heartbeat
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(psycopg.OperationalError("the stream was closed"))
            await asyncio.sleep(0)  # the waiting task stops watching the socket first
        await self._connection.close()

    # -------------------------------------------------------------------- receiving

    def _drain(self) -> list[Received]:
        """The messages that have arrived."""
        items: list[Received] = []
        size = 0
        get, add = self._pgconn.get_copy_data, items.append
        while size < RECEIVE_BYTES and len(items) < RECEIVE_MESSAGES:
            count, view = get(1)
            if count == 0:
                break
            if count < 0:
                raise self._last_error()
            data = bytes(view)
            if data[0] == _DATA:
                add(Data(_lsn(data, 1)[0], data[25:]))
                size += count
            elif data[0] == _KEEPALIVE:
                add(self._keepalive(data))
        return items

    def _keepalive(self, data: bytes) -> Keepalive:
        end_lsn, _, asks = _KEEPALIVE_LAYOUT.unpack_from(data, 1)
        self._asked = False
        if asks:
            self._send_status(ask=False)
        return Keepalive(end_lsn)

    def _last_error(self) -> psycopg.Error:
        """Why the server ended the stream."""
        while (result := self._pgconn.get_result()) is not None:
            if result.status == pq.ExecStatus.FATAL_ERROR:
                return error_of(result)
            if result.status == pq.ExecStatus.COPY_BOTH:
                break
        return psycopg.OperationalError("the server ended the replication")

    def _ended(self, error: psycopg.Error) -> Exception:
        if self._closed:
            return SourceUnavailable("the replication connection was closed")
        return translate(error, self._url)

    async def _ready(self, *, writing: bool = False) -> None:
        """Wait until the socket can be read, or written."""
        loop = asyncio.get_running_loop()
        socket = self._pgconn.socket
        ready = self._waiting = loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        (loop.add_writer if writing else loop.add_reader)(socket, wake)
        try:
            await ready
        finally:
            self._waiting = None
            (loop.remove_writer if writing else loop.remove_reader)(socket)

    # -------------------------------------------------------------------- confirming

    async def _beat(self) -> None:
        while True:
            self._send_status(ask=not self._asked)
            await asyncio.sleep(STATUS_SECONDS)

    def _send_soon(self) -> None:
        self._timer = None
        if not self._closed:
            self._send_status(ask=False)

    def _send_status(self, *, ask: bool) -> None:
        """A failure is left to the reader, which gets the reason from the server."""
        now = time.time_ns() // 1000 - _EPOCH_MICROSECONDS
        lsn = self._confirmed
        status = _STATUS_LAYOUT.pack(_STATUS, lsn, lsn, lsn, now, ask)
        with suppress(psycopg.Error):
            # What cannot be sent now stays in libpq's buffer, and the next flush sends it.
            self._pgconn.put_copy_data(status)
            self._pgconn.flush()
            self._sent, self._sent_at = lsn, time.monotonic()
            self._asked = self._asked or ask


_DATA, _KEEPALIVE, _STATUS = b"w"[0], b"k"[0], b"r"[0]
_lsn = struct.Struct(">Q").unpack_from
_KEEPALIVE_LAYOUT = struct.Struct(">QqB")
_STATUS_LAYOUT = struct.Struct(">BQQQqB")
_EPOCH_MICROSECONDS = 946_684_800_000_000
"""PostgreSQL counts time from the year 2000."""


async def open_stream(
    url: str,
    slot: str,
    publications: Sequence[str],
    start_lsn: int = 0,
    *,
    purpose: str = "replication",
    streaming: bool = True,
    messages: bool = False,
) -> ReplicationStream:
    """Read the slot from an LSN on; the server begins later if that was confirmed already. Nothing
    is confirmed by this. With
    `streaming`, the server sends large transactions before they commit. With `messages`, also what
    `pg_logical_emit_message` wrote."""
    command = start_command(slot, publications, start_lsn, streaming, messages)
    until = time.monotonic() + SLOT_RELEASE_SECONDS
    while True:
        connection = await open_walsender(url, purpose=purpose)
        stream = ReplicationStream(connection, url)
        try:
            await stream.begin(command)
            return stream
        except psycopg.errors.ObjectInUse as error:
            await connection.close()
            if time.monotonic() > until:
                raise translate(error, url) from error
            await asyncio.sleep(0.1)
        except psycopg.Error as error:
            await connection.close()
            raise translate(error, url) from error
        except BaseException:
            await connection.close()
            raise


def start_command(
    slot: str, publications: Sequence[str], start_lsn: int, streaming: bool, messages: bool
) -> str:
    r"""
    >>> start_command("hw", ["a'b"], 255, True, False)
    'START_REPLICATION SLOT "hw" LOGICAL 0/FF (proto_version \'2\', publication_names \'"a\'\'b"\', streaming \'on\')'
    """  # noqa: E501
    names = ", ".join('"' + name.replace('"', '""') + '"' for name in publications)
    escaped = names.replace("'", "''")
    options = ["proto_version '2'", f"publication_names '{escaped}'"]
    if streaming:
        options.append("streaming 'on'")
    if messages:
        options.append("messages 'true'")
    quoted = slot.replace('"', '""')
    return (
        f'START_REPLICATION SLOT "{quoted}" LOGICAL {print_lsn(start_lsn)} ({", ".join(options)})'
    )
