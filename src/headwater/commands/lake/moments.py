"""Moments in the arguments of commands."""

from __future__ import annotations

from headwater.errors import ConfigError
from headwater.pipeline.lake.moments import Moment, parse_moment


def given_moment(text: str) -> Moment:
    """The moment that an argument names. ConfigError for another text."""
    try:
        return parse_moment(text)
    except ValueError as error:
        raise ConfigError(
            str(error),
            hint="Write 2026-11-15, '2026-11-15 10:00', 2026-11-15T10:00:00+01:00, or a position.",
        ) from None
