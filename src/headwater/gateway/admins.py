"""Who may see what is behind the data: sessions, costs, the log, Headwater's own tables.

With authentication, whoever's token says so in the claim that the setting `admin_claim` names, as a
plain `true`. Without, whoever sits at this machine. That a request comes from this machine does not
show that: proxies and pages pass on what others ask. So whatever hints at either makes it nobody's,
and so does a gateway that is meant for more than its own machine.
"""

from __future__ import annotations

from ipaddress import ip_address

from starlette.requests import HTTPConnection

from headwater.errors import Forbidden
from headwater.gateway.addresses import host_of, is_local_name
from headwater.identity import Identity
from headwater.settings import Settings

LOCAL_ONLY = "headwater.local_only"
"""In the scope of a request: it came to a gateway that is for its own machine only."""

_PASSED_ON = ("forwarded", "via", "x-real-ip")
"""What proxies add to a request, beside `X-Forwarded-…`."""


def is_admin(settings: Settings, identity: Identity, *, here: bool) -> bool:
    """Whether this caller is an admin; `here` says that it sits at this machine (`is_here`).

    >>> is_admin(Settings(), Identity(), here=True), is_admin(Settings(), Identity(), here=False)
    (True, False)
    """
    if settings.has_auth:
        return identity.claims.get(settings.admin_claim) is True
    return here


def is_here(request: HTTPConnection, settings: Settings) -> bool:
    """Whether a request was made at this machine, as far as can be told, and for nobody else."""
    return (
        LOCAL_ONLY in request.scope
        and not settings.has_auth
        and not settings.trusted_proxies
        and _is_own_peer(request)
        and is_local_name(host_of(request.headers.getlist("host")))
        and not _is_passed_on(request)
        and _is_own_page(request)
    )


def _is_own_peer(request: HTTPConnection) -> bool:
    if request.client is None:  # A Unix socket; or a server that does not say.
        server = request.scope.get("server")
        return server is not None and server[1] is None
    try:
        return ip_address(request.client.host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _is_passed_on(request: HTTPConnection) -> bool:
    # nginx, where it is not told otherwise, adds no header and speaks HTTP as of 1996.
    old = request.scope.get("http_version") == "1.0"
    return old or any(n in _PASSED_ON or n.startswith("x-forwarded-") for n in request.headers)


def _is_own_page(request: HTTPConnection) -> bool:
    """Not that of another origin, though the settings may let all of them in. Images and the like
    are asked for without an origin, but browsers tell whether the page is another's."""
    site = request.headers.get("sec-fetch-site", "none")
    origin = request.headers.get("origin")
    is_own = origin is None or origin.partition("://")[2] == request.headers.get("host")
    return is_own and site in ("none", "same-origin")


def not_admin(settings: Settings, what: str) -> Forbidden:
    """For one who is none and asks for what only admins may have."""
    hint = (
        f"The token must say so: its claim {settings.admin_claim!r} must be true."
        if settings.has_auth
        else "Configure authentication: without, only who sits at the machine of a gateway that "
        "serves nobody else, through no proxy, is an admin."
    )
    return Forbidden(f"{what} is for admins only", code="admin_only", hint=hint)
