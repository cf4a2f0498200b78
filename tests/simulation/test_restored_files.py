"""The files of the server are replaced by an older copy, like a volume snapshot: the same cluster,
the same timeline, another history.

Random writers that overlap, roll back, prepare and commit without waiting for the disk; positions
of every kind collected meanwhile; copies of the files, and the return to one of them. After each
return every position that was ever issued is used. The rows that it contained when it was issued
are compared with the rows that it contains now: if they are the same it is accepted and gives
exactly the rest, otherwise it is refused. `make fuzz` has more histories, `SEED=…` others.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import NamedTuple

import psycopg
import pytest

from headwater.capture.postgres import schema
from headwater.database import Connection, connect
from headwater.errors import ResyncRequired
from headwater.log import cursors
from headwater.log.reading.reader import LogReader
from headwater.model import Position
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.planning import Planner
from tests.support.cluster import Cluster, StopMode, releases, running
from tests.support.generators.sizes import first_seed, size
from tests.support.log_probe import enable, rows, run

SEED = first_seed(1)
HISTORIES = size("rollbacks", 2, large=50)
ROUNDS = 4
WRITERS = 5
READERS = 3

Row = tuple[int, int, str]
"""Transaction, number and time of a row of the log: no two histories share one by accident."""


class Given(NamedTuple):
    """A position that was issued, with the rows that it contained."""

    source: str
    position: str
    held: frozenset[Row]


class Writer:
    """A session that writes to rows of its own."""

    def __init__(self, number: int, connection: Connection) -> None:
        self.number = number
        self.connection = connection
        self.is_open = False


class History:
    """One server through several restores."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.chance = random.Random(seed)
        self.planner = Planner(cluster.url)
        self.given: list[Given] = []
        self.trimmed: set[Row] = set()
        self.present: set[Row] = set()
        self.copies: dict[str, set[Row]] = {}
        self.readers: list[Position] = []
        self.offset: Offset | None = None
        self.verdicts: Counter[str] = Counter()
        self.numbers = iter(range(1, 10**9))

    # -------------------------------------------------------------------- the server

    async def connect(self) -> None:
        self._stack = AsyncExitStack()
        self.reading = await self._session("reader")
        self.other = await self._session("other")
        self.reader = await LogReader.open(self.reading)
        self.writers = [Writer(i, await self._session("writer")) for i in range(WRITERS)]
        # As every reader does over a new connection.
        self.readers = [each for each in self.readers if await self._is_accepted(each)]
        await self.look()

    async def _session(self, purpose: str) -> Connection:
        connection = await connect(self.cluster.url, purpose=purpose, application_path=True)
        self._stack.push_async_callback(connection.close)
        return connection

    async def disconnect(self) -> None:
        await self._stack.aclose()

    async def stop(self) -> None:
        """Stop it like a power cut or like an operator."""
        mode: StopMode = self.chance.choice(["immediate", "immediate", "fast"])
        if mode == "fast":
            await self.disconnect()
            self.cluster.stop(mode)
        else:
            self.cluster.stop(mode)
            await self.disconnect()

    async def copy(self, name: str) -> None:
        await self.look()
        await self.stop()
        self.cluster.copy(name)
        self.copies[name] = set(self.trimmed)
        self.cluster.start()
        await self.connect()

    async def put_back(self, name: str) -> None:
        await self.stop()
        self.cluster.put_back(name)
        self.trimmed = set(self.copies[name])
        self.present = set()
        self.cluster.start()
        await self.connect()

    async def look(self) -> None:
        """Read the rows of the log; rows that it had before and has no more were trimmed."""
        found = {
            (int(xid), seq, at)
            for xid, seq, at in await rows(
                self.other, "select xid::text, seq, extract(epoch from at)::text from headwater.log"
            )
        }
        self.present = found

    @property
    def held(self) -> set[Row]:
        return self.present | self.trimmed

    async def give(self, source: str, position: Position) -> None:
        await self.look()
        held = frozenset(row for row in self.held if position.contains(row[0]))
        self.given.append(Given(source, str(position), held))

    # -------------------------------------------------------------------- what happens

    async def live(self, steps: int) -> None:
        for _ in range(steps):
            await self.chance.choice(self._steps())()

    def _steps(self) -> list[Callable[[], Awaitable[None]]]:
        return [
            *[self.write] * 8, *[self.end] * 4, self.burn, self.finish_prepared, self.savepoint,
            *[self.read] * 4, self.ask, self.plan, self.begin_plan, self.save_cursor, self.trim,
        ]  # fmt: skip

    async def _begun(self) -> Writer:
        writer = self.chance.choice(self.writers)
        if not writer.is_open:
            level = self.chance.choice(["read committed", "repeatable read"])
            await run(writer.connection, f"begin isolation level {level}")
            waits = self.chance.choice(["on", "off", "off"])
            await run(writer.connection, f"set local synchronous_commit = {waits}")
            # A prepared transaction keeps its rows locked.
            await run(writer.connection, "set local lock_timeout = 20")
            writer.is_open = True
        return writer

    async def write(self) -> None:
        writer = await self._begun()
        await self._run(writer, self._statement(writer.number))

    async def _run(self, writer: Writer, *statements: str) -> None:
        try:
            await run(writer.connection, *statements)
        except (psycopg.errors.SerializationFailure, psycopg.errors.LockNotAvailable):
            await run(writer.connection, "rollback")
            writer.is_open = False

    def _statement(self, writer: int) -> str:
        table = self.chance.choice(["apples", "apples", "pears", "unseen"])
        first = self.chance.randint(1, 20)
        mine = (
            f"owner = {writer} and id % 20 between {first} and {first + self.chance.randint(0, 6)}"
        )
        count, number = self.chance.randint(1, 4), next(self.numbers)
        return self.chance.choice([
            f"insert into {table} (owner, n)"
            f" select {writer}, {number} from generate_series(1, {count})",
            f"update {table} set n = {number} where {mine}",
            f"delete from {table} where {mine}",
        ])  # fmt: skip

    async def savepoint(self) -> None:
        writer = await self._begun()
        statement = self._statement(writer.number)
        await self._run(writer, "savepoint s", statement, "rollback to s")

    async def end(self) -> None:
        open_ones = [writer for writer in self.writers if writer.is_open]
        if not open_ones:
            return
        writer = self.chance.choice(open_ones)
        writer.is_open = False
        how = self.chance.choice(["commit"] * 7 + ["rollback"] * 2 + ["prepare"])
        if how == "prepare":
            await self.finish_prepared()
            how = f"prepare transaction 'p{next(self.numbers)}'"
        await run(writer.connection, how)

    async def finish_prepared(self) -> None:
        found = await rows(self.other, "select gid from pg_prepared_xacts order by gid")
        if found:
            (gid,) = self.chance.choice(found)
            how = self.chance.choice(["commit", "commit", "rollback"])
            await run(self.other, f"{how} prepared '{gid}'")

    async def burn(self) -> None:
        """Use transaction ids without writing."""
        for _ in range(self.chance.randint(1, 12)):
            await run(self.other, "begin", "select pg_current_xact_id()", "rollback")

    async def trim(self) -> None:
        """Trim the log. Rows that were in it before and are not after are known as trimmed."""
        await self.look()
        before = set(self.present)
        await run(self.other, "select headwater.trim_log()")
        await self.look()
        self.trimmed |= before - self.present

    async def read(self) -> None:
        """One of several readers continues: each has its own steps through the history."""
        if len(self.readers) < READERS:
            self.readers.append(await self.reader.now(self.reading))
        number = self.chance.randrange(READERS) % len(self.readers)
        try:
            batch = await self.reader.read(self.reading, self.readers[number])
        except ResyncRequired:
            self.readers.pop(number)
            return
        self.readers[number] = batch.position
        await self.give("reader", batch.position)

    async def ask(self) -> None:
        await self.give("now", await self.reader.now(self.reading))

    async def plan(self) -> None:
        if self.offset is None:
            self.offset = Offset(self.planner.now())
        try:
            self.offset = self.planner.latest(self.offset, self.chance.choice([None, 3]))
        except ResyncRequired:
            self.offset = None
            return
        await self.give("offset", self.offset.position)
        if self.offset.until is not None:
            await self.give("offset", self.offset.until)

    async def begin_plan(self) -> None:
        await self.give("planner", self.chance.choice([self.planner.now, self.planner.beginning])())

    async def save_cursor(self) -> None:
        await self.trim()  # one that is trimmed past is lost, which says nothing
        position = await self.reader.now(self.reading)
        await cursors.save(self.other, "mine", position)

    # -------------------------------------------------------------------- the judgement

    async def judge(self) -> None:
        await self.look()
        (floor,) = (await rows(self.other, "select last_value from headwater.log_floor"))[0]
        now = await self.reader.now(self.reading)
        for given in self.given:
            await self._judge(given, floor, now)
        if (saved := await cursors.load(self.other, "mine")) is not None and saved.xmin >= floor:
            await self.reader.check(self.reading, saved)

    async def _judge(self, given: Given, floor: int, now: Position) -> None:
        position = Position.parse(given.position)
        accepted = await self._is_accepted(position)
        assert accepted == self._is_planned(position), given
        holds = frozenset(row for row in self.held if position.contains(row[0])) == given.held
        if not now.covers(position) or position.xmin < floor:
            assert not accepted, given
            self.verdicts["ahead or trimmed"] += 1
            return
        assert accepted == holds, (given, accepted, holds)
        self.verdicts["accepted" if accepted else "refused"] += 1
        if accepted:
            batch = await self.reader.read(self.reading, position)
            delivered = {c.seq for each in batch.transactions for c in each.changes}
            assert delivered == {seq for xid, seq, _ in self.present if not position.contains(xid)}

    async def _is_accepted(self, position: Position) -> bool:
        try:
            await self.reader.check(self.reading, position)
        except ResyncRequired:
            return False
        return True

    def _is_planned(self, position: Position) -> bool:
        try:
            self.planner.check(position)
        except ResyncRequired:
            return False
        return True


async def prepare(cluster: Cluster, retention: str) -> None:
    connection = await connect(cluster.url, purpose="test", application_path=True)
    await schema.install(connection)
    for table in ("apples", "pears", "unseen"):
        await run(connection, f"create table {table} (id serial primary key, owner int, n int)")
    await enable(connection, "apples", "pears")
    await run(connection, f"select headwater.set_retention('{retention}')")
    await connection.close()


@pytest.mark.parametrize("release", sorted(releases()))
@pytest.mark.parametrize("seed", range(SEED, SEED + HISTORIES))
@pytest.mark.timeout(600)
async def test_a_position_is_accepted_where_its_history_exists(release: str, seed: int) -> None:
    with running(release) as cluster:
        await prepare(cluster, "1 second" if seed % 2 else "30 days")
        history = History(cluster, seed)
        await history.connect()
        for round_ in range(ROUNDS):
            await history.live(history.chance.randint(10, 60))
            await history.copy(f"copy{round_}")
            await history.live(history.chance.randint(5, 60))
            if history.chance.random() < 0.3:
                await history.judge()
            await history.put_back(f"copy{history.chance.randint(max(0, round_ - 1), round_)}")
            await history.live(history.chance.randint(5, 100))
            await history.judge()
        await history.disconnect()
        history.planner.close()
        print(dict(history.verdicts))
