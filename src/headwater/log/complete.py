"""Waits until the log has every change that a snapshot of the database contains.

Triggers write to the log in the writer's own transaction, so a snapshot always has both. Changes of
tables that are captured from the write-ahead log (WAL) arrive a little later, with the ids of their
transactions. A position is complete when the slot that feeds the log was confirmed up to a place in
the WAL that was read after the snapshot was taken: every commit in the snapshot lies before that
place, and the slot is confirmed only after the changes were appended. No other module decides this.

After the wait, the rows are in the log for statements with a newer snapshot than that of the
position. So a reader whose transaction has a snapshot of its own reads them over another
connection. A database without such tables is not asked anything. The wait is a generator of
questions and pauses, so that it exists once for callers that await and for those that block.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias

from headwater.database import Connection
from headwater.errors import DatabaseError
from headwater.limits import WAL_CAPTURE_SECONDS

SLOT = (
    "coalesce((select pg_catalog.to_jsonb(i) operator(pg_catalog.->>) 'wal_slot'"
    " from headwater.installation i), '')"
)
"""The slot that feeds the log; empty where no table is captured from the WAL, also where the schema
is of a release that could not do that."""

IS_MIXED = "(select is_called from headwater.wal_batches)"
"""Whether the log may have rows from the WAL, also if no table is captured from there now. Rows of
one transaction may be appended after rows that later ones wrote by triggers, so transactions are
ordered by the times of their commits then."""

WRITTEN = "pg_catalog.pg_current_wal_insert_lsn() operator(pg_catalog.-) '0/0'"
"""The end of the WAL, as a number of bytes. Everything in the statement's snapshot lies before."""

_FIRST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.02


class StillBehind(DatabaseError):
    """Capture works, but the wait was for a caller that must not hold its snapshot for so long."""


class _Question(NamedTuple):
    """A statement whose answer is one row, or None."""

    statement: str
    values: dict[str, Any]


_Step: TypeAlias = _Question | float


async def wait(
    connection: Connection, slot: str, upto: int, *, holds_snapshot: bool = False
) -> None:
    """Return when the log has everything up to this place in the WAL. The connection must not be in
    a transaction. DatabaseError, with the reason, if capture makes no progress. `holds_snapshot`
    says that the caller is in a transaction meanwhile, over another connection: it gets
    `StillBehind` after a while, and takes a new snapshot."""
    version = connection.info.server_version
    steps = _wait(slot, int(upto), version, time.monotonic, holds_snapshot=holds_snapshot)
    answer: tuple[Any, ...] | None = None
    try:
        while True:
            step = steps.send(answer)
            answer = None
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                cursor = await connection.execute(step.statement.encode(), step.values)
                answer = await cursor.fetchone()
    except StopIteration:
        return


def wait_blocking(
    ask: Callable[[str, dict[str, Any]], tuple[Any, ...] | None],
    slot: str,
    upto: int,
    server_version: int,
    *,
    holds_snapshot: bool = False,
) -> None:
    """The same for a caller that blocks."""
    steps = _wait(slot, int(upto), server_version, time.monotonic, holds_snapshot=holds_snapshot)
    answer: tuple[Any, ...] | None = None
    try:
        while True:
            step = steps.send(answer)
            answer = None
            if isinstance(step, float):
                time.sleep(step)
            else:
                answer = ask(*step)
    except StopIteration:
        return


def _wait(
    slot: str,
    upto: int,
    server_version: int,
    clock: Callable[[], float],
    *,
    holds_snapshot: bool = False,
) -> Generator[_Step, tuple[Any, ...] | None, None]:
    pause, until = _FIRST_PAUSE, clock() + WAL_CAPTURE_SECONDS
    reached: tuple[int, ...] = ()
    was_flushed = False
    while True:
        answer = yield _Question(_CONFIRMED, {"slot": slot})
        if answer is None:
            raise DatabaseError(
                f"capture from the WAL was ended or its slot {slot} was lost",
                hint="It is tried again. `headwater doctor` shows the state of the slot.",
            )
        confirmed, flushed = map(int, answer)
        if confirmed >= upto:
            return
        if flushed < upto and pause > _FIRST_PAUSE and not was_flushed:
            # Commits that did not wait for the disk: the server sends only what is on disk.
            yield _Question(_FLUSH_17 if server_version >= 170_000 else FLUSH, {})
            was_flushed = True
        if clock() > until:
            sent = yield _Question(_SENT, {"slot": slot})
            progress = (confirmed, *map(int, sent or ()))
            if sent is None or progress == reached:
                raise _stuck(slot, upto - confirmed, is_running=sent is not None)
            if reached and holds_snapshot:
                raise StillBehind(f"WAL capture is {upto - confirmed} bytes behind")
            reached, until = progress, clock() + WAL_CAPTURE_SECONDS
        yield pause
        pause = min(pause * 1.5, _LONGEST_PAUSE)


def _stuck(slot: str, behind: int, *, is_running: bool) -> DatabaseError:
    state = "makes no progress" if is_running else "is not running"
    return DatabaseError(
        f"WAL capture {state}: {behind} bytes behind",
        hint=f"A gateway runs it by itself. If slot {slot} is in use by another program, end that.",
    )


_CONFIRMED = """
    select confirmed_flush_lsn operator(pg_catalog.-) '0/0',
           pg_catalog.pg_current_wal_flush_lsn() operator(pg_catalog.-) '0/0'
    from pg_catalog.pg_replication_slots where slot_name operator(pg_catalog.=) %(slot)s
"""

# While the server sends one large transaction, only the number of batches changes.
_SENT = """
    select coalesce(r.sent_lsn operator(pg_catalog.-) '0/0', 0),
           (select last_value from headwater.wal_batches)
    from pg_catalog.pg_replication_slots s
    left join pg_catalog.pg_stat_replication r on r.pid operator(pg_catalog.=) s.active_pid
    where s.slot_name operator(pg_catalog.=) %(slot)s and s.active
"""

_FLUSH_17 = "select pg_catalog.pg_logical_emit_message(false, 'headwater', '', true)"

FLUSH = """
    select pg_catalog.pg_logical_emit_message(true, 'headwater', ''),
           pg_catalog.set_config('synchronous_commit', 'local', true)
"""
"""Has the server write its WAL to disk: a commit that waits for its own WAL waits for all WAL
before it."""
