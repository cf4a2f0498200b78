"""Settings: from the call, else the environment (`HEADWATER_…`), else `headwater.toml`.

>>> parse_duration("90 days")
datetime.timedelta(days=90)
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec

from headwater.errors import ConfigError
from headwater.limits import (
    DURATION_SECONDS_MAX,
    LAKE_SNAPSHOT_EVENTS,
    MAINTENANCE_SECONDS,
    REQUEST_SECONDS_MIN,
    SECRET_BYTES_MIN,
)

FILE_NAME = "headwater.toml"

ENCODINGS = ("zstd", "gzip", "br")
"""What `compression` may list, best first."""

ALGORITHMS = (
    "HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512",
    "ES256", "ES256K", "ES384", "ES512", "EdDSA",
)  # fmt: skip
"""What `auth_algorithms` may list. There is no `none` among them."""

UNIX = "unix"
"""What `trusted_proxies` calls a peer on a Unix socket, which has no address."""

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every setting, with its default. docs/reference/settings.md is the page about them."""

    url: str | None = None
    """The database. Without one, `Headwater()` uses the embedded PostgreSQL."""

    question_url: str | None = None
    """The database as a login role that owns nothing and may read nothing itself. What is asked as
    a session's database role is asked over it."""

    data_dir: str | None = None
    """Where the embedded PostgreSQL keeps its data."""

    retention: str | None = None
    """How long the log keeps a change. Kept in the database; left as it is there unless given."""

    maintenance: str = f"{MAINTENANCE_SECONDS:.0f} seconds"
    """How often retention and altered tables are looked after."""

    coalesce: str = "adaptive"
    """When changes are delivered: `adaptive`, or a quiet and a maximum time as in `50ms/200ms`."""

    topic_window: str = "adaptive"
    """How long signals of a topic are collected before they are sent: `adaptive`, which is no
    longer than it takes, or a time as in `16 ms`."""

    query_timeout: str = "10 seconds"
    """How long a query may run, unless it says so itself."""

    mutation_timeout: str = "30 seconds"
    """How long a mutation may run, unless it says so itself."""

    mutation_retention: str = "24 hours"
    """How long the idempotency key and the result of a mutation are stored. A repetition in this
    time is answered with the result, a later one runs again."""

    query_concurrency: int = 64
    """Queries that are executed at once, each on a connection of its own."""

    mutation_connections: int = 16
    """Mutations that run at once, each on a connection of its own."""

    query_sweep: str = "600 seconds"
    """In which time every subscribed query is executed once without a reason, as a safety net."""

    reconcile_interval: str = "600 seconds"
    """In which time every live query and topic is compared once with the database, as a safety net:
    `off` for never, `0 seconds` for at every flush."""

    query_cache_bytes: int = 256 * 1024 * 1024
    """Results kept in memory, in all."""

    query_cache_entry_bytes: int = 10 * 1024 * 1024
    """The largest result that is kept in memory."""

    replica_url: str | None = None
    """A streaming replica that queries are executed on. Without one, on the database itself."""

    replica_wait: str = "1 second"
    """How long a query waits for the replica to have the change that woke it, before it is executed
    on the database itself."""

    lake: str = "lake"
    """The folder or URL of the lake that the pipeline writes."""

    lake_interval: str = "1 second"
    """How often the pipeline commits to the lake; 0 for as often as it can."""

    lake_vacuum: str = "7 days"
    """How long files that no longer belong to the lake are kept."""

    lake_snapshots: int = LAKE_SNAPSHOT_EVENTS
    """After how many changes of a table the pipeline keeps another snapshot of it; 0 for none at
    all, neither from events nor from the tables themselves."""

    lake_retention: str | None = None
    """How long the lake keeps events. Without it, for ever."""

    host: str = "127.0.0.1"
    """The address `headwater serve` listens on."""

    port: int = 8484
    """The port `headwater serve` listens on; 0 for any that is free."""

    origins: tuple[str, ...] = ()
    """Origins whose pages may use the gateway from a browser, beside its own; `*` for all, who then
    may not use the cookie."""

    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks whose `X-Forwarded-For` is believed; `unix` for a Unix socket."""

    compression: tuple[str, ...] = ENCODINGS
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

    publishes_per_second: int = 50
    """Messages and states a second that one session may send to channels in the long run."""

    presence_period: str = "5 seconds"
    """How often a gateway tells the others that it is there, where channels are declared."""

    presence_timeout: str = "15 seconds"
    """When the members of a gateway that was killed are gone, at the latest."""

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

    admin_claim: str = "headwater_admin"
    """The claim that makes its bearer an admin, where it is `true`."""

    activity: str = "2 seconds"
    """How often a gateway writes down its sessions and views while an admin looks; 0 for never."""

    @property
    def retention_period(self) -> timedelta | None:
        return None if self.retention is None else parse_duration(self.retention, name="retention")

    @property
    def maintenance_period(self) -> timedelta:
        return parse_duration(self.maintenance, name="maintenance")

    @property
    def topic_window_period(self) -> timedelta:
        """Zero for adaptive."""
        if self.topic_window == "adaptive":
            return timedelta(0)
        period = parse_duration(self.topic_window, name="topic_window", least=0)
        if period > timedelta(seconds=10):
            raise ConfigError(
                f"topic_window: {self.topic_window!r} is too long", hint="Ten seconds is the most."
            )
        return period

    @property
    def keepalive_period(self) -> timedelta:
        return parse_duration(self.keepalive, name="keepalive")

    @property
    def drain_period(self) -> timedelta:
        return parse_duration(self.drain, name="drain", least=0)

    @property
    def recheck_period(self) -> timedelta:
        return parse_duration(self.recheck, name="recheck")

    @property
    def presence_period_seconds(self) -> float:
        period = parse_duration(self.presence_period, name="presence_period", least=0)
        if period < timedelta(milliseconds=50):
            raise ConfigError(
                f"presence_period: {self.presence_period!r} is too short",
                hint="50 ms is the least.",
            )
        return period.total_seconds()

    @property
    def presence_timeout_seconds(self) -> float:
        timeout = parse_duration(self.presence_timeout, name="presence_timeout").total_seconds()
        least = 3 * self.presence_period_seconds
        if timeout < least:
            raise ConfigError(
                f"presence_timeout: {self.presence_timeout!r} is too short",
                hint=f"Three times presence_period is the least: {least:g} seconds.",
            )
        return timeout

    @property
    def activity_period(self) -> timedelta:
        """Zero for never."""
        if self.activity.strip() == "0":
            return timedelta(0)
        return parse_duration(self.activity, name="activity")

    @property
    def query_timeout_period(self) -> timedelta:
        return parse_duration(self.query_timeout, name="query_timeout")

    @property
    def mutation_timeout_period(self) -> timedelta:
        return parse_duration(self.mutation_timeout, name="mutation_timeout")

    @property
    def mutation_retention_period(self) -> timedelta:
        name = "mutation_retention"
        return parse_duration(self.mutation_retention, name=name, least=REQUEST_SECONDS_MIN)

    @property
    def query_sweep_period(self) -> timedelta:
        return parse_duration(self.query_sweep, name="query_sweep")

    @property
    def reconcile_seconds(self) -> float | None:
        """None for never, 0 for at every flush."""
        if self.reconcile_interval.strip() == "off":
            return None
        name, other = "reconcile_interval", "Or: off, or 0 seconds for at every flush."
        interval = parse_duration(self.reconcile_interval, name=name, least=0, other=other)
        return interval.total_seconds()

    @property
    def replica_wait_period(self) -> timedelta:
        return parse_duration(self.replica_wait, name="replica_wait", least=0)

    @property
    def lake_interval_period(self) -> timedelta:
        return parse_duration(self.lake_interval, name="lake_interval", least=0)

    @property
    def lake_vacuum_period(self) -> timedelta:
        return parse_duration(self.lake_vacuum, name="lake_vacuum", least=3600)

    @property
    def lake_retention_period(self) -> timedelta | None:
        if self.lake_retention is None:
            return None
        return parse_duration(self.lake_retention, name="lake_retention", least=86_400)

    @property
    def auth_leeway_period(self) -> timedelta:
        return parse_duration(self.auth_leeway, name="auth_leeway", least=0)

    @property
    def trusted_networks(self) -> tuple[Network, ...]:
        return tuple(_network(text) for text in self.trusted_proxies if text != UNIX)

    @property
    def auth_public_key_text(self) -> str | None:
        """The key itself, also where the setting names a file. Environments that hold no line
        breaks write them as `\\n`."""
        if self.auth_public_key is None or "-----BEGIN" in self.auth_public_key:
            return self.auth_public_key and self.auth_public_key.replace("\\n", "\n")
        return read_file(self.auth_public_key, name="auth_public_key").decode("utf-8", "replace")

    @property
    def auth_jwks_is_url(self) -> bool:
        return self.auth_jwks is not None and "://" in self.auth_jwks

    @property
    def has_auth(self) -> bool:
        """Whether there is a key, and so every session needs a token."""
        return any((self.auth_secret, self.auth_public_key, self.auth_jwks))


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
    check(settings)
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


# ------------------------------------------------------------------------ checks


def check(settings: Settings) -> None:
    """Raise ConfigError for a value that cannot work; the message names the setting."""
    _ = settings.retention_period, settings.maintenance_period, settings.topic_window_period
    _ = settings.keepalive_period, settings.drain_period, settings.recheck_period
    _ = settings.query_timeout_period, settings.mutation_timeout_period, settings.activity_period
    _ = settings.query_sweep_period, settings.replica_wait_period, settings.reconcile_seconds
    _ = settings.mutation_retention_period
    _ = settings.lake_interval_period, settings.lake_vacuum_period
    _ = settings.lake_retention_period
    _ = settings.presence_timeout_seconds
    _ = settings.trusted_networks
    for name, low, high in _RANGES:
        if not low <= getattr(settings, name) <= high:
            raise ConfigError(f"{name}: {getattr(settings, name)} is not in {low} … {high}")
    _check_names("compression", settings.compression, ENCODINGS)
    for origin in settings.origins:
        _check_origin(origin)
    _check_auth(settings)


_RANGES = (
    ("port", 0, 65_535),
    ("sessions_per_user", 1, 1_000_000),
    ("sessions_per_ip", 1, 1_000_000),
    ("subscriptions_per_user", 1, 1_000_000),
    ("requests_per_second", 1, 1_000_000),
    ("publishes_per_second", 1, 1_000_000),
    ("query_concurrency", 1, 1_000),
    ("mutation_connections", 1, 1_000),
    ("lake_snapshots", 0, 2**40),
    ("query_cache_bytes", 0, 2**40),
    ("query_cache_entry_bytes", 0, 2**40),
)


def _check_names(name: str, values: tuple[str, ...], known: tuple[str, ...]) -> None:
    for value in values:
        if value not in known:
            raise ConfigError(f"{name}: there is no {value!r}", hint=f"Use: {', '.join(known)}.")


def _check_origin(origin: str) -> None:
    parts = urlsplit(origin)
    if origin != "*" and origin != f"{parts.scheme}://{parts.netloc}":
        raise ConfigError(
            f"origins: {origin!r} is not an origin",
            hint="Write it as browsers do, without a path: https://app.example, or * for all.",
        )


def _check_auth(settings: Settings) -> None:
    _ = settings.auth_leeway_period, settings.auth_public_key_text
    _check_names("auth_algorithms", settings.auth_algorithms, ALGORITHMS)
    if not settings.auth_user_claim:
        raise ConfigError("auth_user_claim: a name is needed", hint="It is sub unless you say so.")
    if not settings.admin_claim:
        raise ConfigError(
            "admin_claim: a name is needed", hint="It is headwater_admin unless you say so."
        )
    if settings.auth_secret is not None and len(settings.auth_secret.encode()) < SECRET_BYTES_MIN:
        raise ConfigError(
            f"auth_secret: shorter than {SECRET_BYTES_MIN} bytes, so it can be guessed",
            hint="Make one: openssl rand -base64 48",
        )
    if settings.auth_jwks is not None:
        _check_key_set(settings.auth_jwks, settings.auth_jwks_is_url)
    if not settings.has_auth and (idle := next(_means_auth(settings), None)):
        raise ConfigError(
            f"{idle}: set, but there is no key to verify tokens with, so nobody would be refused",
            hint="Set auth_secret, auth_public_key or auth_jwks.",
        )


def _means_auth(settings: Settings) -> Iterator[str]:
    """Settings that somebody gives who expects tokens to be verified."""
    names = ("auth_algorithms", "auth_audience", "auth_issuer", "auth_tenants", "auth_cookie")
    return (name for name in names if getattr(settings, name))


def _check_key_set(source: str, is_url: bool) -> None:
    if not is_url:
        read_file(source, name="auth_jwks")
    elif urlsplit(source).scheme not in ("https", "http") or not urlsplit(source).hostname:
        raise ConfigError(
            "auth_jwks: neither a file nor a URL that begins with https://",
            hint="Your identity provider names it: https://…/.well-known/jwks.json",
        )


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise ConfigError(
            f"trusted_proxies: {error}",
            hint="Write an address or a network: 10.0.0.7, 10.0.0.0/8, 2001:db8::/32.",
        ) from error


def read_file(path: str, *, name: str) -> bytes:
    """What is in the file that a setting names."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise ConfigError(f"{name}: cannot read {path!r:.200}: {reason}") from error


# ------------------------------------------------------------------------ lengths of time

_UNITS = {
    "ms": 0.001,
    "s": 1,
    "second": 1,
    "m": 60,
    "minute": 60,
    "h": 3600,
    "hour": 3600,
    "d": 86400,
    "day": 86400,
}


def parse_duration(
    text: str, *, name: str = "duration", least: int = 1, other: str = ""
) -> timedelta:
    """A length of time as people write it: `30 days`, `12h`, `90 seconds`. `least` in seconds;
    `other` is what the hint of an error says besides."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    # Words have a plural, letters have none: 50ms are not 50 minutes.
    unit = (_UNITS.get(match[2]) or _UNITS.get(match[2].removesuffix("s"))) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{name}: {text!r} is not a length of time",
            hint=f"Write a number and a unit: 30 days, 12h, 90 seconds. {other}".rstrip(),
        )
    seconds = float(match[1]) * unit
    if seconds > DURATION_SECONDS_MAX:
        raise ConfigError(f"{name}: {text!r} is too long", hint="A hundred years is the most.")
    period = timedelta(seconds=seconds)
    if period < timedelta(seconds=least):
        named = {1: "One second", 3600: "One hour", 7200: "Two hours", 86_400: "One day"}
        shortest = named.get(least, f"{least} seconds")
        raise ConfigError(f"{name}: {text!r} is too short", hint=f"{shortest} is the least.")
    return period
