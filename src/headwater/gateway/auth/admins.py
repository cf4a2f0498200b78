"""Decides which users are admins: they may read sessions, costs, the log and Headwater's own
tables.

With authentication, a user is an admin if the claim that `[auth] admin_claim` names is `true` in
the token. Without authentication, a user of this machine is. A request from a local address is
not enough: proxies and web pages forward requests of others. So a request that may come through
either is not an admin's, nor is any request to a gateway that also serves other machines.
"""

from __future__ import annotations

from ipaddress import ip_address

from starlette.requests import HTTPConnection

from headwater.errors import Forbidden
from headwater.gateway.http.addresses import host_of, is_local_name
from headwater.identity import Identity
from headwater.settings import Settings
from headwater.settings.groups import AuthSettings

LOCAL_ONLY = "headwater.local_only"
"""A key in the scope of a request: the gateway serves only its own machine."""

_PASSED_ON = ("forwarded", "via", "x-real-ip")
"""Headers that proxies add to a request, besides `X-Forwarded-…`."""


def is_admin(settings: AuthSettings, identity: Identity, *, local: bool) -> bool:
    """Whether this caller is an admin; `local` says that it is a user of this machine (`is_local`).

    >>> nobody = Identity()
    >>> [is_admin(AuthSettings(), nobody, local=local) for local in (True, False)]
    [True, False]
    """
    if settings.has_key:
        return identity.claims.get(settings.admin_claim) is True
    return local


def is_local(request: HTTPConnection, settings: Settings) -> bool:
    """Whether a user of this machine made the request. False if a proxy or another site's page may
    have forwarded it."""
    return (
        LOCAL_ONLY in request.scope
        and not settings.auth.has_key
        and not settings.gateway.trusted_proxies
        and _is_own_peer(request)
        and is_local_name(host_of(request.headers.getlist("host")))
        and not _is_passed_on(request)
        and _is_own_page(request)
    )


def _is_own_peer(request: HTTPConnection) -> bool:
    if request.client is None:  # A Unix socket, or a server that does not pass the address.
        server = request.scope.get("server")
        return server is not None and server[1] is None
    try:
        return ip_address(request.client.host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _is_passed_on(request: HTTPConnection) -> bool:
    # By default nginx adds no header, and speaks HTTP/1.0.
    old = request.scope.get("http_version") == "1.0"
    return old or any(n in _PASSED_ON or n.startswith("x-forwarded-") for n in request.headers)


def _is_own_page(request: HTTPConnection) -> bool:
    """Whether the request is not from a page of another origin, even if the settings allow all
    origins. Browsers request images without an origin, but with a header that names the site of the
    page."""
    site = request.headers.get("sec-fetch-site", "none")
    origin = request.headers.get("origin")
    is_own = origin is None or origin.partition("://")[2] == request.headers.get("host")
    return is_own and site in ("none", "same-origin")


def not_admin(settings: AuthSettings, what: str) -> Forbidden:
    """The error for a caller that is not an admin and requests what only admins may see."""
    hint = (
        f"The token's claim {settings.admin_claim!r} must be true."
        if settings.has_key
        else "Configure authentication. Without it, only clients on the gateway's machine are "
        "admins, if the gateway serves that machine alone and without a proxy."
    )
    return Forbidden(f"{what} is for admins only", code="admin_only", hint=hint)
