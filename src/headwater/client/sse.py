"""Parses Server-Sent Events: takes bytes in any chunks, and returns whole events.

Pure. Lines end with LF, CR or CRLF; a byte order mark at the start, comments and unknown fields are
ignored; an event without data is ignored, except for its `id`. The size of one event is bounded, so
that a broken server cannot fill the memory.
"""

from __future__ import annotations

import msgspec

from headwater.client.errors import too_large
from headwater.limits import CLIENT_MESSAGE_BYTES_MAX


class SseEvent(msgspec.Struct, frozen=True):
    """One event. `id` is the last id in the stream, in this event or before it."""

    event: str
    data: bytes
    id: str | None = None


class SseParser:
    """The state of one stream.

    >>> SseParser().feed(b"event: hello\\nid: 7\\ndata: {}\\n\\ndata: not yet")
    [SseEvent(event='hello', data=b'{}', id='7')]
    """

    def __init__(self, bytes_max: int = CLIENT_MESSAGE_BYTES_MAX) -> None:
        self.id: str | None = None
        self.retry: int | None = None
        """Milliseconds that the server asks to wait before a reconnect."""
        self._bytes_max = bytes_max
        self._tail: list[bytes] = []
        self._data: list[bytes] = []
        self._event = ""
        self._size = 0
        self._at_start = True
        self._after_return = False

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """The events that these bytes complete. Raises LimitExceeded for one that is too large."""
        if self._after_return and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # the second half of a CRLF
            self._after_return = False
        if not chunk:
            return []
        self._after_return = chunk.endswith(b"\r")
        if b"\n" not in chunk and b"\r" not in chunk:
            self._keep(chunk)
            return []
        lines = b"".join([*self._tail, chunk]).splitlines(keepends=True)
        self._size -= sum(map(len, self._tail))
        self._tail = []
        rest = b"" if lines[-1].endswith((b"\n", b"\r")) else lines.pop()
        events = [self._take(line.rstrip(b"\r\n")) for line in lines]
        if rest:
            self._keep(rest)
        return [event for event in events if event is not None]

    def _keep(self, part: bytes) -> None:
        self._tail.append(part)
        self._grow(len(part))

    def _grow(self, count: int) -> None:
        self._size += count
        if self._size > self._bytes_max:
            raise too_large(self._bytes_max)

    def _take(self, line: bytes) -> SseEvent | None:
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._grow(len(value))
                self._data.append(value)
            case b"event":
                self._event = value.decode(errors="replace")
            case b"id" if b"\0" not in value:
                self.id = value.decode(errors="replace")
            case b"retry" if value.isdigit():
                self.retry = int(value)
        return None

    def _dispatch(self) -> SseEvent | None:
        name, data = self._event or "message", self._data
        self._event, self._data, self._size = "", [], 0
        return SseEvent(name, b"\n".join(data), self.id) if data else None
