"""Positions in a binary log, and how two of them compare.

A position is a text such as `mariadb 1 binlog.000003:4711 0-1-55`: the dialect, the server (its
UUID, or its id on MariaDB), the file and the offset in it, and the GTIDs up to there, or `-` on a
server without them. File and offset order everything on one server. GTIDs order it on all servers
of a replication group, so that capture continues after a failover.

    >>> Position.parse("mariadb 1 binlog.000003:4711 0-1-55").offset
    4711
    >>> Position.parse("mariadb 1 b.000010:4 -") >= Position.parse("mariadb 1 b.000009:900 -")
    True
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Literal, TypeAlias
from uuid import UUID

import msgspec

from headwater.errors import PositionLost

Dialect: TypeAlias = Literal["mysql", "mariadb"]


class Position(msgspec.Struct, frozen=True):
    """After a transaction, or between two: never inside one."""

    dialect: Dialect
    server: str
    file: str
    offset: int
    gtids: str = ""

    def __str__(self) -> str:
        return f"{self.dialect} {self.server} {self.file}:{self.offset} {self.gtids or '-'}"

    @staticmethod
    def parse(text: str) -> Position:
        try:
            dialect, server, rest = text.split(" ", 2)
            place, gtids = rest.rsplit(" ", 1)
            file, offset = place.rsplit(":", 1)
            if dialect not in ("mysql", "mariadb") or not file:
                raise ValueError
            return Position(
                dialect,  # type: ignore[arg-type]
                server,
                file,
                int(offset),
                "" if gtids == "-" else gtids,
            )
        except ValueError:
            raise PositionLost(
                f"{text!r} is not a position of a MySQL or MariaDB source",
                hint="Copy the tables again: headwater source resnapshot NAME",
            ) from None

    def place(self) -> tuple[int, int]:
        """What orders positions on one server."""
        return file_number(self.file), self.offset

    def __ge__(self, mark: Position) -> bool:
        """Whether everything up to `mark` is also up to here. GTIDs decide where both have them: on
        MySQL an offset may be ahead of what readers of the tables see. Without GTIDs, positions of
        two servers cannot be compared, and the answer is no."""
        if self.dialect != mark.dialect:
            return False
        if self.gtids and mark.gtids and (self.dialect == "mysql" or self.server != mark.server):
            return contains_gtids(self.dialect, self.gtids, mark.gtids)
        return self.server == mark.server and self.place() >= mark.place()


def file_number(file: str) -> int:
    """The number of a binary log file: `binlog.000012` is 12.

    >>> file_number("mysql-bin.000012"), file_number("mysql-bin.1000000")
    (12, 1000000)
    """
    try:
        return int(file.rpartition(".")[2])
    except ValueError:
        return 0


def contains_gtids(dialect: Dialect, gtids: str, mark: str) -> bool:
    """Whether all transactions of `mark` are among `gtids`.

    >>> contains_gtids("mariadb", "0-1-55,1-2-3", "0-9-54")
    True
    >>> contains_gtids("mysql", "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-9", "")
    True
    """
    if dialect == "mariadb":
        have = mariadb_gtids(gtids)
        wanted = mariadb_gtids(mark).items()
        return all(have.get(domain, (0, 0))[1] >= number for domain, (_, number) in wanted)
    return GtidSet.parse(gtids).contains(GtidSet.parse(mark))


def mariadb_gtids(text: str) -> dict[int, tuple[int, int]]:
    """The last transaction of each domain: its server and its number.

    >>> mariadb_gtids("0-1-55,7-2-3")
    {0: (1, 55), 7: (2, 3)}
    """
    found = dict[int, tuple[int, int]]()
    for each in filter(None, text.split(",")):
        domain, server, number = (int(part) for part in each.split("-"))
        found[domain] = server, number
    return found


def print_mariadb_gtids(gtids: dict[int, tuple[int, int]]) -> str:
    return ",".join(f"{domain}-{server}-{n}" for domain, (server, n) in sorted(gtids.items()))


class GtidSet:
    """MySQL's set of transactions: for each server, ranges of numbers, both ends included.

    >>> some = GtidSet.parse("3e11fa47-71ca-11e1-9e33-c80aa9429562:1-3:5")
    >>> some.add("3e11fa47-71ca-11e1-9e33-c80aa9429562", 4)
    >>> str(some)
    '3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5'
    """

    def __init__(self, ranges: dict[str, list[list[int]]]) -> None:
        self._ranges = ranges

    @staticmethod
    def parse(text: str) -> GtidSet:
        return GtidSet({server: [list(r) for r in ranges] for server, ranges in _parsed(text)})

    def __str__(self) -> str:
        return ",".join(
            f"{server}:{':'.join(str(a) if a == b else f'{a}-{b}' for a, b in ranges)}"
            for server, ranges in sorted(self._ranges.items())
        )

    def add(self, server: str, number: int) -> None:
        ranges = self._ranges.setdefault(server, [])
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
            return
        if not any(first <= number <= last for first, last in ranges):
            ranges.append([number, number])
            self._ranges[server] = _joined(ranges)

    def contains(self, other: GtidSet) -> bool:
        return all(
            any(first <= a and b <= last for first, last in self._ranges.get(server, []))
            for server, ranges in other._ranges.items()
            for a, b in ranges
        )

    def encoded(self) -> bytes:
        """As a replica sends it. The end of a range is the first number after it."""
        parts = [struct.pack("<Q", len(self._ranges))]
        for server, ranges in sorted(self._ranges.items()):
            parts.append(UUID(server).bytes + struct.pack("<Q", len(ranges)))
            parts += [struct.pack("<QQ", first, last + 1) for first, last in ranges]
        return b"".join(parts)


@lru_cache(64)
def _parsed(text: str) -> tuple[tuple[str, tuple[tuple[int, int], ...]], ...]:
    servers = dict[str, list[list[int]]]()
    for each in filter(None, (part.strip() for part in text.split(","))):
        server, *ranges = each.split(":")
        for piece in ranges:
            first, _, last = piece.partition("-")
            servers.setdefault(server.lower(), []).append([int(first), int(last or first)])
    return tuple(
        (server, tuple((a, b) for a, b in _joined(ranges))) for server, ranges in servers.items()
    )


def _joined(ranges: list[list[int]]) -> list[list[int]]:
    joined = list[list[int]]()
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1][1] = max(joined[-1][1], last)
        else:
            joined.append([first, last])
    return joined
