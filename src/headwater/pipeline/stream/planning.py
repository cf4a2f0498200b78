"""Plans which rows of the log a batch reads, over one connection, in a few short statements.

A position that the log no longer reaches back to is `ResyncRequired`. Positions that a checkpoint
may store are on disk, so that a crash of the server cannot take them back. The changes between two
positions are inspected once; cutting them into batches needs only small queries after that. Where
there is nothing to read, a planner can wait for a NOTIFY of the writers.

An error here would end the stream, so a lost connection is made again, up to a time limit.
"""

from __future__ import annotations

import time
from collections import deque
from datetime import datetime
from typing import Any

import msgspec
import psycopg
from psycopg.rows import dict_row

from headwater import limits
from headwater.database import connect_blocking, translate
from headwater.errors import ConfigError, ResyncRequired
from headwater.log import complete, marks, reach
from headwater.log.between import BETWEEN, parameters
from headwater.log.waking.waker import CHANNEL
from headwater.model import Position
from headwater.pipeline.stream.offsets import Offset, Range, range_between
from headwater.pipeline.stream.waiting import WaitPace
from headwater.pipeline.stream.worker import RESNAPSHOT, LogSlice

_SPARK_PART_CHANGES = 50_000
"""Changes that one task of the data source reads."""

_SPARK_ROW_BYTES = 2_000
"""A larger row counts as several, so that batches and parts are bounded in bytes as well."""

_SPARK_SAMPLED_CHANGES = 1_000
"""The size of rows is sampled where there are more changes between two positions. Fewer are read as
one part, whose rows pass in pieces."""

_SPARK_PARTS_MAX = 1_000
"""Tasks that read one batch; for a larger batch each task reads more."""

_SPARK_PLANNING_PAUSE_SECONDS = 0.1
"""Pause before the first new attempt to connect; each further pause is twice as long."""

_SPARK_MOVE_SECONDS = 300.0
"""How often a stream without changes moves its position past transactions that have ended."""


class Pair(msgspec.Struct, frozen=True):
    """The changes between two positions: the lowest and the highest number, the slots of the log
    that hold them, and as how many an average row counts. Without slots there are none."""

    since: Position
    until: Position
    first: int
    last: int
    slots: tuple[int, ...]
    weight: int = 1


class ChangeKind(msgspec.Struct, frozen=True):
    """Changes of one shape of a table: of rows, or of the whole table (truncate, reset)."""

    relation: int
    shape: int
    is_row: bool
    count: int


class Planner:
    """Finds positions in the log, and cuts the changes between two of them into batches and parts.
    A lost connection is made again until `patience` seconds have passed. A planner with a `pace`
    can wait for changes."""

    def __init__(
        self,
        url: str,
        tables: tuple[str, ...] = (),
        *,
        patience: float = limits.SPARK_PLANNING_PATIENCE_SECONDS,
        pace: WaitPace | None = None,
    ) -> None:
        self._url = url
        self._tables = tables
        self._patience = patience
        self._pace = pace
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None
        self._was_connected = False
        self._checked: deque[str] = deque(maxlen=4)
        self._pair: Pair | None = None
        self._move_at = time.monotonic() + _SPARK_MOVE_SECONDS

    # -------------------------------------------------------------------- positions

    def now(self, *, holds_snapshot: bool = False) -> Position:
        """The present position, which is on disk. A caller that `holds_snapshot` over another
        connection, and locks, gets `StillBehind` where capture from the WAL takes long."""
        return self._marked(self._now(holds_snapshot=holds_snapshot))

    def _now(self, *, holds_snapshot: bool = False) -> Position:
        log, snapshot, written, flushed, slot = self._one(_NOW)
        if flushed < written:
            self._one(complete.FLUSH)
        if slot:
            version = self._connected().info.server_version
            complete.wait_blocking(
                self._maybe, slot, written, version, holds_snapshot=holds_snapshot
            )
        return Position.of_snapshot(log, snapshot)

    def _marked(self, position: Position, since: Position | None = None) -> Position:
        """With a mark, which identifies its history."""
        if position.mark is not None:
            return position
        rows = self._all(marks.NEWEST, marks.newest_parameters(position, since))
        found = marks.marked(position, rows, since)
        self._checked.append(str(found))
        return found

    def beginning(self) -> Position:
        """The position before everything that the log has."""
        return self._marked(self._beginning())

    def _beginning(self) -> Position:
        log, _, floor = self._one(reach.PRESENT)
        return Position(log, max(floor, 1), max(floor, 1))

    def before(self, moment: datetime) -> Position:
        """A position before every transaction of that time or later, and before few others.
        ResyncRequired if the log does not reach back that far."""
        held = self._beginning()
        self._now()  # the log has every transaction that has committed by then
        commit = "pg_xact_commit_timestamp(xid::xid)" if self.has_commit_times() else "null"
        first, present, reaches = self._one(_FIRST_SINCE.format(commit=commit), {"moment": moment})
        if held.xmin > 1 and not reaches:
            raise ResyncRequired(
                f"the log was trimmed, and does not reach back to {moment.isoformat()}",
                hint="Use a later time, or since=beginning.",
            )
        # A transaction that is still running may have written at that time.
        oldest = max(present if first is None else min(first, present), held.xmin)
        return self._marked(Position(held.log, oldest, oldest))

    def check(self, position: Position) -> None:
        """Raise ResyncRequired unless the log still has everything since the position."""
        text = str(position)
        reach.check_blocking(self._one, position, RESNAPSHOT, lambda: text in self._checked)
        if position.mark is not None and text not in self._checked:
            self._checked.append(text)

    def is_replaced(self, position: Position) -> bool:
        """Whether the position is of a history of this log that was replaced."""
        return reach.is_replaced_blocking(self._one, position)

    def rename_log(self) -> None:
        """Give the log another name, for all its readers. Positions of the old name end."""
        self._one("select headwater.rename_log()")

    # -------------------------------------------------------------------- cutting

    def latest(self, start: Offset, rows_max: int | None, target: Position | None = None) -> Offset:
        """The end of a batch that begins at `start`: now or the target, or earlier, so that the
        batch has at most `rows_max` rows. `start` itself where there are no changes."""
        self.check(start.position)
        if start.until is not None:
            return self._cut(self._inspect(start.position, start.until), start.seq, rows_max)
        until = target or self._now()
        if start.position.covers(until):
            return start
        pair = self._inspect(start.position, until)
        if pair.slots:
            return self._cut(pair, 0, rows_max)
        if not self._should_move(start.position, until):
            return start
        return Offset(self._marked(until, start.position))

    def next(self, start: Offset, rows_max: int | None, seconds: float) -> Offset:
        """The same, but where there are no changes, wait for some, at most this long."""
        assert self._pace is not None
        until = time.monotonic() + seconds
        self._was_notified(0)  # of changes that are read now
        end = self.latest(start, rows_max)
        while end == start and (now := time.monotonic()) < until:
            was_notified = self._was_notified(min(self._pace.pause(now), until - now))
            end = self.latest(start, rows_max)
            self._pace.have_looked(
                time.monotonic(), was_notified=was_notified, has_changes=end != start
            )
        return end

    def _was_notified(self, seconds: float) -> bool:
        """Wait for a NOTIFY, at most this long; whether there was one. Those that have arrived
        since the last call are removed."""
        try:
            found = self._connected().notifies(timeout=seconds, stop_after=1)
            return bool(list(found))
        except psycopg.Error:
            self.close()  # the next statement connects again
            return False

    def has_changes(self, since: Position, until: Position) -> bool:
        """Whether there are changes between two positions, apart from those of Headwater's own
        tables, such as the progress of the pipeline."""
        (found,) = self._one(_HAS_CHANGES, parameters(since, until))
        return bool(found)

    def _should_move(self, since: Position, until: Position) -> bool:
        """Whether to continue without changes, with an empty batch. A transaction that was running
        has ended without a change: its id must not hold the position back until the log is trimmed
        past it."""
        if time.monotonic() < self._move_at or not since.xip or until.xmin < since.xmax:
            return False
        self._move_at = time.monotonic() + _SPARK_MOVE_SECONDS
        return True

    def _cut(self, pair: Pair, after: int, rows_max: int | None) -> Offset:
        """The end of a batch after number `after`. A row has one number, so `rows_max` numbers are
        at most `rows_max` rows."""
        after = max(after, pair.first - 1)
        rows_max = rows_max and max(rows_max // pair.weight, 1)
        if rows_max is None or pair.last - after <= rows_max:
            return Offset(pair.until)
        if after >= pair.first and not self._any(pair, after, after + rows_max):
            after = self._next(pair, after) - 1
        upto = after + rows_max
        return Offset(pair.until) if upto >= pair.last else Offset(pair.since, pair.until, upto)

    def _inspect(self, since: Position, until: Position) -> Pair:
        """The pair of two positions, which is queried once. The check that the log was not trimmed
        comes after that query."""
        pair = self._pair
        if pair is None or (pair.since, pair.until) != (since, until):
            slots, first, last = self._one(_INSPECT, parameters(since, until))
            if slots:
                until = self._marked(until, since)
            pair = Pair(since, until, first or 0, last or 0, tuple(sorted(slots or ())))
            self._pair = pair = self._weighed(pair)
        self.check(since)
        if str(pair.until) not in self._checked:
            self.check(pair.until)
        return pair

    def kinds(self, since: Position, until: Position) -> list[ChangeKind]:
        """What changed between two positions, by table and shape."""
        pair = self._inspect(since, until)
        if not pair.slots:
            return []
        values = parameters(since, until) | {"slots": list(pair.slots)}
        return [ChangeKind(*row) for row in self._all(_KINDS, values)]

    def _weighed(self, pair: Pair) -> Pair:
        """With the weight of its rows, from a few of them."""
        if pair.last - pair.first < _SPARK_SAMPLED_CHANGES:
            return pair
        values = parameters(pair.since, pair.until) | {"slots": list(pair.slots)}
        (size,) = self._one(_ROW_BYTES, values)
        return msgspec.structs.replace(pair, weight=max(int(size) // _SPARK_ROW_BYTES, 1))

    def _any(self, pair: Pair, after: int, upto: int) -> bool:
        """Whether there are rows with numbers above `after` and up to `upto`."""
        values = parameters(pair.since, pair.until) | {"after": after, "upto": upto}
        (found,) = self._one(_ANY, values | {"slots": list(pair.slots)})
        return bool(found)

    def _next(self, pair: Pair, after: int) -> int:
        """The lowest number above `after`. The pair has such a number."""
        values = parameters(pair.since, pair.until) | {"after": after, "slots": list(pair.slots)}
        (found,) = self._one(_NEXT, values)
        return int(found or pair.last)

    def parts(
        self,
        start: Offset,
        end: Offset,
        *,
        not_before: datetime | None = None,
        before: datetime | None = None,
    ) -> list[LogSlice]:
        """The changes between two offsets, in parts that can be read in parallel."""
        wanted = range_between(start, end)
        if wanted is None:
            return []
        pair = self._inspect(wanted.since, wanted.until)
        first = max(wanted.after, pair.first - 1)
        last = pair.last if wanted.upto is None else min(wanted.upto, pair.last)
        if not pair.slots or last <= first:
            return []
        whole = LogSlice(
            self._url,
            wanted,
            self.relations(),
            self.has_commit_times(),
            pair.slots,
            not_before=None if not_before is None else not_before.isoformat(),
            before=None if before is None else before.isoformat(),
            origins=self.has_origins(),
        )
        return [
            msgspec.structs.replace(
                whole,
                range=Range(pair.since, pair.until, after, upto),
                whole=upto == pair.last,
            )
            for after, upto in _split(first, last, max(_SPARK_PART_CHANGES // pair.weight, 1))
        ]

    # -------------------------------------------------------------------- tables

    def relations(self) -> tuple[int, ...]:
        """The oids of the tables to read; none for all. ConfigError for a table that was never
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
        """Whether the server stores the time of every commit."""
        (setting,) = self._one("select current_setting('track_commit_timestamp')")
        return bool(setting == "on")

    def has_origins(self) -> bool:
        """Whether a source has applied transactions here. The schema may be of an earlier release,
        which knew no sources."""
        (known,) = self._one(_KNOWS_ORIGINS)
        return bool(known and self._one(_HAS_ORIGINS)[0])

    # -------------------------------------------------------------------- the connection

    def ask(self, statement: str) -> list[dict[str, Any]]:
        """The rows of a statement, by the names of their columns."""
        try:
            with self._connected().cursor(row_factory=dict_row) as cursor:
                return cursor.execute(statement.encode()).fetchall()
        except psycopg.Error as error:
            raise translate(error, self._url) from error

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
            if self._pace is not None:
                self._listen(self._connection, self._pace)
        return self._connection

    @staticmethod
    def _listen(connection: psycopg.Connection[tuple[Any, ...]], pace: WaitPace) -> None:
        connection.execute(f"listen {CHANNEL}".encode())
        setting = "select current_setting('max_prepared_transactions')"
        if connection.execute(setting.encode()).fetchone() != ("0",):
            # A transaction with a NOTIFY cannot be prepared.
            pace.never_sleep()

    def _one(self, statement: str, values: dict[str, Any] | None = None) -> tuple[Any, ...]:
        (row,) = self._all(statement, values)
        return row

    def _maybe(
        self, statement: str, values: dict[str, Any] | None = None
    ) -> tuple[Any, ...] | None:
        return next(iter(self._all(statement, values)), None)

    def _all(self, statement: str, values: dict[str, Any] | None = None) -> list[tuple[Any, ...]]:
        """The rows. A lost connection is made again until the patience ends; where there was none
        before, an error is raised at once."""
        deadline, pause = time.monotonic() + self._patience, _SPARK_PLANNING_PAUSE_SECONDS
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


def _split(first: int, last: int, size: int = _SPARK_PART_CHANGES) -> list[tuple[int, int]]:
    """The numbers above `first` and up to `last`, in parts of this size; in larger ones where these
    were more than `_SPARK_PARTS_MAX`.

    >>> _split(7, 50_010)
    [(7, 50007), (50007, 50010)]
    """
    size = max(size, -(-(last - first) // _SPARK_PARTS_MAX))
    return [(after, min(after + size, last)) for after in range(first, last, size)]


_NOW = f"""
    select headwater.log_id(), pg_current_snapshot()::text,
           {complete.WRITTEN}, pg_current_wal_flush_lsn() - '0/0', {complete.SLOT}
"""

_FIRST_SINCE = """
    select min(xid)::text::bigint, pg_snapshot_xmin(pg_current_snapshot())::text::bigint,
           exists (select from headwater.log where at < %(moment)s)
    from headwater.log where at >= %(moment)s or {commit} >= %(moment)s
"""

_HAS_CHANGES = f"""
    select exists (
      select from headwater.log
      where {BETWEEN}
        and shape not in (select id from headwater.shapes where schema_name = 'headwater'))
"""

_INSPECT = f"""
    select array_agg(slot), min(first), max(last) from (
      select slot, min(seq) as first, max(seq) as last from headwater.log
      where {BETWEEN} group by slot
    ) held
"""

_KINDS = f"""
    select (select relid::bigint from headwater.shapes where id = shape limit 1), shape, is_row, n
    from (
      select shape::bigint, op in ('I', 'U', 'D') as is_row, count(*) as n from headwater.log
      where slot = any(%(slots)s::smallint[]) and {BETWEEN} group by 1, 2
    ) changed
"""

_ROW_BYTES = f"""
    select coalesce(avg(bytes), 0)
    from generate_series(0, 7) n cross join lateral (
      select coalesce(octet_length(before::text), 0) + coalesce(octet_length(after::text), 0) bytes
      from headwater.log
      where slot = any(%(slots)s::smallint[]) and {BETWEEN}
        and xid >= (%(since_xmax)s::text::bigint
          + n * (%(until_xmax)s::text::bigint - %(since_xmax)s::text::bigint) / 8)::text::xid8
      order by xid, seq limit 2
    ) sample
"""

_ANY = f"""
    select exists (
      select from headwater.log
      where slot = any(%(slots)s::smallint[]) and seq > %(after)s and seq <= %(upto)s and {BETWEEN})
"""

_NEXT = f"""
    select min(seq) from headwater.log
    where slot = any(%(slots)s::smallint[]) and seq > %(after)s and {BETWEEN}
"""

_KNOWS_ORIGINS = """
    select has_table_privilege(to_regclass('headwater.source_transactions'), 'select')
"""

_HAS_ORIGINS = "select exists (select from headwater.source_transactions)"

_RELATION = """
    select distinct relid::bigint from headwater.shapes
    where %(name)s in (table_name, schema_name || '.' || table_name)
      and (schema_name = 'public' or %(name)s like '%%.%%')
       or relid = headwater.find_table(%(name)s)
"""
