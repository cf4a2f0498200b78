"""Everything that prevents capture, each with its fix: release, settings, rights, tables.

Nothing is changed at the server. Rights are tried, not read from grants, which may come from roles.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from headwater.capture.mysql.binlog import may_dump
from headwater.capture.mysql.connection import Address, connect, query, quoted
from headwater.capture.mysql.describe import Found, find_tables, is_mirrored, problem_of
from headwater.capture.mysql.positions import Position
from headwater.capture.mysql.server import Server, log_status, variables
from headwater.capture.source import Problem, SourceDefinition, TableSpec
from headwater.errors import SourceRefused

if TYPE_CHECKING:
    from pymysql.connections import Connection

RETENTION_SECONDS_MIN = 86_400
_OLDEST = {"mysql": (5, 7, 0), "mariadb": (10, 5, 0)}
_SETTINGS = (
    "log_bin", "binlog_format", "binlog_row_image", "binlog_row_metadata", "server_id",
    "binlog_row_value_options", "binlog_expire_logs_seconds", "expire_logs_days",
)  # fmt: skip


def find_problems(
    connection: Connection[Any],
    server: Server,
    address: Address,
    definition: SourceDefinition,
    server_id: int,
) -> list[Problem]:
    oldest = _OLDEST[server.dialect]
    if server.version < oldest:
        version = ".".join(map(str, server.version))
        needed = ".".join(map(str, oldest[:2]))
        return [Problem(f"{server.dialect} {version} is too old", f"Use {needed} or later.")]
    settings = variables(connection, *_SETTINGS)
    problems = [*_settings(settings), *_server_id(settings, server_id)]
    if settings.get("log_bin") == "ON":
        problems += _rights(connection, server, address)
        problems += _filters(connection, server, address)
    problems += _retention(settings)
    problems += _tables(connection, server, address, definition)
    return problems


# ------------------------------------------------------------------------ settings


def _settings(settings: dict[str, str]) -> Iterator[Problem]:
    if settings.get("log_bin") != "ON":
        yield Problem(
            "the server writes no binary log (log_bin is off)",
            "Set log_bin = binlog in the server's configuration, and restart it.",
        )
    for name, wanted in (
        ("binlog_format", "ROW"), ("binlog_row_image", "FULL"), ("binlog_row_metadata", "FULL"),
    ):  # fmt: skip
        value = settings.get(name)
        if value is not None and value.upper() != wanted:
            yield Problem(
                f"{name} is {value}, capture needs {wanted}",
                f"set global {name} = '{wanted}', also in the server's configuration; sessions"
                " that are open keep the old value",
            )
    if "PARTIAL_JSON" in settings.get("binlog_row_value_options", ""):
        yield Problem(
            "binlog_row_value_options is PARTIAL_JSON", "set global binlog_row_value_options = ''"
        )


def _server_id(settings: dict[str, str], server_id: int) -> Iterator[Problem]:
    own = int(settings.get("server_id", "0"))
    if own == 0:
        yield Problem("the server's server_id is 0", "Set server_id = 1, and restart the server.")
    if own == server_id:
        yield Problem(
            f"the source uses the server id {server_id}, which is the server's own",
            "Give the source another one: the option server_id.",
        )


def _retention(settings: dict[str, str]) -> Iterator[Problem]:
    seconds = float(settings.get("binlog_expire_logs_seconds") or 0)
    seconds = seconds or float(settings.get("expire_logs_days") or 0) * 86_400
    if 0 < seconds < RETENTION_SECONDS_MIN:
        yield Problem(
            f"binary logs are deleted after {seconds:.0f} seconds; a source that is stopped for"
            " longer must be copied again",
            "set global binlog_expire_logs_seconds = 259200",
            warning=True,
        )


# ------------------------------------------------------------------------ rights


def _rights(connection: Connection[Any], server: Server, address: Address) -> Iterator[Problem]:
    import pymysql

    right = "binlog monitor" if server.dialect == "mariadb" else "replication client"
    try:
        file, offset, _ = log_status(connection, server)
        query(connection, "show binary logs")
    except pymysql.err.Error:
        yield Problem(
            f"the user {address.user} may not see where the binary log ends",
            f"grant {right} on *.* to {_user(address)}",
        )
        file, offset = "", 4
    # Another number than the source's: the server ends an older reader of the same number.
    number = random.randrange(3_000_000_000, 4_000_000_000)
    with connect(address, read_timeout=30) as other:
        position = Position(server.dialect, server.identity, file, offset)
        if (reason := may_dump(other, position, number)) is not None:
            yield Problem(
                f"the user {address.user} may not read the binary log: {reason}",
                f"grant replication slave on *.* to {_user(address)}",
            )


def _user(address: Address) -> str:
    return f"'{address.user}'@'%'"


def _filters(connection: Connection[Any], server: Server, address: Address) -> Iterator[Problem]:
    """The server may be configured to log only some databases."""
    import pymysql

    renamed = server.dialect == "mysql" and server.version >= (8, 2, 0)
    try:
        rows = query(connection, "show binary log status" if renamed else "show master status")
    except pymysql.err.Error:
        return
    for row in rows:
        only, without = (str(value or "").split(",") for value in row[2:4])
        if (only != [""] and address.database not in only) or address.database in without:
            yield Problem(
                f"the server does not log changes of the database {address.database}",
                "Change binlog_do_db or binlog_ignore_db in the server's configuration.",
            )


# ------------------------------------------------------------------------ tables


def _tables(
    connection: Connection[Any], server: Server, address: Address, definition: SourceDefinition
) -> Iterator[Problem]:
    present, absent = find_tables(
        connection, definition, address, fold=server.fold, mariadb=server.dialect == "mariadb"
    )
    for spec in absent:
        yield Problem(
            f"the table {spec.name} does not exist, or the user {address.user} may not see it",
            f"Create it, or grant select on it to {_user(address)}.",
            missing=spec.name,
        )
    if not present and not absent:
        yield Problem(
            f"the database {address.database} has no table that {address.user} may see",
            f"grant select on {quoted(address.database)}.* to {_user(address)}",
        )
    for spec, found in present:
        problems = list(_table(connection, address, spec, found))
        yield from problems
        if definition.options.get("allow_cascades") or problems:
            continue
        if has_cascade(connection, found):
            yield Problem(
                f"{spec.name} has a foreign key with a cascade, whose changes are not in the"
                " binary log",
                "Delete and update its rows in statements instead, or set the option"
                " allow_cascades = true and accept that the mirror misses them.",
            )


def _table(
    connection: Connection[Any], address: Address, spec: TableSpec, found: Found
) -> Iterator[Problem]:
    import pymysql

    problem = problem_of(spec, found)
    if problem is not None:
        yield Problem(*problem)
        return
    if found.engine.lower() != "innodb":
        yield Problem(
            f"{spec.name} uses the engine {found.engine}, which has no transactions: its copy may"
            " miss rows that are written at the same time",
            f"alter table {quoted(found.schema, found.name)} engine = InnoDB",
            warning=True,
        )
    columns = [quoted(shape.name) for shape in found.shapes if is_mirrored(spec, shape.name)]
    try:
        statement = f"select {', '.join(columns)} from {quoted(found.schema, found.name)} limit 0"
        query(connection, statement)
    except pymysql.err.Error as error:
        yield Problem(
            f"the user {address.user} may not read {spec.name}: {error.args[-1]}",
            f"grant select on {quoted(found.schema, found.name)} to {_user(address)}",
        )


_STRING = re.compile(r"'(?:[^'\\]|\\.|'')*'")
_CASCADE = re.compile(r"FOREIGN KEY .* ON (DELETE|UPDATE) (CASCADE|SET NULL|SET DEFAULT)")


def has_cascade(connection: Connection[Any], found: Found) -> bool:
    """From the table's definition: the catalog hides foreign keys from users who may only read."""
    rows = query(connection, f"show create table {quoted(found.schema, found.name)}")
    return _CASCADE.search(_STRING.sub("''", str(rows[0][1]))) is not None


def refuse_old(server: Server) -> None:
    if server.version < _OLDEST[server.dialect]:
        version = ".".join(map(str, server.version))
        needed = ".".join(map(str, _OLDEST[server.dialect][:2]))
        raise SourceRefused(
            f"{server.dialect} {version} is too old", hint=f"Use {needed} or later."
        )
