"""Opens connections to PostgreSQL, and translates the driver's errors into ours.

Headwater's own statements find names in `pg_catalog` only. So they never use a function, operator
or type of a user, which would run with Headwater's rights. The search path that the session began
with stays its default (`set local search_path to default`). Connections for statements of the
application have that path (`application_path=True`).
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import AsyncConnection, errors
from psycopg.abc import RV, PQGen
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from headwater.errors import (
    CaptureError,
    ConfigError,
    DatabaseError,
    HeadwaterError,
    NotInstalled,
    PermissionMissing,
)
from headwater.limits import CONNECT_TIMEOUT_SECONDS, DEAD_PEER_SECONDS


class Connection(AsyncConnection[tuple[Any, ...]]):
    """The driver's connection with two faults fixed: a cancelled task stays cancelled, and a
    connection may be closed while another task waits for a result."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waiting: asyncio.Task[Any] | None = None
        self._shut_down = False

    async def wait(self, gen: PQGen[RV], *args: Any, **options: Any) -> RV:
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        self._waiting = task
        try:
            return await super().wait(gen, *args, **options)
        except psycopg.Error as error:
            # The driver cancels the statement first. If the connection is lost meanwhile, it only
            # reports that loss, and a caller that retries after a loss would never end.
            if task is not None and task.cancelling() > before:
                raise asyncio.CancelledError from error
            raise
        finally:
            self._waiting = None
            if self._shut_down:
                self._shut_down = False
                await super().close()

    async def close(self) -> None:
        """Close it. A task that waits for a result gets the error of a lost connection.

        The driver would free memory that this task still reads, and its file descriptor, which may
        belong to another connection by then. So the socket is shut down, and the waiting task
        closes the connection.
        """
        if self._waiting is None or self._waiting is asyncio.current_task():
            await super().close()
        elif not self.closed:
            self._shut_down = True
            line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=self.fileno())
            with suppress(OSError):  # the other side may have gone
                line.shutdown(socket.SHUT_RDWR)
            line.detach()

    @property
    def closed(self) -> bool:
        return self._shut_down or super().closed


PINNED_PATH = "pg_catalog, pg_temp"
"""The search path of our own statements."""

OWN_SCHEMA = "headwater"
"""The schema of our tables; with `"$user"` in the path, a role of that name searches it first."""

_MARK = "headwater.direct"
"""Set as a start option of every session. If it is missing, the connection is that of a pooler,
which drops start options."""

PIN = (
    f"select pg_catalog.set_config('search_path', '{PINNED_PATH}', false),"
    f" pg_catalog.current_setting('{_MARK}', true)"
)
"""Sets that path for a session; also after RESET ALL, which gives it the path it began with."""


async def connect(
    url: str,
    *,
    purpose: str,
    options: str = "",
    prepares: bool = True,
    application_path: bool = False,
) -> Connection:
    """Open a connection in autocommit mode. `purpose` shows in pg_stat_activity. Where functions
    are executed, the driver must not prepare statements: at a rollback it would remove those of
    the functions (`queries/execution/chunked_fetch.py`) with its own.

    Times are read in UTC and texts in UTF-8, independent of the server's time zone and encoding,
    and backslashes in the texts of statements are literal. Names are found in `pg_catalog` only;
    with `application_path`, in the path that the role or the database has.
    """
    try:
        connection = await _open(url, purpose, options, prepares)
        try:
            if not application_path:
                _check_direct(await (await connection.execute(PIN)).fetchone(), url)
                return connection
            path = await _path_without_ours(connection)
        except BaseException:
            await connection.close()
            raise
        if path is None:
            return connection
        await connection.close()
        # As an option, so that it is also what RESET gives.
        return await _open(url, purpose, f"{options} {_option('search_path', path)}", prepares)
    except psycopg.Error as error:
        raise translate(error, url) from error


async def _open(url: str, purpose: str, options: str, prepares: bool) -> Connection:
    return await Connection.connect(
        url,
        autocommit=True,
        **_TIMEOUTS,
        application_name=f"headwater {purpose}",
        client_encoding="utf8",
        options=f"{_SETTINGS} {options}",
        **({} if prepares else {"prepare_threshold": None}),
    )


def connect_blocking(
    url: str,
    *,
    purpose: str,
    options: str = "",
    autocommit: bool = True,
    has_timeouts: bool = True,
    **settings: Any,
) -> psycopg.Connection[tuple[Any, ...]]:
    """The same for threads and programs without an event loop. Names are found in `pg_catalog`
    only. With `has_timeouts=False` the timeouts of the server do not end long transactions. Raises
    the driver's errors."""
    connection: psycopg.Connection[tuple[Any, ...]] = psycopg.connect(
        url,
        autocommit=True,
        **_TIMEOUTS,
        application_name=f"headwater {purpose}",
        client_encoding="utf8",
        options=f"{_SETTINGS} {options}",
        **settings,
    )
    try:
        _check_direct(connection.execute(PIN).fetchone(), url)
        if not has_timeouts:
            connection.execute(NO_TIMEOUTS.encode())
        connection.autocommit = autocommit
    except BaseException:
        connection.close()
        raise
    return connection


def pinned_url(url: str) -> str:
    """Start options for a driver that executes its own queries before any setting can be made, and
    the time after which a server that does not answer counts as lost."""
    given = conninfo_to_dict(url)
    path = f"{given.get('options') or ''} {_option('search_path', PINNED_PATH)}".strip()
    own = {name: value for name, value in _TIMEOUTS.items() if name not in given}
    return make_conninfo(url, options=path, **own)


_TIMEOUTS: dict[str, Any] = {
    "connect_timeout": CONNECT_TIMEOUT_SECONDS,
    "keepalives_idle": DEAD_PEER_SECONDS,
    "tcp_user_timeout": DEAD_PEER_SECONDS * 1000,
}


_SETTINGS = (
    "-c timezone=UTC -c client_min_messages=warning -c standard_conforming_strings=on"
    f" -c {_MARK}=on"
)


NO_TIMEOUTS = """
    select set_config(name, '0', false) from pg_settings where name in
      ('idle_in_transaction_session_timeout', 'statement_timeout', 'transaction_timeout')
"""
"""Ends the timeouts that the server, the database or the role has set, for the rest of the session.
Before version 17 PostgreSQL has no `transaction_timeout`."""


def _check_direct(row: tuple[Any, ...] | None, url: str) -> None:
    """ConfigError for a session of a pooler. It would seem to work, but notifications, session
    locks and settings would be lost between transactions."""
    assert row is not None
    if row[1] != "on":
        raise _pooled(url, "it drops the settings that a session is started with")


def _pooled(url: str, reason: str) -> ConfigError:
    return ConfigError(
        f"{without_password(url)} is a connection pooler such as PgBouncer: {reason}",
        hint="Headwater needs its own sessions: give it the address of PostgreSQL itself"
        " (docs/howto/pgbouncer.md). Your application may keep using the pooler.",
    )


def _option(name: str, value: str) -> str:
    """A setting as a start option: blanks and backslashes are escaped.

    >>> print(_option("search_path", "a, b"))
    -c search_path=a,\\ b
    """
    return f"-c {name}=" + re.sub(r"([\\\s])", r"\\\1", value)


async def _path_without_ours(connection: Connection) -> str | None:
    """The path that replaces the session's own; None if that is right."""
    if connection.info.user != OWN_SCHEMA:
        return None
    cursor = await connection.execute("select pg_catalog.current_setting('search_path')")
    row = await cursor.fetchone()
    assert row is not None
    path = application_path(row[0], connection.info.user)
    return None if path == row[0] else path


# ------------------------------------------------------------------------ search paths


def application_path(path: str, user: str) -> str:
    """The path in which the application's names are found, given that of its session. For the role
    `headwater`, `"$user"` is the schema of our own tables, in which no application should find its
    names: it is left out. A path that names this schema explicitly is not changed.

    >>> application_path('"$user", public', "headwater"), application_path('"$user"', "shop")
    ('"public"', '"$user"')
    """
    names = split_path(path)
    if user != OWN_SCHEMA or names is None or "$user" not in names:
        return path
    return print_path(name for name in names if name != "$user")


def print_path(schemas: Iterable[str]) -> str:
    """The schemas as a value of the setting.

    >>> print_path(["public", "Sales"])
    '"public", "Sales"'
    """
    return ", ".join('"' + name.replace('"', '""') + '"' for name in schemas)


def split_path(path: str) -> tuple[str, ...] | None:
    """The names in a value of the setting, as the server reads it; None if it would not.

    >>> split_path('"$user", Public,"a ""b, "'), split_path(""), split_path("a b"), split_path("a,")
    (('$user', 'public', 'a "b, '), (), None, None)
    """
    if not path.strip():
        return ()
    names, at = list[str](), 0
    while (match := _NAME.match(path, at)) is not None:
        quoted, plain, comma = match.groups()
        names.append(plain.lower() if quoted is None else quoted.replace('""', '"'))
        at = match.end()
        if not comma:
            return tuple(names)
    return None


_NAME = re.compile(r'\s*(?:"((?:[^"]|"")+)"|([^\s",]+))\s*(,|\Z)')


# ------------------------------------------------------------------------ two URLs


async def check_question_url(connection: Connection, question_url: str) -> None:
    """ConfigError unless this is the same database as that of the connection, with a role that can
    log in: statements with a user's role run there."""
    try:
        asking = await connect(question_url, purpose="setup")
    except HeadwaterError as error:
        raise ConfigError(f"question_url: {error}", hint=error.hint) from error
    async with asking:
        if not await is_same_database(connection, asking):
            raise ConfigError(
                f"question_url: {without_password(question_url)} is another database than url;"
                " statements with a user's role would run there",
                hint="Give the same host, port and database in both, also where url comes from the"
                " command line and question_url from the settings.",
            )


async def is_same_database(one: Connection, other: Connection) -> bool:
    """Whether two connections are to the same database of the same server, tested by sharing a
    snapshot."""
    async with one.transaction():
        cursor = await one.execute("select pg_catalog.pg_export_snapshot()")
        row = await cursor.fetchone()
        assert row is not None
        try:
            async with other.transaction():
                await other.execute("set transaction isolation level repeatable read, read only")
                await other.execute(f"set transaction snapshot '{row[0]}'".encode())
        except psycopg.Error as error:
            if not error.sqlstate:
                raise translate(error) from error
            return False
    return True


@contextmanager
def translated(url: str = "") -> Iterator[None]:
    """Translate errors of the driver inside the block into ours."""
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, url) from error


def translate(error: psycopg.Error, url: str = "") -> HeadwaterError:
    """Our error for an error of the driver."""
    message = error.diag.message_primary or str(error).strip()
    hint = error.diag.message_hint
    if message.startswith("headwater: "):
        return CaptureError(message.removeprefix("headwater: "), hint=hint)
    if "unsupported startup parameter" in message:  # PgBouncer's words
        return _pooled(url, message.rpartition("FATAL:")[2].strip())
    match error:
        case errors.InsufficientPrivilege():
            return PermissionMissing(
                message, hint=hint or "headwater doctor lists the missing rights."
            )
        case errors.InvalidSchemaName() | errors.UndefinedFunction() | errors.UndefinedTable() if (
            "headwater" in message
        ):
            return NotInstalled(
                f"Headwater is not installed in this database ({message})",
                hint="Run: headwater init",
            )
        case psycopg.ProgrammingError() if not error.sqlstate:
            # Not with libpq's text, which repeats parts of the URL, such as the password.
            return ConfigError("the database URL is not usable", hint=_URL_HINT)
        case psycopg.OperationalError() if not error.sqlstate:
            return DatabaseError(
                f"cannot reach the database {without_password(url)}: {message}", hint=_REACH_HINT
            )
    return DatabaseError(message, hint=hint)


def is_refused(error: psycopg.Error) -> bool:
    """Whether the statement, its values or a row caused the error, so that a repetition would also
    fail. A table or column that is missing after a schema change does not count."""
    state = error.sqlstate or ""
    return state[:2] in _STATEMENT_CLASSES and state not in _ALTERED


_STATEMENT_CLASSES = frozenset({"21", "22", "23", "2F", "38", "39", "42", "44", "54", "P0"})
"""Of SQLSTATE: cardinality, data, constraints, functions, syntax and rights, check options, limits
of a statement, and what functions raise themselves."""

_ALTERED = frozenset({errors.UndefinedTable.sqlstate, errors.UndefinedColumn.sqlstate})


_URL_HINT = "A URL looks like postgresql://user:password@host:5432/database."
_REACH_HINT = "Check that the server runs and the URL is right, or use --embedded."


def is_reserved(schema: str) -> bool:
    """Whether a schema is Headwater's or PostgreSQL's own: no table of a user is created there.

    >>> [is_reserved(name) for name in ("headwater", "pg_catalog", "information_schema", "sales")]
    [True, True, True, False]
    """
    return schema in ("headwater", "information_schema") or schema.startswith("pg_")


def without_password(url: str) -> str:
    """The URL as it may appear in messages and logs. A password that is a reference to the
    environment stays: it is the name of a variable.

    >>> without_password("postgresql://ann:secret@db:5432/shop")
    'postgresql://ann:***@db:5432/shop'
    >>> without_password("postgresql://ann:se/cr@t@db?password=secret&user=ann")
    'postgresql://ann:***@db?password=***&user=ann'
    >>> without_password("mysql://ann:${SHOP_PASSWORD}@db/shop")
    'mysql://ann:${SHOP_PASSWORD}@db/shop'
    """
    masked = re.sub(r"(?<=://)([^:/@]*):(?!\$\{\w+\}@[^@]*$).*@", r"\1:***@", url)
    return re.sub(r"(?i)(password=)(?!\$\{\w+\}(?:[&\s]|$))[^&\s]*", r"\1***", masked)
