"""Opens connections to a source database, and translates the driver's errors into a source's.

The settings that decide how values print are set when a session starts, so a row of a snapshot and
a row of the log have the same texts. No error contains a password.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import errors, pq

from headwater.capture.kinds import ENCODED
from headwater.database import Connection, connect, without_password
from headwater.errors import (
    ConfigError,
    HeadwaterError,
    SourceError,
    SourceRefused,
    SourceUnavailable,
)
from headwater.limits import CONNECT_TIMEOUT_SECONDS, DEAD_PEER_SECONDS

SETTINGS = {
    "timezone": "UTC",
    "datestyle": "ISO",
    "intervalstyle": "iso_8601",
    "bytea_output": "hex",
    "extra_float_digits": "1",
    "lc_monetary": "C",
    "xmlbinary": "base64",
    "standard_conforming_strings": "on",
    "client_min_messages": "warning",
    "search_path": "pg_catalog",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "row_security": "off",
}
"""Of every session. Without row security the server refuses to hide rows silently."""

_OPTIONS = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())


async def open_session(url: str, *, purpose: str) -> Connection:
    """A session for statements, in autocommit mode."""
    with source_errors(url):
        return await connect(url, purpose=purpose, options=_OPTIONS)


async def open_walsender(url: str, *, purpose: str) -> Connection:
    """A session for commands of the replication protocol. It reads statements without
    parameters only."""
    with source_errors(url):
        return await Connection.connect(
            url,
            autocommit=True,
            replication="database",
            connect_timeout=CONNECT_TIMEOUT_SECONDS,
            keepalives_idle=DEAD_PEER_SECONDS,
            tcp_user_timeout=DEAD_PEER_SECONDS * 1000,
            application_name=f"headwater {purpose}",
            client_encoding="utf8",
            options=_OPTIONS,
        )


def error_of(result: pq.abc.PGresult) -> psycopg.Error:
    """The driver's error for a result that is one."""
    return errors.error_from_result(result)


@contextmanager
def source_errors(url: str) -> Iterator[None]:
    """Translate errors of the driver, and of `headwater.database`, inside the block."""
    try:
        yield
    except psycopg.Error as error:
        raise translate(error, url) from error
    except SourceError:
        raise
    except HeadwaterError as error:
        if isinstance(error.__cause__, psycopg.Error):
            raise translate(error.__cause__, url) from error.__cause__
        raise


def translate(error: psycopg.Error, url: str) -> HeadwaterError:
    """The error of a source for an error of the driver."""
    message = error.diag.message_primary or _first_line(str(error))
    where = without_password(url)
    if isinstance(error, psycopg.ProgrammingError) and not error.sqlstate:
        # Not with libpq's text, which repeats parts of the URL, such as the password.
        return ConfigError(
            "the URL of the source is not usable",
            hint=f"A URL looks like postgresql://user:password@host:5432/database. {ENCODED}",
        )
    if error.sqlstate in _BUSY:
        return SourceUnavailable(f"{where}: {message}", hint=_BUSY[error.sqlstate])
    for words, hint in _REFUSED_WORDS.items():
        if words in message:
            return SourceRefused(f"cannot read {where}: {message}", hint=hint)
    if error.sqlstate is None or error.sqlstate[:2] in _PASSING:
        return SourceUnavailable(
            f"cannot reach {where}: {message}",
            hint="Check that the server runs and that the URL is right.",
        )
    hint = error.diag.message_hint or "`headwater source status` lists what is missing."
    return SourceRefused(f"{where}: {message}", hint=hint)


def _first_line(text: str) -> str:
    """Without the lines that repeat the reason for each address of a host.

    >>> _first_line("refused: a\\nMultiple connection attempts failed. All failures were:")
    'refused: a'
    """
    return text.strip().partition("\nMultiple connection attempts failed.")[0].replace("\n", "; ")


_PASSING = frozenset({"08", "40", "53", "57", "58", "XX"})
"""Classes of SQLSTATE: the connection, conflicts, resources, an operator, the system, a defect."""

_BUSY = {
    "55006": "Another runner reads this slot. It must end first; two sources need two names.",
    "53400": "Raise max_replication_slots at the source and restart it, or drop a slot that"
    " nothing uses: select pg_drop_replication_slot('…').",
}

_GRANT = "Give the role the right: alter role … with login replication."
_REFUSED_WORDS: dict[str, str] = {
    "password authentication failed": "Check the user and the password in the URL.",
    "no password supplied": "Put the password into the URL, or into a password file.",
    "no pg_hba.conf entry": "Allow the connection in the server's pg_hba.conf and reload it.",
    "does not exist": "Check the names in the URL and the tables of the source.",
    "must be superuser or replication role": _GRANT,
    "permission denied to start WAL sender": _GRANT,
    "permission denied to use replication slots": _GRANT,
    "is not permitted to log in": "Give the role the right: alter role … with login.",
}
"""A connection that fails has no SQLSTATE in the driver, only the server's words."""


async def fetch(connection: Connection, statement: str, *values: Any) -> list[tuple[Any, ...]]:
    """All rows of a statement with bound values."""
    cursor = await connection.execute(statement.encode(), values or None)
    return await cursor.fetchall()


async def fetch_value(connection: Connection, statement: str, *values: Any) -> Any:
    """The first value of the first row; None without rows."""
    rows = await fetch(connection, statement, *values)
    return rows[0][0] if rows else None
