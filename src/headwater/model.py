"""The types that all other modules use: Table, Change, Origin, Transaction, Position, Delta.

This module imports nothing of ours, does no I/O and reads no clock. All values are frozen. The same
structs pass from the log through the hub to the client.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from datetime import date, datetime, time
from typing import Any, Literal, TypeAlias
from uuid import UUID

import msgspec

Value: TypeAlias = Any
"""A column's value in Python: int, Decimal, str, datetime, … as `headwater.log.images` says."""

Row: TypeAlias = Mapping[str, Value]
"""One row of a table by column name."""

Key: TypeAlias = tuple[Value, ...]
"""The primary key's values, in the order of `Table.key`."""

Op: TypeAlias = Literal["insert", "update", "delete", "truncate", "reset"]
"""The operation. `reset` means that the table changed without changes of single rows: read it
again."""


class Column(msgspec.Struct, frozen=True):
    """A column as it was when a change was written.

    `type` is the canonical name of the type, without domains (`integer`, `numeric`, `timestamp with
    time zone`, `text[]`); `declared` is the type in the table's definition (`numeric(12,2)`).
    `collation` is the collation's name for types that have one, and `C` for every collation that
    orders by code point. `enum` says that the type is an enumeration, whose labels are equal
    exactly when their texts are; no other foreign type promises that. `operators` are the
    comparison operators in the order of `SIGNS`, for a type of an extension; empty for PostgreSQL's
    own operators, and in the log.
    """

    name: str
    type: str
    declared: str
    collation: str | None = None
    enum: bool = False
    operators: tuple[str, ...] = ()

    def operator(self, sign: str) -> str:
        """The operator with its schema, so that no operator of a user's schema is used.

        >>> Column("id", "bigint", "bigint").operator("<=")
        'operator(pg_catalog.<=)'
        """
        return (
            self.operators[SIGNS.index(sign)] if self.operators else f"operator(pg_catalog.{sign})"
        )


SIGNS = ("<", "<=", "=", ">=", ">", "<>")


def with_operators(column: Column, operators: dict[str, list[str]]) -> Column:
    """The column with its operators from `headwater.operators`."""
    return msgspec.structs.replace(column, operators=tuple(operators.get(column.name, ())))


class Table(msgspec.Struct, frozen=True):
    """The shape of a table at one time. A column added, dropped, renamed or retyped makes a new one
    with another `id`; changes point at the shape they were written under. `oid` stays the same when
    the table is renamed. `virtual` names the columns that are computed when they are read, and are
    left out.
    """

    id: int
    schema: str
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    oid: int = 0
    virtual: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name for people: `orders`, or `sales.orders` outside the public schema."""
        return self.name if self.schema == "public" else f"{self.schema}.{self.name}"

    @property
    def is_system(self) -> bool:
        """Whether it is one of Headwater's own tables, which a feed has only if it names them."""
        return self.schema == "headwater"

    def key_of(self, row: Row) -> Key:
        return tuple(row[column] for column in self.key)


class Actor(msgspec.Struct, frozen=True):
    """Who made a change: set by the writer for its transaction, empty if it was not set."""

    user_id: str | None = None
    function_name: str | None = None
    trace_id: str | None = None


NO_ACTOR = Actor()


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a mirrored change came from: the name of the source, its own position after the
    transaction (an LSN, a GTID, a resume token, a queue id) and when that transaction was committed
    there. What a later copy changed has the position of the copy, and no time. `kind` is the
    source's kind (`mysql`), if the source still exists."""

    source: str
    position: str | None = None
    committed_at: datetime | None = None
    kind: str | None = None


class Change(msgspec.Struct, frozen=True, gc=False):
    """A change of one row, from `before` to `after`, at a place in the log.

    `seq` orders the changes of any one row. `key` is empty for `truncate` and `reset`. `origin` is
    set for changes that a source made in a mirror.
    """

    seq: int
    xid: int
    at: datetime
    table: Table
    op: Op
    key: Key = ()
    before: Row | None = None
    after: Row | None = None
    actor: Actor = NO_ACTOR
    origin: Origin | None = None

    @property
    def changed(self) -> tuple[str, ...]:
        """The columns whose values differ; for an insert or a delete, every column."""
        if self.before is None or self.after is None:
            return tuple(self.after or self.before or ())
        before = self.before
        return tuple(
            name
            for name, value in self.after.items()
            if name not in before or differ(before[name], value)
        )


def differ(before: Value, after: Value) -> bool:
    """Whether two values print differently, even if they are equal in Python.

    >>> from decimal import Decimal
    >>> differ(Decimal("5.0"), Decimal("5.00")), differ(0.0, -0.0), differ(1, True)
    (True, True, True)
    >>> differ(float("nan"), float("nan")), differ({"a": [1]}, {"a": [1]})
    (False, False)
    """
    type_ = before.__class__
    if type_ is not after.__class__:
        return True
    return bool(before != after) if type_ in _EXACT else repr(before) != repr(after)


_EXACT = frozenset({str, int, bool, bytes, date, datetime, time, UUID, type(None)})


class PositionMark(msgspec.Struct, frozen=True):
    """Which rows of the log a position was the first to contain, how many, and a digest of them.

    The rows are those from transaction `xid` and number `seq` on, in the order of these two, and
    the last row of each transaction in `late`, which began earlier and ended only then; one of
    these may have none. See `headwater.log.marks`.
    """

    xid: int
    seq: int
    rows: int
    digest: int
    late: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> PositionMark:
        xid, seq, rows, digest, *late = text.split(".")
        xids = _xids(late[0] if late else "")
        return cls(int(xid), int(seq), int(rows), int(digest, 16), xids)

    def is_of(self, position: Position) -> bool:
        """Whether a position can have this mark. A mark from a client may have any numbers."""
        return (
            self.xid <= position.xmax
            and self.seq <= _BIGINT_MAX
            and all(xid < self.xid and position.contains(xid) for xid in self.late)
            and _is_ascending(self.late)
        )

    def __str__(self) -> str:
        late = f".{','.join(map(str, self.late))}" if self.late else ""
        return f"{self.xid}.{self.seq}.{self.rows}.{self.digest:012x}{late}"


class Position(msgspec.Struct, frozen=True, eq=False):
    """A place in the log: a database snapshot, and the log it belongs to.

    A position contains the transactions that were visible in its snapshot: those below `xmin`, and
    those below `xmax` that are not in `xip`. It is the resume token, the cursor, the SSE id and the
    Spark offset; it prints and parses itself. By its `mark` the log recognises a position of a
    history that was replaced; two positions are equal when they contain the same.

    >>> position = Position.parse("9f3a61c2-748:752:749,751~750.31.1.0c55a1d2e3f4")
    >>> position.contains(747), position.contains(749), position.contains(750)
    (True, False, True)
    >>> str(position)
    '9f3a61c2-748:752:749,751~750.31.1.0c55a1d2e3f4'
    >>> other = Position.parse("9f3a61c2-748:752:749,751")
    >>> position == other, position != other, position != Position("9f3a61c2", 748, 752)
    (True, False, True)
    """

    log: str
    xmin: int
    xmax: int
    xip: tuple[int, ...] = ()
    mark: PositionMark | None = None

    @classmethod
    def parse(cls, text: str) -> Position:
        """Read what `str` printed. Raises ValueError with the reason for anything else.

        >>> Position.parse("yesterday")
        Traceback (most recent call last):
            ...
        ValueError: 'yesterday' is not a position: expected LOG-XMIN:XMAX:XIP,…
        """
        match = _POSITION.fullmatch(text) if len(text) <= _POSITION_CHARS_MAX else None
        if match is None:
            raise ValueError(f"{text!r:.100} is not a position: expected LOG-XMIN:XMAX:XIP,…")
        position = cls.of_snapshot(match["log"], match["snapshot"])
        if match["mark"] is None:
            return position
        mark = PositionMark.parse(match["mark"])
        if not mark.is_of(position):
            raise ValueError(f"{text!r:.100} is not a position: its mark is out of range")
        return msgspec.structs.replace(position, mark=mark)

    @classmethod
    def of_snapshot(cls, log: str, snapshot: str) -> Position:
        """Build a position from PostgreSQL's text form of a `pg_snapshot`."""
        xmin, xmax, xip = snapshot.split(":")
        running = _xids(xip)
        position = cls(log, int(xmin), int(xmax), running)
        if not (
            1 <= position.xmin <= position.xmax <= _BIGINT_MAX
            and all(position.xmin <= xid < position.xmax for xid in running)
            and _is_ascending(running)
        ):
            raise ValueError(
                f"{snapshot!r:.100} is not a snapshot: its transaction ids are out of order or"
                " range"
            )
        return position

    @property
    def snapshot(self) -> str:
        """PostgreSQL's text form, to be cast to `pg_snapshot`."""
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, self.xip))}"

    def __str__(self) -> str:
        mark = "" if self.mark is None else f"~{self.mark}"
        return f"{self.log}-{self.snapshot}{mark}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Position):
            return NotImplemented
        return self._contents == other._contents

    def __ne__(self, other: object) -> bool:
        # A Struct has an inequality of its own, which would compare identities.
        return not self == other

    def __hash__(self) -> int:
        return hash(self._contents)

    @property
    def _contents(self) -> tuple[str, int, int, tuple[int, ...]]:
        return self.log, self.xmin, self.xmax, self.xip

    def contains(self, xid: int) -> bool:
        """Whether the transaction had committed (or failed) as of this position."""
        return xid < self.xmin or (xid < self.xmax and not _is_among(self.xip, xid))

    def covers(self, other: Position) -> bool:
        """Whether every transaction in `other` is in this position too.

        >>> later, earlier = Position("a", 5, 9, (5,)), Position("a", 4, 6, (4, 5))
        >>> later.covers(earlier), earlier.covers(later)
        (True, False)
        """
        return (
            self.log == other.log
            and self.xmax >= other.xmax
            and all(xid >= other.xmax or _is_among(other.xip, xid) for xid in self.xip)
        )

    def joined(self, other: Position) -> Position:
        """The least position of the same log that covers both.

        >>> print(Position("a", 5, 9, (5, 7)).joined(Position("a", 4, 8, (4, 5))))
        a-5:9:5
        """
        if self.covers(other):
            return self
        if other.covers(self):
            return other
        xmax = max(self.xmax, other.xmax)
        running = sorted({*self.xip, *other.xip})
        xip = tuple(xid for xid in running if not (self.contains(xid) or other.contains(xid)))
        return Position(self.log, xip[0] if xip else xmax, xmax, xip)


_BIGINT_MAX = 2**63 - 1
_XIDS = r"[0-9]{1,20}(?:,[0-9]{1,20})*"
_LATE = _XIDS.replace("*", "{,999}")  # limits.MARK_LATE_MAX
_POSITION_CHARS_MAX = 100_000  # limits.POSITION_CHARS_MAX
_POSITION = re.compile(
    rf"(?P<log>[0-9a-f]{{1,16}})-(?P<snapshot>[0-9]{{1,20}}:[0-9]{{1,20}}:(?:{_XIDS})?)"
    rf"(?:~(?P<mark>(?:[0-9]{{1,20}}\.){{3}}[0-9a-f]{{12}}(?:\.{_LATE})?))?"
)


def _xids(text: str) -> tuple[int, ...]:
    return tuple(int(xid) for xid in text.split(",")) if text else ()


def _is_among(xids: tuple[int, ...], xid: int) -> bool:
    """Whether a number is in an ascending sequence, which may be long in a client's position."""
    at = bisect_left(xids, xid)
    return at < len(xids) and xids[at] == xid


def _is_ascending(xids: tuple[int, ...]) -> bool:
    return list(xids) == sorted(set(xids))


class Transaction(msgspec.Struct, frozen=True):
    """Changes that became visible together, and a position to resume from after processing them.

    Many transactions are read at a time. The last one of a read has the position at the end of the
    read, the others have the position at its beginning: resuming from any of them never skips a
    change, and repeats at most that read. One of more than `limits.TRANSACTION_PART_CHANGES`
    arrives in parts, of which only the last is `complete`; after a lost connection they begin
    again.
    """

    xid: int
    changes: tuple[Change, ...]
    position: Position
    complete: bool = True

    @property
    def at(self) -> datetime:
        """When its last change was written."""
        return self.changes[-1].at


Cursor: TypeAlias = tuple[Value, ...]
"""The place of a row in an order: the values of the order's columns, the primary key last."""


class _Delta(msgspec.Struct, frozen=True, tag_field="delta", tag=str.lower, omit_defaults=True):
    """One step from a live query's old result to its new one.

    The deltas of a transaction are applied one after the other; every index refers to the rows at
    that time. `row` has the selected columns, `cursor` the place of the row in the order; rows of a
    reactive query have no cursor.
    """


class Enter(_Delta, frozen=True):
    """The row is new in the window: insert it at `index`."""

    key: Key
    row: Row
    index: int
    cursor: Cursor = ()


class Leave(_Delta, frozen=True):
    """The row is no longer in the window: remove it from `index`."""

    key: Key
    index: int


class Move(_Delta, frozen=True):
    """The row changed and moved: remove it from `source`, insert it at `index`."""

    key: Key
    row: Row
    source: int
    index: int
    cursor: Cursor = ()


class Update(_Delta, frozen=True):
    """The row changed and stays where it is. In a streamed query it has no index and no cursor."""

    key: Key
    row: Row
    index: int | None = None
    cursor: Cursor | None = None


class Reset(_Delta, frozen=True):
    """Discard the old result; the result is now exactly `rows`. Every snapshot is a reset."""

    rows: tuple[Enter, ...] = ()


class Match(_Delta, frozen=True):
    """Streamed: the row now belongs to the result."""

    key: Key
    row: Row


class Unmatch(_Delta, frozen=True):
    """Streamed: the row no longer belongs to the result."""

    key: Key


Delta: TypeAlias = Enter | Leave | Move | Update | Reset | Match | Unmatch
