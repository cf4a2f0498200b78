"""The server: its dialect and release, where its binary log ends, and how to resume from a
position.

On MariaDB a position on the same server is resumed by file and offset, after its GTIDs were
compared with those at that place: a reset log has other ones. After a failover it is resumed by
GTID. MySQL is resumed by GTID where it has them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from headwater.capture.mysql.connection import query
from headwater.capture.mysql.positions import Dialect, Position, file_number
from headwater.errors import PositionLost, SourceRefused

if TYPE_CHECKING:
    from pymysql.connections import Connection

_RESNAPSHOT = "Copy the tables again: headwater source resnapshot NAME"


class Server(msgspec.Struct, frozen=True):
    """`identity` is the UUID, or MariaDB's server id. `fold`: names of tables have no case."""

    dialect: Dialect
    version: tuple[int, int, int]
    identity: str
    fold: bool
    gtids: bool


def read_server(connection: Connection[Any]) -> Server:
    ((version, fold),) = query(connection, "select @@version, @@lower_case_table_names")
    mariadb = "mariadb" in version.lower()
    numbers = re.findall(r"\d+", version)
    if mariadb and version.startswith("5.5.5-"):
        numbers = numbers[3:]
    major, minor, patch = (int(n) for n in (*numbers, "0", "0", "0")[:3])
    if mariadb:
        ((identity,),) = query(connection, "select @@server_id")
        gtids = True
    else:
        ((identity,),) = query(connection, "select @@server_uuid")
        gtids = str(variables(connection, "gtid_mode").get("gtid_mode")).upper() == "ON"
    dialect: Dialect = "mariadb" if mariadb else "mysql"
    return Server(dialect, (major, minor, patch), str(identity), int(fold) != 0, gtids)


def variables(connection: Connection[Any], *names: str) -> dict[str, str]:
    """Global settings; those that the server does not have are absent."""
    places = ", ".join(["%s"] * len(names))
    statement = f"show global variables where variable_name in ({places})"
    return {str(name).lower(): str(value) for name, value in query(connection, statement, names)}


def log_status(connection: Connection[Any], server: Server) -> tuple[str, int, str]:
    """Where the binary log ends, and on MySQL the GTIDs that are committed."""
    renamed = server.dialect == "mysql" and server.version >= (8, 2, 0)
    rows = query(connection, "show binary log status" if renamed else "show master status")
    if not rows:
        raise SourceRefused(
            "the server writes no binary log", hint="Set log_bin, and restart the server."
        )
    file, offset, *rest = rows[0]
    gtids = re.sub(r"\s", "", str(rest[2])) if len(rest) > 2 and server.gtids else ""
    return str(file), int(offset), gtids


def current_position(connection: Connection[Any], server: Server) -> Position:
    file, offset, gtids = log_status(connection, server)
    if server.dialect == "mariadb":
        gtids = gtids_at(connection, file, offset) or ""
    return Position(server.dialect, server.identity, file, offset, gtids)


def gtids_at(connection: Connection[Any], file: str, offset: int) -> str | None:
    """MariaDB's GTIDs at a place; None if there is no such place."""
    statement = f"select binlog_gtid_pos(%s, {int(offset)})"
    ((gtids,),) = query(connection, statement, (file,))
    return None if gtids is None else str(gtids)


def binary_logs(connection: Connection[Any]) -> list[tuple[str, int]]:
    """Names and sizes, the oldest first."""
    rows = query(connection, "show binary logs")
    return [(str(row[0]), int(row[1])) for row in rows]


def resumes_by_gtid(connection: Connection[Any], server: Server, position: Position) -> bool:
    """Whether to resume by GTID, otherwise by file and offset. Raises `PositionLost`."""
    if position.dialect != server.dialect:
        raise _lost(f"the position is of {position.dialect}, the server is {server.dialect}")
    if server.dialect == "mysql" and position.gtids and server.gtids:
        executed = "select gtid_subset(%s, @@global.gtid_executed)"
        if str(query(connection, executed, (position.gtids,))[0][0]) != "1":
            raise _lost("the server does not have all transactions up to the position")
        return True
    same = position.server == server.identity
    if not same and not position.gtids:
        raise _lost(f"the position is of the server {position.server}, and has no GTIDs")
    if not same:
        return True
    if server.dialect == "mysql":
        _check_place(connection, position)
        return False
    return _mariadb_by_gtid(connection, server, position)


def _mariadb_by_gtid(connection: Connection[Any], server: Server, position: Position) -> bool:
    file, _, _ = log_status(connection, server)
    if file_number(file) < file_number(position.file):
        raise _lost(f"the binary log was reset: it ends before {position.file}")
    there = gtids_at(connection, position.file, position.offset)
    if there is not None and _sorted(there) != _sorted(position.gtids):
        raise _lost(f"the binary log was reset: {position.file} has other transactions now")
    if there is None and not position.gtids:
        raise _lost(f"the server no longer has {position.file}")
    return there is None or position.offset > 0xFFFFFFFF


def _sorted(gtids: str) -> list[str]:
    return sorted(filter(None, gtids.split(",")))


def _check_place(connection: Connection[Any], position: Position) -> None:
    sizes = dict(binary_logs(connection))
    if sizes.get(position.file, -1) < position.offset:
        raise _lost(f"the server no longer has {position.file}:{position.offset}")
    if position.offset > 0xFFFFFFFF:
        raise _lost("a place after 4 GiB of a file cannot be resumed without GTIDs")


def _lost(reason: str) -> PositionLost:
    return PositionLost(reason, hint=_RESNAPSHOT)
