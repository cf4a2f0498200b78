"""Reads the changes since a position. No loop and no waiting: `follow` has those.

One statement asks for the rows of all transactions that the position does not contain, and for its
own snapshot, which is the next position. Where that is more than a page, both positions are fixed,
and `catch_up` reads the pages between them by number. The same pair always gives the same changes.

Where tables are captured from the write-ahead log, the position is taken first, and the rows up to
it are read when `headwater.log.complete` says that they are there.

Which rows these are is decided in `headwater.log.between`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec
from psycopg import errors
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGresult

from headwater.database import Connection, connect
from headwater.errors import ResyncRequired
from headwater.limits import LOG_TABLES_SECONDS
from headwater.log import complete, marks, reach
from headwater.log.between import (
    BETWEEN,
    BETWEEN_TESTED,
    SINCE,
    UNTIL,
    parameters,
    since_ranges,
)
from headwater.log.reading.origins import find_origins
from headwater.log.reading.rows import ROWS_AS_JSON, LogRow, Shapes, decode_rows
from headwater.log.reading.slots import Slots
from headwater.log.reading.transactions import PendingTransactions
from headwater.model import Origin, Position, Table, Transaction

_LOG_PAGE_CHANGES = 50_000
"""Changes in one read. With more since the position, they are read page by page."""


class LogBatch(msgspec.Struct, frozen=True):
    """The result of one read. `position` is how far the log was read.

    With `backlog` set, there is more than a page: the batch has no transactions, and
    `LogReader.catch_up` reads from the old position to this one. The position survives a crash of
    the server once its WAL is on disk up to `written`; at the time of the read it was on disk up to
    `flushed`. `has_changes` says that anything was written, also to tables that the reader does not
    want.
    """

    transactions: tuple[Transaction, ...]
    position: Position
    written: int
    flushed: int
    has_changes: bool
    backlog: bool = False


class LogReader:
    """Reads the log over connections that its caller owns; remembers shapes and slots.

    `wants` leaves tables out before their images are decoded. Without it, only the tables of
    Headwater itself are left out, such as signals. With `url`, it may also be used inside a
    transaction where tables are captured from the WAL: it opens a second connection then, which
    `close` ends.
    """

    def __init__(
        self,
        log: str,
        installation: str,
        opened: Position,
        wants: Callable[[Table], bool] | None = None,
        url: str | None = None,
    ) -> None:
        self.log = log
        self._opened = opened
        self._installation = installation.encode()
        self._shapes = Shapes(wants)
        self._slots = Slots()
        self._url = url
        self._second: Connection | None = None
        self._waits = False
        """Whether tables were captured from the WAL when this was last read."""
        self._is_mixed = False
        """Whether the log may have rows from the WAL, also of before."""

    @classmethod
    async def open(
        cls,
        connection: Connection,
        wants: Callable[[Table], bool] | None = None,
        *,
        url: str | None = None,
    ) -> LogReader:
        """A reader of the log in this database. The connection is for reading the log only."""
        await _prepare(connection)
        log, installation, snapshot, waits, is_mixed = await _one(
            connection,
            "select headwater.log_id(), id, pg_current_snapshot()::text, wal_slot is not null,"
            f" {complete.IS_MIXED} from headwater.installation",
        )
        reader = cls(log, installation, Position.of_snapshot(log, snapshot), wants, url)
        reader._waits, reader._is_mixed = waits, is_mixed
        return reader

    async def close(self) -> None:
        """End the second connection, if there is one."""
        second, self._second = self._second, None
        if second is not None:
            await second.close()

    async def now(self, connection: Connection) -> Position:
        """The present position."""
        snapshot, slot, written = await _one(connection, _NOW)
        position = Position.of_snapshot(self.log, snapshot)
        if not slot:
            return await self._marked(connection, position)
        outside = await self._outside(connection)
        await complete.wait(outside, slot, written, holds_snapshot=outside is not connection)
        return await self._marked(outside, position)

    async def _outside(self, connection: Connection) -> Connection:
        """A connection that sees what is committed now: the same, unless it is in a transaction."""
        if connection.info.transaction_status == TransactionStatus.IDLE:
            return connection
        if self._second is None or self._second.closed:
            assert self._url is not None, "inside a transaction, a reader needs the URL"
            self._second = await connect(self._url, purpose="reader")
            await _prepare(self._second)
        return self._second

    async def _marked(
        self, connection: Connection, position: Position, since: Position | None = None
    ) -> Position:
        """With a mark of the newest rows, for a position that was not reached by a read."""
        cursor = await connection.execute(
            marks.NEWEST.encode(), marks.newest_parameters(position, since)
        )
        return marks.marked(position, await cursor.fetchall(), since)

    async def check(self, connection: Connection, position: Position) -> None:
        """Raise ResyncRequired unless the log still has everything since the position."""
        await reach.check(connection, position, self.log)

    async def read(self, connection: Connection, since: Position) -> LogBatch:
        """Everything committed since the position, as of the connection's snapshot.

        In a repeatable-read transaction, that is the transaction's snapshot; otherwise now.
        """
        if self._waits:
            return await self._read_complete(connection, since)
        slots = await self._slots.holding(connection, since)
        try:
            cursor = await connection.execute(
                _rows_since(slots, since_ranges(since)),
                {**parameters(since), "limit": _LOG_PAGE_CHANGES + 1},
                prepare=True,
            )
        except errors.ProgramLimitExceeded:
            # Fewer rows than a page, but larger than the server can send at once.
            return LogBatch((), await self.now(connection), 0, 0, has_changes=True, backlog=True)
        answer = _values(cursor.pgresult, 10)
        snapshot, floor, installation, retention, slot, written, flushed, feed, *rest = answer
        self._is_mixed, page = rest[0] == b"t", rest[1]
        if feed:
            self._waits = True
            return await self._read_complete(connection, since)
        position = Position.of_snapshot(self.log, snapshot.decode())
        self._check(since, installation, floor)
        if self._slots.must_repeat(retention, int(slot), position):
            return await self.read(connection, since)
        return await self._batch(connection, since, position, page, (int(written), int(flushed)))

    async def _read_complete(self, connection: Connection, since: Position) -> LogBatch:
        """The same where tables are captured from the WAL. The position is taken first; its rows
        are read when they are there, in a newer snapshot."""
        snapshot, feed, written = await _one(connection, _NOW)
        if not feed:
            self._waits = False
            return await self.read(connection, since)
        position = Position.of_snapshot(self.log, snapshot)
        outside = await self._outside(connection)
        if not since.covers(position):
            await complete.wait(outside, feed, written, holds_snapshot=outside is not connection)
        while True:
            slots = await self._slots.holding(outside, since)
            values = {**parameters(since, position), "limit": _LOG_PAGE_CHANGES + 1}
            try:
                statement = _rows_since(slots, since_ranges(since), UNTIL)
                cursor = await outside.execute(statement, values, prepare=True)
            except errors.ProgramLimitExceeded:
                position = await self._marked(outside, position, since)
                return LogBatch((), position, 0, 0, has_changes=True, backlog=True)
            answer = _values(cursor.pgresult, 10)
            snapshot, floor, installation, retention, slot, _, flushed, _, mixed, page = answer
            self._is_mixed = mixed == b"t"
            self._check(since, installation, floor)
            # Rows are appended by transactions that the position does not contain.
            visible = Position.of_snapshot(self.log, snapshot.decode())
            if not self._slots.must_repeat(retention, int(slot), visible):
                break
        lsns = (int(written), max(int(written), int(flushed)))
        return await self._batch(outside, since, position, page, lsns)

    def _check(self, since: Position, installation: bytes, floor: bytes) -> None:
        if installation != self._installation:
            raise ResyncRequired("the log was given another name", hint=reach.READ_AGAIN)
        reach.check_floor(since, int(floor))

    async def _batch(
        self,
        connection: Connection,
        since: Position,
        position: Position,
        page: bytes,
        lsns: tuple[int, int],
    ) -> LogBatch:
        """The rows of a read as a batch. `lsns` are how far the WAL was written and on disk."""
        rows = decode_rows(page)
        backlog = len(rows) > _LOG_PAGE_CHANGES
        # A position from before this connection may contain transactions that were only ended by a
        # restart of the server, after rows that are read now: no mark can begin there.
        if backlog or (rows and not since.covers(self._opened)):
            position = await self._marked(connection, position, since)
        else:
            stamps = (marks.Stamp.of(row.xid, row.seq, row.at) for row in rows)
            mark = marks.mark_of_read(since, position, stamps)
            position = msgspec.structs.replace(position, mark=mark)
        await self._shapes.learn(connection, {row.shape for row in rows})
        mirrored = set() if backlog else self._shapes.mirrored(rows)
        origins = await find_origins(connection, mirrored)
        return LogBatch(
            () if backlog else tuple(self._assemble(rows, origins, since, position)),
            position,
            *lsns,
            has_changes=bool(rows),
            backlog=backlog,
        )

    async def tables_since(self, connection: Connection, since: Position) -> list[Table] | None:
        """The tables that changed since the position, in every shape that they had, without those
        that the reader does not want. None where the query takes too long."""
        seconds = LOG_TABLES_SECONDS
        try:
            async with connection.transaction():
                await connection.execute(
                    f"set local statement_timeout = '{int(seconds * 1000)}ms'".encode()
                )
                await connection.execute("set local enable_seqscan = on")
                cursor = await connection.execute(
                    f"select distinct shape from headwater.log where {SINCE}", parameters(since)
                )
                shapes = {shape for (shape,) in await cursor.fetchall()}
        except errors.QueryCanceled:
            return None
        await self._shapes.learn(connection, shapes)
        return self._shapes.tables(shapes)

    async def catch_up(
        self, connection: Connection, since: Position, until: Position
    ) -> AsyncIterator[Transaction]:
        """The transactions between two positions, page by page. Only the last one carries `until`;
        a consumer that resumes from an earlier one begins at `since` again."""
        held: Transaction | None = None
        pending = PendingTransactions()
        origins: dict[int, Origin] = {}
        async with aclosing(self._pages(connection, since, until)) as pages:
            async for rows, upto in pages:
                await self._shapes.learn(connection, {row.shape for row in rows})
                pending.add(self._shapes.wanted(rows))
                new = self._shapes.mirrored(rows) - origins.keys()
                origins |= await find_origins(connection, new)
                xids = self._in_order(pending)
                finished, others_end = await _without_changes_beyond(connection, xids, upto)
                if self._is_mixed and others_end is not None:
                    # Not before a transaction that ended earlier, and was appended later.
                    finished = [xid for xid in finished if pending.newest(xid) <= others_end]
                for xid, ready, complete in pending.take_ready(finished):
                    if held is not None:
                        yield held
                    changes = self._shapes.changes(ready, origins)
                    held = Transaction(xid, changes, since, complete)
                    if complete:
                        origins.pop(xid, None)
        if held is not None:
            yield Transaction(held.xid, held.changes, until)

    async def _pages(
        self, connection: Connection, since: Position, until: Position
    ) -> AsyncGenerator[tuple[list[LogRow], int], None]:
        """The rows between two positions in the order of `seq`, with the last number of each page.
        A caller that stops early must close it: the next page was requested already."""
        first, last = await _one(connection, _SEQ_BOUNDS, parameters(since, until))
        size = _LOG_PAGE_CHANGES
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
                yield decode_rows(page), first - 1
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)

    def _assemble(
        self,
        rows: list[LogRow],
        origins: Mapping[int, Origin],
        since: Position,
        position: Position,
    ) -> Iterator[Transaction]:
        """Whole transactions in the order of their last change."""
        pending = PendingTransactions()
        pending.add(self._shapes.wanted(rows))
        order = self._in_order(pending)
        for xid in order[:-1]:
            yield Transaction(xid, self._shapes.changes(pending.take(xid), origins), since)
        for xid in order[-1:]:
            yield Transaction(xid, self._shapes.changes(pending.take(xid), origins), position)

    def _in_order(self, pending: PendingTransactions) -> list[int]:
        """The transactions in an order in which they can have committed."""
        return pending.xids_by_time() if self._is_mixed else pending.xids()


async def _prepare(connection: Connection) -> None:
    """Making a plan for each read would cost more than the read. The one plan must neither scan a
    slot that was empty when it was made, nor start workers for a handful of rows."""
    for setting in (
        "plan_cache_mode = force_generic_plan",
        "enable_seqscan = off",
        "jit = off",
        "max_parallel_workers_per_gather = 0",
    ):
        await connection.execute(f"set {setting}")


_NOW = f"select pg_current_snapshot()::text, {complete.SLOT}, {complete.WRITTEN}"

# After the rows: a slot that was emptied while it was read is noticed.
_FLOOR = f"({reach.FLOOR} where page.rows is not null)"


@lru_cache(maxsize=64)
def _rows_since(slots: tuple[int, ...], ranges: tuple[str, ...], until: str = "true") -> str:
    parts = " union all ".join(
        f"select * from headwater.log_{slot} where {range_} and {until}"
        for slot in slots
        for range_ in ranges
    )
    return f"""
        with page as materialized (
          select {ROWS_AS_JSON} as rows
          from (select * from ({parts}) new order by seq limit %(limit)s) ordered
        )
        select pg_current_snapshot()::text, {_FLOOR},
               installation.id, installation.retention::text,
               headwater.slot_at(clock_timestamp()),
               pg_current_wal_insert_lsn() - '0/0', pg_current_wal_flush_lsn() - '0/0',
               coalesce(installation.wal_slot, ''), {complete.IS_MIXED}, page.rows
        from page cross join headwater.installation"""


_PAGE = f"""
    with page as materialized (
      select {ROWS_AS_JSON} as rows
      from (
        select * from headwater.log
        where seq between %(first)s and %(last)s and {BETWEEN_TESTED}
        order by seq
      ) ordered
    )
    select {_FLOOR}, page.rows from page"""

_SEQ_BOUNDS = (
    f"select coalesce(min(seq), 1), coalesce(max(seq), 0) from headwater.log where {BETWEEN}"
)


async def _fetch_page(
    connection: Connection, since: Position, until: Position, first: int, size: int
) -> bytes:
    numbers = {"first": first, "last": first + size - 1}
    cursor = await connection.execute(_PAGE, parameters(since, until) | numbers)
    floor, page = _values(cursor.pgresult, 2)
    reach.check_floor(since, int(floor))
    return page


async def _without_changes_beyond(
    connection: Connection, xids: list[int], upto: int
) -> tuple[list[int], datetime | None]:
    """The transactions without rows after the pages read so far, in the same order; and when the
    first of the others ends."""
    cursor = await connection.execute(
        "select x.xid::text::bigint, (select max(l.at) from headwater.log l"
        " where l.xid = x.xid and l.seq > %s) from unnest(%s::xid8[]) with ordinality x (xid, n)"
        " order by x.n",
        (upto, list(map(str, xids))),
    )
    found = await cursor.fetchall()
    ends = [at for _, at in found if at is not None]
    return [xid for xid, at in found if at is None], min(ends, default=None)


def _values(result: PGresult | None, count: int) -> list[bytes]:
    """The first row's values as the server sent them."""
    assert result is not None
    values = [result.get_value(0, column) for column in range(count)]
    return [value for value in values if value is not None]


async def _one(
    connection: Connection, statement: str, values: dict[str, Any] | None = None
) -> tuple[Any, ...]:
    cursor = await connection.execute(statement.encode(), values)
    row = await cursor.fetchone()
    assert row is not None
    return row
