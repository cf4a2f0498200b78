"""How far back the lake goes, where old events were removed.

The file `_retention` says it. It is written before the events are removed, so that a request for an
older moment is refused also after a crash. `headwater.pipeline.jobs.trim` removes the events.
"""

from __future__ import annotations

from datetime import UTC, date, datetime

import msgspec

from headwater.errors import ResyncRequired
from headwater.model import Position
from headwater.pipeline.files import FileLocation
from headwater.pipeline.lake.moments import Moment

_FILE = "_retention"


class RetentionFloor(msgspec.Struct, frozen=True):
    """Events before this day may have been removed. The positions, one for each log, contain every
    removed event."""

    day: date
    positions: tuple[str, ...]

    def check(self, when: Moment) -> None:
        """ResyncRequired for a moment whose events may have been removed."""
        start = datetime.combine(self.day, datetime.min.time(), UTC)
        if isinstance(when, datetime):
            is_stored = when >= start
        else:
            ends = map(Position.parse, self.positions)
            is_stored = all(when.covers(end) for end in ends if end.log == when.log)
        if not is_stored:
            raise ResyncRequired(
                f"the events of {when} were removed from the lake by its retention: the earliest"
                f" moment that it knows is {start:%Y-%m-%d %H:%M} UTC",
                hint="To keep more from now on, set a longer [lake] retention.",
            )


def load(root: str) -> RetentionFloor | None:
    """How far back the lake goes; None for a lake that was never trimmed."""
    place = FileLocation.of(root)
    if not place.exists(_FILE):
        return None
    return msgspec.json.decode(place.read(_FILE), type=RetentionFloor)


def save(root: str, floor: RetentionFloor) -> None:
    FileLocation.of(root).write(_FILE, msgspec.json.encode(floor))
