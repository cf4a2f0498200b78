"""The gateway: admits connections, opens their subscriptions, and ends them.

It has everything between a request and the hub that is not HTTP. Requests come from `http.app`,
which knows paths and status codes. `session` decides what a slow client gets, `auth.authorization`
what a user may read.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from opentelemetry.context import Context

from headwater.channels.definitions import Channels
from headwater.channels.registry import ChannelRegistry
from headwater.errors import (
    InvalidQuery,
    NotFound,
    Unauthorized,
    Unavailable,
)
from headwater.gateway.activity import ACTIVITY_PERIOD, TABLE, Activity
from headwater.gateway.auth.authorization import Authorization, combined_access
from headwater.gateway.auth.authorize_hook import AccessRequest, Authorize
from headwater.gateway.auth.tickets import Ticket, Tickets
from headwater.gateway.auth.tokens import Authenticator, Credentials, missing
from headwater.gateway.calls import CallHandler
from headwater.gateway.channels import ChannelHandler
from headwater.gateway.connection import GatewayConnection, no_session
from headwater.gateway.http.addresses import Proxies
from headwater.gateway.http.tracing import traced
from headwater.gateway.quotas import Quotas, owner_of
from headwater.gateway.session import (
    AnySubscription,
    ChannelSubscription,
    Session,
    SessionFeed,
    SessionLive,
    SessionQuery,
    SessionTopic,
)
from headwater.hub.feeds.view import FeedQuery
from headwater.hub.hub import Hub
from headwater.hub.reading.row_security import feed_rights
from headwater.hub.reading.tables import KnownTable
from headwater.hub.subscriptions.subscriber import Access
from headwater.identity import Identity, anonymous
from headwater.limits import (
    ARGUMENT_VALUES_MAX,
    BEHIND_SECONDS_MAX,
    FEED_TABLES_MAX,
    SUBSCRIBE_BYTES_PER_REQUEST,
)
from headwater.live.filters.filter import EVERYTHING, Filter, from_json
from headwater.live.query import LiveQuery
from headwater.metrics import Metrics
from headwater.model import Position
from headwater.protocol import (
    VERSION,
    Answer,
    Authenticated,
    ChangesQuery,
    ChannelCall,
    Hello,
    Publish,
    QueryCall,
    Reanchor,
    SetState,
    Subscribe,
)
from headwater.queries.execution.mutations import MutationRunner
from headwater.queries.functions import Mutation, Query
from headwater.settings import Settings
from headwater.topics.definitions import Topics

_KEEPALIVE_SLOTS = 16
"""Connections are divided into this many groups, which get their keepalives one after the other."""


logger = logging.getLogger(__name__)


class Gateway:
    """Use as an async context manager, inside that of its hub."""

    def __init__(
        self,
        hub: Hub,
        settings: Settings,
        *,
        url: str,
        authorize: Authorize | None = None,
        metrics: Metrics | None = None,
        queries: Mapping[str, Query] = {},
        mutations: Mapping[str, Mutation] = {},
        runner: MutationRunner | None = None,
        topics: Topics | None = None,
        channels: Channels | None = None,
        registry: ChannelRegistry | None = None,
        declared: Collection[str] = (),
        declared_sources: Collection[str] = (),
        activity_period: timedelta = ACTIVITY_PERIOD,
        measure_database: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`queries` and `mutations` are the functions of the application by name; `runner` executes
        mutations; `topics` and `channels` are the declared ones, and `registry` has the open
        channels; `declared` are the tables that the application declares, and
        `declared_sources` its sources, whose mirrors are declared too; `measure_database`
        sets the metrics that are read from the database."""
        self.hub = hub
        self.calls = CallHandler(hub, queries, mutations, runner)
        self.settings = settings
        self.metrics = metrics or Metrics()
        self.quotas = Quotas(settings.limits)
        self.channels = ChannelHandler(channels or Channels(), registry, self.quotas)
        self.proxies = Proxies(settings.gateway)
        self._measure_database = measure_database
        self.stopping = False
        self._authenticator = Authenticator.from_settings(settings.auth)
        self._topics = Topics() if topics is None else topics
        self._authorization = Authorization(
            hub, settings, authorize, self._topics, declared, declared_sources
        )
        self._tickets = Tickets(url)
        self._connections: dict[str, GatewayConnection] = {}
        self.activity = Activity(hub, self.metrics, self._connections.values, activity_period)
        self._slots: list[dict[GatewayConnection, None]] = [{} for _ in range(_KEEPALIVE_SLOTS)]
        self._opened = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Gateway:
        if self.settings.opens_every_table and not self.has_hook:
            logger.warning(
                "every client with a token may read every enabled table: declare @hw.authorize,"
                ' or set [auth] role, or set [gateway] tables = "closed" and declare tables'
            )
        self._start(self._keep_alive())
        self._start(self._recheck_often())
        self._start(self.activity.run())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in list(self._connections.values()):
            self.release(connection)
        await self.calls.close()
        await self._tickets.__aexit__()
        if self._authenticator is not None:
            await self._authenticator.close()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -------------------------------------------------------------------- who

    @property
    def has_hook(self) -> bool:
        """Whether the application has an authorize hook."""
        return self._authorization.has_hook

    async def identify(self, credentials: Credentials) -> Identity:
        """The identity of a request; an anonymous one if no authentication is configured."""
        if self._authenticator is None:
            if credentials.ticket is not None:
                raise _no_tickets()
            return anonymous(self.settings.auth)
        token = credentials.token
        if credentials.ticket is not None:
            token = await self._tickets.redeem(credentials.ticket)
        if token is None:
            raise missing()
        return await self._authenticator.verify(token)

    def count_request(self, account: str | None, address: str, *, weight: int = 1) -> None:
        """Raise LimitExceeded for an owner with too many requests."""
        self.quotas.request(account, address, time.monotonic(), weight=weight)

    def check_address(self, address: str) -> None:
        """Raise LimitExceeded for an address with too many requests without a user."""
        self.quotas.check_address(address, time.monotonic())

    async def issue_ticket(self, identity: Identity, token: str | None) -> Ticket:
        """A ticket for this token, by which the caller was identified."""
        if self._authenticator is None or token is None:
            raise _no_tickets()
        return await self._tickets.issue(identity.account or "", token)

    async def authenticate(self, connection: GatewayConnection, token: str) -> Authenticated:
        """Replace the token of a connection by a new one of the same user."""
        session = connection.session
        if self._authenticator is not None:
            session.identity = await self._authenticator.renew(token, session.identity)
            connection.by_ticket = False
            self._expect_expiry(connection)
            connection.start(self._authorization.recheck_until_decided(connection))
        return Authenticated(session.identity.expires_at)

    async def past_of(
        self, identity: Identity, name: str, *, local: bool
    ) -> tuple[KnownTable, Access]:
        """A table, and what this user may read of its past: what a change feed from the beginning
        would show. Forbidden where there may be none."""
        known = await self.hub.tables.find(name)
        log = "0" if self.hub.position is None else self.hub.position.log
        asked = AccessRequest(kind="feed", table="", since=Position(log, 1, 1))
        access = await self._authorization.of_table(identity, known, asked, local=local)
        table = known.table
        await feed_rights(self.hub.tables, table.oid, table.label, known.secured, access)
        return known, access

    # -------------------------------------------------------------------- connections

    def open(
        self,
        identity: Identity,
        *,
        address: str,
        transport: str,
        local: bool = False,
        by_ticket: bool = False,
    ) -> GatewayConnection:
        """A connection, within the quotas. The caller releases it. `local` says that its client
        runs on this machine, `by_ticket` that it has not sent its token yet."""
        if self.stopping:
            raise Unavailable("the gateway is stopping", hint="Connect again in a moment.")
        lease = self.quotas.session(identity.account, address)
        connection = GatewayConnection(
            secrets.token_urlsafe(16),
            identity,
            address=address,
            transport=transport,
            lease=lease,
            metrics=self.metrics,
            memory=self.hub.memory,
            owner=owner_of(identity.account, address),
            local=local,
        )
        connection.by_ticket = by_ticket
        self._connections[connection.session.id] = connection
        self._opened += 1
        self._slots[self._opened % _KEEPALIVE_SLOTS][connection] = None
        self.metrics.opened.labels(transport).inc()
        keepalive = self.settings.gateway.keepalive_period.total_seconds()
        hello = Hello(connection.session.id, VERSION, keepalive, identity.expires_at)
        connection.session.send(hello)
        self._expect_expiry(connection)
        return connection

    def release(self, connection: GatewayConnection) -> None:
        """Forget a connection: its client has disconnected or was not admitted."""
        if self._connections.pop(connection.session.id, None) is not None:
            for slot in self._slots:
                slot.pop(connection, None)
            self.activity.usage.ended(connection)
            connection.release()

    def find(self, session: str, identity: Identity) -> GatewayConnection:
        """The open connection of that session, for its own user only."""
        connection = self._connections.get(session)
        if connection is None or not _same_user(identity, connection.session.identity):
            raise no_session()
        return connection

    def _expect_expiry(self, connection: GatewayConnection) -> None:
        if connection.expiry is not None:
            connection.expiry.cancel()
            connection.expiry = None
        expires_at = connection.session.identity.expires_at
        if expires_at is not None:
            left = (expires_at - datetime.now(UTC)).total_seconds()
            loop = asyncio.get_running_loop()
            connection.expiry = loop.call_later(max(left, 0), self._expire, connection)

    def _expire(self, connection: GatewayConnection) -> None:
        error = Unauthorized(
            "the token has expired",
            code="token_expired",
            hint="Connect again with a new token. On an open connection, send a new token before"
            " the old one expires.",
        )
        connection.end("token_expired", error)

    # -------------------------------------------------------------------- subscriptions

    async def subscribe_once(
        self, connection: GatewayConnection, message: Subscribe, *, parent: Context | None = None
    ) -> None:
        """The same for an HTTP request. Browsers repeat a request whose connection was cut before
        the response: the repetition is then for the same subscription."""
        digest = hash(msgspec.json.encode(message))
        known = connection.session.subscriptions.get(message.id)
        if known is None or known.digest != digest:
            await self.subscribe(connection, message, parent=parent, digest=digest)
        elif connection.openings and (opening := connection.openings.get(known)) is not None:
            await asyncio.wait({opening})
            if not opening.cancelled():
                opening.result()

    async def subscribe(
        self,
        connection: GatewayConnection,
        message: Subscribe,
        *,
        parent: Context | None = None,
        digest: int | None = None,
    ) -> None:
        """Open a subscription. Its messages are sent through the connection's session; errors in
        the request are raised."""
        connection.check_id(message.id)
        if connection.closing is not None:
            raise no_session()
        session = connection.session
        subscription = _subscription(session, message)
        subscription.digest = digest
        # The cost of a filter grows with its length; the request itself is counted already.
        if weight := len(msgspec.json.encode(message.live)) // SUBSCRIBE_BYTES_PER_REQUEST:
            self.count_request(session.identity.account, connection.address, weight=weight)
        lease = self.quotas.subscription(session.identity.account, connection.address)
        session.add(subscription)
        connection.keep(message.id, lease)
        attributes = {"headwater.kind": subscription.kind}
        if message.query is not None:
            attributes["headwater.function"] = message.query.name
        with traced("headwater.subscribe", attributes, parent) as trace_id:
            opening = self._open(connection, subscription, message, trace_id)
            await self._until_open(connection, subscription, asyncio.create_task(opening))

    async def _open(
        self,
        connection: GatewayConnection,
        subscription: AnySubscription,
        message: Subscribe,
        trace_id: str | None,
    ) -> None:
        if not isinstance(subscription, ChannelSubscription):
            subscription.lost = not await self._has_read(subscription, message)
        match subscription:
            case SessionTopic():
                await self._open_topic(connection, subscription, message)
            case SessionLive():
                await self._open_live(connection, subscription, message)
            case SessionQuery():
                await self._open_query(connection, subscription, message, trace_id)
            case SessionFeed():
                await self._open_feed(connection, subscription, message)
            case ChannelSubscription():
                identity = connection.session.identity
                await self.channels.open(connection, subscription, message)
                self._opened_with(connection, subscription, {}, identity)

    async def _has_read(self, subscription: AnySubscription, message: Subscribe) -> bool:
        """Wait until this gateway has read the log up to the positions that the client has seen.
        Returns whether the database has all of these positions."""
        positions = [_position_or_none(message.since), read_position(message.after, "after")]
        if message.changes is not None:
            positions.append(read_position(message.changes.since))
        # The positions of feeds and topics are rounded down to what is on disk: the client may have
        # seen more.
        newest = isinstance(subscription, SessionFeed)
        found = [
            await self.hub.contains(each, newest=newest, seconds=BEHIND_SECONDS_MAX)
            for each in positions
            if each is not None
        ]
        return all(found)

    async def _until_open(
        self,
        connection: GatewayConnection,
        subscription: AnySubscription,
        opening: asyncio.Task[None],
    ) -> None:
        """Raises the errors of the opening; none if it was cancelled because the client has ended
        the subscription or disconnected meanwhile."""
        subscription.give_up = opening.cancel
        connection.opening(subscription, opening)
        try:
            await asyncio.wait({opening})
            if not subscription.over:
                opening.result()
            elif not opening.cancelled():
                opening.exception()  # no client waits for it
        except BaseException:
            connection.session.forget(subscription)
            subscription.close()
            raise

    async def _open_live(
        self, connection: GatewayConnection, subscription: SessionLive, message: Subscribe
    ) -> None:
        _check_conflated(message, "a live query")
        assert message.live is not None
        query = LiveQuery.from_json(message.live)
        identity = connection.session.identity
        access_request = AccessRequest(
            kind="live",
            table=query.table,
            columns=query.columns,
            where=query.where,
            order=query.order,
            limit=query.limit,
            after=query.after,
            mode=query.mode,
        )
        known = await self.hub.tables.find(query.table)
        tables = {query.table: known}
        accesses = await self._authorization.of(connection, tables, access_request)
        handle = await self.hub.live(
            query,
            subscription,
            known=None if self._authorization.has_hook else known,  # it may have been replaced
            access=accesses[query.table],
            since=message.since,
            verify=message.verify,
            owner=connection.owner,
        )
        self._opened_with(connection, subscription, accesses, identity, access_request)
        subscription.opened(handle)
        if handle.is_of(*TABLE):
            self.activity.wake()

    async def _open_query(
        self,
        connection: GatewayConnection,
        subscription: SessionQuery,
        message: Subscribe,
        trace_id: str | None,
    ) -> None:
        _check_conflated(message, "a reactive query")
        if message.verify:
            raise InvalidQuery(
                "messages of a reactive query carry no hash",
                path="verify",
                hint="Leave verify out.",
            )
        call = message.query
        assert call is not None
        query = self.calls.query(call.name)
        handle = await self.hub.reactive.subscribe(
            query,
            query.bind(call.args, most=ARGUMENT_VALUES_MAX),
            subscription.identity,
            subscription,
            since=message.since,
            delta=call.delta,
            trace_id=trace_id,
            owner=connection.owner,
        )
        self._opened_with(connection, subscription, {}, subscription.identity)
        subscription.opened(handle)

    async def _open_feed(
        self, connection: GatewayConnection, subscription: SessionFeed, message: Subscribe
    ) -> None:
        if subscription.policy == "conflate":
            raise InvalidQuery(
                "a change feed cannot be conflated: it sends each change",
                path="overflow",
                hint="Use pause or drop.",
            )
        assert message.changes is not None
        query = _feed_query(message.changes)
        identity = connection.session.identity
        where = EVERYTHING if query.where is None else query.where
        access_request = AccessRequest(kind="feed", table="", where=where, since=query.since)
        tables = await self.hub.tables.find_each(query.tables)
        accesses = await self._authorization.of_feed(connection, tables, access_request)
        access = combined_access(accesses)
        # While a hook decides, tables can be altered or replaced: then they are looked up again.
        known = () if self._authorization.has_hook else tables.values()
        handle = await self.hub.feed(query, subscription, known=known, access=access)
        self._opened_with(connection, subscription, accesses, identity, access_request)
        subscription.opened(handle)

    async def _open_topic(
        self, connection: GatewayConnection, subscription: SessionTopic, message: Subscribe
    ) -> None:
        if subscription.policy == "conflate":
            raise InvalidQuery(
                "a topic cannot be conflated: it sends each changed row",
                path="overflow",
                hint="Use pause or drop.",
            )
        if message.verify:
            raise InvalidQuery(
                "messages of a topic carry no hash", path="verify", hint="Leave verify out."
            )
        since = read_position(message.since)
        definition, parameters = self._topics.find(subscription.topic)
        identity = connection.session.identity
        access_request = AccessRequest(
            kind="topic", table="", since=since, topic=subscription.topic
        )
        access = await self._authorization.of_topic(
            connection, definition, parameters, access_request
        )
        handle = await self.hub.topics.subscribe(
            subscription.topic, definition, subscription, since, access=access
        )
        self._opened_with(connection, subscription, {}, identity, access_request)
        subscription.opened(handle)

    def _opened_with(
        self,
        connection: GatewayConnection,
        subscription: AnySubscription,
        accesses: dict[str, Access],
        identity: Identity,
        access_request: AccessRequest | None = None,
    ) -> None:
        if subscription.over:
            return
        connection.accesses[subscription.id] = accesses
        if access_request is not None:
            connection.access_requests[subscription.id] = access_request
        if connection.session.identity is not identity:
            # A new token arrived meanwhile; decisions under the old one may be out of date.
            connection.start(self._authorization.recheck_until_decided(connection))

    async def reanchor(self, connection: GatewayConnection, message: Reanchor) -> None:
        """Move a live query's window; answered if `request` is set."""
        subscription = connection.session.subscriptions.get(message.id)
        if not isinstance(subscription, SessionLive) or subscription.handle is None:
            raise NotFound(
                f"this session has no live query {message.id!r:.100}",
                code="subscription_unknown",
                hint="The subscription may have ended. Subscribe again.",
            )
        await subscription.handle.reanchor(message.after)
        if message.request is not None:
            connection.session.send(Answer(message.request, str(self.hub.position or "")))

    async def send_to_channel(
        self, connection: GatewayConnection, message: Publish | SetState
    ) -> None:
        """Publish on a channel, or change the state there; answered if `request` is set."""
        request = message.request
        if request is not None:
            connection.begin_request(request)
        try:
            match message:
                case Publish(id, data, idempotency_key=key):
                    await self.channels.publish(connection, id, data, key)
                case SetState(id, state):
                    self.channels.set_state(connection, id, state)
        finally:
            if request is not None:
                connection.end_request(request)
        if request is not None:
            connection.session.send(Answer(request, str(self.hub.position or "")))

    # -------------------------------------------------------------------- time passes

    async def _recheck_often(self) -> None:
        while True:
            await asyncio.sleep(self.settings.gateway.recheck_period.total_seconds())
            await self._authorization.recheck_all(list(self._connections.values()))

    async def _keep_alive(self) -> None:
        pause = self.settings.gateway.keepalive_period.total_seconds() / _KEEPALIVE_SLOTS
        while True:
            for slot in self._slots:
                await asyncio.sleep(pause)
                now = time.monotonic()
                for connection in list(slot):
                    connection.tick(now)

    async def stop(self) -> None:
        """Refuse new connections, and ask all clients to reconnect. A client with a running
        mutation gets that message after the answer, so that it knows the outcome."""
        self.stopping = True
        error = Unavailable(
            "the gateway is stopping", code="stopping", hint="Connect again in a moment."
        )
        busy = self.calls.mutating
        for connection in [each for each in self._connections.values() if each not in busy]:
            connection.end("stopping", error)
        await self.calls.answered(self.settings.gateway.drain_period.total_seconds())
        for connection in list(self._connections.values()):
            connection.end("stopping", error)

    # -------------------------------------------------------------------- state and metrics

    @property
    def not_ready_reason(self) -> str | None:
        """Why clients should not be routed to this gateway; None if it is ready."""
        if self.stopping:
            return "stopping"
        return None if self.hub.ready else (self.hub.problem or "starting")

    async def measure(self) -> bytes:
        """The metrics, including those that are computed on request."""
        if self._measure_database is not None:
            await self._measure_database()
        connections = self._connections.values()
        transports = Counter(c.transport for c in connections)
        for transport in ("sse", "websocket", "ndjson"):
            self.metrics.sessions.labels(transport).set(transports[transport])
        kinds = Counter(s.kind for c in connections for s in c.session.subscriptions.values())
        for kind in ("live", "query", "changes", "topic", "channel"):
            self.metrics.subscriptions.labels(kind).set(kinds[kind])
        memory = self.hub.memory
        self.metrics.memory_bytes.set(memory.total)
        self.metrics.memory_largest_bytes.set(max((held for _, held in memory.owners), default=0))
        self.metrics.stalled_bytes.set(sum(c.session.buffered for c in connections))
        return self.metrics.render()


def _no_tickets() -> Unauthorized:
    return Unauthorized(
        "this gateway verifies no tokens, so it neither issues nor accepts tickets",
        hint="Connect without a ticket, or configure authentication.",
        code="ticket",
    )


def _same_user(one: Identity, other: Identity) -> bool:
    return (one.user, one.tenant) == (other.user, other.tenant)


def _subscription(session: Session, message: Subscribe) -> AnySubscription:
    match message.live, message.query, message.changes, message.topic, message.channel:
        case dict(), None, None, None, None:
            return SessionLive(session, message.id)
        case None, QueryCall(), None, None, None:
            return SessionQuery(session, message.id)
        case None, None, ChangesQuery(), None, None:
            return SessionFeed(session, message.id, message.overflow or "pause")
        case None, None, None, str(topic), None:
            return SessionTopic(session, message.id, message.overflow or "pause", topic)
        case None, None, None, None, ChannelCall(name):
            return ChannelSubscription(session, message.id, name)
    raise InvalidQuery("expected exactly one of live, query, changes, topic and channel")


def _check_conflated(message: Subscribe, what: str) -> None:
    if message.overflow not in (None, "conflate"):
        raise InvalidQuery(
            f"expected conflate: of {what}, only the current state is sent",
            path="overflow",
            hint="Leave overflow out.",
        )


def _feed_query(message: ChangesQuery) -> FeedQuery:
    if len(message.tables) > FEED_TABLES_MAX:
        raise InvalidQuery(
            f"expected at most {FEED_TABLES_MAX} tables", path="tables", hint="Open several feeds."
        )
    where: Filter | None = None
    if message.where is not None:
        if len(message.tables) != 1:
            raise InvalidQuery(
                "a filter needs exactly one table",
                path="where",
                hint="Name one table, or leave the filter out.",
            )
        where = from_json(message.where)
    return FeedQuery(message.tables, where, read_position(message.since), message.format)


def _position_or_none(text: str | None) -> Position | None:
    """A live or reactive query with a `since` that is no position begins with a snapshot."""
    try:
        return read_position(text)
    except InvalidQuery:
        return None


def read_position(text: str | None, path: str = "since") -> Position | None:
    try:
        return None if text is None else Position.parse(text)
    except ValueError:
        raise InvalidQuery(
            f"{text!r:.100} is not a position",
            path=path,
            hint="Use the position of a message without changing it.",
        ) from None
