"""Proxies that fail: one between clients and a gateway cuts connections, one between a gateway and
its database holds data back.

Connections are cut on demand, and at random at any byte: before some bytes are forwarded, after a
part of them, or after all of them, in either direction.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import quote, urlsplit

from psycopg.conninfo import conninfo_to_dict


class _Proxy(ABC):
    """Accepts connections, and ends them all when it is closed."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self.serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.transport.abort())

    @abstractmethod
    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until it ends."""

    async def close(self) -> None:
        """End all connections, also those that are being opened, and wait for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Cutter(_Proxy):
    """Forwards connections, and cuts them on demand."""

    def __init__(
        self, target: str, *, chance: random.Random | None = None, share: float = 0.0
    ) -> None:
        """With a `chance`, this share of all reads cuts the connection."""
        super().__init__()
        parts = urlsplit(target)
        self._chance = chance or random.Random(0)
        self.share = share
        self._target = (parts.hostname, parts.port)
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self.url = ""
        self.is_open = True
        """Whether connections are accepted."""
        self.cuts = 0

    def shut(self) -> None:
        """Cut all connections, and accept none until `is_open` is set."""
        self.is_open = False
        self.cut_some(self._chance, 1.1)

    def cut_some(self, chance: random.Random, share: float) -> None:
        for pair in list(self._pairs):
            if chance.random() < share:
                self.cuts += 1
                for writer in pair:
                    writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_open:
            writer.close()
            return
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
        """The bytes that are forwarded before the connection is cut; None if it is not cut."""
        if self._chance.random() >= self.share:
            return None
        return data[: self._chance.choice((0, len(data), len(data) * 2 // 3))]


@asynccontextmanager
async def cutting(
    target: str, *, chance: random.Random | None = None, share: float = 0.0
) -> AsyncIterator[Cutter]:
    cutter = Cutter(target, chance=chance, share=share)
    server = await asyncio.start_server(cutter.accept, "127.0.0.1", 0)
    cutter.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield cutter
    finally:
        server.close()
        await cutter.close()


class Holder(_Proxy):
    """Forwards connections to a database. While held, it forwards nothing in either direction, and
    loses nothing: a gateway that reads through it falls behind."""

    def __init__(self, url: str) -> None:
        super().__init__()
        found = conninfo_to_dict(url)
        self._host, self._port = (
            str(found.get("host") or "127.0.0.1"),
            int(found.get("port") or 5432),
        )
        self._user, self._name = str(found.get("user")), str(found.get("dbname"))
        self._password = found.get("password")
        self._passes = asyncio.Event()
        self._passes.set()
        self.url = ""

    def hold(self) -> None:
        self._passes.clear()

    def release(self) -> None:
        self._passes.set()

    def serve_at(self, port: int) -> None:
        password = "" if self._password is None else f":{quote(str(self._password))}"
        self.url = f"postgresql://{self._user}{password}@127.0.0.1:{port}/{self._name}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await self._connect()
        except OSError:
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(reader, upstream[1]))
                tasks.create_task(self._copy(upstream[0], writer))
        finally:
            for end in (writer, upstream[1]):
                end.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._host.startswith("/"):
            return await asyncio.open_unix_connection(f"{self._host}/.s.PGSQL.{self._port}")
        return await asyncio.open_connection(self._host, self._port)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def holding(url: str) -> AsyncIterator[Holder]:
    """A proxy for the database at `url`. Its own URL is in its attribute `url`."""
    holder = Holder(url)
    server = await asyncio.start_server(holder.accept, "127.0.0.1", 0)
    holder.serve_at(server.sockets[0].getsockname()[1])
    try:
        yield holder
    finally:
        server.close()
        await holder.close()
