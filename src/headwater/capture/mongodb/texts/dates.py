"""Milliseconds since 1970 as dates, for all the years that BSON has.

Python's dates end with the year 9999 and begin with the year 1; PostgreSQL's reach from 4714 BC to
294276, and BSON's reach further than both.

    >>> timestamp_text(0), timestamp_text(-62_167_219_200_001)
    ('1970-01-01 00:00:00', '0002-12-31 23:59:59.999 BC')
"""

from __future__ import annotations

from typing import Any

FIRST = -210_866_803_200_000
"""PostgreSQL's first timestamp, 4714-11-24 BC."""
END = 9_224_318_016_000_000
"""PostgreSQL has no timestamp from the year 294277 on."""

_DAY = 86_400_000
_YEAR_10000 = 253_402_300_800_000


def fits(milliseconds: int) -> bool:
    return FIRST <= milliseconds < END


def timestamp_text(milliseconds: int) -> str:
    """In UTC, without a zone, as PostgreSQL reads it."""
    days, rest = divmod(milliseconds, _DAY)
    day, era = _day(days)
    return f"{day} {_time(rest)}{era}"


def date_text(milliseconds: int) -> str:
    day, era = _day(milliseconds // _DAY)
    return day + era


def extended(milliseconds: int) -> Any:
    """What stands beside `$date`: a text for the years that the specification of relaxed extended
    JSON writes so, else the number.

    >>> extended(1_500), extended(-1)
    ('1970-01-01T00:00:01.500Z', {'$numberLong': '-1'})
    """
    if not 0 <= milliseconds < _YEAR_10000:
        return {"$numberLong": str(milliseconds)}
    days, rest = divmod(milliseconds, _DAY)
    return f"{_day(days)[0]}T{_time(rest)}Z"


def _time(milliseconds: int) -> str:
    seconds, fraction = divmod(milliseconds, 1000)
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}" + (f".{fraction:03}" if fraction else "")


def _day(days: int) -> tuple[str, str]:
    """The Gregorian date of a day since 1970, and ` BC` where it needs that.

    Counted in years that begin in March, so that the leap day is the last of its year; 400 years
    always have 146,097 days.
    """
    cycle, day = divmod(days + 719_468, 146_097)
    year = (day - day // 1_460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    month = (5 * day + 2) // 153
    day_of_month = day - (153 * month + 2) // 5 + 1
    month = month + 3 if month < 10 else month - 9
    year += 400 * cycle + (month <= 2)
    if year > 0:
        return f"{year:04}-{month:02}-{day_of_month:02}", ""
    return f"{1 - year:04}-{month:02}-{day_of_month:02}", " BC"
