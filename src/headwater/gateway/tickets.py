"""One-time tickets: what an EventSource, which cannot send a header, shows instead of a token.

A client with a token asks for a ticket and opens the stream with `?ticket=…`. A URL ends up in
logs, so a ticket is good for one use and a few seconds, and says nothing by itself. Tickets are
kept in the database (`007_tickets.sql`), as hashes: any gateway takes one that another gave out,
and whoever reads the table has none. The session that a ticket opens ends when the token would
have.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import msgspec
import psycopg

from headwater.database import Connection, connect, translated
from headwater.errors import (
    DatabaseError,
    LimitExceeded,
    PermissionMissing,
    Unauthorized,
    Unavailable,
)
from headwater.identity import Identity
from headwater.limits import TICKET_DATABASE_SECONDS, TICKET_SECONDS, TICKETS_PER_USER_MAX

_Result = TypeVar("_Result")

_RANDOM_BYTES = 32
_TEXT_CHARS = 43  # of as many bytes in base64url


class Ticket(msgspec.Struct, frozen=True):
    """`text` is told to nobody but the client."""

    text: str
    expires_at: datetime


async def issue(connection: Connection, identity: Identity) -> Ticket:
    """A new ticket for this user; LimitExceeded `tickets_per_user` for one who hoards them."""
    text = secrets.token_urlsafe(_RANDOM_BYTES)
    cursor = await connection.execute(
        "select accepted, at from headwater.issue_ticket(%s, %s, %s, %s, %s)",
        (
            _hash(text),
            identity.account or "",
            msgspec.json.encode(identity).decode(),
            timedelta(seconds=TICKET_SECONDS),
            TICKETS_PER_USER_MAX,
        ),
    )
    row = await cursor.fetchone()
    assert row is not None
    accepted, at = row
    if not accepted:
        raise LimitExceeded(
            f"{TICKETS_PER_USER_MAX} tickets of this user are not used yet, which is the most",
            hint="Ask for a ticket when a stream is about to be opened, not before.",
            code="tickets_per_user",
            retry_after=_seconds_until(at),
        )
    return Ticket(text, at)


async def redeem(connection: Connection, text: str) -> Identity:
    """Who the ticket was given to. It is used up; Unauthorized `ticket` for one that does not hold,
    `token_expired` where the token has ended since."""
    if len(text) != _TEXT_CHARS or not text.isascii():
        raise _refused()
    cursor = await connection.execute("select headwater.redeem_ticket(%s)", (_hash(text),))
    row = await cursor.fetchone()
    if row is None or row[0] is None:
        raise _refused()
    identity = msgspec.json.decode(row[0], type=Identity)
    if identity.expires_at is not None and identity.expires_at <= datetime.now(UTC):
        raise Unauthorized(
            "the token that the ticket was given for has expired",
            hint="Get a new token, and a ticket with it.",
            code="token_expired",
        )
    return identity


def _hash(text: str) -> bytes:
    # Plain SHA-256 will do: there are 256 random bits in it, so nothing to guess.
    return hashlib.sha256(text.encode()).digest()


def _seconds_until(at: datetime) -> float:
    """By our clock, which is not the database's: kept within what makes sense."""
    return min(max((at - datetime.now(UTC)).total_seconds(), 1.0), float(TICKET_SECONDS))


def _refused() -> Unauthorized:
    return Unauthorized(
        "the ticket is unknown, used or over",
        hint=f"A ticket is good for one use within {TICKET_SECONDS} s: ask for another.",
        code="ticket",
    )


class Tickets:
    """Tickets over one connection that is opened when first needed and again when lost.

    One at a time is enough: measured on a local server without fsync, half of them took less
    than 0.25 ms.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Connection | None = None
        self._using = asyncio.Lock()

    async def issue(self, identity: Identity) -> Ticket:
        return await self._ask(lambda connection: issue(connection, identity))

    async def redeem(self, text: str) -> Identity:
        return await self._ask(lambda connection: redeem(connection, text))

    async def __aenter__(self) -> Tickets:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        async with self._using:
            await self._drop()

    async def _ask(self, question: Callable[[Connection], Awaitable[_Result]]) -> _Result:
        try:
            async with asyncio.timeout(TICKET_DATABASE_SECONDS), self._using:
                with translated(self._url):
                    return await self._answered(question)
        except PermissionMissing:
            raise
        except (TimeoutError, DatabaseError) as error:
            raise Unavailable(
                "tickets cannot be kept or looked up now: the database does not answer",
                hint="Try again. The gateway's /readyz tells when it is back.",
            ) from error

    async def _answered(self, question: Callable[[Connection], Awaitable[_Result]]) -> _Result:
        """A connection that was lost while nobody used it is opened again, once."""
        used = self._connection is not None
        try:
            return await self._put(question)
        except psycopg.OperationalError:
            if not used:
                raise
        return await self._put(question)

    async def _put(self, question: Callable[[Connection], Awaitable[_Result]]) -> _Result:
        if self._connection is None:
            self._connection = await connect(self._url, purpose="tickets")
        try:
            return await question(self._connection)
        except (psycopg.Error, asyncio.CancelledError):
            # In which state it is now nobody knows.
            await self._drop()
            raise

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
