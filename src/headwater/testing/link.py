"""A link that is cut now and then: a TCP proxy between clients and a gateway.

It cuts connections when told to, and by chance at any byte: before some bytes are passed on, after
a part of them, or after all of them, in either direction.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


class Cutter:
    """Forwards connections, and cuts them when told to."""

    def __init__(
        self, target: str, *, chance: random.Random | None = None, share: float = 0.0
    ) -> None:
        """With a `chance`, so large a share of all that is read ends its connection."""
        parts = urlsplit(target)
        self._chance = chance or random.Random(0)
        self.share = share
        self._target = (parts.hostname, parts.port)
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self.url = ""
        self.cuts = 0

    def cut_some(self, chance: random.Random, share: float) -> None:
        for pair in list(self._pairs):
            if chance.random() < share:
                self.cuts += 1
                for writer in pair:
                    writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await self._connect()
        except OSError:
            writer.close()
            return
        pair = (writer, upstream[1])
        self._pairs.add(pair)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(reader, upstream[1]))
                tasks.create_task(self._copy(upstream[0], writer))
        finally:
            self._pairs.discard(pair)
            for end in pair:
                end.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self._target)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                last = self._last(data)
                writer.write(data if last is None else last)
                await writer.drain()
                if last is not None:
                    self.cuts += 1
                    break
        writer.transport.abort()

    def _last(self, data: bytes) -> bytes | None:
        """What of these bytes is still passed on before the connection is cut; None if it is
        not."""
        if self._chance.random() >= self.share:
            return None
        return data[: self._chance.choice((0, len(data), len(data) * 2 // 3))]


@asynccontextmanager
async def cutting(
    target: str, *, chance: random.Random | None = None, share: float = 0.0
) -> AsyncIterator[Cutter]:
    cutter = Cutter(target, chance=chance, share=share)
    server = await asyncio.start_server(cutter.serve, "127.0.0.1", 0)
    cutter.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield cutter
    finally:
        server.close()
        cutter.cut_some(random.Random(0), 1.1)
