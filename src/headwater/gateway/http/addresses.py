"""The address of a client, as quotas count it, and the host name of a request. Pure.

A proxy appends the address of its caller to `X-Forwarded-For`. So only the entries of trusted
proxies are used: from the right, up to and including the first address that is not a trusted proxy.
Entries further left were written by the client, and are ignored.
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
        """The client's address, or `unix`. `peer` is the address of the connection, None on a Unix
        socket; `forwarded` are the lines of `X-Forwarded-For` in order.

        If a trusted proxy wrote something that is not an address, the peer is used.
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
        # Every hop is a trusted proxy: the first of them is the client.
        return _written(_read(hops[0]), own) if hops else own

    def _trusts(self, text: str) -> bool:
        if text == UNIX:
            return self._unix
        address = _read(text)
        # In Python, an address is never in a network of the other IP version.
        return address is not None and any(address in network for network in self._networks)


def counted(address: str) -> str:
    """The key under which an address is counted: for IPv6 its /64 network, which one subscriber
    has.

    >>> counted("192.0.2.7"), counted("2001:db8::a:1")
    ('192.0.2.7', '2001:db8::/64')
    """
    found = _read(address)
    return str(ip_network((found, 64), strict=False)) if isinstance(found, IPv6Address) else address


_HOST = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9_.-]+))(?::[0-9]{1,5})?", re.ASCII
)


def host_of(hosts: Sequence[str]) -> str | None:
    """The name in the Host header of a request, without its port; None for a missing, repeated or
    invalid header. Never guessed: with a fallback to the server's own address, any text would count
    as this machine.

    >>> host_of(["LocalHost:8484"]), host_of(["[::1]"]), host_of(["["]), host_of(["a", "a"])
    ('localhost', '::1', None, None)
    """
    found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    if found is None:
        return None
    name: str = found["six"] or found["name"]
    # An IPv6 address must be in brackets, and only that may be.
    return name.lower() if (":" in name) == (found["six"] is not None) else None


def is_local_name(host: str | None) -> bool:
    """Whether this name is `localhost` or an IP address, which needs no name server.

    >>> is_local_name("localhost"), is_local_name("127.0.0.1"), is_local_name("evil.example")
    (True, True, False)
    """
    try:
        return host == "localhost" or bool(ip_address(host or ""))
    except ValueError:
        return False


_WITH_PORT = re.compile(r"\[(?P<six>[^]]*)\](?::\d+)?|(?P<four>[\d.]+):\d+")


def _read(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an address as proxies write it: alone, with a port, or in brackets. An IPv4-mapped IPv6
    address becomes the IPv4 address; zones are removed."""
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
