"""A flush without a database: what parts of the hub are driven with in unit tests.

`FakeHub` drives parts as the flush loop does. `FakeDatabase` has the rows of two tables and the log
of their changes, so that a part which reads rows or the log reads what the changes say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from random import Random
from typing import Any

from headwater.database import Connection
from headwater.errors import HeadwaterError
from headwater.hub.flush_state import FlushState
from headwater.hub.part import Flush, Part
from headwater.hub.reading.tables import KnownTable, Tables
from headwater.hub.resources import Resources
from headwater.log.images import ImageDecoder
from headwater.log.signals import is_signals
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
SIGNALS = Table(3, "headwater", "signals", (), (), oid=103)
VALUES = 6
"""Of the column n, in generated histories."""


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


class FakeDatabase:
    """The rows of the two tables by id, and every transaction so far."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, dict[str, int]]] = {"things": {}, "others": {}}
        self.log: list[Transaction] = []

    def write(self, seq: int, table: Table, id: int, n: int | None) -> Change | None:
        """Give a row a value, or delete it. None where there is no row to delete."""
        rows = self.rows[table.name]
        before, after = rows.pop(id, None), None if n is None else {"id": id, "n": n}
        if after is not None:
            rows[id] = after
        if before is None and after is None:
            return None
        op: Op = "insert" if before is None else "delete" if after is None else "update"
        return Change(seq, seq, AT, table, op, (id,), before=before, after=after)

    def truncate(self, seq: int, table: Table) -> Change:
        self.rows[table.name].clear()
        return Change(seq, seq, AT, table, "truncate")


class FakeLog:
    """Reads the log of the database, as a `LogReader` does. Flushes may come meanwhile."""

    def __init__(self, database: FakeDatabase) -> None:
        self._database = database

    async def check(self, connection: Any, position: Position) -> None: ...

    async def catch_up(
        self, connection: Any, since: Position, until: Position
    ) -> AsyncIterator[Transaction]:
        for each in list(self._database.log):
            await asyncio.sleep(0)
            if until.contains(each.xid) and not since.contains(each.xid):
                yield each


class FakeResources(Resources):
    def __init__(self, database: FakeDatabase) -> None:
        super().__init__("postgresql://nowhere", None, FakeTables(), Memory(0, 0), Metrics())
        self._log: Any = FakeLog(database)

    @asynccontextmanager
    async def log_reader(self, wants: Any = None) -> AsyncIterator[Any]:
        yield None, self._log

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks)


class FakeFlush(Flush):
    def __init__(
        self,
        since: Position,
        position: Position,
        new: Sequence[Transaction],
        connection: Connection | None = None,
    ) -> None:
        self._connection = connection
        self.number = 0
        self.since = since
        self.position = position
        self.written = position.xmax
        self.transactions = new
        self.changes = [each for each in new if not is_signals(each.changes[0].table)]
        self.touched = 0

    @property
    def connection(self) -> Connection:  # type: ignore[override]
        assert self._connection is not None, "nothing is to be asked"
        return self._connection

    async def export(self) -> str:
        raise AssertionError("nothing is to be read")

    async def allow_any_plan(self) -> None:
        assert self._connection is not None, "nothing is to be asked"


class FakeHub:
    """Drives parts as the flush loop does, with transactions that a test makes up."""

    def __init__(self) -> None:
        self.flushes = FlushState()
        self.flushes.progress.skip_to(at(1))
        self.flushes.waker = self
        self.database = FakeDatabase()
        self.resources = FakeResources(self.database)
        self.connection: Any = None
        """What flushes lend to parts that ask over it."""
        self.parts: list[Part] = []
        self.busy: Callable[[], bool] = lambda: False
        """Whether something is being read beside the flushes."""
        self._seq = 1
        self._woken = False

    # ---------------------------------------------------------------- as a waker

    def wake(self) -> None:
        self._woken = True

    def notified(self) -> None:
        self._woken = True

    # ---------------------------------------------------------------- what a test makes happen

    async def flush(self, *changes: tuple[Table, Op, int, int], fails: bool = False) -> None:
        """One transaction. With `fails`, the step fails before any part is asked to send."""
        await self._flush([change(self.next_seq(), *each) for each in changes], fails=fails)

    async def commit(self, *changes: Change | None, fails: bool = False) -> None:
        """One transaction with changes of `database`."""
        await self._flush([each for each in changes if each is not None], fails=fails)

    async def skip(self, *changes: Change | None, known: bool = True) -> None:
        """More than a flush takes; with `known`, of tables that are known."""
        since, until, new = self._write([each for each in changes if each is not None])
        tables = {each.table for one in new for each in one.changes} if known else None
        self.flushes.begun += 1
        for part in self.parts:
            if tables is not None:
                await part.prepare_skip(tables)
            part.skipped(since, until, tables)
        self.flushes.skip_to(until)
        self.flushes.wake()

    def lose(self) -> None:
        """The connection of the flushes is lost, until the next flush."""
        self.flushes.lose("the database is away")
        for part in self.parts:
            part.lost()
        self.flushes.end_step()

    def resync(self) -> None:
        """The log cannot say what happened: also between this and the next flush."""
        self.lose()
        for part in self.parts:
            part.resync()

    def restart(self) -> None:
        """The server restarts."""
        self.lose()
        self.flushes.restarts += 1
        for part in self.parts:
            part.restarted()

    async def settle(self) -> None:
        """Flush for as long as a part asks for it, or reads something beside the flushes."""
        async with asyncio.timeout(10):
            while True:
                for _ in range(20):
                    await asyncio.sleep(0)
                if self._woken:
                    self._woken = False
                    await self._flush([])
                elif not self.busy() and not self.resources.is_busy:
                    return

    async def close(self) -> None:
        self.flushes.lose("the hub is stopping")
        await self.resources.end_tasks()
        for part in self.parts:
            await part.close()

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    # ---------------------------------------------------------------- as the flush loop does

    def _write(self, made: list[Change]) -> tuple[Position, Position, list[Transaction]]:
        xid = self._seq
        since, until = self.flushes.progress.position, at(self.next_seq())
        new = [Transaction(xid, tuple(made), until)] if made else []
        self.database.log += new
        return since, until, new

    async def _flush(self, made: list[Change], *, fails: bool = False) -> None:
        since, until, new = self._write(made)
        flush = FakeFlush(since, until, new, self.connection)
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
            part.sweep()


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


class FakeHistory:
    """Generated transactions and faults, as a hub meets them."""

    def __init__(self, chance: Random, hub: FakeHub) -> None:
        self.chance = chance
        self.hub = hub

    def changes(self) -> list[Change | None]:
        """Of one transaction: the database has them from here on."""
        chance, hub = self.chance, self.hub
        made: list[Change | None] = []
        for _ in range(chance.randrange(5)):
            table = OTHERS if chance.random() < 0.1 else THINGS
            n = None if chance.random() < 0.3 else chance.randrange(VALUES)
            made.append(hub.database.write(hub.next_seq(), table, chance.randrange(12), n))
        if chance.random() < 0.05:
            made.append(hub.database.truncate(hub.next_seq(), THINGS))
        return made

    async def step(self) -> None:
        """A flush, or one that fails, or more than a flush takes; or the log is lost."""
        hub, chance = self.hub, self.chance
        for _ in range(chance.randrange(20)):
            await asyncio.sleep(0)  # what is read beside the flushes continues
        kinds = ["commit", "fail", "skip", "lose", "restart", "resync"]
        match chance.choices(kinds, [10, 1, 1, 1, 1, 1]):
            case ["commit"]:
                await hub.commit(*self.changes())
            case ["fail"]:
                await hub.commit(*self.changes(), fails=True)
            case ["skip"]:
                await hub.skip(*self.changes(), known=chance.random() < 0.7)
            case ["lose"]:
                hub.lose()
                await hub.commit(*self.changes())
            case ["restart"]:
                hub.restart()
                await hub.commit(*self.changes())
            case ["resync"]:
                hub.resync()
                self.changes()  # which no flush brings: the log is followed from now on
                await hub.commit()
                await hub.commit(*self.changes())
