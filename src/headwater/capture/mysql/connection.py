"""Connections to MySQL and MariaDB: the URL, sessions with the settings that reading needs, and the
driver's errors as ours. Everything here blocks; the callers run it in threads.

Sessions are in UTC, with an empty SQL mode and utf8mb4, so that values have one text whatever the
server's defaults are.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from headwater.capture.kinds import ENCODED
from headwater.errors import (
    ConfigError,
    HeadwaterError,
    PositionLost,
    SourceRefused,
    SourceUnavailable,
)

if TYPE_CHECKING:
    from pymysql.connections import Connection

CONNECT_SECONDS = 10
READ_SECONDS = 300
"""A chunk of rows or a look at the catalog that takes longer ends with an error."""

_PARAMETERS = frozenset(("ssl-mode", "ssl-ca", "ssl-cert", "ssl-key", "socket", "connect-timeout"))
_SSL_MODES = ("disabled", "preferred", "required", "verify-ca", "verify-identity")


class Address(msgspec.Struct, frozen=True):
    """Where a source is. Its `repr` has no password."""

    host: str
    port: int
    user: str
    password: str
    database: str
    parameters: dict[str, str]

    def __repr__(self) -> str:
        return f"mysql://{self.user}@{self.host}:{self.port}/{self.database}"

    __str__ = __repr__


def parse_url(url: str) -> Address:
    """
    >>> parse_url("mysql://me:p%40ss@db/shop?ssl-mode=required")
    mysql://me@db:3306/shop
    """
    parts = urlsplit(url)
    try:
        port = parts.port or 3306
    except ValueError:
        raise ConfigError("the port in the source's URL is not a number", hint=ENCODED) from None
    database = unquote(parts.path.lstrip("/"))
    parameters = {key.replace("_", "-"): value for key, value in parse_qsl(parts.query)}
    if unknown := sorted(set(parameters) - _PARAMETERS):
        raise ConfigError(
            f"the source's URL has the unknown parameter {unknown[0]}",
            hint=f"Known are {', '.join(sorted(_PARAMETERS))}.",
        )
    if parts.scheme not in ("mysql", "mariadb") or not database:
        raise ConfigError(
            "the source's URL must name a database",
            hint="Write mysql://user:password@host:3306/database",
        )
    user, password = unquote(parts.username or "root"), unquote(parts.password or "")
    return Address(parts.hostname or "localhost", port, user, password, database, parameters)


def connect(address: Address, **options: Any) -> Connection[Any]:
    """A session in autocommit. Values are bytes or text as the server sent them, unconverted."""
    pymysql = _driver()
    arguments: dict[str, Any] = {
        "host": address.host, "port": address.port, "user": address.user,
        "password": address.password.encode(), "charset": "utf8mb4", "autocommit": True, "conv": {},
        "read_timeout": READ_SECONDS, "write_timeout": READ_SECONDS,
        "connect_timeout": int(address.parameters.get("connect-timeout", CONNECT_SECONDS)),
        "init_command": "set time_zone = '+00:00', sql_mode = '', sql_quote_show_create = 1",
        "local_infile": False, "program_name": "headwater",
    }  # fmt: skip
    if path := address.parameters.get("socket"):
        arguments["unix_socket"] = path
    arguments |= _tls(address.parameters) | options
    with translated(address):
        connection: Connection[Any] = pymysql.connect(**arguments)
        return connection


def _driver() -> Any:
    try:
        import pymysql
    except ImportError:
        raise ConfigError(
            "a MySQL or MariaDB source needs PyMySQL", hint='pip install "headwater[mysql]"'
        ) from None
    return pymysql


def _tls(parameters: dict[str, str]) -> dict[str, Any]:
    mode = parameters.get("ssl-mode", "preferred")
    if mode not in _SSL_MODES:
        raise ConfigError(f"ssl-mode={mode} is unknown", hint=f"Known are {', '.join(_SSL_MODES)}.")
    if mode in ("disabled", "preferred") and "ssl-ca" not in parameters:
        return {"ssl_disabled": True} if mode == "disabled" else {}
    context = ssl.create_default_context(cafile=parameters.get("ssl-ca"))
    context.check_hostname = mode == "verify-identity"
    if not mode.startswith("verify"):
        context.verify_mode = ssl.CERT_NONE
    if certificate := parameters.get("ssl-cert"):
        context.load_cert_chain(certificate, parameters.get("ssl-key"))
    return {"ssl": context}


def interrupt(connection: Any) -> None:
    """End what another thread waits for on this connection."""
    if (open_socket := connection._sock) is not None:
        with suppress(OSError):
            open_socket.shutdown(socket.SHUT_RDWR)


def query(
    connection: Connection[Any], statement: str, values: tuple[Any, ...] = ()
) -> list[tuple[Any, ...]]:
    """All rows; numbers are texts, because nothing is converted."""
    with connection.cursor() as cursor:
        cursor.execute(statement, values or None)
        return list(cursor.fetchall())


def as_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def literal(connection: Connection[Any], value: str | bytes | int) -> str:
    """A value inside of a statement."""
    if isinstance(value, int):
        return str(value)
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    return str(connection.escape(value))


def quoted(*names: str) -> str:
    """
    >>> print(quoted("shop", "odd`name"))
    `shop`.`odd``name`
    """
    return ".".join("`" + name.replace("`", "``") + "`" for name in names)


# ------------------------------------------------------------------------ errors

_WRONG_LOGIN = (1045, 1698, 1251, 1862, 3118, 3159)
_MISSING_RIGHT = (1044, 1142, 1143, 1227, 1370)
_UNKNOWN = (1049, 1146, 1054)
BINLOG_ERROR = 1236
_UNREACHABLE = "Check that the server runs, and the host and the port in the URL."


@contextmanager
def translated(address: Address) -> Iterator[None]:
    """The driver's errors as ours."""
    pymysql = _driver()
    try:
        yield
    except pymysql.err.Error as error:
        raise translation(address, error) from error
    except (OSError, EOFError, ssl.SSLError) as error:
        raise SourceUnavailable(
            f"{address.host}:{address.port} ended the connection: {error}", hint=_UNREACHABLE
        ) from error


def translation(address: Address, error: Exception) -> HeadwaterError:
    code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
    message = str(error.args[1]) if len(error.args) > 1 else str(error)
    place = f"{address.host}:{address.port}"
    if code in _WRONG_LOGIN:
        return SourceRefused(
            f"{place} refused the user {address.user}: {message}",
            hint="Correct the user or the password in the source's URL.",
        )
    if code == BINLOG_ERROR:
        return _binlog_error(place, message)
    if code in _MISSING_RIGHT:
        return SourceRefused(
            f"the user {address.user} lacks a right: {message}",
            hint="grant replication slave, replication client, select on *.* to the user",
        )
    if code in _UNKNOWN:
        return SourceRefused(f"{place}: {message}", hint="Correct the names in the source.")
    return SourceUnavailable(
        f"{place} cannot be read: {message or type(error).__name__}", hint=_UNREACHABLE
    )


def _binlog_error(place: str, message: str) -> HeadwaterError:
    """The server's one number for everything that is wrong with a request for the binary log."""
    if re.search(r"same server_?(uuid|id)|same server_uuid/server_id", message, re.IGNORECASE):
        return SourceRefused(
            f"another replica or runner reads {place} with the same server id",
            hint="Stop it, or give this source another one: the option server_id.",
        )
    if "max_allowed_packet" in message:
        return SourceRefused(
            f"{place} has an event that is too large to send: {message}",
            hint="Raise max_allowed_packet at the source.",
        )
    return PositionLost(
        f"{place} no longer has the changes after the position: {message}",
        hint="Copy the tables again: headwater source resnapshot NAME. "
        "Keep binary logs longer: binlog_expire_logs_seconds.",
    )
