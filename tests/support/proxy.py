"""A TCP proxy that damages what it forwards: between a client and its gateways, or between a
gateway and its database.

It works on bytes. It can cut a connection (with FIN or RST) before a request, behind it, instead of
the answer or in the middle of the answer; leave it half-open, so that bytes vanish in one direction
or both and nothing says so; and delay it. Several targets are behind its one address: new
connections go to the present one.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

How = Literal["fin", "rst", "silence"]
Moment = Literal["request", "forwarded", "answer", "middle"]
Direction = Literal["up", "down"]

HOWS: tuple[How, ...] = ("fin", "rst", "silence")
MOMENTS: tuple[Moment, ...] = ("request", "forwarded", "answer", "middle")

_STREAM = re.compile(rb"GET /v1/(stream|ws)\b")
_EXTENSIONS = re.compile(rb"sec-websocket-extensions:", re.IGNORECASE)


@dataclass(frozen=True)
class Fault:
    """A fault for the connection of the next request that contains a text."""

    match: bytes
    moment: Moment
    """Before the request is forwarded; right behind that; when its answer comes, which is lost; or
    behind half of what comes."""
    how: How


@dataclass(eq=False)
class Pair:
    """A connection, as two: to the client and to the target."""

    client: asyncio.StreamWriter
    target: asyncio.StreamWriter
    swallowed: set[Direction] = field(default_factory=set)
    """Directions in which bytes vanish, and an end too."""
    due: Fault | None = None
    """What happens at the next bytes of the target."""
    is_answered: bool = False
    """Whether the target has sent anything."""
    is_stream: bool = False
    """Whether the target sends when it likes, and not only when it is asked."""
    is_asked: bool = False
    """Whether the client has sent something that is not answered yet."""

    def swallow(self, *directions: Direction) -> None:
        """Lose all bytes in these directions from here on. A connection that has not begun, or on
        which nothing is under way, is reset instead: browsers try one such connection after the
        other, and wait long for each."""
        if self.is_answered and (self.is_stream or self.is_asked):
            self.swallowed |= set(directions)
        else:
            self.cut("rst")

    def cut(self, how: How) -> None:
        if how == "silence":
            self.swallow("up", "down")
            return
        if self.swallowed:
            return  # Neither end may learn that the connection is gone.
        for writer in (self.client, self.target):
            if how == "rst":
                _reset(writer)
            else:
                writer.close()


class FaultProxy:
    """Forwards connections to the present one of its targets."""

    def __init__(self, targets: Sequence[tuple[str, int]]) -> None:
        self.targets = list(targets)
        self.present = 0
        self.url = ""
        self.port = 0
        self.delay: tuple[float, float] = (0.0, 0.0)
        """Seconds by which everything is delayed: at least and at most."""
        self.armed: list[Fault] = []
        self.faults = 0
        """How many have happened."""
        self._pairs: set[Pair] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._chance = random.Random(0)

    # ------------------------------------------------------------------ what a test does

    def cut(self, how: How, chance: random.Random | None = None, share: float = 1.0) -> None:
        """Cut connections: all, or a share of them by chance."""
        for pair in list(self._pairs):
            if chance is None or chance.random() < share:
                self.faults += 1
                pair.cut(how)

    def swallow(self, *directions: Direction) -> None:
        """Present connections lose all bytes in these directions from here on."""
        for pair in list(self._pairs):
            self.faults += 1
            pair.swallow(*directions)

    def arm(self, match: bytes, moment: Moment, how: How) -> None:
        self.armed.append(Fault(match, moment, how))

    def heal(self) -> None:
        """No further faults. Connections that are half-open stay half-open."""
        self.delay = (0.0, 0.0)
        self.armed.clear()

    # ------------------------------------------------------------------ forwarding

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream, target = await asyncio.open_connection(*self.targets[self.present])
        except OSError:
            _reset(writer)
            return
        pair = Pair(writer, target)
        self._pairs.add(pair)
        copying = (
            asyncio.create_task(self._copy(pair, "up", reader, target)),
            asyncio.create_task(self._copy(pair, "down", upstream, writer)),
        )
        self._serving.update(copying)
        try:
            await asyncio.wait(copying)
        finally:
            self._serving.difference_update(copying)
            self._pairs.discard(pair)
            writer.close()
            target.close()

    async def close(self) -> None:
        for pair in list(self._pairs):
            pair.swallowed.clear()
            pair.cut("rst")
        await asyncio.gather(*self._serving)

    async def _copy(
        self,
        pair: Pair,
        direction: Direction,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if any(self.delay):
                    await asyncio.sleep(self._chance.uniform(*self.delay))
                await self._forward(pair, direction, data, writer)
        if direction == "up":
            pair.client.close()
        if direction not in pair.swallowed:
            writer.close()

    async def _forward(
        self, pair: Pair, direction: Direction, data: bytes, writer: asyncio.StreamWriter
    ) -> None:
        if direction in pair.swallowed:
            return
        if direction == "up":
            # Compressed frames could not be searched.
            data = _EXTENSIONS.sub(b"x-websocket-extensions-:", data)
            pair.is_asked = True
            pair.is_stream = pair.is_stream or _STREAM.match(data) is not None
            fault = self._matching(data)
            if fault is not None and fault.moment == "request":
                self._happen(pair, fault)
                return
            writer.write(data)
            await writer.drain()
            if fault is not None and fault.moment == "forwarded":
                self._happen(pair, fault)
            elif fault is not None:
                pair.due = fault
            return
        fault, pair.due = pair.due, None
        if fault is not None:
            data = data[: len(data) // 2] if fault.moment == "middle" else b""
        if data:
            pair.is_answered, pair.is_asked = True, False
            writer.write(data)
            await writer.drain()
        if fault is not None:
            self._happen(pair, fault)

    def _matching(self, data: bytes) -> Fault | None:
        said = data + _unmasked(data)
        for fault in self.armed:
            if fault.match in said:
                self.armed.remove(fault)
                return fault
        return None

    def _happen(self, pair: Pair, fault: Fault) -> None:
        self.faults += 1
        pair.cut(fault.how)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with an RST."""
    raw = writer.get_extra_info("socket")
    with suppress(OSError):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _unmasked(data: bytes) -> bytes:
    """The text of the WebSocket frames that begin here; nothing where none do."""
    found, at = bytearray(), 0
    while len(data) >= at + 6 and data[at] & 0x70 == 0 and data[at + 1] & 0x80:
        size, head = data[at + 1] & 0x7F, 2
        if size == 126:
            size, head = int.from_bytes(data[at + 2 : at + 4]), 4
        elif size == 127:
            size, head = int.from_bytes(data[at + 2 : at + 10]), 10
        mask = data[at + head : at + head + 4]
        payload = data[at + head + 4 : at + head + 4 + size]
        found += bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))
        at += head + 4 + size
    return bytes(found)


@asynccontextmanager
async def proxying(*targets: str) -> AsyncIterator[FaultProxy]:
    """A proxy before these URLs, inside the block."""
    parts = [urlsplit(target) for target in targets]
    proxy = FaultProxy([(each.hostname or "", each.port or 0) for each in parts])
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    proxy.url = f"{parts[0].scheme}://127.0.0.1:{proxy.port}"
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
