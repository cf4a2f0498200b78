"""A connection of a client: its session, sink, quota leases and timers, with I/O and clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any

from headwater.errors import HeadwaterError, InvalidQuery, LimitExceeded, NotFound
from headwater.gateway.auth.authorize_hook import AccessRequest
from headwater.gateway.backlog import Backlog
from headwater.gateway.http.transports import Sink
from headwater.gateway.quotas import Lease, QuotaOwner
from headwater.gateway.session import (
    ChannelSubscription,
    Session,
    SessionFeed,
    SessionSubscription,
    error_message,
)
from headwater.hub.subscriptions.subscriber import Access
from headwater.identity import Identity
from headwater.limits import (
    SESSION_BEHIND_SECONDS_MAX,
    SESSION_IDLE_SECONDS_MAX,
    SESSION_QUEUE_BYTES_MAX,
    SESSION_REQUESTS_MAX,
    SUBSCRIPTION_ID_CHARS_MAX,
)
from headwater.memory import Memory
from headwater.metrics import Metrics
from headwater.protocol import Frame, Keepalive

KEEPALIVE = Frame(Keepalive())


class GatewayConnection:
    """A connection, from the admission of its client until the client has disconnected."""

    __slots__ = (
        "_active_at", "_behind_since", "_caught_up", "_lease", "_leases", "_metrics", "_requests",
        "_room", "_tasks", "access_requests", "accesses", "address", "backlog", "by_ticket",
        "closing", "expiry", "local", "openings", "owner", "session", "since", "sink", "transport",
    )  # fmt: skip

    def __init__(
        self,
        id: str,
        identity: Identity,
        *,
        address: str,
        transport: str,
        lease: Lease,
        metrics: Metrics,
        memory: Memory,
        owner: QuotaOwner,
        local: bool = False,
    ) -> None:
        self.session = Session(id, identity, self)
        self.owner = owner
        """The owner of its subscriptions in quotas: the user, or the address without one."""
        waiting = memory.open(self._exceeded, in_total=False)
        waiting.join(("queue", owner))
        self.backlog = Backlog(memory, waiting)
        self.address = address
        self.local = local
        """Whether its client runs on this machine (`admins.is_local`)."""
        self.by_ticket = False
        """Whether a ticket opened it and no token was sent since: it may only subscribe."""
        self.transport = transport
        self.since = datetime.now(UTC)
        self.sink: Sink | None = None
        self.accesses: dict[str, dict[str, Access]] = {}
        """By subscription and table: the access at the last check."""
        self.access_requests: dict[str, AccessRequest] = {}
        """By subscription: the request for the authorize hook."""
        self.openings: dict[SessionSubscription, asyncio.Task[None]] | None = None
        """The subscriptions that are being opened."""
        self.closing: str | None = None
        self.expiry: asyncio.TimerHandle | None = None
        self._metrics = metrics
        self._lease = lease
        self._leases: dict[str, Lease] = {}
        self._tasks: set[asyncio.Task[None]] | None = None
        self._room: asyncio.Event | None = None
        self._caught_up: asyncio.Event | None = None
        self._requests: set[str] | None = None
        self._behind_since: float | None = None
        self._active_at = time.monotonic()

    def attach(self, sink: Sink) -> None:
        self.sink = sink
        sink.on_drain = self._drained
        sink.backlog = self.backlog
        self.session.attach(sink)
        # Subscriptions that fell behind before there was a sink would get no drain event.
        self.session.drained()
        if self.closing is not None:
            sink.close()

    def keep(self, id: str, lease: Lease) -> None:
        """Hold the quota lease of a subscription until it ends."""
        self._leases[id] = lease

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task that ends with this connection."""
        tasks = self._tasks = self._tasks or set()
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def opening(self, subscription: SessionSubscription, task: asyncio.Task[None]) -> None:
        """A subscription is being opened."""
        openings = self.openings = self.openings or {}
        openings[subscription] = task
        task.add_done_callback(lambda _: openings.pop(subscription, None))

    # -------------------------------------------------------------------- requests

    def begin_request(self, id: str) -> None:
        """Reserve the id of a request until it is answered."""
        self.check_id(id)
        requests = self._requests = self._requests or set()
        if len(requests) >= SESSION_REQUESTS_MAX:
            raise LimitExceeded(
                f"this session has {SESSION_REQUESTS_MAX} unanswered requests, which is the limit",
                hint="Wait until one of them is answered.",
                code="requests_per_session",
            )
        requests.add(id)

    def end_request(self, id: str) -> None:
        if self._requests is not None:
            self._requests.discard(id)
        self._active_at = time.monotonic()

    def check_id(self, id: str) -> None:
        """Raise InvalidQuery for an id that cannot be used for a new request or subscription."""
        if not 1 <= len(id) <= SUBSCRIPTION_ID_CHARS_MAX:
            raise InvalidQuery(f"expected 1 to {SUBSCRIPTION_ID_CHARS_MAX} characters", path="id")
        if self.uses(id):
            raise InvalidQuery(
                f"this session has a subscription or request {id!r} already",
                path="id",
                hint="Choose another id, or end that one first.",
            )

    def uses(self, id: str) -> bool:
        """Whether an error with this id would end another request or subscription."""
        return id in self.session.subscriptions or id in (self._requests or ())

    # -------------------------------------------------------------------- called by the session

    def fell_behind(self, subscription: SessionSubscription) -> None:
        match subscription:
            case SessionFeed(policy=policy) | ChannelSubscription(policy=policy):
                self._metrics.overflows.labels(policy).inc()
            case _:
                self._metrics.overflows.labels("conflate").inc()

    def caught_up(self, subscription: SessionSubscription) -> None:
        if self._caught_up is not None:
            self._caught_up.set()

    def forgotten(self, subscription: SessionSubscription) -> None:
        self.accesses.pop(subscription.id, None)
        self.access_requests.pop(subscription.id, None)
        if lease := self._leases.pop(subscription.id, None):
            lease.close()
        self._active_at = time.monotonic()
        self.caught_up(subscription)

    async def all_sent(self) -> None:
        """Wait until no subscription has unsent messages."""
        while any(each.has_unsent for each in self.session.subscriptions.values()):
            self._caught_up = self._caught_up or asyncio.Event()
            self._caught_up.clear()
            await self._caught_up.wait()

    async def room(self) -> None:
        while self.session.buffered > SESSION_QUEUE_BYTES_MAX // 4 and self.closing is None:
            self._room = self._room or asyncio.Event()
            self._room.clear()
            await self._room.wait()

    def _drained(self) -> None:
        if self._room is not None:
            self._room.set()
        self.session.drained()

    # -------------------------------------------------------------------- time passes

    def tick(self, now: float) -> None:
        """Called periodically: send a keepalive, or end a connection that is behind or idle too
        long."""
        session = self.session
        if session.is_behind:
            self._behind_since = self._behind_since or now
            if now - self._behind_since > SESSION_BEHIND_SECONDS_MAX:
                self.abort("behind")
            return
        self._behind_since = None
        idle = not (session.subscriptions or self._requests)
        if idle and now - self._active_at > SESSION_IDLE_SECONDS_MAX:
            self.end("idle")
        elif self.sink is not None and session.buffered == 0:
            self.sink.send(KEEPALIVE)

    # -------------------------------------------------------------------- the end

    def end(self, reason: str, error: HeadwaterError | None = None) -> None:
        """End the connection after what is queued and the reason were sent."""
        if self.closing is not None:
            return
        self._close(reason)
        if error is not None:
            self.session.send(error_message(error))
        if self.sink is not None:
            self.sink.close()

    def abort(self, reason: str) -> None:
        """End the connection immediately, without sending what is queued."""
        if self.closing is None:
            self._close(reason)
        if self.sink is not None:
            self.sink.abort()

    def _exceeded(self, *_: object) -> None:
        """Too many bytes wait for the client. It does not read, so it cannot be sent the reason."""
        self.abort("memory")
        self.backlog.close()

    def _close(self, reason: str) -> None:
        self.closing = reason
        self._metrics.closed.labels(reason).inc()
        if self._room is not None:
            self._room.set()

    def release(self) -> None:
        """Release everything. The client has disconnected."""
        self.closing = self.closing or "gone"
        if self.expiry is not None:
            self.expiry.cancel()
        for task in self._tasks or ():
            task.cancel()
        self.session.close()
        self.backlog.close()
        self._lease.close()
        if self._room is not None:
            self._room.set()


def no_session() -> NotFound:
    """The error for a session that has ended or belongs to another gateway."""
    return NotFound(
        "this gateway has no such session",
        code="session_unknown",
        hint="A session ends with its connection and exists in one gateway only. Send the request"
        " to the gateway that holds the stream, or use /v1/ws.",
    )
