"""Writes down what a gateway is busy with, in the table `headwater.activity`, while an admin looks.

Every period: a row for the gateway, which is also the sign that it is alive, and a row for each of
its costliest sessions and views, if it differs from what was written last. Who looks is known to
the gateway that an admin follows the table at; a lock in the database tells the others. While
nobody looks nothing is written, and the question whether anybody does is all that it costs. What
goes wrong here is no trouble of anybody's: it is logged, and tried again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from heapq import nlargest
from typing import Any, TypeAlias, TypeVar

import msgspec
import psycopg
from prometheus_client import Histogram

from headwater.database import Connection as Database
from headwater.database import connect, translate
from headwater.errors import HeadwaterError
from headwater.gateway.connection import Connection
from headwater.hub.costs import Cost
from headwater.hub.feeds import FeedView
from headwater.hub.group import Group
from headwater.hub.hub import Hub
from headwater.hub.live import LiveView
from headwater.hub.topic import TopicView
from headwater.limits import (
    ACTIVITY_DETAIL_CHARS_MAX,
    ACTIVITY_ROWS_MAX,
    ACTIVITY_SECONDS_MAX,
    ACTIVITY_SILENT_PERIODS,
    ACTIVITY_TURN_ITEMS,
    ACTIVITY_VIEWS_SHOWN_MAX,
)
from headwater.metrics import Metrics

logger = logging.getLogger(__name__)

TABLE = ("headwater", "activity")

encode = msgspec.json.encode

AnyView: TypeAlias = LiveView | Group | FeedView | TopicView

Item = TypeVar("Item")


_DELETE = "delete from headwater.activity where gateway = %s"
_KNOWN = "select from headwater.activity where gateway = %s and kind = 'gateway'"


class Entry(msgspec.Struct, frozen=True):
    """A row of the table; what its columns mean is said there (`012_activity.sql`)."""

    kind: str
    id: str
    type: str | None
    name: str | None
    detail: msgspec.Raw
    since: datetime
    subscriptions: int = 0
    rows: int = 0
    sent: int = 0
    bytes: int = 0
    waiting: int = 0
    runs: int = 0
    seconds: float = 0.0

    @property
    def mark(self) -> tuple[str, str]:
        return self.kind, self.id


class Activity:
    """That of one gateway. `connections` are its sessions at the moment."""

    def __init__(
        self,
        hub: Hub,
        metrics: Metrics,
        connections: Callable[[], Iterable[Connection]],
        period: timedelta,
    ) -> None:
        self.gateway = secrets.token_hex(4)
        """What this gateway is called in the table."""
        self._hub = hub
        self._metrics = metrics
        self._connections = connections
        self._period = period
        self._since = datetime.now(UTC)
        self._sent = self._sent_bytes = 0
        """To sessions that are over."""
        self._database: Database | None = None
        self._written: dict[tuple[str, str], Entry] = {}
        self._has_rows = False
        """Whether there may be rows of ours."""
        self._holds = False
        self._wake = asyncio.Event()
        self._lag = Quantiles(metrics.lag_seconds)
        self._flush = Quantiles(metrics.flush_seconds)
        self._trouble = ""

    def look(self) -> None:
        """Somebody has begun to follow the table: have it filled at once."""
        self._wake.set()

    def ended(self, connection: Connection) -> None:
        """A session is over. What was sent to it stays part of what the gateway has sent."""
        if connection.sink is not None:
            self._sent += connection.sink.sent
            self._sent_bytes += connection.sink.sent_bytes

    async def run(self) -> None:
        """For ever. Ended, it takes its rows away."""
        if not self._period:
            return
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._period.total_seconds()):
                        await self._wake.wait()
                self._wake.clear()
                await self._try_round()
        finally:
            with suppress(psycopg.Error, HeadwaterError, TimeoutError):
                async with asyncio.timeout(ACTIVITY_SECONDS_MAX):
                    await self._leave()

    async def _try_round(self) -> None:
        try:
            async with asyncio.timeout(ACTIVITY_SECONDS_MAX):
                await self.round()
        except asyncio.CancelledError:
            await self._drop()  # In which state it is now nobody knows.
            raise
        except (psycopg.Error, HeadwaterError, TimeoutError) as error:
            await self._drop()
            found = translate(error) if isinstance(error, psycopg.Error) else error
            trouble = str(found) or "it takes too long"
            if self._trouble != trouble:  # told once
                self._trouble = trouble
                logger.warning("activity cannot be written down: %s", trouble)
        except Exception:
            await self._drop()
            logger.exception("activity cannot be written down")
        else:
            self._trouble = ""

    async def round(self) -> None:
        """Write down what has changed, if anybody looks; otherwise take away what is there."""
        ours = self._hub.lives.is_followed(*TABLE)
        if self._holds and not ours:
            await (await self._connected()).execute("select pg_advisory_unlock_all()")
            self._holds = False
        if ours or await self._others_look():
            database = await self._connected()
            if ours and not self._holds:
                await database.execute("select headwater.looks_at_activity()")
                self._holds = True
            await self._write(database)
        else:
            await self._leave()

    async def _others_look(self) -> bool:
        if not self._hub.ready:
            return False
        rows = await self._hub.tables.ask("select headwater.is_activity_looked_at()", None)
        return bool(rows[0][0])

    # -------------------------------------------------------------------- writing

    async def _write(self, database: Database) -> None:
        entries = {entry.mark: entry for entry in await self._entries()}
        if not await self._is_known(database):
            # Rows of ours that may be there are of before something went wrong.
            self._written = {}
            await database.execute(_DELETE, (self.gateway,))
        news = [entry for mark, entry in entries.items() if self._written.get(mark) != entry]
        gone = [{"kind": kind, "id": id} for kind, id in self._written.keys() - entries.keys()]
        silence = self._period * ACTIVITY_SILENT_PERIODS
        values = (self.gateway, _text(news), _text(gone), silence)
        self._has_rows = True
        await database.execute("select headwater.write_activity(%s, %s, %s, %s)", values)
        self._written = entries

    async def _is_known(self, database: Database) -> bool:
        """Whether what we remember to have written is there. Another gateway may have taken us for
        dead, and taken our rows away."""
        if not self._written:
            return False
        return await (await database.execute(_KNOWN, (self.gateway,))).fetchone() is not None

    async def _leave(self) -> None:
        """Take the rows away, and with the connection the lock."""
        if self._has_rows:
            await (await self._connected()).execute(_DELETE, (self.gateway,))
            self._has_rows = False
        await self._drop()

    async def _connected(self) -> Database:
        if self._database is None:
            # What is lost in a crash of the server is written again.
            options = "-c synchronous_commit=off"
            self._database = await connect(self._hub.url, purpose="activity", options=options)
        return self._database

    async def _drop(self) -> None:
        database, self._database = self._database, None
        self._written, self._holds = {}, False
        if database is not None:
            await database.close()

    # -------------------------------------------------------------------- what there is to say

    async def _entries(self) -> list[Entry]:
        connections = list(self._connections())
        views: list[AnyView] = [
            *self._hub.lives, *self._hub.groups, *self._hub.feeds, *self._hub.topics
        ]  # fmt: skip
        own = await self._own(connections)
        sessions = await _costliest(connections, _session_weight)
        costly = await _costliest(views, lambda view: view.cost.weight)
        return [own, *map(_session, sessions), *map(_view, costly)]

    async def _own(self, connections: list[Connection]) -> Entry:
        # Those that end while they are counted are among the connections: count them once.
        sent, size = self._sent, self._sent_bytes
        kinds: Counter[str] = Counter()
        waiting = 0
        async for connection in _in_turns(connections):
            kinds.update(each.kind for each in connection.session.subscriptions.values())
            waiting += connection.session.buffered
            if connection.sink is not None:
                sent += connection.sink.sent
                size += connection.sink.sent_bytes
        return Entry(
            "gateway",
            self.gateway,
            None,
            socket.gethostname(),
            msgspec.Raw(encode(self._state(len(connections), kinds))),
            self._since,
            subscriptions=kinds.total(),
            sent=sent,
            bytes=size,
            waiting=waiting,
        )

    def _state(self, sessions: int, kinds: Counter[str]) -> dict[str, Any]:
        metrics = self._metrics
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "ready": self._hub.ready,
            "sessions": sessions,
            "subscriptions": kinds,
            "views": len(self._hub.lives.views),
            "changes": _total(metrics.changes),
            "flushes": _total(metrics.flushes),
            "resyncs": _total(metrics.resyncs),
            "overflows": _total(metrics.overflows),
            "refused": _total(metrics.refused),
            "lag": self._lag.since_last(),
            "flush": self._flush.since_last(),
            "at": datetime.now(UTC),  # so that it differs each time: a sign of life
        }


async def _in_turns(items: Sequence[Item]) -> AsyncIterator[Item]:
    """One after the other; now and then others have their turn, who wait for what they follow."""
    for number, item in enumerate(items, 1):
        yield item
        if number % ACTIVITY_TURN_ITEMS == 0:
            await asyncio.sleep(0)


async def _costliest(items: Sequence[Item], weight: Callable[[Item], float]) -> list[Item]:
    weights = [weight(item) async for item in _in_turns(items)]
    found = nlargest(ACTIVITY_ROWS_MAX, range(len(items)), key=weights.__getitem__)
    return [items[index] for index in found]


def _session_weight(connection: Connection) -> int:
    sink = connection.sink
    return connection.session.buffered + (0 if sink is None else sink.sent_bytes)


def _session(connection: Connection) -> Entry:
    session, sink = connection.session, connection.sink
    identity = session.identity
    views = sorted(each.view for each in session.subscriptions.values() if each.view)
    detail = {
        "address": connection.address,
        "tenant": identity.tenant,
        "role": identity.role,
        "expires_at": identity.expires_at,
        "behind": session.is_behind,
        "views": views[:ACTIVITY_VIEWS_SHOWN_MAX],
    }
    return Entry(
        "session",
        # Its own id is a secret of its client, and enough to act for it.
        hashlib.sha256(session.id.encode()).hexdigest()[:12],
        connection.transport,
        identity.user,
        _raw(detail),
        connection.since,
        subscriptions=len(session.subscriptions),
        sent=0 if sink is None else sink.sent,
        bytes=0 if sink is None else sink.sent_bytes,
        waiting=session.buffered,
    )


def _view(view: AnyView) -> Entry:
    detail: dict[str, Any]
    match view:
        case LiveView():
            role = None if view.scope is None else view.scope.role
            detail = {"query": view.wish.to_json(), "role": role, "live": view.live}
            return _costly(view, "live", view.query.table.label, detail, view.followers, view.held)
        case Group():
            identity = view.identity
            detail = {
                "args": view.arguments.values,
                "user": identity.user,
                "tenant": identity.tenant,
                "error": None if view.error is None else str(view.error),
            }
            followers = len(view.subscribers) + len(view.joining)
            return _costly(view, "query", view.query.name, detail, followers, 0)
        case FeedView():
            names = sorted(name if schema == "public" else f"{schema}.{name}"
                           for schema, name in view.names)  # fmt: skip
            of = "everything" if view.everything else ", ".join(names)
            return _costly(view, "changes", of, {"format": view.format}, len(view.subscribers), 0)
        case TopicView():
            return _costly(view, "topic", view.name, {}, len(view.subscribers), 0)


def _costly(
    view: AnyView, type: str, name: str, detail: dict[str, Any], followers: int, rows: int
) -> Entry:
    cost: Cost = view.cost
    return Entry(
        "view", str(view.id), type, name, _raw(detail), cost.since,
        subscriptions=followers, rows=rows, sent=cost.deltas, bytes=cost.bytes, runs=cost.runs,
        seconds=round(cost.seconds, 6),
    )  # fmt: skip


def _raw(detail: dict[str, Any]) -> msgspec.Raw:
    """As JSON, of bounded length: a query may be a long list of keys."""
    try:
        text = encode({name: value for name, value in detail.items() if value is not None})
    except (TypeError, ValueError):
        text = encode({"cut": repr(detail)[:ACTIVITY_DETAIL_CHARS_MAX]})
    if len(text) > ACTIVITY_DETAIL_CHARS_MAX:
        text = encode({"cut": text[:ACTIVITY_DETAIL_CHARS_MAX].decode("utf-8", "ignore")})
    return msgspec.Raw(text)


_NUL = re.compile(r"(?<!\\)((?:\\\\)*)\\u0000")


def _text(value: Any) -> str:
    """As JSON that PostgreSQL takes: a NUL, which no text there can have, is told as unknown."""
    return _NUL.sub(r"\1\\ufffd", encode(value).decode())


def _total(counter: Any) -> int:
    """Of all labels."""
    samples = (sample for family in counter.collect() for sample in family.samples)
    return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))


class Quantiles:
    """The middle and the upper end of what a histogram has seen since it was last asked."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._before: list[float] = []

    def since_last(self) -> dict[str, float] | None:
        """None where it has seen nothing."""
        samples = [s for f in self._histogram.collect() for s in f.samples]
        bounds = [float(s.labels["le"]) for s in samples if s.name.endswith("_bucket")]
        counts = [s.value for s in samples if s.name.endswith("_bucket")]
        before, self._before = self._before or [0.0] * len(counts), counts
        seen = [now - then for now, then in zip(counts, before, strict=True)]
        if not seen or not seen[-1]:
            return None
        return {"p50": quantile(bounds, seen, 0.5), "p99": quantile(bounds, seen, 0.99)}


def quantile(bounds: list[float], counts: list[float], share: float) -> float:
    """A quantile of what is counted up to each bound, evenly spread between two of them.

    >>> quantile([1, 2, 4, float("inf")], [0, 10, 10, 10], 0.5)
    1.5
    """
    wanted = counts[-1] * share
    low, below = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= wanted:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (wanted - below) / ((count - below) or 1)
        low, below = bound, count
    return low
