"""How fast one event reaches many SSE streams, and what an idle one costs:
`python -m benchmarks.fanout [--large]`.

The servers run beside each other, each with its own streams, and take turns. The client is one
process for all: it waits on epoll, counts the ends of events and does not parse. Client and server
share the machine, so the report has the rate by the clock and the rate by the server's own CPU
time.
"""

from __future__ import annotations

import resource
import select
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from urllib.parse import quote, urlsplit

import msgspec
import psycopg

from benchmarks.measure import Result, execute, ratios, report, scratch_server
from benchmarks.streaming import Server, has_nchan, nchan, ours
from headwater.testing.gateway_process import serving

PUBLISH = b"POST /publish HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s"
EVENTS = b"GET /events HTTP/1.1\r\nhost: localhost\r\naccept: text/event-stream\r\n\r\n"
BODY = b"x" * 185  # With nchan's own lines as long on the wire as one of our events.
PATIENCE_SECONDS = 20
QUERY = '{"table": "news"}'
PROGRAM = """
from headwater import Headwater

hw = Headwater()
hw.table("news")
"""
KIB = 1024


class Size(msgspec.Struct, frozen=True):
    streams: int
    events: int
    rounds: int
    idle: int


TINY = Size(streams=5, events=3, rounds=1, idle=10)
SMALL = Size(streams=200, events=200, rounds=5, idle=500)
LARGE = Size(streams=2000, events=50, rounds=7, idle=10_000)


class Rate(msgspec.Struct, frozen=True):
    """Deliveries a second."""

    wall: float
    cpu: float


class Streams:
    """Many streams of one server."""

    request = EVENTS

    def __init__(self, server: Server, count: int) -> None:
        self.server = server
        self._poll = select.epoll()
        self._sockets = {s.fileno(): s for s in (self._open() for _ in range(count))}
        self.bytes = 0

    def _open(self) -> socket.socket:
        stream = socket.create_connection(("127.0.0.1", self.server.port))
        stream.sendall(self.request)
        head = b""
        while not self._is_begun(head):
            head += stream.recv(4 * KIB)
            assert head.startswith(b"HTTP/1.1 200"), head
        stream.setblocking(False)
        self._poll.register(stream.fileno(), select.EPOLLIN)
        return stream

    def _is_begun(self, head: bytes) -> bool:
        return b"\r\n\r\n" in head

    def close(self) -> None:
        for stream in self._sockets.values():
            stream.close()
        self._poll.close()

    def publish(self, events: int) -> None:
        """Send events to all streams, each after all streams have the one before."""
        # A new connection each turn: servers close idle connections.
        with socket.create_connection(("127.0.0.1", self.server.port)) as publisher:
            for _ in range(events):
                publisher.sendall(PUBLISH % (len(BODY), BODY))
                self._await_event()
                assert publisher.recv(4 * KIB).startswith(b"HTTP/1.1 20")

    def _await_event(self) -> None:
        missing = len(self._sockets)
        sockets, poll = self._sockets, self._poll.poll
        while missing > 0:
            if not (readable := poll(PATIENCE_SECONDS)):
                raise RuntimeError(f"{missing} streams did not get an event")
            for number, _ in readable:
                data = sockets[number].recv(4 * KIB)
                assert data, "the server closed a stream"
                self.bytes += len(data)
                missing -= data.count(b"\n\n")

    def rate(self, events: int) -> Rate:
        used, started = self.server.cpu_seconds(), time.perf_counter()
        self.publish(events)
        wall = time.perf_counter() - started
        used = self.server.cpu_seconds() - used
        deliveries = events * len(self._sockets)
        return Rate(deliveries / wall, deliveries / max(used, 0.01))


class LiveStreams(Streams):
    """Streams of one live query at a gateway; an event is an update of its row."""

    request = b"GET /v1/live?q=%s HTTP/1.1\r\nhost: localhost\r\n\r\n" % quote(QUERY).encode()

    def __init__(self, server: Server, count: int, database: str) -> None:
        self._writer = psycopg.connect(database, autocommit=True)
        super().__init__(server, count)

    def _is_begun(self, head: bytes) -> bool:
        return b"event: snapshot" in head and head.endswith(b"\n\n\r\n")

    def publish(self, events: int) -> None:
        for _ in range(events):
            self._writer.execute("update news set version = version + 1")
            self._await_event()

    def close(self) -> None:
        super().close()
        self._writer.close()


@contextmanager
def gateway() -> Iterator[tuple[Server, str]]:
    """`headwater serve` over a database with one row, and where that is."""
    with scratch_server() as database, tempfile.TemporaryDirectory() as folder:
        execute(
            database.url,
            "create table news (id int primary key, version int, text text)",
            "insert into news values (1, 0, 'as long as it must be')",
        )
        Path(folder, "news.py").write_text(PROGRAM)
        with serving(
            database.url,
            Path(folder),
            program="news:hw",
            limits_sessions_per_ip=1_000_000,
            limits_subscriptions_per_user=1_000_000,
            limits_bytes_per_user=2**40,
            limits_bytes_total=2**40,
            limits_requests_per_second=1_000_000,
            gateway_keepalive="1 hour",
        ) as served:
            port = urlsplit(served.url).port
            assert port is not None
            yield Server(port, served.process.pid), database.url


@contextmanager
def _streams(size: Size) -> Iterator[dict[str, Streams]]:
    """Every server there is, each with its streams open and warm."""
    with ExitStack() as stack:
        servers = {
            "fast path": stack.enter_context(ours("fast")),
            "plain ASGI": stack.enter_context(ours("plain")),
        }
        if has_nchan():
            servers["nginx with nchan"] = stack.enter_context(nchan())
        opened = {}
        for name, server in servers.items():
            opened[name] = streams = Streams(server, size.streams)
            stack.callback(streams.close)
        server, database = stack.enter_context(gateway())
        live = LiveStreams(server, size.streams, database)
        stack.callback(live.close)
        opened["headwater serve"] = live
        for streams in opened.values():
            streams.publish(2)
            streams.bytes = 0
        yield opened


def fan_out(size: Size) -> list[Result]:
    rates: dict[str, list[Rate]] = {}
    with _streams(size) as opened:
        for turn in range(size.rounds):
            names = list(opened)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                rates.setdefault(name, []).append(opened[name].rate(size.events))
        deliveries = size.rounds * size.events * size.streams
        bytes_each = {name: streams.bytes / deliveries for name, streams in opened.items()}
    results = [
        Result(
            f"{name}, {size.streams:,} streams",
            f"{median(r.wall for r in rates[name]):,.0f} deliveries/s",
            "see the ratio",
            None,
            f"{median(r.cpu for r in rates[name]):,.0f} a second of its CPU;"
            f" {bytes_each[name]:.0f} bytes each",
        )
        for name in rates
    ]
    return [*results, _against_nchan(rates)]


def _against_nchan(rates: dict[str, list[Rate]]) -> Result:
    name, target = "fast path / nginx with nchan", "at least 1"
    if "nginx with nchan" not in rates:
        return Result(name, "skipped", target, None, "no nginx with nchan here")
    fast, other = rates["fast path"], rates["nginx with nchan"]
    wall = ratios([r.wall for r in fast], [r.wall for r in other])
    cpu = ratios([r.cpu for r in fast], [r.cpu for r in other])
    detail = f"by the server's CPU time: {cpu:.2f}"
    return Result(name, f"{wall:.2f} by the clock", target, wall >= 1, detail)


def idle(size: Size) -> Result:
    """Memory of the gateway's process for a live query that is open and silent."""
    with gateway() as (server, database):
        # What the first connections allocate does not belong to a stream.
        warm = LiveStreams(server, 5, database)
        before = server.memory_bytes()
        streams = LiveStreams(server, size.idle, database)
        streams.publish(1)
        each = (server.memory_bytes() - before) / size.idle / KIB
        streams.close()
        warm.close()
    return Result(
        f"{size.idle:,} idle streams of headwater serve",
        f"{each:.1f} KiB each",
        "under 20 KiB",
        each < 20,
    )


def run(*, large: bool = False, tiny: bool = False) -> list[Result]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    size = TINY if tiny else LARGE if large else SMALL
    return [*fan_out(size), idle(size)]


if __name__ == "__main__":
    report("Streams", run(large="--large" in sys.argv))
