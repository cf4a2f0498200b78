"""Checks of single values. Each raises ConfigError, and the message begins with the `name` of the
setting."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from headwater.errors import ConfigError
from headwater.limits import SECRET_BYTES_MIN

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


def check_known(name: str, values: Iterable[str], known: tuple[str, ...]) -> None:
    for value in values:
        if value not in known:
            raise ConfigError(f"{name}: there is no {value!r}", hint=f"Use: {', '.join(known)}.")


def check_origin(name: str, origin: str) -> None:
    parts = urlsplit(origin)
    if origin != "*" and origin != f"{parts.scheme}://{parts.netloc}":
        raise ConfigError(
            f"{name}: {origin!r} is not an origin",
            hint="Write it as browsers do, without a path: https://app.example, or * for all.",
        )


def check_secret(name: str, secret: str | None) -> None:
    if secret is not None and len(secret.encode()) < SECRET_BYTES_MIN:
        raise ConfigError(
            f"{name}: shorter than {SECRET_BYTES_MIN} bytes, so it can be guessed",
            hint="Make one: openssl rand -base64 48",
        )


def check_url(name: str, url: str) -> None:
    if urlsplit(url).scheme not in ("https", "http") or not urlsplit(url).hostname:
        raise ConfigError(
            f"{name}: neither a file nor a URL that begins with https://",
            hint="Your identity provider names it: https://…/.well-known/jwks.json",
        )


def parse_network(name: str, text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigError(
            f"{name}: {error}",
            hint="Write an address or a network: 10.0.0.7, 10.0.0.0/8, 2001:db8::/32.",
        ) from error


def read_file(name: str, path: str) -> bytes:
    """The content of the file that a setting names."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise ConfigError(f"{name}: cannot read {path!r:.200}: {reason}") from error
