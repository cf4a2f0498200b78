"""Events become items: both dialects, transactions of every form, and positions. The events are
made here; those of a real server are in tests/integration/capture/mysql."""

from __future__ import annotations

import struct
from typing import Any
from uuid import UUID

import pytest

from headwater import limits
from headwater.capture.mysql.assembly import Assembler, Catalog
from headwater.capture.mysql.describe import Charsets, Found, describe
from headwater.capture.mysql.positions import Position
from headwater.capture.mysql.types import Shape
from headwater.capture.mysql.wire import events
from headwater.capture.mysql.wire import table_map as wire
from headwater.capture.mysql.wire.events import Header
from headwater.capture.source import Progress, TableSpec, TransactionPart
from headwater.errors import PositionLost, SourceRefused

SERVER = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
FOUND = Found(
    "d", "t", "BASE TABLE", "InnoDB", [Shape("id", "int"), Shape("n", "int")], ["id"]
)  # fmt: skip
CATALOG = Catalog(
    {("d", "t"): describe(TableSpec("t"), FOUND)}, frozenset(), Charsets({}, {}), False
)


class Log:
    """An assembler and the events given to it, each 100 bytes long."""

    def __init__(self, position: str, *, named_columns: bool = True, by_gtid: bool = False) -> None:
        self.place = Position.parse(position).offset
        self.assembler = Assembler(
            Position.parse(position), CATALOG, lambda: CATALOG,
            by_gtid=by_gtid, named_columns=named_columns,
        )  # fmt: skip

    def event(self, type: int, body: bytes = b"", *, stored: bool = True, at: int = 5) -> Log:
        self.place += 100 if stored else 0
        end = self.place & 0xFFFFFFFF if stored else 0
        self.assembler.feed(Header(at, type, 1, 100, end, 0), body)
        return self

    def query(self, statement: str, schema: str = "d") -> Log:
        head = struct.pack("<IIBHH", 1, 0, len(schema), 0, 0)
        return self.event(events.QUERY, head + f"{schema}\0{statement}".encode())

    def gtid(self, number: int, *, alone: bool = False) -> Log:
        return self.event(events.MARIADB_GTID, struct.pack("<QIB", number, 0, int(alone)))

    def mysql_gtid(self, number: int) -> Log:
        return self.event(events.GTID, b"\0" + UUID(SERVER).bytes + struct.pack("<q", number))

    def table_map(self, table: str = "t", number: int = 7) -> Log:
        head = number.to_bytes(6, "little") + b"\0\0\1d\0" + bytes([len(table)])
        columns = bytes([2, wire.LONG, wire.LONG, 0, 0b10])
        names = bytes([1, 1, 0, 4, 5]) + b"\2id\1n" + bytes([8, 1, 0])
        return self.event(events.TABLE_MAP, head + table.encode() + b"\0" + columns + names)

    def rows(self, *ids: int, type: int = events.WRITE_1, number: int = 7) -> Log:
        body = number.to_bytes(6, "little") + b"\0\0" + bytes([2, 0b11])
        body += b"".join(b"\0" + struct.pack("<ii", id, 1) for id in ids)
        return self.event(type, body)

    def items(self) -> list[Any]:
        self.assembler.progress()
        items, self.assembler.items = self.assembler.items, []
        return items


def _rows(items: list[Any]) -> list[Any]:
    return [
        [[row[0] for row in (c.after or c.before) if row] for c in item.changes]
        for item in items
        if isinstance(item, TransactionPart)
    ]


MARIADB = "mariadb 1 b.000001:400 0-1-5"
MYSQL = f"mysql {SERVER} b.000001:400 {SERVER}:1-5"


def test_mariadb_transaction() -> None:
    log = Log(MARIADB).gtid(6).table_map().rows(1, 2).rows(3).event(events.XID)
    (part,) = log.items()
    assert part.position == "mariadb 1 b.000001:900 0-1-6"
    assert part.committed_at.timestamp() == 5
    assert _rows([part]) == [[["1", "2", "3"]]]


def test_mysql_transaction() -> None:
    log = Log(MYSQL).mysql_gtid(6).query("BEGIN").table_map().rows(1).event(events.XID)
    (part,) = log.items()
    assert part.position == f"mysql {SERVER} b.000001:900 {SERVER}:1-6"


def test_mysql_without_gtids() -> None:
    log = Log(f"mysql {SERVER} b.000001:400 -").event(events.ANONYMOUS_GTID)
    (part,) = log.query("BEGIN").table_map().rows(1).query("COMMIT").items()
    assert part.position == f"mysql {SERVER} b.000001:900 -"


def test_compressed_transaction_of_mysql() -> None:
    inner = Log(MYSQL)
    recorded = list[bytes]()
    inner.assembler.feed = lambda header, body: recorded.append(  # type: ignore[method-assign]
        events.HEADER.pack(5, header.type, 1, events.HEADER_SIZE + len(body), 0, 0) + body
    )
    inner.query("BEGIN").table_map().rows(1).event(events.XID)
    body = bytes([2, 3, 252, 255, 0, 0]) + b"".join(recorded)
    (part,) = Log(MYSQL).mysql_gtid(6).event(events.PAYLOAD, body).items()
    assert (part.position, _rows([part])) == (
        f"mysql {SERVER} b.000001:600 {SERVER}:1-6",
        [[["1"]]],
    )


def test_other_tables_are_progress() -> None:
    log = Log(MARIADB).gtid(6).table_map("other", 8).rows(1, number=8).event(events.XID)
    assert log.items() == [Progress("mariadb 1 b.000001:800 0-1-6")]
    assert log.items() == []


def test_no_progress_inside_of_a_transaction() -> None:
    log = Log(MARIADB).gtid(6).table_map().rows(1)
    assert log.items() == []
    assert len(log.event(events.XID).items()) == 1


def test_rollback_and_savepoints() -> None:
    log = Log(MARIADB).gtid(6).table_map().rows(1).query("ROLLBACK")
    assert log.items() == [Progress("mariadb 1 b.000001:800 0-1-6")]
    log.gtid(7).table_map().rows(1).query("SAVEPOINT `s`").rows(2, 3).query("ROLLBACK TO `s`")
    assert _rows(log.rows(4).event(events.XID).items()) == [[["1", "4"]]]


def test_large_transactions_have_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SOURCE_PART_CHANGES", 3)
    log = (
        Log(MARIADB).gtid(6).table_map().rows(1, 2).rows(3, 4).rows(*range(5, 13)).event(events.XID)
    )
    items = log.items()
    assert [sum(len(c.after) for c in item.changes) for item in items] == [2, 2, 3, 3, 2]
    assert [item.position is None for item in items] == [True, True, True, True, False]
    log.gtid(7).table_map().rows(1, 2).rows(3, 4).query("SAVEPOINT s").rows(5, 6)
    with pytest.raises(SourceRefused):
        log.query("ROLLBACK")


def test_files_larger_than_4_gib() -> None:
    log = Log("mariadb 1 b.000001:4294967200 0-1-5").gtid(6).table_map().rows(1).event(events.XID)
    (part,) = log.items()
    assert part.position == "mariadb 1 b.000001:4294967600 0-1-6"


def test_rotation_and_heartbeats() -> None:
    log = Log(MARIADB)
    log.event(events.ROTATE, struct.pack("<Q", 4) + b"b.000002")
    assert log.items() == [Progress("mariadb 1 b.000002:4 0-1-5")]
    log.event(events.ROTATE, struct.pack("<Q", 4) + b"b.000002", stored=False)
    log.place = 204
    log.event(events.HEARTBEAT, b"b.000002")
    assert log.items() == [Progress("mariadb 1 b.000002:304 0-1-5")]
    assert log.event(events.HEARTBEAT, b"b.000002", stored=False).items() == []


def test_no_place_while_the_server_passes_over_what_we_have() -> None:
    log = Log("mariadb 2 x.000000:0 0-1-5", by_gtid=True)
    log.event(events.ROTATE, struct.pack("<Q", 4) + b"x.000001", stored=False)
    assert log.event(events.HEARTBEAT, b"x.000001").items() == []
    log.gtid(6).table_map().rows(1).event(events.XID)
    (part,) = log.items()
    assert part.position == "mariadb 2 x.000001:500 0-1-6"


@pytest.mark.parametrize("statement", ["insert into t values (1)", "DELETE FROM `d`.`t`"])
def test_statements_that_write(statement: str) -> None:
    with pytest.raises(PositionLost):
        Log(MARIADB).gtid(6).query(statement)
    Log(MARIADB).gtid(6).query(statement.replace("t", "other"), schema="e")


def test_what_cannot_be_read() -> None:
    with pytest.raises(PositionLost):
        Log(MYSQL).event(events.INCIDENT, b"\1\0")
    with pytest.raises(SourceRefused):
        Log(MYSQL).event(events.TAGGED_GTID, b"")
    with pytest.raises(SourceRefused):
        Log(MYSQL).query("BEGIN").table_map().event(events.PARTIAL_UPDATE, b"\7" + b"\0" * 7)
    with pytest.raises(SourceRefused):
        Log(MARIADB).gtid(6).table_map().rows(1).event(events.XA_PREPARE, b"\0")
