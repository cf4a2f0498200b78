"""Plans what a batch reads: over one connection, in statements that take less than a millisecond
however much is new.

It keeps the promises of the log: a position that the log no longer reaches back to, or that belongs
to another database, is `ResyncRequired`; positions handed out are safe on disk, so that a crash of
the server cannot take back what a checkpoint holds.
"""

from __future__ import annotations

from typing import Any, LiteralString

import psycopg

from headwater import limits
from headwater.database import translate
from headwater.errors import ConfigError, ResyncRequired
from headwater.model import Position
from headwater.pipeline.offsets import Offset, Range, between


class Planner:
    """Where the log is, and how to cut what is new into batches and parts."""

    def __init__(self, url: str, tables: tuple[str, ...] = ()) -> None:
        self._url = url
        self._tables = tables
        self._connection: psycopg.Connection[tuple[Any, ...]] | None = None

    # -------------------------------------------------------------------- positions

    def now(self) -> Position:
        """The present position, safe on disk."""
        log, snapshot, written, flushed = self._one(_NOW)
        if flushed < written:
            with self._connected().transaction():
                self._connected().execute("set local synchronous_commit = local")
                self._connected().execute("select pg_logical_emit_message(true, 'headwater', '')")
        return Position.of_snapshot(log, snapshot)

    def beginning(self) -> Position:
        """The position that everything the log holds lies behind."""
        log, floor = self._one("select headwater.log_id(), last_value from headwater.log_floor")
        return Position(log, max(floor, 1), max(floor, 1))

    def check(self, position: Position) -> None:
        """Raise ResyncRequired unless the log still holds everything since the position."""
        log, snapshot, floor = self._one(_HELD)
        if position.log != log:
            raise ResyncRequired(
                f"position {position} belongs to another log than this database's ({log})",
                hint=f"The database was restored, failed over or installed anew. {_RESNAPSHOT}",
            )
        if position.xmax > Position.of_snapshot(log, snapshot).xmax:
            raise ResyncRequired(
                f"position {position} is ahead of the database",
                hint=f"The server lost what it had not yet written to disk. {_RESNAPSHOT}",
            )
        if position.xmin < floor:
            raise ResyncRequired(
                f"the log was trimmed past position {position}",
                hint=f"Its retention is over. {_RESNAPSHOT}",
            )

    # -------------------------------------------------------------------- cutting

    def latest(self, start: Offset, rows_max: int | None, target: Position | None = None) -> Offset:
        """How far a batch that begins at `start` goes: to now, or the target, or as far as
        `rows_max` rows at most. `start` itself where nothing is new."""
        self.check(start.position)
        if start.until is not None:
            return self._cut(start, Range(start.position, start.until, start.seq), rows_max)
        until = target or self.now()
        found = Range(start.position, until)
        if start.position.covers(until) or not self._bounds(found):
            return start
        return self._cut(start, found, rows_max)

    def _cut(self, start: Offset, rest: Range, rows_max: int | None) -> Offset:
        whole = Offset(rest.until)
        bounds = self._bounds(rest)
        # Numbers are given out one by one: so many of them are at most so many rows.
        if bounds is None or rows_max is None or bounds[1] - bounds[0] < rows_max:
            return whole
        return Offset(rest.since, rest.until, bounds[0] + rows_max - 1)

    def _bounds(self, wanted: Range) -> tuple[int, int] | None:
        """The lowest and highest number of the rows; None for no rows."""
        first, last = self._one(
            _BOUNDS,
            {
                "xmax": str(wanted.since.xmax),
                "xip": list(map(str, wanted.since.xip)),
                "until": wanted.until.snapshot,
                "after": wanted.after,
            },
        )
        return None if first is None else (first, last)

    def parts(self, start: Offset, end: Offset) -> list[Range]:
        """What lies between two offsets, in parts that can be read beside each other."""
        wanted = between(start, end)
        if wanted is None:
            return []
        self.check(wanted.since)
        bounds = self._bounds(wanted)
        if bounds is None:
            return []
        first, last = bounds[0], min(bounds[1], wanted.upto or bounds[1])
        size = limits.SPARK_PART_CHANGES
        return [
            Range(wanted.since, wanted.until, after, min(after + size, last))
            for after in range(first - 1, last, size)
        ]

    # -------------------------------------------------------------------- tables

    def relations(self) -> tuple[int, ...]:
        """The oids of the tables that are wanted; none for all. ConfigError for one that was never
        captured."""
        found: list[int] = []
        for name in self._tables:
            rows = self._connected().execute(_RELATION, {"name": name}).fetchall()
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
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=limits.CONNECT_TIMEOUT_SECONDS,
                application_name="headwater pipeline",
                options="-c timezone=UTC",
            )
        return self._connection

    def _one(
        self, statement: LiteralString, values: dict[str, Any] | None = None
    ) -> tuple[Any, ...]:
        """One row. A connection that was lost since the last time is made anew, once."""
        fresh = self._connection is None
        try:
            row = self._connected().execute(statement, values).fetchone()
        except psycopg.OperationalError as error:
            self.close()
            if fresh:
                raise translate(error, self._url) from error
            return self._one(statement, values)
        except psycopg.Error as error:
            raise translate(error, self._url) from error
        assert row is not None
        return row


_RESNAPSHOT = "Begin anew with another checkpoint, from since=now or since=beginning."

_NOW = """
    select headwater.log_id(), pg_current_snapshot()::text,
           pg_current_wal_insert_lsn() - '0/0', pg_current_wal_flush_lsn() - '0/0'
"""

_HELD = """
    select headwater.log_id(), pg_current_snapshot()::text,
           (select last_value from headwater.log_floor)
"""

_BOUNDS = """
    select min(seq), max(seq) from headwater.log
    where (xid >= %(xmax)s::xid8 or xid = any(%(xip)s::xid8[]))
      and pg_visible_in_snapshot(xid, %(until)s::pg_snapshot) and seq > %(after)s
"""

_RELATION = """
    select distinct relid::bigint from headwater.shapes
    where %(name)s in (table_name, schema_name || '.' || table_name)
      and (schema_name = 'public' or %(name)s like '%%.%%')
"""
