"""What every request goes through first: its address, its rate, its token, its body.

Reads only as much of a body as is allowed, whatever the headers promise.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from starlette.requests import HTTPConnection, Request

from headwater.errors import Forbidden, InvalidQuery, LimitExceeded
from headwater.gateway.admins import is_here
from headwater.gateway.auth import find_token
from headwater.gateway.bodies import check_json_size
from headwater.gateway.gateway import Gateway
from headwater.idempotency import check_key
from headwater.identity import Identity
from headwater.limits import REQUEST_BODY_SECONDS, REQUEST_BYTES_MAX

Body = TypeVar("Body")


class Caller:
    """Who makes a request, and from where."""

    __slots__ = ("address", "by_cookie", "here", "identity")

    def __init__(
        self, identity: Identity, address: str, *, by_cookie: bool = False, here: bool = False
    ) -> None:
        self.identity = identity
        self.address = address
        self.by_cookie = by_cookie
        self.here = here
        """Whether it sits at this machine (`admins.is_here`)."""


async def admit(gateway: Gateway, request: HTTPConnection) -> Caller:
    """Let a request in, or raise what refuses it."""
    settings = gateway.settings
    address = counted_address(gateway, request)
    found = find_token(request.headers, request.query_params, request.cookies, settings)
    proven = found.ticket is not None or (found.token is not None and not found.from_cookie)
    # Where nothing is verified, anything can be shown: it proves nothing.
    if not (proven and settings.has_auth):
        _check_origin(request, settings.origins, by_cookie=found.from_cookie)
    identity = await gateway.identify(found)
    if identity.account is not None:
        gateway.count_request(identity.account, address)
    here = is_here(request, settings)
    return Caller(identity, address, by_cookie=found.from_cookie, here=here)


def counted_address(gateway: Gateway, request: HTTPConnection) -> str:
    """Where a request comes from; LimitExceeded if too many come from there."""
    peer = request.client.host if request.client else None
    address = gateway.proxies.client(peer, request.headers.getlist("x-forwarded-for"))
    gateway.count_request(None, address)
    return address


def _check_origin(request: HTTPConnection, origins: tuple[str, ...], *, by_cookie: bool) -> None:
    """A browser sends cookies along for any page, and lets any page open a WebSocket. Without a
    token of its own, a page must be one of ours. That all origins are allowed does not mean that
    all of them may act for the user whose cookie it is: such an origin must be named."""
    origin = request.headers.get("origin")
    if origin is None or origin in origins or ("*" in origins and not by_cookie):
        return
    if origin.partition("://")[2] != request.headers.get("host"):
        raise Forbidden(
            f"pages of {origin!r:.200} may not use this gateway",
            code="origin",
            hint="Add the origin to the setting origins, or send a token.",
        )


def check_deliberate(request: Request, caller: Caller) -> None:
    """Refuse what another site's form could have sent with the user's cookie. The origin has been
    looked at; but not all that speaks HTTP sends one, and no form can say that it sends JSON."""
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if caller.by_cookie and sent != "application/json":
        raise Forbidden(
            "with a cookie, a mutation must be sent as JSON",
            code="content_type",
            hint="Send Content-Type: application/json, or a token.",
        )


def idempotency_key(request: Request, in_body: str | None = None) -> str | None:
    """The key by which a repetition of the request is known; None for a request without one."""
    given = request.headers.getlist("idempotency-key")
    if len(given) + (in_body is not None) > 1:
        raise InvalidQuery(
            f"expected one key, got {len(given) + (in_body is not None)}",
            path="idempotency_key",
            hint="Send the header Idempotency-Key once.",
        )
    return check_key(given[0]) if given else in_body


async def read_json(request: Request, type: type[Body], *, empty: Body | None = None) -> Body:
    """The body, as JSON of that type; `empty` stands for none."""
    try:
        async with asyncio.timeout(REQUEST_BODY_SECONDS):
            body = await _read(request)
            return empty if empty is not None and not body else parse_json(body, type)
    except TimeoutError:
        raise LimitExceeded(
            f"the body did not come within {REQUEST_BODY_SECONDS:.0f} seconds", code="too_slow"
        ) from None


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > REQUEST_BYTES_MAX:
            raise LimitExceeded(
                f"the body is larger than {REQUEST_BYTES_MAX:,} bytes", code="too_large"
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
        raise InvalidQuery("nested too deeply", path=path) from None


def parameter(request: Request, name: str) -> Any:
    """A query parameter; the last one of its name, None when it is missing or empty."""
    return request.query_params.get(name) or None


def flag(request: Request, name: str, default: bool) -> bool:
    value = parameter(request, name)
    if value is None:
        return default
    if value not in ("true", "false"):
        raise InvalidQuery(f"expected true or false, got {value!r:.100}", path=name)
    return bool(value == "true")
