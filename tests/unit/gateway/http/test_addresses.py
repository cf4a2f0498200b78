"""Which client address a request counts for."""

from __future__ import annotations

import pytest

from headwater.gateway.http.addresses import Proxies, counted
from headwater.settings.groups import GatewaySettings

TRUSTING = Proxies(GatewaySettings(trusted_proxies=("10.0.0.0/8", "2001:db8:1::/48", "127.0.0.1")))

CLIENTS: list[tuple[str | None, list[str], str]] = [
    # No proxy.
    ("192.0.2.7", [], "192.0.2.7"),
    ("2001:db8::7", [], "2001:db8::7"),
    ("::ffff:192.0.2.7", [], "192.0.2.7"),
    ("fe80::1%eth0", [], "fe80::1"),
    # A header from a client that is not one of our proxies.
    ("192.0.2.7", ["198.51.100.1"], "192.0.2.7"),
    ("2001:db8::7", ["198.51.100.1"], "2001:db8::7"),
    # One proxy, and what its client wrote itself.
    ("10.0.0.1", ["198.51.100.1"], "198.51.100.1"),
    ("::ffff:10.0.0.1", ["198.51.100.1"], "198.51.100.1"),
    ("2001:db8:1::1", ["2001:db8::9"], "2001:db8::9"),
    ("10.0.0.1", ["203.0.113.5, 198.51.100.1"], "198.51.100.1"),
    ("10.0.0.1", ["203.0.113.5", "198.51.100.1"], "198.51.100.1"),
    ("10.0.0.1", ["10.9.9.9, 198.51.100.1"], "198.51.100.1"),
    ("10.0.0.1", ["nonsense, 198.51.100.1"], "198.51.100.1"),
    # Several proxies.
    ("10.0.0.1", ["203.0.113.5, 198.51.100.1, 10.0.0.2,10.0.0.3"], "198.51.100.1"),
    ("10.0.0.1", ["10.0.0.9, 10.0.0.2"], "10.0.0.9"),
    # Ports, brackets, IPv4 inside IPv6.
    ("10.0.0.1", ["198.51.100.1:4711"], "198.51.100.1"),
    ("10.0.0.1", ["[2001:db8::9]:4711"], "2001:db8::9"),
    ("10.0.0.1", ["[2001:db8::9]"], "2001:db8::9"),
    ("10.0.0.1", ["::ffff:198.51.100.1"], "198.51.100.1"),
    # Garbage.
    ("10.0.0.1", ["unknown"], "10.0.0.1"),
    ("10.0.0.1", ["198.51.100.1, unknown"], "10.0.0.1"),
    ("10.0.0.1", ["198.51.100.1, 10.0.0.2, _hidden"], "10.0.0.1"),
    ("10.0.0.1", ["999.1.1.1"], "10.0.0.1"),
    ("10.0.0.1", ["[]:80"], "10.0.0.1"),
    ("10.0.0.1", [""], "10.0.0.1"),
    ("10.0.0.1", [" , ,"], "10.0.0.1"),
    ("testclient", ["198.51.100.1"], "testclient"),
    # A Unix socket that is not trusted.
    (None, ["198.51.100.1"], "unix"),
]


@pytest.mark.parametrize(("peer", "forwarded", "client"), CLIENTS)
def test_client(peer: str | None, forwarded: list[str], client: str) -> None:
    assert TRUSTING.client(peer, forwarded) == client


def test_no_proxy_is_trusted_unless_the_settings_say_so() -> None:
    assert Proxies(GatewaySettings()).client("127.0.0.1", ["198.51.100.1"]) == "127.0.0.1"


def test_a_proxy_on_a_unix_socket() -> None:
    proxies = Proxies(GatewaySettings(trusted_proxies=("unix",)))
    assert proxies.client(None, ["203.0.113.5, 198.51.100.1"]) == "198.51.100.1"
    assert proxies.client(None) == "unix"
    assert proxies.client("127.0.0.1", ["198.51.100.1"]) == "127.0.0.1"
    # "unix" in the header is not an address.
    assert proxies.client(None, ["198.51.100.1, unix"]) == "unix"


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:0:1::a", "2001:db8:0:1::/64"),
        ("2001:db8:0:1:ffff::b", "2001:db8:0:1::/64"),
        ("2001:db8:0:2::a", "2001:db8:0:2::/64"),
        ("unix", "unix"),
        ("testclient", "testclient"),
    ],
)
def test_the_address_that_a_limit_counts(address: str, key: str) -> None:
    assert counted(address) == key
