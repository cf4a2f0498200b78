"""What a connection may read of a table: decided when it subscribes, and checked again
periodically.

Headwater's own tables are for admins only, and are read as Headwater's own role; the application's
hook is not asked about them. A reactive query is not checked here: its function and the database
decide what it returns, and after a new token it is executed as the new identity. Deny when
undecided. While the database cannot be reached, a subscription keeps its access; any other error
ends the subscription.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from datetime import timedelta

import msgspec

from headwater.errors import Forbidden, HeadwaterError, InvalidQuery
from headwater.gateway.auth.admins import is_admin, not_admin
from headwater.gateway.auth.authorize_hook import AccessRequest, Authorize, decide
from headwater.gateway.connection import GatewayConnection
from headwater.gateway.session import (
    AnySubscription,
    ChannelSubscription,
    SessionFeed,
    SessionLive,
    SessionQuery,
    SessionTopic,
)
from headwater.hub.hub import Hub
from headwater.hub.reading.tables import KnownTable
from headwater.hub.subscriptions.subscriber import Access
from headwater.identity import Identity
from headwater.limits import RECONNECT_SECONDS
from headwater.live.filters.filter import EVERYTHING
from headwater.settings import Settings
from headwater.topics.definitions import TopicDefinition, Topics

_RECHECKS_AT_ONCE = 16
"""Subscriptions whose access is checked again at the same time."""


logger = logging.getLogger(__name__)

_ALL = ""
"""Stands for all tables, in the feed of an admin. No table has this name."""


class Authorization:
    """The access of all connections of a gateway."""

    def __init__(
        self,
        hub: Hub,
        settings: Settings,
        authorize: Authorize | None,
        topics: Topics,
        declared: Collection[str] = (),
        declared_sources: Collection[str] = (),
    ) -> None:
        """`declared` are the labels of the tables that the application declares; the mirrors of
        `declared_sources` are declared, too."""
        self._hub = hub
        self._settings = settings
        self._authorize = authorize
        self._topics = topics
        self._declared = frozenset(declared)
        self._declared_sources = frozenset(declared_sources)

    @property
    def has_hook(self) -> bool:
        """Whether the application has an authorize hook."""
        return self._authorize is not None

    async def of(
        self,
        connection: GatewayConnection,
        tables: Mapping[str, KnownTable],
        access_request: AccessRequest,
    ) -> dict[str, Access]:
        """What a connection may read of each table. The hook gets the table's name as Headwater
        prints it, not as the client wrote it."""
        identity, local = connection.session.identity, connection.local
        return {
            name: await self.of_table(identity, known, access_request, local=local)
            for name, known in tables.items()
        }

    async def of_table(
        self, identity: Identity, known: KnownTable, access_request: AccessRequest, *, local: bool
    ) -> Access:
        """The same for one table and a user without a connection. `local` says that the user is one
        of this machine."""
        table, is_admin = known.table, self._is_admin(identity, local=local)
        if table.is_system:
            if not is_admin:
                raise not_admin(self._settings.auth, f"table {table.label}")
            return Access()
        if not is_admin:
            self._check_declared(known)
        request = msgspec.structs.replace(access_request, table=table.label)
        history = self._history(is_admin=is_admin)
        return await decide(self._authorize, identity, request, history=history)

    async def of_feed(
        self,
        connection: GatewayConnection,
        tables: Mapping[str, KnownTable],
        access_request: AccessRequest,
    ) -> dict[str, Access]:
        """The same for the tables of a feed; for all tables if it names none."""
        if tables:
            return await self.of(connection, tables, access_request)
        identity = connection.session.identity
        is_admin = self._is_admin(identity, local=connection.local)
        if is_admin:
            return {_ALL: Access(whole=True)}
        is_closed = self._settings.gateway.tables == "closed"
        if self._authorize is not None or identity.role is not None or is_closed:
            raise InvalidQuery(
                "a feed of every table is for admins only: access is decided for each table",
                path="tables",
                hint="Name the tables of the feed.",
            )
        return {_ALL: Access(history=self._history(is_admin=is_admin))}

    async def of_topic(
        self,
        connection: GatewayConnection,
        definition: TopicDefinition,
        parameters: Mapping[str, str],
        access_request: AccessRequest,
    ) -> Access:
        """The access with which a topic is followed; Forbidden if it is not allowed. The topic's
        access function decides. Without one, the authorize hook must allow all rows of the topic's
        tables."""
        identity = connection.session.identity
        is_admin = self._is_admin(identity, local=connection.local)
        history = self._history(is_admin=is_admin)
        await self._topics.check(definition, parameters, identity)
        if definition.access is None and self._authorize is not None:
            for name in definition.tables:
                known = await self._hub.tables.find(name, captured=False)
                request = msgspec.structs.replace(access_request, table=known.table.label)
                access = await decide(self._authorize, identity, request, history=history)
                if access.where != EVERYTHING:
                    raise _some_rows(definition, name)
                history = _shorter(history, access.history)
        return Access(identity.role, identity.claims_json, history=history)

    def _check_declared(self, known: KnownTable) -> None:
        label = known.table.label
        if self._settings.gateway.tables == "open" or label in self._declared:
            return
        if known.source in self._declared_sources:
            return
        raise Forbidden(
            f"table {label} is not open to clients",
            hint=f"Declare it in the application: hw.table({label!r}). The setting"
            " [gateway] tables is closed.",
        )

    def _history(self, *, is_admin: bool) -> timedelta | None:
        """How far back a feed may begin, if the hook sets no time. Admins may read the whole
        log."""
        return None if is_admin else self._settings.gateway.feed_history_period

    def _is_admin(self, identity: Identity, *, local: bool) -> bool:
        return is_admin(self._settings.auth, identity, local=local)

    # -------------------------------------------------------------------- checked again

    async def recheck_all(self, connections: list[GatewayConnection]) -> None:
        """Call the hook again. Without a hook, the hub checks the rights in the database."""
        if self._authorize is None:
            connections = [each for each in connections if _needs_access_function(each)]
        at_once = asyncio.Semaphore(_RECHECKS_AT_ONCE)
        await asyncio.gather(*(self.recheck(each, at_once) for each in connections))

    async def recheck_until_decided(self, connection: GatewayConnection) -> None:
        while True:
            if await self.recheck(connection):
                return
            await asyncio.sleep(RECONNECT_SECONDS[1])

    async def recheck(
        self, connection: GatewayConnection, at_once: asyncio.Semaphore | None = None
    ) -> bool:
        """Check again what a connection may read, and apply what changed. False if that could not
        be decided now."""
        decided = True
        async with at_once or asyncio.Semaphore():
            for id in list(connection.accesses):
                subscription = connection.session.subscriptions.get(id)
                if subscription is not None:
                    decided &= await self._recheck_one(connection, subscription)
        return decided

    async def _recheck_one(
        self, connection: GatewayConnection, subscription: AnySubscription
    ) -> bool:
        try:
            if isinstance(subscription, SessionQuery):
                await self._change_identity(subscription)
            elif isinstance(subscription, SessionTopic):
                await self._follow_again(connection, subscription)
            elif isinstance(subscription, ChannelSubscription):
                assert subscription.handle is not None, "access is checked once it is open"
                await subscription.handle.recheck(connection.session.identity)
            else:
                await self._decide_again(connection, subscription)
        except HeadwaterError as error:
            if error.retryable:
                return False
            subscription.failed(error)
            subscription.close()
        except Exception:
            # Deny when undecided. One failure must not stop the check of the others.
            logger.exception("the access of a subscription could not be checked again")
            subscription.failed(
                Forbidden(
                    "your access could not be checked again",
                    hint="Subscribe again. The gateway's log has the reason.",
                )
            )
            subscription.close()
        return True

    async def _change_identity(self, subscription: SessionQuery) -> None:
        session = subscription.session
        # Another token may arrive while this one is applied, and must be applied after it.
        while subscription.identity is not session.identity and not subscription.over:
            assert subscription.handle is not None, "access is checked once it is open"
            identity = session.identity
            await subscription.handle.change_identity(identity)
            subscription.identity = identity

    async def _follow_again(
        self, connection: GatewayConnection, subscription: SessionTopic
    ) -> None:
        definition, parameters = self._topics.find(subscription.topic)
        access_request = connection.access_requests[subscription.id]
        access = await self.of_topic(connection, definition, parameters, access_request)
        handle = subscription.handle
        if handle is not None and handle.access != access:
            await self._hub.topics.admit(definition, access)
            handle.access = access

    async def _decide_again(
        self, connection: GatewayConnection, subscription: SessionLive | SessionFeed
    ) -> None:
        known, access_request = (
            connection.accesses[subscription.id],
            connection.access_requests[subscription.id],
        )
        if isinstance(subscription, SessionFeed):
            accesses = await self._of_feed_again(connection, known, access_request)
        else:
            tables = await self._hub.tables.find_each(known)
            accesses = await self.of(connection, tables, access_request)
        if accesses != known and not subscription.over:
            await self._change_access(subscription, accesses)
            if not subscription.over:
                connection.accesses[subscription.id] = accesses

    async def _of_feed_again(
        self, connection: GatewayConnection, known: dict[str, Access], access_request: AccessRequest
    ) -> dict[str, Access]:
        tables = await self._hub.tables.find_each(name for name in known if name != _ALL)
        try:
            return await self.of_feed(connection, tables, access_request)
        except InvalidQuery:  # A feed of all tables, whose user is no longer an admin.
            raise _changed() from None

    async def _change_access(
        self, subscription: SessionLive | SessionFeed, accesses: dict[str, Access]
    ) -> None:
        if isinstance(subscription, SessionFeed) or subscription.handle is None:
            raise _changed()
        (access,) = accesses.values()
        await subscription.handle.change_access(access)


def _changed() -> Forbidden:
    return Forbidden("your access has changed", code="access_changed", hint="Subscribe again.")


def _needs_access_function(connection: GatewayConnection) -> bool:
    subscriptions = connection.session.subscriptions.values()
    return any(isinstance(each, SessionTopic | ChannelSubscription) for each in subscriptions)


def _some_rows(definition: TopicDefinition, table: str) -> Forbidden:
    return Forbidden(
        f"topic {definition.pattern.text} sends whole rows of {table}, and you may read only some",
        hint="Give the topic an access function. Then that function alone decides.",
    )


def combined_access(accesses: dict[str, Access]) -> Access:
    """What a user may read of the tables of one feed."""
    several = len(accesses) > 1
    if several and any(access.where != EVERYTHING for access in accesses.values()):
        raise InvalidQuery(
            "you may read only some rows of these tables, and one feed cannot filter several"
            " tables",
            path="tables",
            hint="Open a feed for each table.",
        )
    first = next(iter(accesses.values()), Access())
    history = first.history
    for access in accesses.values():
        history = _shorter(history, access.history)
    return msgspec.structs.replace(first, history=history)


def _shorter(one: timedelta | None, other: timedelta | None) -> timedelta | None:
    """The shorter time; None is unlimited."""
    return min((each for each in (one, other) if each is not None), default=None)
