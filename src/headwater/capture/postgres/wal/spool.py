"""Puts the changes of transactions that have not committed on disk.

The server streams a large transaction while it runs, in blocks that mix with other transactions.
Each has a temporary file, which has no name and ends with the process. At commit its messages are
read back in their order, without those of subtransactions that were rolled back. So memory does not
grow with a transaction, and transactions come in the order of their commits.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import msgspec

from headwater.capture.postgres.wal.pgoutput import (
    Message,
    StreamAbort,
    StreamCommit,
    StreamStart,
    decode,
)
from headwater.errors import SourceUnavailable

BUFFER_BYTES = 256 * 1024
"""Of each file that is being written or read."""


class Replay(msgspec.Struct, frozen=True):
    """A streamed transaction that has committed: its messages, to be read once."""

    commit: StreamCommit
    messages: Iterator[tuple[Message, int]]
    """With the size of each in bytes."""


class Spool:
    """The streamed transactions of one replication connection."""

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self._open: dict[int, _Transaction] = {}
        self._block: _Transaction | None = None

    def take(self, payload: bytes) -> Message | Replay | None:
        """The message if its transaction has committed. None if it was stored or dropped."""
        if self._block is not None:
            if payload == _STOP:
                self._block = None
            else:
                self._block.add(payload)
            return None
        message = decode(payload)
        if not isinstance(message, StreamStart | StreamCommit | StreamAbort):
            return message
        return self._control(message)

    def _control(self, message: StreamStart | StreamCommit | StreamAbort) -> Replay | None:
        match message:
            case StreamStart(xid):
                if xid not in self._open:
                    with self._disk_errors():
                        self._open[xid] = _Transaction(self._folder)
                self._block = self._open[xid]
            case StreamCommit(xid):
                return Replay(message, self._replay(self._open.pop(xid, None)))
            case StreamAbort(xid, subxid) if xid == subxid:
                if (transaction := self._open.pop(xid, None)) is not None:
                    transaction.close()
            case StreamAbort(xid, subxid):
                if xid in self._open:
                    self._open[xid].aborted.add(subxid)
        return None

    def _replay(self, transaction: _Transaction | None) -> Iterator[tuple[Message, int]]:
        if transaction is None:
            return
        try:
            with self._disk_errors():
                yield from transaction.messages()
        finally:
            transaction.close()

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        with disk_errors(self._folder):
            yield

    @property
    def bytes(self) -> int:
        """How much is on disk now."""
        return sum(transaction.size for transaction in self._open.values())

    def close(self) -> None:
        for transaction in self._open.values():
            transaction.close()
        self._open.clear()
        self._block = None


class _Transaction:
    """One file. A record is its length and the message; the message begins with its letter and the
    id of the subtransaction."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115
            dir=folder, buffering=BUFFER_BYTES, prefix="headwater-wal-"
        )
        self.aborted: set[int] = set()
        self.size = 0

    def add(self, payload: bytes) -> None:
        with disk_errors(self._folder):
            self._file.write(_length.pack(len(payload)))
            self._file.write(payload)
        self.size += len(payload) + 4

    def messages(self) -> Iterator[tuple[Message, int]]:
        self._file.seek(0)
        read, aborted = self._file.read, self.aborted
        while head := read(4):
            (size,) = _length.unpack(head)
            payload = read(size)
            if aborted and _length.unpack_from(payload, 1)[0] in aborted:
                continue
            yield decode(payload, streamed=True), size

    def close(self) -> None:
        self._file.close()


@contextmanager
def disk_errors(folder: str | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SourceUnavailable(
            f"cannot store a large transaction in {folder or tempfile.gettempdir()}:"
            f" {error.strerror}",
            hint="Free some space there, or set the option spool_folder to a larger disk.",
        ) from error


_length = struct.Struct(">I")
_STOP = b"E"
