"""Every setting, with its default. docs/reference/settings.md is the page about them.

A group is a section of the file. It checks its values when it is made, so that an error is raised
at once and not when a value is first used; what is derived from a value is a property of its group.
"""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar, Literal, TypeAlias

import msgspec

from headwater.errors import ConfigError
from headwater.limits import LAKE_SNAPSHOT_EVENTS, MAINTENANCE_SECONDS, REQUEST_SECONDS_MIN
from headwater.settings.checks import (
    Network,
    check_known,
    check_origin,
    check_secret,
    check_url,
    parse_network,
    read_file,
)
from headwater.settings.durations import parse_duration
from headwater.settings.sources import SourceEntry
from headwater.settings.tables import TableEntry

ENCODINGS = ("zstd", "gzip", "br")
"""What `[gateway] compression` may list, best first."""

ALGORITHMS = (
    "HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512",
    "ES256", "ES256K", "ES384", "ES512", "EdDSA",
)  # fmt: skip
"""What `[auth] algorithms` may list. There is no `none` among them."""

UNIX = "unix"
"""The entry in `[gateway] trusted_proxies` for a peer on a Unix socket, which has no address."""

Openness: TypeAlias = Literal["auto", "open", "closed"]


class Group(msgspec.Struct, frozen=True):
    """The settings of one section."""

    section: ClassVar[str]

    @classmethod
    def label(cls, name: str) -> str:
        """The name of a setting of this group in messages: `[gateway] port`."""
        return f"[{cls.section}] {name}"

    def _duration(self, name: str, *, least: int = 1, other: str = "") -> timedelta:
        text = getattr(self, name)
        return parse_duration(text, name=self.label(name), least=least, other=other)

    def _check_range(self, low: int, high: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{self.label(name)}: {value} is not in {low} … {high}")


class LogSettings(Group, frozen=True):
    section: ClassVar[str] = "log"

    retention: str | None = None
    """How long the log keeps a change. Stored in the database; not changed there unless given."""

    maintenance: str = f"{MAINTENANCE_SECONDS:.0f} seconds"
    """How often the log is trimmed and altered tables get new capture functions."""

    def __post_init__(self) -> None:
        _ = self.retention_period, self.maintenance_period

    @property
    def retention_period(self) -> timedelta | None:
        return None if self.retention is None else self._duration("retention")

    @property
    def maintenance_period(self) -> timedelta:
        return self._duration("maintenance")


class LiveSettings(Group, frozen=True):
    section: ClassVar[str] = "live"

    coalesce: str = "adaptive"
    """When changes are delivered: `adaptive`, or a quiet and a maximum time as in `50ms/200ms`."""

    topic_window: str = "adaptive"
    """How long signals of a topic are collected before they are sent: `adaptive` for as short as
    possible, or a time as in `16 ms`."""

    reconcile: str = "600 seconds"
    """The period in which every live query and topic is compared once with the database, as a
    safety net: `off` for never, `0 seconds` for at every flush."""

    def __post_init__(self) -> None:
        _ = self.topic_window_period, self.reconcile_seconds

    @property
    def topic_window_period(self) -> timedelta:
        """Zero for adaptive."""
        if self.topic_window == "adaptive":
            return timedelta(0)
        period = self._duration("topic_window", least=0)
        if period > timedelta(seconds=10):
            raise ConfigError(
                f"{self.label('topic_window')}: {self.topic_window!r} is too long",
                hint="Ten seconds is the most.",
            )
        return period

    @property
    def reconcile_seconds(self) -> float | None:
        """None for never, 0 for at every flush."""
        if self.reconcile.strip() == "off":
            return None
        other = "Or: off, or 0 seconds for at every flush."
        return self._duration("reconcile", least=0, other=other).total_seconds()


class QuerySettings(Group, frozen=True):
    section: ClassVar[str] = "query"

    timeout: str = "10 seconds"
    """How long a query may run, unless it is declared with its own timeout."""

    concurrency: int = 64
    """Queries that are executed at once, each on a connection of its own."""

    sweep: str = "600 seconds"
    """The period in which every subscribed query is executed once without a change, as a safety
    net."""

    cache_bytes: int = 256 * 1024 * 1024
    """Bytes of all results in memory."""

    cache_entry_bytes: int = 10 * 1024 * 1024
    """Bytes of the largest result that is stored in memory."""

    def __post_init__(self) -> None:
        _ = self.timeout_period, self.sweep_period
        self._check_range(1, 1_000, "concurrency")
        self._check_range(0, 2**40, "cache_bytes", "cache_entry_bytes")

    @property
    def timeout_period(self) -> timedelta:
        return self._duration("timeout")

    @property
    def sweep_period(self) -> timedelta:
        return self._duration("sweep")


class MutationSettings(Group, frozen=True):
    section: ClassVar[str] = "mutation"

    timeout: str = "30 seconds"
    """How long a mutation may run, unless it is declared with its own timeout."""

    retention: str = "24 hours"
    """How long the idempotency key and the result of a mutation are stored. A repetition in this
    time is answered with the result, a later one runs again."""

    connections: int = 16
    """Mutations that run at once, each on a connection of its own."""

    def __post_init__(self) -> None:
        _ = self.timeout_period, self.retention_period
        self._check_range(1, 1_000, "connections")

    @property
    def timeout_period(self) -> timedelta:
        return self._duration("timeout")

    @property
    def retention_period(self) -> timedelta:
        return self._duration("retention", least=REQUEST_SECONDS_MIN)


class ReplicaSettings(Group, frozen=True):
    section: ClassVar[str] = "replica"

    url: str | None = None
    """A streaming replica that queries are executed on. Without one, on the database itself."""

    wait: str = "1 second"
    """How long a query waits until the replica has the change that caused it. Then it is executed
    on the database itself."""

    def __post_init__(self) -> None:
        _ = self.wait_period

    @property
    def wait_period(self) -> timedelta:
        return self._duration("wait", least=0)


class LakeSettings(Group, frozen=True):
    section: ClassVar[str] = "lake"

    location: str = "lake"
    """The folder or URL of the lake that the pipeline writes."""

    interval: str = "1 second"
    """How often the pipeline commits to the lake; 0 for as often as it can."""

    vacuum: str = "7 days"
    """How long files that no longer belong to the lake stay."""

    snapshots: int = LAKE_SNAPSHOT_EVENTS
    """The number of changes of a table after which the pipeline makes another snapshot of it; 0 for
    no snapshots."""

    retention: str | None = None
    """How long the lake keeps events. Default: forever."""

    memory: int = 0
    """Bytes of the heap of the Java that Spark runs in, at least 512 MiB; 0 for a quarter of the
    machine's memory, within SPARK_HEAP_BYTES."""

    reconcile: str | None = None
    """How often a pipeline compares each table with the lake. Default: never."""

    archive: bool = True
    """Whether a pipeline makes an archive of Spark's classes after its first start, so that later
    ones are faster."""

    tables: str = "1 minute"
    """How often changes are merged into the typed tables: `off` for no typed tables, `0 seconds`
    for with each batch."""

    tables_include: tuple[str, ...] = ()
    """The tables that get typed tables, as patterns such as `sales.*`. Default: all."""

    tables_exclude: tuple[str, ...] = ()
    """Tables that get none."""

    tables_secret: str | None = None
    """The secret with which values of hashed columns are hashed."""

    tables_catalog: str | None = None
    """The schema of Spark's catalog in which typed tables are registered."""

    table: dict[str, TableEntry] = {}
    """The options of single tables, `[lake.table.NAME]`, by name."""

    def __post_init__(self) -> None:
        _ = self.interval_period, self.vacuum_period, self.retention_period, self.tables_seconds
        _ = self.reconcile_period
        self._check_range(0, 2**40, "snapshots", "memory")
        check_secret(self.label("tables_secret"), self.tables_secret)
        for name, entry in self.table.items():
            if entry.hash and self.tables_secret is None:
                raise ConfigError(
                    f"[lake.table.{name}] hash: a secret is needed, because values could be guessed"
                    " without one",
                    hint="Set [lake] tables_secret: openssl rand -base64 48",
                )

    @property
    def reconcile_period(self) -> timedelta | None:
        return None if self.reconcile is None else self._duration("reconcile", least=3600)

    @property
    def tables_seconds(self) -> float | None:
        """None for no typed tables, 0 for with each batch."""
        if self.tables.strip() == "off":
            return None
        other = "Or: off, or 0 seconds for with each batch."
        return self._duration("tables", least=0, other=other).total_seconds()

    @property
    def interval_period(self) -> timedelta:
        return self._duration("interval", least=0)

    @property
    def vacuum_period(self) -> timedelta:
        return self._duration("vacuum", least=3600)

    @property
    def retention_period(self) -> timedelta | None:
        return None if self.retention is None else self._duration("retention", least=86_400)


class SourcesSettings(Group, frozen=True):
    section: ClassVar[str] = "sources"

    run: bool = True
    """Whether a gateway, and an application that declares sources, runs the sources of the database
    in a child process. Otherwise `headwater source run` does."""


class GatewaySettings(Group, frozen=True):
    section: ClassVar[str] = "gateway"

    host: str = "127.0.0.1"
    """The address `headwater serve` listens on."""

    port: int = 8484
    """The port `headwater serve` listens on; 0 for any free port."""

    origins: tuple[str, ...] = ()
    """Origins whose pages may use the gateway from a browser, besides its own; `*` for all, without
    the cookie."""

    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of trusted proxies, whose `X-Forwarded-For` is used; `unix` for a Unix
    socket."""

    compression: tuple[str, ...] = ENCODINGS
    """Encodings offered to clients, best first."""

    keepalive: str = "15 seconds"
    """How often an idle connection gets a keepalive."""

    drain: str = "10 seconds"
    """How long a stopping gateway waits for its clients to read their last messages."""

    recheck: str = "60 seconds"
    """How often the rights of open subscriptions are checked again."""

    tables: Literal["open", "closed"] = "open"
    """Which tables clients may follow by live queries and feeds: all that are enabled, or only
    those that the application declares (`hw.table`)."""

    feed_history: str = "10 minutes"
    """How far back a client's feed or topic may begin, unless the authorize hook sets another time;
    `all` for the whole log."""

    presence_timeout: str = "15 seconds"
    """The longest time until the members of a killed gateway are removed."""

    metrics: Openness = "auto"
    """Which clients may read `/metrics`: all (`open`), or admins and clients that send
    `metrics_token` (`closed`). `auto` is closed if tokens are verified."""

    metrics_token: str | None = None
    """What a scraper sends as `Authorization: Bearer …` to read `/metrics`."""

    openapi: Openness = "auto"
    """Which clients may read `/openapi.json`: all (`open`), or those with a token (`closed`).
    `auto` is closed if tokens are verified."""

    def __post_init__(self) -> None:
        _ = self.keepalive_period, self.drain_period, self.recheck_period
        _ = self.feed_history_period, self.presence_timeout_seconds, self.trusted_networks
        self._check_range(0, 65_535, "port")
        check_known(self.label("compression"), self.compression, ENCODINGS)
        for origin in self.origins:
            check_origin(self.label("origins"), origin)
        check_secret(self.label("metrics_token"), self.metrics_token)

    @property
    def keepalive_period(self) -> timedelta:
        return self._duration("keepalive")

    @property
    def drain_period(self) -> timedelta:
        return self._duration("drain", least=0)

    @property
    def recheck_period(self) -> timedelta:
        return self._duration("recheck")

    @property
    def feed_history_period(self) -> timedelta | None:
        """None for the whole log."""
        if self.feed_history.strip() == "all":
            return None
        other = "Or: all, or 0 seconds for none."
        return self._duration("feed_history", least=0, other=other)

    @property
    def presence_timeout_seconds(self) -> float:
        return self._duration("presence_timeout").total_seconds()

    @property
    def presence_period_seconds(self) -> float:
        """How often a gateway sends a sign of life to the others, if channels are declared. The
        shortest timeout is one second, so it is never shorter than a third of a second."""
        return self.presence_timeout_seconds / 3

    @property
    def trusted_networks(self) -> tuple[Network, ...]:
        name = self.label("trusted_proxies")
        return tuple(parse_network(name, text) for text in self.trusted_proxies if text != UNIX)


class LimitSettings(Group, frozen=True):
    section: ClassVar[str] = "limits"

    sessions_per_user: int = 8
    """Connections that one user may hold open."""

    sessions_per_ip: int = 32
    """Connections without a user that may be open from one address."""

    subscriptions_per_user: int = 500
    """Subscriptions that one user may hold open."""

    bytes_per_user: int = 128 * 1024 * 1024
    """Bytes of memory that the subscriptions of one user may take; as many bytes may also wait for
    its clients."""

    bytes_total: int = 2 * 1024 * 1024 * 1024
    """Bytes of memory that all subscriptions, and all messages that wait for clients, may take."""

    requests_per_second: int = 100
    """Requests per second that one user, or one address without a user, may make on average."""

    publishes_per_second: int = 50
    """Messages and states per second that one session may send to channels on average."""

    def __post_init__(self) -> None:
        self._check_range(1024 * 1024, 2**50, "bytes_per_user", "bytes_total")
        self._check_range(1, 1_000_000, "sessions_per_user", "sessions_per_ip")
        self._check_range(1, 1_000_000, "subscriptions_per_user")
        self._check_range(1, 1_000_000, "requests_per_second", "publishes_per_second")


class AuthSettings(Group, frozen=True):
    section: ClassVar[str] = "auth"

    secret: str | None = None
    """The shared secret of tokens signed with HS256, HS384 or HS512."""

    public_key: str | None = None
    """The public key (PEM, or a file with it) of tokens signed with RS…, PS…, ES… or EdDSA."""

    jwks: str | None = None
    """The key set (a URL or a file) of tokens signed with one of several keys."""

    algorithms: tuple[str, ...] = ()
    """Accepted algorithms. Default: those that fit the key."""

    audience: str | None = None
    """What a token's `aud` must contain."""

    issuer: str | None = None
    """What a token's `iss` must be."""

    leeway: str = "5 seconds"
    """How far the clocks of the issuer and the gateway may differ."""

    user_claim: str = "sub"
    """The claim that names the user."""

    tenant_claim: str = "tenant"
    """The claim that names the user's tenant."""

    tenants: tuple[str, ...] = ()
    """Tenants that this gateway serves. Default: all."""

    role_claim: str = "role"
    """The claim that names the database role a session reads as."""

    roles: tuple[str, ...] = ()
    """Database roles that a token may name. A token that names another is refused."""

    role: str | None = None
    """The database role of sessions whose token names none."""

    cookie: str | None = None
    """The name of a cookie that may contain the token."""

    admin_claim: str = "headwater_admin"
    """The claim that makes a user an admin if it is `true`."""

    def __post_init__(self) -> None:
        _ = self.leeway_period, self.public_key_text
        check_known(self.label("algorithms"), self.algorithms, ALGORITHMS)
        for name, usual in (("user_claim", "sub"), ("admin_claim", "headwater_admin")):
            if not getattr(self, name):
                raise ConfigError(
                    f"{self.label(name)}: a name is needed",
                    hint=f"It is {usual} unless you say so.",
                )
        check_secret(self.label("secret"), self.secret)
        self._check_jwks()
        self._check_has_key()

    def _check_jwks(self) -> None:
        if self.jwks is not None and self.jwks_is_url:
            check_url(self.label("jwks"), self.jwks)
        elif self.jwks is not None:
            read_file(self.label("jwks"), self.jwks)

    def _check_has_key(self) -> None:
        """With one of these settings, tokens are expected to be verified."""
        for name in ("algorithms", "audience", "issuer", "tenants", "roles", "cookie"):
            if getattr(self, name) and not self.has_key:
                raise ConfigError(
                    f"{self.label(name)}: set, but there is no key to verify tokens with, so every"
                    " client would be accepted",
                    hint="Set [auth] secret, public_key or jwks.",
                )

    @property
    def leeway_period(self) -> timedelta:
        return self._duration("leeway", least=0)

    @property
    def public_key_text(self) -> str | None:
        """The key itself, also where the setting names a file. Environments that hold no line
        breaks write them as `\\n`."""
        if self.public_key is None or "-----BEGIN" in self.public_key:
            return self.public_key and self.public_key.replace("\\n", "\n")
        return read_file(self.label("public_key"), self.public_key).decode("utf-8", "replace")

    @property
    def jwks_is_url(self) -> bool:
        return self.jwks is not None and "://" in self.jwks

    @property
    def has_key(self) -> bool:
        """Whether a key is configured, so that every session needs a token."""
        return any((self.secret, self.public_key, self.jwks))


class Settings(msgspec.Struct, frozen=True):
    """All settings: those without a group, and the groups."""

    url: str | None = None
    """The database. Without one, `Headwater()` uses the embedded PostgreSQL."""

    question_url: str | None = None
    """The URL of the same database with a login role that owns nothing and has no rights of its
    own. Statements with a session's database role are executed over it."""

    data_dir: str | None = None
    """Where the embedded PostgreSQL keeps its data."""

    log: LogSettings = LogSettings()
    live: LiveSettings = LiveSettings()
    query: QuerySettings = QuerySettings()
    mutation: MutationSettings = MutationSettings()
    replica: ReplicaSettings = ReplicaSettings()
    lake: LakeSettings = LakeSettings()
    sources: SourcesSettings = SourcesSettings()
    gateway: GatewaySettings = GatewaySettings()
    limits: LimitSettings = LimitSettings()
    auth: AuthSettings = AuthSettings()

    source: dict[str, SourceEntry] = {}
    """The sources of the file, `[source.NAME]`, by name."""

    def is_closed(self, setting: Openness) -> bool:
        """What `[gateway] metrics` and `openapi` mean."""
        return self.auth.has_key if setting == "auto" else setting == "closed"

    @property
    def opens_every_table(self) -> bool:
        """Whether every token gives access to every enabled table, unless the application has an
        authorize hook."""
        is_open = self.gateway.tables == "open" and self.auth.role is None
        return self.auth.has_key and is_open
