"""One-time tickets, for an EventSource, which cannot send a token in a header.

A client with a token requests a ticket and opens the stream with `?ticket=…`. URLs are logged, so a
ticket is valid for one use and a few seconds, and contains no data. Tickets are stored in the
database (`007_tickets.sql`), so every gateway accepts the tickets of the others.

The token is stored with its ticket, encrypted with the ticket itself, of which the database has
only a hash. The gateway that redeems a ticket verifies the token with its own keys and settings, as
if the client had sent the token. So a ticket never gives more access than its token, and a role
that can write to the table cannot make a ticket without a valid token.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import msgspec
import psycopg
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from headwater.database import Connection, connect, translated
from headwater.errors import (
    DatabaseError,
    LimitExceeded,
    PermissionMissing,
    Unauthorized,
    Unavailable,
)
from headwater.limits import TICKET_DATABASE_SECONDS, TICKET_SECONDS, TICKETS_PER_USER_MAX

_Result = TypeVar("_Result")

_RANDOM_BYTES = 32
_TEXT_CHARS = 43  # 32 bytes in base64url


class Ticket(msgspec.Struct, frozen=True):
    """`text` is sent to the client only, and stored nowhere."""

    text: str
    expires_at: datetime


async def issue(connection: Connection, account: str, token: str) -> Ticket:
    """A new ticket for the user of this token; LimitExceeded `tickets_per_user` if the user has too
    many unused ones."""
    text = secrets.token_urlsafe(_RANDOM_BYTES)
    cursor = await connection.execute(
        "select accepted, at from headwater.issue_ticket(%s, %s, %s, %s, %s)",
        (
            _hash(text),
            account,
            _sealed(text, token),
            timedelta(seconds=TICKET_SECONDS),
            TICKETS_PER_USER_MAX,
        ),
    )
    row = await cursor.fetchone()
    assert row is not None
    accepted, at = row
    if not accepted:
        raise LimitExceeded(
            f"{TICKETS_PER_USER_MAX} tickets of this user are unused, which is the limit",
            hint="Request a ticket only when a stream is about to be opened.",
            code="tickets_per_user",
            retry_after=_seconds_until(at),
        )
    return Ticket(text, at)


async def redeem(connection: Connection, text: str) -> str:
    """The token of a ticket, not yet verified. The ticket cannot be used again; Unauthorized
    `ticket` for an invalid one."""
    if len(text) != _TEXT_CHARS or not text.isascii():
        raise _refused()
    cursor = await connection.execute("select headwater.redeem_ticket(%s)", (_hash(text),))
    row = await cursor.fetchone()
    token = None if row is None or row[0] is None else _opened(text, row[0])
    if token is None:
        raise _refused()
    return token


def ticket_refused(hint: str) -> Unauthorized:
    """The error for a ticket where none is accepted."""
    return Unauthorized("a ticket can only open a stream", hint=hint, code="ticket")


def _sealed(text: str, token: str) -> str:
    """The token, encrypted with the ticket. Each key is used once, so the nonce can be constant."""
    return base64.b64encode(_cipher(text).encrypt(_NONCE, token.encode(), None)).decode()


def _opened(text: str, sealed: str) -> str | None:
    try:
        return _cipher(text).decrypt(_NONCE, base64.b64decode(sealed), None).decode()
    except (InvalidTag, ValueError):
        return None


def _cipher(text: str) -> AESGCM:
    return AESGCM(hashlib.sha256(b"headwater ticket\0" + text.encode()).digest())


_NONCE = bytes(12)


def _hash(text: str) -> bytes:
    # Plain SHA-256 is enough: a ticket has 256 random bits, so it cannot be guessed.
    return hashlib.sha256(text.encode()).digest()


def _seconds_until(at: datetime) -> float:
    """By this machine's clock, which may differ from the database's: limited to sensible values."""
    return min(max((at - datetime.now(UTC)).total_seconds(), 1.0), float(TICKET_SECONDS))


def _refused() -> Unauthorized:
    return Unauthorized(
        "the ticket is unknown, used or expired",
        hint=f"A ticket is valid for one use within {TICKET_SECONDS} s: request another.",
        code="ticket",
    )


class Tickets:
    """Issues and redeems tickets over one connection, which is opened when first needed and again
    when lost.

    One ticket at a time is fast enough: on a local server without fsync, the median was below 0.25
    ms.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Connection | None = None
        self._using = asyncio.Lock()

    async def issue(self, account: str, token: str) -> Ticket:
        return await self._ask(lambda connection: issue(connection, account, token))

    async def redeem(self, text: str) -> str:
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
                "tickets cannot be stored or looked up now: the database does not answer",
                hint="Try again. The gateway's /readyz shows when the database is back.",
            ) from error

    async def _answered(self, question: Callable[[Connection], Awaitable[_Result]]) -> _Result:
        """A connection that was lost while it was idle is opened again, once."""
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
            # The state of the connection is unknown.
            await self._drop()
            raise

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
