"""Plans what a batch reads: over one connection, in a few short statements.

It keeps the promises of the log: a position that the log no longer reaches back to, or that belongs
to another database, is `ResyncRequired`; positions handed out are safe on disk, so that a crash of
the server cannot take back what a checkpoint holds. What lies between two positions is looked over
once; the batches that it is cut into after that only ask whether something is near.

An error here would end the stream: a connection that is lost is made anew, for some time.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import datetime
from typing import Any

import msgspec
import psycopg

from headwater import limits
from headwater.database import connect_blocking, translate
from headwater.errors import ConfigError, ResyncRequired
from headwater.log import marks
from headwater.model import Position
from headwater.pipeline.offsets import Offset, Range, between
from headwater.pipeline.reading import RESNAPSHOT, Part


class Pair(msgspec.Struct, frozen=True):
    """What lies between two positions: the lowest and the highest number, and the slots of the log
    that hold it. No slots: nothing lies there."""

    since: Position
    until: Position
    first: int
    last: int
    slots: tuple[int, ...]


class Planner:
    """Where the log is, and how to cut what is new into batches and parts."""

    def __init__(
        self,
        url: str,
        tables: tuple[str, ...] = (),
        *,
        patience: float = limits.SPARK_PLANNING_PATIENCE_SECONDS,
    ) -> None:
        self._url = url
        self._tables = tables
        self._patience = patience
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._was_connected = False
        self._checked: deque[str] = deque(maxlen=4)
        self._pair: Pair | None = None
        self._move_at = time.monotonic() + limits.SPARK_MOVE_SECONDS

    # -------------------------------------------------------------------- positions

    def now(self) -> Position:
        """The present position, safe on disk."""
        return self._marked(self._now())

    def _now(self) -> Position:
        log, snapshot, written, flushed = self._one(_NOW)
        if flushed < written:
            self._one(_FLUSH)
        return Position.of_snapshot(log, snapshot)

    def _marked(self, position: Position, since: Position | None = None) -> Position:
        """With a mark, by which its history is recognised."""
        if position.mark is not None:
            return position
        rows = self._all(marks.NEWEST, marks.to_mark(position, since))
        found = marks.marked(position, rows, since)
        self._checked.append(str(found))
        return found

    def beginning(self) -> Position:
        """The position that everything the log holds lies behind."""
        return self._marked(self._beginning())

    def _beginning(self) -> Position:
        log, floor = self._one("select headwater.log_id(), last_value from headwater.log_floor")
        return Position(log, max(floor, 1), max(floor, 1))

    def before(self, moment: datetime) -> Position:
        """A position that every transaction of that time or later lies behind, and few others.
        ResyncRequired if the log does not reach back so far."""
        held = self._beginning()
        commit = "pg_xact_commit_timestamp(xid::xid)" if self.has_commit_times() else "null"
        first, present, reaches = self._one(_FIRST_SINCE.format(commit=commit), {"moment": moment})
        if held.xmin > 1 and not reaches:
            raise ResyncRequired(
                f"the log was trimmed, and does not reach back to {moment.isoformat()}",
                hint="Ask for a later time, or since=beginning.",
            )
        # What is still running may have written at that time, too.
        oldest = max(present if first is None else min(first, present), held.xmin)
        return self._marked(Position(held.log, oldest, oldest))

    def check(self, position: Position) -> None:
        """Raise ResyncRequired unless the log still holds everything since the position."""
        log, snapshot, floor = self._one(_HELD)
        if position.log != log:
            raise ResyncRequired(
                f"position {position} belongs to another log than this database's ({log})",
                hint=f"The database was restored, failed over or installed anew. {RESNAPSHOT}",
            )
        if not Position.of_snapshot(log, snapshot).covers(position):
            raise ResyncRequired(
                f"position {position} is ahead of the database",
                hint="The server lost what it had not yet written to disk, or its files were "
                f"replaced by an earlier copy. {RESNAPSHOT}",
            )
        if position.xmin < floor:
            raise ResyncRequired(
                f"the log was trimmed past position {position}",
                hint=f"Its retention is over. {RESNAPSHOT}",
            )
        if position.mark is not None and str(position) not in self._checked:
            self._check_history(position, floor)

    def _check_history(self, position: Position, floor: int) -> None:
        """Once a connection: over the same one, the server's files cannot have been replaced."""
        if not marks.agrees(position, self._one(marks.COVERED, marks.to_check(position))):
            if self._one(_HELD)[2] == floor:
                raise marks.replaced(position, RESNAPSHOT)
            # Rows were trimmed between the questions.
            self.check(position)
        self._checked.append(str(position))

    def is_replaced(self, position: Position) -> bool:
        """Whether this log's history is not the one that the position is of, though it goes by the
        same name: the same transaction ids mean other changes."""
        log, snapshot, _ = self._one(_HELD)
        if position.log != log:
            return False
        if not Position.of_snapshot(log, snapshot).covers(position):
            return True
        return position.mark is not None and not marks.agrees(
            position, self._one(marks.COVERED, marks.to_check(position))
        )

    def rename_log(self) -> None:
        """Have the log go by another name: for good, and to everybody."""
        self._one("select headwater.rename_log()")

    # -------------------------------------------------------------------- cutting

    def latest(self, start: Offset, rows_max: int | None, target: Position | None = None) -> Offset:
        """How far a batch that begins at `start` goes: to now, or the target, or as far as
        `rows_max` rows at most. `start` itself where nothing is new."""
        self.check(start.position)
        if start.until is not None:
            return self._cut(self._look(start.position, start.until), start.seq, rows_max)
        until = target or self._now()
        if start.position.covers(until):
            return start
        pair = self._look(start.position, until)
        if pair.slots:
            return self._cut(pair, 0, rows_max)
        if not self._should_move(start.position, until):
            return start
        return Offset(self._marked(until, start.position))

    def has_news(self, since: Position, until: Position) -> bool:
        """Whether anything lies between two positions but changes of our own tables, such as the
        pipeline's reports."""
        (found,) = self._one(_NEWS, _between(since, until))
        return bool(found)

    def _should_move(self, since: Position, until: Position) -> bool:
        """Whether to go on although nothing is new, which makes an empty batch. A transaction that
        was open has ended without a change: its id must not hold the position back until the log
        is trimmed past it."""
        if time.monotonic() < self._move_at or not since.xip or until.xmin < since.xmax:
            return False
        self._move_at = time.monotonic() + limits.SPARK_MOVE_SECONDS
        return True

    def _cut(self, pair: Pair, after: int, rows_max: int | None) -> Offset:
        """Numbers are given out one by one: so many of them are at most so many rows."""
        after = max(after, pair.first - 1)
        if rows_max is None or pair.last - after <= rows_max:
            return Offset(pair.until)
        if after >= pair.first and not self._any(pair, after, after + rows_max):
            after = self._next(pair, after) - 1
        upto = after + rows_max
        return Offset(pair.until) if upto >= pair.last else Offset(pair.since, pair.until, upto)

    def _look(self, since: Position, until: Position) -> Pair:
        """Looks a pair over, once. That the log was not trimmed is looked at when that is done."""
        pair = self._pair
        if pair is None or (pair.since, pair.until) != (since, until):
            slots, first, last = self._one(_LOOK, _between(since, until))
            if slots:
                until = self._marked(until, since)
            pair = Pair(since, until, first or 0, last or 0, tuple(sorted(slots or ())))
            self._pair = pair
        self.check(since)
        if str(pair.until) not in self._checked:
            self.check(pair.until)
        return pair

    def _any(self, pair: Pair, after: int, upto: int) -> bool:
        """Whether there are rows with numbers above `after` and up to `upto`."""
        values = _between(pair.since, pair.until) | {"after": after, "upto": upto}
        (found,) = self._one(_ANY, values | {"slots": list(pair.slots)})
        return bool(found)

    def _next(self, pair: Pair, after: int) -> int:
        """The lowest number above `after`; there is one."""
        values = _between(pair.since, pair.until) | {"after": after, "slots": list(pair.slots)}
        (found,) = self._one(_NEXT, values)
        return int(found or pair.last)

    def parts(
        self,
        start: Offset,
        end: Offset,
        *,
        not_before: datetime | None = None,
        before: datetime | None = None,
    ) -> list[Part]:
        """What lies between two offsets, in parts that can be read beside each other."""
        wanted = between(start, end)
        if wanted is None:
            return []
        pair = self._look(wanted.since, wanted.until)
        first = max(wanted.after, pair.first - 1)
        last = pair.last if wanted.upto is None else min(wanted.upto, pair.last)
        if not pair.slots or last <= first:
            return []
        whole = Part(
            self._url,
            wanted,
            self.relations(),
            self.has_commit_times(),
            pair.slots,
            not_before=None if not_before is None else not_before.isoformat(),
            before=None if before is None else before.isoformat(),
        )
        return [
            msgspec.structs.replace(
                whole,
                range=Range(pair.since, pair.until, after, upto),
                whole=upto == pair.last,
            )
            for after, upto in _split(first, last)
        ]

    # -------------------------------------------------------------------- tables

    def relations(self) -> tuple[int, ...]:
        """The oids of the tables that are wanted; none for all. ConfigError for one that was never
        captured."""
        found: list[int] = []
        for name in self._tables:
            rows = self._all(_RELATION, {"name": name})
            if not rows:
                raise ConfigError(
                    f"table {name} was never captured",
                    hint=f"Enable it first: headwater enable {name}",
                )
            found += (oid for (oid,) in rows)
        return tuple(found)

    def has_commit_times(self) -> bool:
        """Whether the server keeps the time of every commit."""
        (setting,) = self._one("select current_setting('track_commit_timestamp')")
        return bool(setting == "on")

    # -------------------------------------------------------------------- asking

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connected(self) -> psycopg.Connection[tuple[Any, ...]]:
        if self._connection is None:
            self._connection = connect_blocking(
                self._url,
                purpose="pipeline",
                options="-c jit=off -c max_parallel_workers_per_gather=0",
            )
            self._was_connected = True
            self._checked.clear()
        return self._connection

    def _one(self, statement: str, values: dict[str, Any] | None = None) -> tuple[Any, ...]:
        (row,) = self._all(statement, values)
        return row

    def _all(self, statement: str, values: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """The rows. A connection that is lost is made anew, until patience is at its end; one that
        never was is an error at once."""
        deadline, pause = time.monotonic() + self._patience, limits.SPARK_PLANNING_PAUSE_SECONDS
        while True:
            try:
                return self._connected().execute(statement.encode(), values).fetchall()
            except psycopg.Error as error:
                lost = self._connection is None or self._connection.closed
                if not (lost and self._was_connected) or time.monotonic() + pause > deadline:
                    raise translate(error, self._url) from error
                self.close()
            time.sleep(pause)
            pause *= 2


def _between(since: Position, until: Position) -> dict[str, Any]:
    return {
        "xmax": str(since.xmax),
        "xip": list(map(str, since.xip)),
        "end": str(until.xmax),
        "until": until.snapshot,
    }


def _split(first: int, last: int) -> list[tuple[int, int]]:
    """The numbers above `first` and up to `last`, in not too many parts.

    >>> _split(7, 50_010)
    [(7, 50007), (50007, 50010)]
    """
    size = max(limits.SPARK_PART_CHANGES, -(-(last - first) // limits.SPARK_PARTS_MAX))
    return [(after, min(after + size, last)) for after in range(first, last, size)]


_NOW = """
    select headwater.log_id(), pg_current_snapshot()::text,
           pg_current_wal_insert_lsn() - '0/0', pg_current_wal_flush_lsn() - '0/0'
"""

# A commit that waits for the disk takes everything before it there.
_FLUSH = """
    select pg_logical_emit_message(true, 'headwater', ''),
           set_config('synchronous_commit', 'local', true)
"""

_HELD = """
    select headwater.log_id(), pg_current_snapshot()::text,
           (select last_value from headwater.log_floor)
"""

_FIRST_SINCE = """
    select min(xid)::text::bigint, pg_snapshot_xmin(pg_current_snapshot())::text::bigint,
           exists (select from headwater.log where at < %(moment)s)
    from headwater.log where at >= %(moment)s or {commit} >= %(moment)s
"""

_NEW = """
    (xid >= %(xmax)s::xid8 or xid = any(%(xip)s::xid8[])) and xid < %(end)s::xid8
    and pg_visible_in_snapshot(xid, %(until)s::pg_snapshot)
"""

_NEWS = f"""
    select exists (
      select from headwater.log
      where {_NEW}
        and shape not in (select id from headwater.shapes where schema_name = 'headwater'))
"""

_LOOK = f"""
    select array_agg(slot), min(first), max(last) from (
      select slot, min(seq) as first, max(seq) as last from headwater.log where {_NEW} group by slot
    ) held
"""

_ANY = f"""
    select exists (
      select from headwater.log
      where slot = any(%(slots)s::smallint[]) and seq > %(after)s and seq <= %(upto)s and {_NEW})
"""

_NEXT = f"""
    select min(seq) from headwater.log
    where slot = any(%(slots)s::smallint[]) and seq > %(after)s and {_NEW}
"""

_RELATION = """
    select distinct relid::bigint from headwater.shapes
    where %(name)s in (table_name, schema_name || '.' || table_name)
      and (schema_name = 'public' or %(name)s like '%%.%%')
       or relid = headwater.find_table(%(name)s)
"""
