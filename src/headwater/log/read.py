"""Reads what is new in the log since a position. No loop, no waiting: `follow` has those.

The rows new since a snapshot are those of transactions it does not contain; they are asked for in
one statement together with the statement's own snapshot, which is the next position. Transactions
come out whole, in the order of their last change: a transaction that changed a row after another
one did so after that one had committed, so this order is right for every row.

When more is new than fits a page, both snapshots are kept and the pages between them are read by
number. Reading the same pair again gives the same changes for ever.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, LiteralString

import msgspec
from psycopg import errors
from psycopg.pq.abc import PGresult

from headwater.database import Connection
from headwater.errors import ResyncRequired
from headwater.limits import (
    LOG_PAGE_CHANGES,
    LOG_SLOTS,
    LOG_TABLES_SECONDS,
    SLOT_CHECK_SECONDS,
    SLOT_SECONDS_MIN,
    TRANSACTION_PART_CHANGES,
)
from headwater.log import marks
from headwater.log.images import ImageDecoder
from headwater.model import NOBODY, Actor, Change, Column, Op, Position, Table, Transaction


class LogRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One line of `headwater.log`, decoded straight from the page's JSON. Images stay text until
    somebody wants them: what is in them must not matter to readers of other tables."""

    seq: int
    xid: int
    at: datetime
    shape: int
    op: str
    before: str | None
    after: str | None
    user_id: str | None
    function_name: str | None
    trace_id: str | None


_COLUMNS = (
    "seq, xid::text::bigint, at, shape, op::text, before::text, after::text,"
    " user_id, function_name, trace_id"
)
_OPS: dict[str, Op] = {
    "I": "insert",
    "U": "update",
    "D": "delete",
    "T": "truncate",
    "R": "reset",
}
_decode_page = msgspec.json.Decoder(list[LogRow]).decode


class Batch(msgspec.Struct, frozen=True):
    """What one read brought. `position` is where the log was read to.

    With `backlog` set, more is new than a page holds: nothing was taken, and `LogReader.catch_up`
    reads from the old position to this one. The position would survive a crash of the server once
    its WAL is on disk up to `written`; at the time of the read it was there up to `flushed`. `news`
    says that something was written at all, also to tables nobody here wants.
    """

    transactions: tuple[Transaction, ...]
    position: Position
    written: int
    flushed: int
    news: bool
    backlog: bool = False


class LogReader:
    """Reads the log through connections that its caller owns; remembers shapes and slots.

    `wants` leaves out the tables nobody asked for before their images are decoded; without it, only
    signals are left out, which are no changes.
    """

    def __init__(
        self,
        log: str,
        installation: str,
        opened: Position,
        wants: Callable[[Table], bool] | None = None,
    ) -> None:
        self.log = log
        self._opened = opened
        self._installation = installation.encode()
        self._wants = wants
        self._shapes: dict[int, tuple[Table, ImageDecoder] | None] = {}
        self._slots = _Slots()

    @classmethod
    async def open(
        cls, connection: Connection, wants: Callable[[Table], bool] | None = None
    ) -> LogReader:
        """A reader of the log in this database. The connection is for reading the log only."""
        # Making a plan for each read would cost more than the read. The one plan must neither scan
        # a slot that was empty when it was made, nor start workers for a handful of rows.
        for setting in (
            "plan_cache_mode = force_generic_plan",
            "enable_seqscan = off",
            "jit = off",
        ):
            await connection.execute(f"set {setting}")
        await connection.execute("set max_parallel_workers_per_gather = 0")
        log, installation, snapshot = await _one(
            connection,
            "select headwater.log_id(), id, pg_current_snapshot()::text"
            " from headwater.installation",
        )
        return cls(log, installation, Position.of_snapshot(log, snapshot), wants)

    async def now(self, connection: Connection) -> Position:
        (snapshot,) = await _one(connection, "select pg_current_snapshot()::text")
        return await self._marked(connection, Position.of_snapshot(self.log, snapshot))

    async def _marked(
        self, connection: Connection, position: Position, since: Position | None = None
    ) -> Position:
        """With a mark, though it was not reached by reading on."""
        cursor = await connection.execute(marks.NEWEST.encode(), marks.to_mark(position, since))
        return marks.marked(position, await cursor.fetchall(), since)

    async def check(self, connection: Connection, position: Position) -> None:
        """Raise ResyncRequired unless the log still holds everything since the position."""
        await check(connection, self.log, position)

    async def read(self, connection: Connection, since: Position) -> Batch:
        """Everything committed since the position, as of the connection's snapshot.

        In a repeatable-read transaction, that is the transaction's snapshot; otherwise now.
        """
        slots = await self._slots.holding(connection, since)
        try:
            cursor = await connection.execute(
                _new_rows(slots, bool(since.xip)),
                {**_new_xids(since), "limit": LOG_PAGE_CHANGES + 1},
                prepare=True,
            )
        except errors.ProgramLimitExceeded:
            # Fewer rows than a page, but larger than the server can send at once.
            return Batch((), await self.now(connection), 0, 0, news=True, backlog=True)
        answer = _values(cursor.pgresult, 8)
        snapshot, floor, installation, retention, slot, written, flushed, page = answer
        if installation != self._installation:
            raise ResyncRequired("the log was given another name", hint=_READ_AGAIN)
        _check_floor(since, int(floor))
        position = Position.of_snapshot(self.log, snapshot.decode())
        if self._slots.misled(retention, int(slot), position):
            return await self.read(connection, since)
        rows = _decode_page(page)
        backlog = len(rows) > LOG_PAGE_CHANGES
        # One from before this connection may know as rolled back what only a restart ended, later
        # than what is read now: no mark can begin there.
        if backlog or (rows and not since.covers(self._opened)):
            position = await self._marked(connection, position, since)
        else:
            stamps = (marks.Stamp.of(row.xid, row.seq, row.at) for row in rows)
            mark = marks.read_on(since, position, stamps)
            position = msgspec.structs.replace(position, mark=mark)
        await self._learn_shapes(connection, {row.shape for row in rows})
        return Batch(
            () if backlog else tuple(self._assemble(rows, since, position)),
            position,
            int(written),
            int(flushed),
            news=bool(rows),
            backlog=backlog,
        )

    async def tables_since(self, connection: Connection, since: Position) -> list[Table] | None:
        """The tables that have changed since the position, in every shape that they had; None where
        finding that out takes too long. Leaves out those that the reader does not want."""
        seconds = LOG_TABLES_SECONDS
        try:
            async with connection.transaction():
                await connection.execute(
                    f"set local statement_timeout = '{int(seconds * 1000)}ms'".encode()
                )
                await connection.execute("set local enable_seqscan = on")
                cursor = await connection.execute(
                    "select distinct shape from headwater.log"
                    " where xid >= %(xmax)s::xid8 or xid = any(%(xip)s::xid8[])",
                    _new_xids(since),
                )
                shapes = {shape for (shape,) in await cursor.fetchall()}
        except errors.QueryCanceled:
            return None
        await self._learn_shapes(connection, shapes)
        return [known[0] for shape in shapes if (known := self._shapes[shape])]

    async def catch_up(
        self, connection: Connection, since: Position, until: Position
    ) -> AsyncIterator[Transaction]:
        """All between two positions, page by page. Only the last transaction carries `until`;
        resuming from an earlier one begins at `since` again."""
        held: Transaction | None = None
        pending = _Pending()
        async with aclosing(self._pages(connection, since, until)) as pages:
            async for rows, upto in pages:
                await self._learn_shapes(connection, {row.shape for row in rows})
                pending.add(self._wanted(rows))
                finished = await _without_changes_beyond(connection, pending.xids(), upto)
                for xid, ready, complete in pending.take_ready(finished):
                    if held is not None:
                        yield held
                    held = Transaction(xid, self._changes(ready), since, complete)
        if held is not None:
            yield Transaction(held.xid, held.changes, until)

    async def _pages(
        self, connection: Connection, since: Position, until: Position
    ) -> AsyncGenerator[tuple[list[LogRow], int], None]:
        """The rows between two positions in the order of `seq`, with how far each page reaches.
        To be closed by whoever stops before the end: the next page is on its way."""
        first, last = await _seq_bounds(connection, since, until)
        size = LOG_PAGE_CHANGES
        fetching = asyncio.ensure_future(_fetch_page(connection, since, until, first, size))
        try:
            while first <= last:
                try:
                    page = await fetching
                except errors.ProgramLimitExceeded:
                    size = max(1, size // 10)
                    fetching = asyncio.ensure_future(
                        _fetch_page(connection, since, until, first, size)
                    )
                    continue
                first += size
                # PostgreSQL prepares the next page while this one is decoded.
                fetching = asyncio.ensure_future(_fetch_page(connection, since, until, first, size))
                await asyncio.sleep(0)
                yield _decode_page(page), first - 1
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)

    async def _learn_shapes(self, connection: Connection, shapes: set[int]) -> None:
        unknown = shapes - self._shapes.keys()
        if not unknown:
            return
        cursor = await connection.execute(
            "select distinct on (id) id, relid, schema_name, table_name, columns, key"
            " from headwater.shapes where id = any(%s)",
            (list(unknown),),
        )
        for id_, oid, schema, name, columns, key in await cursor.fetchall():
            typed = msgspec.convert(columns, tuple[Column, ...])
            table = Table(id_, schema, name, typed, tuple(key), oid)
            wanted = not table.is_system if self._wants is None else self._wants(table)
            self._shapes[id_] = (table, ImageDecoder(table)) if wanted else None

    def _assemble(
        self, rows: list[LogRow], since: Position, position: Position
    ) -> Iterator[Transaction]:
        """Whole transactions in the order of their last change."""
        pending = _Pending()
        pending.add(self._wanted(rows))
        order = pending.xids()
        for xid in order[:-1]:
            yield Transaction(xid, self._changes(pending.take(xid)), since)
        for xid in order[-1:]:
            yield Transaction(xid, self._changes(pending.take(xid)), position)

    def _wanted(self, rows: list[LogRow]) -> Iterator[LogRow]:
        return (row for row in rows if self._shapes[row.shape] is not None)

    def _changes(self, rows: list[LogRow]) -> tuple[Change, ...]:
        shapes = self._shapes
        return tuple(_change(row, *known) for row in rows if (known := shapes[row.shape]))


class _Pending:
    """Rows of transactions that may not have ended, in the order of each one's last row."""

    def __init__(self) -> None:
        self._rows: dict[int, list[LogRow]] = {}

    def add(self, rows: Iterable[LogRow]) -> None:
        for row in rows:
            mine = self._rows.pop(row.xid, [])
            mine.append(row)
            self._rows[row.xid] = mine

    def xids(self) -> list[int]:
        return list(self._rows)

    def take(self, xid: int) -> list[LogRow]:
        return self._rows.pop(xid)

    def take_ready(self, finished: list[int]) -> Iterator[tuple[int, list[LogRow], bool]]:
        """The finished transactions, whole; then parts of those that would outgrow memory. Of
        these a row stays behind, so that there is a last part to come."""
        for xid in finished:
            yield xid, self.take(xid), True
        for xid, rows in self._rows.items():
            if len(rows) > TRANSACTION_PART_CHANGES:
                self._rows[xid] = rows[-1:]
                yield xid, rows[:-1], False


class _Slots:
    """Knows which partitions of the log can hold anything new, so that a read visits two or three
    and not all of them.

    Writers choose the slot by the server's clock. Between two looks they can only reach the present
    slot and its neighbours. Three things could mislead us, and a read that shows one of them is
    done again after another look: a new retention numbers the slots anew; the clock jumps; and a
    transaction that was running at a look commits what it wrote long before.
    """

    def __init__(self) -> None:
        self._slots: tuple[int, ...] = ()
        self._near: frozenset[int] = frozenset()
        self._xmin = 0
        self._retention: bytes | None = None
        self._looked_at: Position | None = None
        self._long_running: frozenset[int] = frozenset()
        self._look_again_at = 0.0

    async def holding(self, connection: Connection, since: Position) -> tuple[int, ...]:
        if (
            self._retention is None
            or since.xmin < self._xmin
            or time.monotonic() >= self._look_again_at
        ):
            await self._look(connection, since)
        return self._slots

    def misled(self, retention: bytes, slot: int, position: Position) -> bool:
        """Whether the read may have passed over something; then the next one looks again."""
        moved = retention != self._retention or slot not in self._near
        if not moved and not any(position.contains(xid) for xid in self._long_running):
            return False
        if moved:
            self._looked_at = None  # whoever is running may have written anywhere
        self._retention = None
        return True

    async def _look(self, connection: Connection, since: Position) -> None:
        self._look_again_at = time.monotonic() + SLOT_CHECK_SECONDS
        retention, seconds, writing, snapshot, occupied = await _one(
            connection,
            "select retention::text, extract(epoch from retention) / 30,"
            " headwater.slot_at(clock_timestamp()), pg_current_snapshot()::text,"
            f" array({_OCCUPIED}) from headwater.installation",
            {"xmin": str(since.xmin)},
        )
        near = {(writing + step) % LOG_SLOTS for step in (-1, 0, 1)}
        self._near = frozenset(range(LOG_SLOTS) if seconds < SLOT_SECONDS_MIN else near)
        self._slots = tuple(sorted(self._near.union(occupied)))
        self._xmin = since.xmin
        self._retention = str(retention).encode()
        # One that began after the last look has written nowhere but near.
        before, now = self._looked_at, Position.of_snapshot(since.log, snapshot)
        old = now.xip if before is None else [xid for xid in now.xip if xid < before.xmax]
        self._long_running = frozenset(() if len(self._near) == LOG_SLOTS else old)
        self._looked_at = now


_OCCUPIED = " union all ".join(
    f"select {slot} where exists (select from headwater.log_{slot} where xid >= %(xmin)s::xid8)"
    for slot in range(LOG_SLOTS)
)

_ROW = f"json_build_array({_COLUMNS})"

# The floor is asked for after the rows are there, and past the snapshot, being a sequence: a slot
# that was emptied while we read it is noticed.
_FLOOR = "(select last_value from headwater.log_floor where page.rows is not null)"


@lru_cache(maxsize=64)
def _new_rows(slots: tuple[int, ...], with_running: bool) -> str:
    conditions = ["xid >= %(xmax)s::xid8"]
    if with_running:
        conditions.append("xid = any(%(xip)s::xid8[])")
    parts = " union all ".join(
        f"select * from headwater.log_{slot} where {condition}"
        for slot in slots
        for condition in conditions
    )
    return f"""
        with page as materialized (
          select coalesce(json_agg({_ROW}), '[]') as rows
          from (select * from ({parts}) new order by seq limit %(limit)s) ordered
        )
        select pg_current_snapshot()::text, {_FLOOR},
               installation.id, installation.retention::text,
               headwater.slot_at(clock_timestamp()),
               pg_current_wal_insert_lsn() - '0/0', pg_current_wal_flush_lsn() - '0/0', page.rows
        from page cross join headwater.installation"""


_PAGE = f"""
    with page as materialized (
      select coalesce(json_agg({_ROW}), '[]') as rows
      from (
        select * from headwater.log
        where seq between %(first)s and %(last)s
          and not pg_visible_in_snapshot(xid, %(since)s::pg_snapshot)
          and pg_visible_in_snapshot(xid, %(until)s::pg_snapshot)
        order by seq
      ) ordered
    )
    select {_FLOOR}, page.rows from page"""


async def _fetch_page(
    connection: Connection, since: Position, until: Position, first: int, size: int
) -> bytes:
    cursor = await connection.execute(
        _PAGE,
        {
            "first": first,
            "last": first + size - 1,
            "since": since.snapshot,
            "until": until.snapshot,
        },
    )
    floor, page = _values(cursor.pgresult, 2)
    _check_floor(since, int(floor))
    return page


async def _seq_bounds(connection: Connection, since: Position, until: Position) -> tuple[int, int]:
    first, last = await _one(
        connection,
        "select coalesce(min(seq), 1), coalesce(max(seq), 0) from headwater.log"
        " where (xid >= %(xmax)s::xid8 or xid = any(%(xip)s::xid8[]))"
        " and pg_visible_in_snapshot(xid, %(until)s::pg_snapshot)",
        {**_new_xids(since), "until": until.snapshot},
    )
    return first, last


def _new_xids(since: Position) -> dict[str, Any]:
    """Parameters that tell the transactions which a position does not contain."""
    return {"xmax": str(since.xmax), "xip": list(map(str, since.xip))}


async def _without_changes_beyond(connection: Connection, xids: list[int], upto: int) -> list[int]:
    """Those of the transactions that are wholly in the pages read so far, in their order."""
    cursor = await connection.execute(
        "select x.xid::text::bigint from unnest(%s::xid8[]) with ordinality x (xid, n)"
        " where not exists (select from headwater.log l where l.xid = x.xid and l.seq > %s)"
        " order by x.n",
        (list(map(str, xids)), upto),
    )
    return [row[0] for row in await cursor.fetchall()]


def _change(row: LogRow, table: Table, decode: ImageDecoder) -> Change:
    before = None if row.before is None else decode(row.before)
    after = None if row.after is None else decode(row.after)
    image = after if after is not None else before
    anonymous = not (row.user_id or row.function_name or row.trace_id)
    return Change(
        row.seq,
        row.xid,
        row.at,
        table,
        _OPS[row.op],
        table.key_of(image) if image is not None else (),
        before,
        after,
        NOBODY
        if anonymous
        else Actor(row.user_id or None, row.function_name or None, row.trace_id or None),
    )


def _check_floor(position: Position, floor: int) -> None:
    if position.xmin < floor:
        raise ResyncRequired(
            f"the log was trimmed past position {position}",
            hint=f"Its retention is over. {_READ_AGAIN} A longer retention is set with `retention` "
            "in headwater.toml.",
        )


async def check(connection: Connection, log: str, position: Position) -> None:
    """Raise ResyncRequired unless the log of that name still holds everything since the position,
    and everything in it happened in the log's own history."""
    if position.log != log:
        raise ResyncRequired(
            f"position {position} belongs to another log than this database's ({log})",
            hint=f"The database was restored, failed over or installed anew. {_READ_AGAIN}",
        )
    (snapshot,) = await _one(connection, "select pg_current_snapshot()::text")
    # Not only its end: an id that was given out again may belong to what is running now.
    if not Position.of_snapshot(log, snapshot).covers(position):
        raise ResyncRequired(
            f"position {position} is ahead of the database",
            hint="The server crashed and lost what it had not yet written to disk, or its files "
            f"were replaced by an earlier copy. {_READ_AGAIN}",
        )
    floor = await _floor(connection)
    _check_floor(position, floor)
    if position.mark is not None and not await _has_history(connection, position):
        if await _floor(connection) == floor:
            raise marks.replaced(position, _READ_AGAIN)
        # Rows were trimmed between the questions.
        await check(connection, log, position)


async def check_history(connection: Connection, position: Position, history: timedelta) -> None:
    """Raise ResyncRequired if a transaction that the position does not contain is older than this:
    if its last change is. In the order of transactions, so a position far back is refused by the
    first one."""
    cursor = await connection.execute(_TOO_OLD, {**_new_xids(position), "history": history})
    if await cursor.fetchone() is not None:
        raise ResyncRequired(
            f"position {position} lies further back than a feed may begin here",
            hint=f"{_READ_AGAIN} How far back it may begin is decided by the setting feed_history,"
            " or by the application's authorize hook.",
        )


_TOO_OLD = """
    (select xid from headwater.log where xid = any(%(xip)s::xid8[])
     group by xid having max(at) < clock_timestamp() - %(history)s limit 1)
    union all
    (select xid from headwater.log where xid >= %(xmax)s::xid8
     group by xid having max(at) < clock_timestamp() - %(history)s limit 1)
    limit 1
"""


async def _has_history(connection: Connection, position: Position) -> bool:
    cursor = await connection.execute(marks.COVERED.encode(), marks.to_check(position))
    answer = await cursor.fetchone()
    assert answer is not None
    return marks.agrees(position, answer)


async def _floor(connection: Connection) -> int:
    (floor,) = await _one(connection, "select last_value from headwater.log_floor")
    return int(floor)


_READ_AGAIN = "Read the tables again, then follow the log from its present position."


def _values(result: PGresult | None, count: int) -> list[bytes]:
    """The first row's values as the server sent them."""
    assert result is not None
    values = [result.get_value(0, column) for column in range(count)]
    return [value for value in values if value is not None]


async def _one(
    connection: Connection, statement: LiteralString, parameters: dict[str, Any] | None = None
) -> tuple[Any, ...]:
    cursor = await connection.execute(statement, parameters)
    row = await cursor.fetchone()
    assert row is not None
    return row
