"""Lengths of time as people write them.

>>> parse_duration("90 days")
datetime.timedelta(days=90)
"""

from __future__ import annotations

import re
from datetime import timedelta

from headwater.errors import ConfigError
from headwater.limits import DURATION_SECONDS_MAX

_UNITS = {
    "ms": 0.001,
    "s": 1,
    "second": 1,
    "m": 60,
    "minute": 60,
    "h": 3600,
    "hour": 3600,
    "d": 86400,
    "day": 86400,
}


def parse_duration(
    text: str, *, name: str = "duration", least: int = 1, other: str = ""
) -> timedelta:
    """A length of time as people write it: `30 days`, `12h`, `90 seconds`. `least` is in seconds;
    `other` is added to the hint of an error."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    # Words have a plural, letters have none: 50ms are not 50 minutes.
    unit = (_UNITS.get(match[2]) or _UNITS.get(match[2].removesuffix("s"))) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{name}: {text!r} is not a length of time",
            hint=f"Write a number and a unit: 30 days, 12h, 90 seconds. {other}".rstrip(),
        )
    seconds = float(match[1]) * unit
    if seconds > DURATION_SECONDS_MAX:
        raise ConfigError(f"{name}: {text!r} is too long", hint="A hundred years is the most.")
    period = timedelta(seconds=seconds)
    if period < timedelta(seconds=least):
        named = {1: "One second", 3600: "One hour", 7200: "Two hours", 86_400: "One day"}
        shortest = named.get(least, f"{least} seconds")
        raise ConfigError(f"{name}: {text!r} is too short", hint=f"{shortest} is the least.")
    return period
