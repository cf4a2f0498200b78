"""Moments as people write them: a time or a position."""

from __future__ import annotations

from datetime import UTC, datetime

from headwater.errors import ConfigError
from headwater.model import Position


def parse_moment(text: str) -> datetime | Position:
    """A position, or a time. A time without an offset is UTC.

    >>> parse_moment("2026-11-15 10:00")
    datetime.datetime(2026, 11, 15, 10, 0, tzinfo=datetime.timezone.utc)
    """
    try:
        return Position.parse(text)
    except ValueError:
        pass
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ConfigError(
            f"{text!r:.100} is neither a time nor a position",
            hint="Write 2026-11-15, '2026-11-15 10:00', 2026-11-15T10:00:00+01:00, or a position.",
        ) from None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at
