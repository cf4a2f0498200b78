"""Where a request comes from, as quotas count it, and where it says that it goes. Pure.

A proxy puts the address it was called from at the end of `X-Forwarded-For`, behind what its own
caller wrote there. So only the part that trusted proxies wrote is believed: from the right, up to
and including the first address that is not one of them. What a client itself wrote stands further
left and never counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from headwater.settings.groups import UNIX, GatewaySettings


class Proxies:
    """The proxies that the settings trust."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._networks = settings.trusted_networks
        self._unix = UNIX in settings.trusted_proxies

    def client(self, peer: str | None, forwarded: Iterable[str] = ()) -> str:
        """The client's address, or `unix`. `peer` is who is connected, None on a Unix socket;
        `forwarded` are the lines of `X-Forwarded-For` in their order.

        Where a trusted proxy wrote what is no address, the peer itself counts.
        """
        own = UNIX if peer is None else _written(_read(peer), peer)
        if not self._trusts(own):
            return own
        hops = [hop for line in forwarded for hop in line.split(",") if hop.strip()]
        for hop in reversed(hops):
            address = _read(hop)
            if address is None:
                return own
            if not self._trusts(str(address)):
                return str(address)
        # Every hop is ours: the first of them asks on its own behalf.
        return _written(_read(hops[0]), own) if hops else own

    def _trusts(self, text: str) -> bool:
        if text == UNIX:
            return self._unix
        address = _read(text)
        # An address of the other family is in no network, and Python says so.
        return address is not None and any(address in network for network in self._networks)


def counted(address: str) -> str:
    """What stands for an address when connections are counted: of IPv6, the /64 that a subscriber
    has to itself.

    >>> counted("192.0.2.7"), counted("2001:db8::a:1")
    ('192.0.2.7', '2001:db8::/64')
    """
    found = _read(address)
    return str(ip_network((found, 64), strict=False)) if isinstance(found, IPv6Address) else address


_HOST = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9_.-]+))(?::[0-9]{1,5})?", re.ASCII
)


def host_of(hosts: Sequence[str]) -> str | None:
    """The name in the Host header of a request, without its port; None where there are several or
    none, or what is there is no host. Never guessed: a framework that falls back to the server's
    own address would take any text for this machine.

    >>> host_of(["LocalHost:8484"]), host_of(["[::1]"]), host_of(["["]), host_of(["a", "a"])
    ('localhost', '::1', None, None)
    """
    found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if found is None:
        return None
    name: str = found["six"] or found["name"]
    # In brackets there is an address of IPv6, and nowhere else.
    return name.lower() if (":" in name) == (found["six"] is not None) else None


def is_local_name(host: str | None) -> bool:
    """Whether no name server is needed to get from this name to an address.

    >>> is_local_name("localhost"), is_local_name("127.0.0.1"), is_local_name("evil.example")
    (True, True, False)
    """
    try:
        return host == "localhost" or bool(ip_address(host or ""))
    except ValueError:
        return False


_WITH_PORT = re.compile(r"\[(?P<six>[^]]*)\](?::\d+)?|(?P<four>[\d.]+):\d+")


def _read(text: str) -> IPv4Address | IPv6Address | None:
    """An address as proxies write it: alone, with a port, in brackets. An IPv4 address inside an
    IPv6 one is the IPv4 address; zones are left out."""
    text = text.strip()
    if match := _WITH_PORT.fullmatch(text):
        text = match["six"] or match["four"] or ""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _written(address: IPv4Address | IPv6Address | None, otherwise: str) -> str:
    return otherwise if address is None else str(address)
