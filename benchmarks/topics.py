"""From a signal to its viewers: `python -m benchmarks.topics [--large]`.

One chat whose message grows, as a text stream writes it: every change is a transaction that updates
the row and signals its topic. It is followed by 1, 100 and 1,000 viewers over SSE, which are plain
sockets that look no further than the number in the row. A latency is from the writer's COMMIT
returning to a viewer's socket holding the row, of every change and viewer. What the gateway asks
the database is counted by the database: scans of the table's key, less those of the writer.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.measure import Result, percentile, report, scratch_server
from headwater.database import Connection
from headwater.database import connect as connect_database
from headwater.testing.gateway_process import Served, serving

PROGRAM = """
from headwater import Headwater

hw = Headwater()
hw.topic("chat:{id}", entity="messages")
"""
MESSAGES = "create table messages (id bigint primary key, n int not null, content text not null)"
GROW = (
    "with grown as (update messages set n = %s, content = content || %s where id = 1 returning id)"
    " select headwater.signal('chat:1', array_agg(id::text)) from grown"
)
TOKEN = "the river rises "
STATISTICS_SECONDS = 11.0
"""A PostgreSQL session that falls idle tells what it counted within ten seconds."""
LENIENT: dict[str, Any] = {
    "limits_sessions_per_ip": 10_000,
    "limits_subscriptions_per_user": 10_000,
    "limits_bytes_per_user": 2**40,
    "limits_requests_per_second": 100_000,
}


class Size(NamedTuple):
    """How much work a run does."""

    viewers: tuple[int, ...]
    changes: int
    pause: float
    settle: float


TINY = Size((1, 3), 5, 0.0, 0.0)
SMALL = Size((1, 100, 1_000), 200, 0.02, STATISTICS_SECONDS)
LARGE = Size((1, 100, 1_000, 5_000), 2_000, 0.02, STATISTICS_SECONDS)


class Viewers:
    """All viewers of the chat: what each has received, and when."""

    def __init__(self) -> None:
        self.arrivals: list[tuple[int, float]] = []
        self.bytes = 0
        self.open: set[Viewer] = set()
        self._news = asyncio.Event()

    def received(self) -> None:
        self._news.set()

    async def until(self, number: int) -> None:
        """Wait until every viewer has this change."""
        async with asyncio.timeout(60):
            while any(viewer.newest < number for viewer in self.open):
                self._news.clear()
                await self._news.wait()

    def latencies(self, committed: dict[int, float]) -> list[float]:
        """In milliseconds. A change that came together with a later one came with that."""
        return [(at - committed[number]) * 1e3 for number, at in self.arrivals]


class Viewer(asyncio.Protocol):
    """A stream that records the number of the newest row it was sent."""

    def __init__(self, viewers: Viewers, encoding: str) -> None:
        self._viewers = viewers
        self._encoding = encoding
        self.newest = -1
        self.subscribed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(
            b"GET /v1/stream?topics=chat:1 HTTP/1.1\r\nHost: localhost\r\n"
            b"Accept-Encoding: %s\r\n\r\n" % self._encoding.encode()
        )

    def data_received(self, data: bytes) -> None:
        viewers = self._viewers
        viewers.bytes += len(data)
        place = data.rfind(b'"n":')
        if place >= 0:
            number = int(data[place + 4 : data.index(b",", place)])
            viewers.arrivals.append((number, time.perf_counter()))
            self.newest = number
            viewers.received()
        if not self.subscribed.done() and b'"subscribed"' in data:
            self.subscribed.set_result(None)

    def close(self) -> None:
        self._transport.close()


@asynccontextmanager
async def watching(gateway: Served, count: int, encoding: str = "") -> AsyncIterator[Viewers]:
    viewers, address = Viewers(), urlsplit(gateway.url)
    assert address.hostname is not None
    assert address.port is not None
    loop = asyncio.get_running_loop()
    for _ in range(count):
        _, viewer = await loop.create_connection(
            lambda: Viewer(viewers, encoding), address.hostname, address.port
        )
        viewers.open.add(viewer)
        if not encoding:
            await viewer.subscribed
    try:
        yield viewers
    finally:
        for viewer in viewers.open:
            viewer.close()


class Chat:
    """The row that grows."""

    def __init__(self, connection: Connection, size: Size) -> None:
        self._connection = connection
        self._size = size
        self.number = 0

    async def grow(self) -> dict[int, float]:
        """Write change after change; returns when each was committed."""
        committed = {}
        await self._connection.execute("update messages set content = '' where id = 1")
        for _ in range(self._size.changes):
            self.number += 1
            await self._connection.execute(GROW.encode(), (self.number, TOKEN), prepare=True)
            committed[self.number] = time.perf_counter()
            await asyncio.sleep(self._size.pause)
        return committed

    async def scans(self) -> int:
        """How often the row was looked up, when all sessions have reported."""
        await asyncio.sleep(self._size.settle)
        cursor = await self._connection.execute(
            "select idx_scan from pg_stat_user_tables where relname = 'messages'"
        )
        row = await cursor.fetchone()
        assert row is not None
        return int(row[0])


async def latency(gateway: Served, chat: Chat, count: int) -> list[Result]:
    async with watching(gateway, count) as viewers:
        before, asked = await chat.scans(), _asked(gateway)
        committed = await chat.grow()
        await viewers.until(chat.number)
        times, signals = viewers.latencies(committed), len(committed)
        asked = _asked(gateway) - asked
        # The writer looks the row up once a change, and once to empty it.
        scans = await chat.scans() - before - signals - 1
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    return [
        Result(
            f"signal → viewer, {count:,} viewers",
            f"p50 {p50:.2f} ms, p99 {p99:.2f} ms",
            detail=f"{signals} signals, {len(times):,} rows received, "
            f"{viewers.bytes / count / signals:,.0f} bytes a signal and viewer",
        ),
        Result(
            f"queries a signal, {count:,} viewers",
            f"{asked / signals:.2f} asked, {scans / signals:.2f} counted in PostgreSQL",
            "at most 1",
            asked <= signals,
        ),
    ]


def _asked(gateway: Served) -> float:
    return gateway.metric("headwater_questions_total", kind="topic")


async def sizes(gateway: Served, chat: Chat) -> Result:
    """What one viewer receives of a text that grows, as it is and compressed."""
    received = {}
    for encoding in ("identity", "br"):
        async with watching(gateway, 1) as plain, watching(gateway, 1, encoding) as viewers:
            await chat.grow()
            await plain.until(chat.number)
            received[encoding] = await _settled(viewers)
    plain_bytes, brotli = received["identity"], received["br"]
    return Result(
        "bytes a viewer, a text that grows",
        f"{plain_bytes:,} plain, {brotli:,} with brotli (÷{plain_bytes / brotli:.0f})",
        detail=f"{len(TOKEN)} characters more with each change",
    )


async def _settled(viewers: Viewers) -> int:
    """How much was received, once nothing more comes."""
    seen = -1
    while viewers.bytes != seen:
        seen = viewers.bytes
        await asyncio.sleep(0.3)
    return seen


@contextmanager
def _gateway(url: str, folder: Path) -> Iterator[Served]:
    (folder / "chat.py").write_text(PROGRAM)
    with serving(url, folder, program="chat:hw", **LENIENT) as gateway:
        yield gateway


async def _run(size: Size) -> list[Result]:
    with scratch_server() as server, tempfile.TemporaryDirectory() as folder:
        connection = await connect_database(server.url, purpose="benchmark", application_path=True)
        await connection.execute(MESSAGES)
        await connection.execute("insert into messages values (1, 0, '')")
        chat, results = Chat(connection, size), []
        with _gateway(server.url, Path(folder)) as gateway:
            for count in size.viewers:
                results += await latency(gateway, chat, count)
            results.append(await sizes(gateway, chat))
        await connection.close()
        return results


def run(*, large: bool = False, tiny: bool = False) -> list[Result]:
    return asyncio.run(_run(TINY if tiny else LARGE if large else SMALL))


if __name__ == "__main__":
    report("Topics, from signal to viewer", run(large="--large" in sys.argv))
