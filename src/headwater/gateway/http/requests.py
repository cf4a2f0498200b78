"""The checks that every request passes first: its address, its rate, its token, its body.

Never reads more of a body than is allowed, also if its headers announce less.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import Any, TypeVar

import msgspec
from starlette.requests import HTTPConnection, Request

from headwater.errors import Forbidden, HeadwaterError, InvalidQuery, LimitExceeded
from headwater.gateway.auth.admins import is_local
from headwater.gateway.auth.tickets import ticket_refused
from headwater.gateway.auth.tokens import Credentials, find_token
from headwater.gateway.gateway import Gateway
from headwater.gateway.http.bodies import check_json_size
from headwater.idempotency import check_key
from headwater.identity import Identity
from headwater.limits import REQUEST_BODY_SECONDS, REQUEST_BYTES_MAX

Body = TypeVar("Body")


class HttpCaller:
    """The identity and the address of a request."""

    __slots__ = ("address", "by_cookie", "by_ticket", "identity", "local", "token")

    def __init__(
        self, identity: Identity, address: str, found: Credentials, *, local: bool = False
    ) -> None:
        self.identity = identity
        self.address = address
        self.token = found.token
        self.by_cookie = found.from_cookie
        self.by_ticket = found.ticket is not None
        self.local = local
        """Whether a user of this machine made the request (`admins.is_local`)."""


async def admit(
    gateway: Gateway, request: HTTPConnection, *, opens_stream: bool = False
) -> HttpCaller:
    """Admit a request, or raise the error that refuses it. Only a request that `opens_stream` may
    have a ticket: URLs are logged, and a link can contain one."""
    settings = gateway.settings
    address = _address(gateway, request)
    found = find_token(request.headers, request.query_params, request.cookies, settings.auth)
    if found.ticket is not None and not opens_stream:
        raise ticket_refused("Send Authorization: Bearer … with this request.")
    proven = found.ticket is not None or (found.token is not None and not found.from_cookie)
    # Without authentication a token is not verified, so it proves nothing.
    if not (proven and settings.auth.has_key):
        _check_origin(request, settings.gateway.origins, by_cookie=found.from_cookie)
    identity = await _identified(gateway, found, address)
    local = is_local(request, settings)
    return HttpCaller(identity, address, found, local=local)


async def identify(gateway: Gateway, request: HTTPConnection, token: str) -> Identity:
    """The identity in a token that was sent in a request's body; counted as in `admit`."""
    return await _identified(gateway, Credentials(token), _address(gateway, request))


async def _identified(gateway: Gateway, found: Credentials, address: str) -> Identity:
    """The identity of a request. The request counts for the user; without a user, for the address,
    because the users of an office share one. A ticket from an address with too many requests is
    refused before the database is queried."""
    if found.ticket is not None:
        gateway.check_address(address)
    try:
        identity = await gateway.identify(found)
    except HeadwaterError:
        gateway.count_request(None, address)
        raise
    gateway.count_request(identity.account, address)
    return identity


def _address(gateway: Gateway, request: HTTPConnection) -> str:
    """The client's address."""
    peer = request.client.host if request.client else None
    return gateway.proxies.client(peer, request.headers.getlist("x-forwarded-for"))


def _check_origin(request: HTTPConnection, origins: tuple[str, ...], *, by_cookie: bool) -> None:
    """A browser sends cookies with the requests of any page, and lets any page open a WebSocket. So
    a page without a token must have an allowed origin. `*` does not allow an origin to use the
    user's cookie: for that the settings must name the origin."""
    origin = request.headers.get("origin")
    if origin is None or origin in origins or ("*" in origins and not by_cookie):
        return
    if origin.partition("://")[2] != request.headers.get("host"):
        raise Forbidden(
            f"pages of {origin!r:.200} may not use this gateway",
            code="origin",
            hint="Add the origin to the setting [gateway] origins, or send a token.",
        )


def shows_metrics_token(request: Request, expected: str | None) -> bool:
    """Whether a request has the `expected` token for metrics."""
    if expected is None:
        return False
    sent = request.headers.get("authorization", "")
    return hmac.compare_digest(sent.encode("utf-8", "replace"), f"Bearer {expected}".encode())


def check_deliberate(request: Request, caller: HttpCaller) -> None:
    """Refuse a request that a form of another site could have sent with the user's cookie. The
    origin is checked before, but not every HTTP client sends one; a form cannot send JSON as its
    content type."""
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if caller.by_cookie and sent != "application/json":
        raise Forbidden(
            "with a cookie, a mutation must be sent as JSON",
            code="content_type",
            hint="Send Content-Type: application/json, or a token.",
        )


def idempotency_key(request: Request, in_body: str | None = None) -> str | None:
    """The idempotency key of a request; None if it has none."""
    given = request.headers.getlist("idempotency-key")
    if len(given) + (in_body is not None) > 1:
        raise InvalidQuery(
            f"expected one key, got {len(given) + (in_body is not None)}",
            path="idempotency_key",
            hint="Send the header Idempotency-Key once.",
        )
    return check_key(given[0]) if given else in_body


async def read_json(request: Request, type: type[Body], *, empty: Body | None = None) -> Body:
    """The body, decoded from JSON; `empty` for a request without a body."""
    try:
        async with asyncio.timeout(REQUEST_BODY_SECONDS):
            body = await _read(request)
            return empty if empty is not None and not body else parse_json(body, type)
    except TimeoutError:
        raise LimitExceeded(
            f"the body was not received within {REQUEST_BODY_SECONDS:.0f} seconds",
            code="too_slow",
            hint="Send less in one request, or check the network.",
        ) from None


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > REQUEST_BYTES_MAX:
            raise LimitExceeded(
                f"the body is larger than {REQUEST_BYTES_MAX:,} bytes",
                code="too_large",
                hint="Send less in one request.",
            )
    return bytes(body)


def parse_json(text: bytes | str, type: type[Body], *, path: str = "") -> Body:
    check_json_size(text)
    try:
        return msgspec.json.decode(text, type=type)
    except msgspec.ValidationError as error:
        raise InvalidQuery(str(error), path=path) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidQuery(f"not valid JSON: {error}", path=path) from None
    except RecursionError:
        raise InvalidQuery("the JSON is nested too deeply", path=path) from None


def parameter(request: Request, name: str) -> Any:
    """A parameter of the URL; the last one of that name, None if it is missing or empty."""
    return request.query_params.get(name) or None


def flag(request: Request, name: str, default: bool) -> bool:
    value = parameter(request, name)
    if value is None:
        return default
    if value not in ("true", "false"):
        raise InvalidQuery(f"expected true or false, got {value!r:.100}", path=name)
    return bool(value == "true")
