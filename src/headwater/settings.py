"""Settings: from the call, else the environment (`HEADWATER_…`), else `headwater.toml`.

>>> parse_duration("90 days")
datetime.timedelta(days=90)
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from headwater.errors import ConfigError
from headwater.limits import MAINTENANCE_SECONDS

FILE_NAME = "headwater.toml"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every setting, with its default. docs/reference/settings.md is the page about them."""

    url: str | None = None
    """The database. Without one, `Headwater()` uses the embedded PostgreSQL."""

    data_dir: str | None = None
    """Where the embedded PostgreSQL keeps its data."""

    retention: str | None = None
    """How long the log keeps a change. Kept in the database; left as it is there unless given."""

    maintenance: str = f"{MAINTENANCE_SECONDS:.0f} seconds"
    """How often retention and altered tables are looked after."""

    coalesce: str = "adaptive"
    """When changes are delivered: `adaptive`, or a quiet and a maximum time as in `50ms/200ms`."""

    host: str = "127.0.0.1"
    """The address `headwater serve` listens on."""

    port: int = 8484
    """The port `headwater serve` listens on; 0 for any that is free."""

    origins: tuple[str, ...] = ()
    """Origins whose pages may use the gateway from a browser, beside its own; `*` for all."""

    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks whose `X-Forwarded-For` is believed."""

    compression: tuple[str, ...] = ("br", "zstd", "gzip")
    """Encodings offered to clients, best first."""

    keepalive: str = "15 seconds"
    """How often an idle connection hears that it is alive."""

    drain: str = "10 seconds"
    """How long a stopping gateway waits for its clients to take what is theirs."""

    recheck: str = "60 seconds"
    """How often the rights of open subscriptions are looked at again."""

    sessions_per_user: int = 8
    """Connections that one user may hold open."""

    sessions_per_ip: int = 32
    """Connections that may be open from one address."""

    subscriptions_per_user: int = 500
    """Subscriptions that one user may hold open."""

    requests_per_second: int = 100
    """Requests a second that one user, or one address without a user, may make in the long run."""

    auth_secret: str | None = None
    """The shared secret of tokens signed with HS256, HS384 or HS512."""

    auth_public_key: str | None = None
    """The public key (PEM, or a file with it) of tokens signed with RS…, PS…, ES… or EdDSA."""

    auth_jwks: str | None = None
    """The key set (a URL or a file) of tokens signed with one of several keys."""

    auth_algorithms: tuple[str, ...] = ()
    """Algorithms to accept; left out, those that fit the key."""

    auth_audience: str | None = None
    """What a token's `aud` must contain."""

    auth_issuer: str | None = None
    """What a token's `iss` must be."""

    auth_leeway: str = "5 seconds"
    """How far the clocks of the issuer and the gateway may differ."""

    auth_user_claim: str = "sub"
    """The claim that names the user."""

    auth_tenant_claim: str = "tenant"
    """The claim that names the user's tenant."""

    auth_tenants: tuple[str, ...] = ()
    """Tenants this gateway serves; left out, all."""

    auth_role_claim: str = "role"
    """The claim that names the database role a session reads as."""

    auth_role: str | None = None
    """The database role of sessions whose token names none."""

    auth_cookie: str | None = None
    """A cookie that may carry the token."""

    @property
    def retention_period(self) -> timedelta | None:
        return None if self.retention is None else parse_duration(self.retention, name="retention")

    @property
    def maintenance_period(self) -> timedelta:
        return parse_duration(self.maintenance, name="maintenance")


def load_settings(
    *,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Settings:
    """The settings in force. Overrides that are None do not count."""
    environment = os.environ if environment is None else environment
    values = _from_file((folder or Path.cwd()) / FILE_NAME)
    for name in Settings.__struct_fields__:
        if text := environment.get(f"HEADWATER_{name.upper()}"):
            values[name] = _split(text) if name in _LISTS else text
    values |= {name: value for name, value in (overrides or {}).items() if value is not None}
    try:
        settings = msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"wrong setting: {error}", hint="docs/reference/settings.md lists them all."
        ) from error
    # Say what is wrong at once, not when it is first used.
    _ = settings.retention_period, settings.maintenance_period
    return settings


_LISTS = frozenset(
    field.name for field in msgspec.structs.fields(Settings) if isinstance(field.default, tuple)
)


def _split(text: str) -> list[str]:
    """A list in an environment variable: `a, b`."""
    return [item.strip() for item in text.split(",") if item.strip()]


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} is not valid TOML: {error}") from error


_UNITS = {
    "s": 1,
    "second": 1,
    "m": 60,
    "minute": 60,
    "h": 3600,
    "hour": 3600,
    "d": 86400,
    "day": 86400,
}


def parse_duration(text: str, *, name: str = "duration") -> timedelta:
    """A length of time as people write it: `30 days`, `12h`, `90 seconds`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)s?\s*", text)
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{name}: {text!r} is not a length of time",
            hint="Write a number and a unit: 30 days, 12h, 90 seconds.",
        )
    period = timedelta(seconds=float(match[1]) * unit)
    if period < timedelta(seconds=1):
        raise ConfigError(f"{name}: {text!r} is too short", hint="One second is the least.")
    return period
