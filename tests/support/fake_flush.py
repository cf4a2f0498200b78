"""A flush without a database, to drive parts of the hub in unit tests."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from headwater.database import Connection
from headwater.errors import HeadwaterError
from headwater.hub.flush_state import FlushState
from headwater.hub.part import Flush, Part
from headwater.hub.resources import Resources
from headwater.hub.tables import KnownTable, Tables
from headwater.log.images import ImageDecoder
from headwater.memory import Memory
from headwater.metrics import Metrics
from headwater.model import Change, Column, Op, Position, Table, Transaction
from headwater.protocol import Frame, Wire

AT = datetime(2030, 1, 1, tzinfo=UTC)
THINGS = Table(
    1,
    "public",
    "things",
    (Column("id", "integer", "integer"), Column("n", "integer", "integer")),
    ("id",),
    oid=101,
)
OTHERS = Table(2, "public", "others", THINGS.columns, ("id",), oid=102)


def at(number: int) -> Position:
    """The position that contains the first transactions."""
    return Position("ff", number, number)


def change(seq: int, table: Table, op: Op, id: int, n: int) -> Change:
    row = {"id": id, "n": n}
    return Change(
        seq, seq, AT, table, op, (id,),
        before=None if op == "insert" else row, after=None if op == "delete" else row,
    )  # fmt: skip


def known(table: Table) -> KnownTable:
    return KnownTable(
        table,
        "pg_catalog.row_to_json(o.*)",
        secured=False,
        decode=ImageDecoder(table),
        decode_key=ImageDecoder(table),
        wire=Wire(table),
    )


class FakeTables(Tables):
    """Two tables that every role may read. Questions about them are answered without a database."""

    def __init__(self) -> None:
        super().__init__("postgresql://nowhere")

    async def find(self, name: str, *, captured: bool = True) -> KnownTable:
        return known({"things": THINGS, "others": OTHERS}[name])

    async def ask(self, statement: str, values: Any) -> list[tuple[Any, ...]]:
        return []


class FakeFlush(Flush):
    def __init__(self, since: Position, position: Position, new: Sequence[Transaction]) -> None:
        self.number = 0
        self.since = since
        self.position = position
        self.written = position.xmax
        self.transactions = self.changes = new
        self.touched = 0

    @property
    def connection(self) -> Connection:  # type: ignore[override]
        raise AssertionError("nothing is to be asked")

    async def export(self) -> str:
        raise AssertionError("nothing is to be read")

    async def allow_any_plan(self) -> None:
        raise AssertionError("nothing is to be asked")


class FakeHub:
    """Drives parts as the flush loop does, with transactions that a test makes up."""

    def __init__(self) -> None:
        self.flushes = FlushState()
        self.flushes.progress.skip_to(at(1))
        self.resources = Resources(
            "postgresql://nowhere", None, FakeTables(), Memory(0, 0), Metrics()
        )
        self.parts: list[Part] = []
        self._seq = 1

    async def flush(self, *changes: tuple[Table, Op, int, int], fails: bool = False) -> None:
        """One transaction. With `fails`, the step fails before any part is asked to send."""
        since = self.flushes.progress.position
        made = []
        for table, op, id, n in changes:
            self._seq += 1
            made.append(change(self._seq, table, op, id, n))
        self._seq += 1
        until = at(self._seq)
        new = [Transaction(self._seq, tuple(made), until)] if made else []
        flush = FakeFlush(since, until, new)
        self.flushes.begun += 1
        for part in self.parts:
            await part.prepare(flush)
        self.flushes.durable_before = self.flushes.durable
        self.flushes.progress.skip_to(until)
        self.flushes.begin_step(until)
        flush.number = self.flushes.number
        for part in self.parts:
            if fails:
                part.unsent(flush)
            else:
                await part.send(flush)
        self.flushes.end_step()
        for part in self.parts:
            part.ended(flush)


class Listener:
    """A subscriber that remembers what it was sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.error: HeadwaterError | None = None

    def subscribed(self, view: int, *, key: tuple[str, ...], resumed: bool) -> None:
        self.messages.append(("subscribed", resumed))

    def deliver(self, frame: Frame) -> None:
        self.messages.append(frame.message)

    def failed(self, error: HeadwaterError) -> None:
        self.error = error

    async def room(self) -> None:
        pass
