"""Knows which partitions of the log can hold changes since a position, so that a read visits two or
three of them and not all.

Writers choose the partition, its *slot*, by the server's clock. Between two inspections they can
only reach the present slot and its neighbours. Three events make that wrong: the retention changes,
which numbers the slots differently; the clock jumps; a transaction that was running at an
inspection commits rows from long before. A read that shows one of these is repeated after another
inspection.
"""

from __future__ import annotations

import time

from headwater.database import Connection
from headwater.model import Position

_LOG_SLOTS = 32
"""Partitions of the log. Retention empties them in turn; see docs/design/001-log.md."""

_SLOT_CHECK_SECONDS = 60
"""How often a reader inspects which slots of the log are in use. Shorter than any slot lasts."""

_SLOT_SECONDS_MIN = 3_600
"""With slots shorter than this (a retention below 30 hours) a reader visits all of them."""


class Slots:
    """One for each reader. Call `holding` before a read, and `must_repeat` with what it showed."""

    def __init__(self) -> None:
        self._slots: tuple[int, ...] = ()
        self._near: frozenset[int] = frozenset()
        self._xmin = 0
        self._retention: bytes | None = None
        self._inspected_at: Position | None = None
        self._long_running: frozenset[int] = frozenset()
        self._next_inspection = 0.0

    async def holding(self, connection: Connection, since: Position) -> tuple[int, ...]:
        """The slots that can hold changes since the position."""
        if (
            self._retention is None
            or since.xmin < self._xmin
            or time.monotonic() >= self._next_inspection
        ):
            await self._inspect(connection, since)
        return self._slots

    def must_repeat(self, retention: bytes, slot: int, visible: Position) -> bool:
        """Whether the read may have missed a row; the next one inspects the slots first. `visible`
        is the snapshot of the read."""
        moved = retention != self._retention or slot not in self._near
        if not moved and not any(visible.contains(xid) for xid in self._long_running):
            return False
        if moved:
            self._inspected_at = None  # running transactions may have written to any slot
        self._retention = None
        return True

    async def _inspect(self, connection: Connection, since: Position) -> None:
        self._next_inspection = time.monotonic() + _SLOT_CHECK_SECONDS
        cursor = await connection.execute(_INSPECT, {"xmin": str(since.xmin)})
        row = await cursor.fetchone()
        assert row is not None
        retention, seconds, writing, snapshot, occupied = row
        near = {(writing + step) % _LOG_SLOTS for step in (-1, 0, 1)}
        self._near = frozenset(range(_LOG_SLOTS) if seconds < _SLOT_SECONDS_MIN else near)
        self._slots = tuple(sorted(self._near.union(occupied)))
        self._xmin = since.xmin
        self._retention = str(retention).encode()
        # A transaction that began after the last inspection has written to near slots only.
        before, now = self._inspected_at, Position.of_snapshot(since.log, snapshot)
        old = now.xip if before is None else [xid for xid in now.xip if xid < before.xmax]
        self._long_running = frozenset(() if len(self._near) == _LOG_SLOTS else old)
        self._inspected_at = now


_OCCUPIED = " union all ".join(
    f"select {slot} where exists (select from headwater.log_{slot} where xid >= %(xmin)s::xid8)"
    for slot in range(_LOG_SLOTS)
)

_INSPECT = f"""
    select retention::text, extract(epoch from retention) / 30,
           headwater.slot_at(clock_timestamp()), pg_current_snapshot()::text, array({_OCCUPIED})
    from headwater.installation""".encode()
