"""How values of each column type are read and compared in memory.

A kind defines how a constant is read, the SQL type it is cast to, and whether memory decides
equality and order exactly as PostgreSQL does. If not (`equates` or `orders` is false), the database
decides. `comparable` converts a value into one that Python compares exactly as PostgreSQL compares
the original, and `reverse` into one for the reverse order. Both are source text, so that compiled
filters and sort keys make no unnecessary calls.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any
from uuid import UUID

from headwater import limits
from headwater.model import Column, Value


@dataclass(frozen=True, slots=True)
class Kind:
    """How memory treats the values of a column."""

    expects: str
    """What a constant must be, for messages: `an integer`."""
    read: Callable[[Any], Value]
    """Reads a constant from JSON or Python; raises ValueError or TypeError for anything else."""
    cast: str = ""
    """The SQL type that constants are cast to: a keyword, or a name with its schema, so that no
    type of a user can be chosen instead. Empty if PostgreSQL infers it from the column."""
    comparable: str = "{v}"
    reverse: str = "-{v}"
    equates: bool = True
    orders: bool = True
    nan: bool = False
    """Whether NaN occurs: equal to itself and above every other value, unlike in Python."""
    text: bool = False
    """Whether LIKE applies."""
    null: tuple[Any, Any] | None = None
    """Values below and above all comparables, for NULL in a sort key."""
    null_doubt: str = ""
    """Source of a test for values that only the database knows to be NULL or not."""
    strict: bool = False
    """Whether values that are equal in Python can be written differently (1.0 and 1.00)."""

    @property
    def compares(self) -> bool:
        """Whether PostgreSQL compares its values with constants at all."""
        return self.read is not _read_nothing

    def may_be_null(self, value: Value) -> bool:
        """Whether only the database can decide if this is NULL."""
        return bool(self.null_doubt) and bool(_function(self.null_doubt)(value))

    def to_comparable(self, value: Value) -> Any:
        """The comparable value of a constant."""
        return _function(self.comparable)(value)


# ------------------------------------------------------------------------ reading constants


def _read_number(value: Any) -> int | Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | str):
        raise TypeError
    if isinstance(value, str) and not _NUMBER.fullmatch(value):
        raise ValueError
    if isinstance(value, int):
        return value
    number = Decimal(repr(value) if isinstance(value, float) else value)
    if not -limits.NUMERIC_SCALE_MAX <= number.adjusted() < limits.NUMERIC_DIGITS_MAX:
        raise ValueError
    return number


_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,6})?|NaN|[+-]?Infinity")


def _read_integer(value: Any) -> int | Decimal:
    """Whole numbers become int. A fraction stays, because `region > 7.5` is valid."""
    number = _read_number(value)
    if isinstance(number, int):
        return number
    if not number.is_finite():
        raise ValueError
    if number.adjusted() > _INTEGER_DIGITS:
        return number  # larger than any integer of PostgreSQL, and slow in Python
    return int(number) if number == int(number) else number


_INTEGER_DIGITS = 20


def _read_numeric(value: Any) -> Decimal:
    return Decimal(_read_number(value))


def _read_double(value: Any) -> float:
    number = _read_number(value)
    double = float(number)
    if abs(double) == INFINITY and abs(number) != INFINITY:
        raise ValueError
    return double


def _read_real(value: Any) -> float:
    double = _read_double(value)
    if abs(single(double)) == INFINITY and abs(double) != INFINITY:
        raise ValueError
    return single(double)


def _read_boolean(value: Any) -> bool:
    if value in ("true", "false"):
        return bool(value == "true")
    if not isinstance(value, bool):
        raise TypeError
    return value


def _read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    value.encode()  # a lone surrogate is not valid text
    if "\0" in value:
        raise ValueError
    return value


def _read_timestamptz(value: Any) -> Value:
    if value in ("infinity", "-infinity") or is_far(value):
        far_moment(value)
        return value
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    if not isinstance(moment, datetime):
        raise TypeError
    return moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)


def _read_timestamp(value: Any) -> Value:
    if value in ("infinity", "-infinity") or is_far(value):
        far_moment(value)
        return value
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    if not isinstance(moment, datetime) or moment.tzinfo:
        raise TypeError
    return moment


def _read_date(value: Any) -> Value:
    if value in ("infinity", "-infinity") or is_far(value):
        far_day(value)
        return value
    day = date.fromisoformat(value) if isinstance(value, str) else value
    if not isinstance(day, date) or isinstance(day, datetime):
        raise TypeError
    return day


def _read_time(value: Any) -> Value:
    if value == "24:00:00":
        return value
    moment = time.fromisoformat(value) if isinstance(value, str) else value
    if not isinstance(moment, time) or moment.tzinfo:
        raise TypeError
    return moment


def _read_uuid(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(value)


def _read_bytes(value: Any) -> bytes:
    if isinstance(value, str) and value.startswith("\\x"):
        return bytes.fromhex(value[2:])
    if not isinstance(value, bytes):
        raise TypeError
    return value


def _read_nothing(_: Any) -> Value:
    raise TypeError


# ------------------------------------------------------------------------ exact comparables

INFINITY = float("inf")
EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
NAIVE_EPOCH = datetime(2000, 1, 1)
_NEVER = timedelta(days=999_999_998)
_FAR = re.compile(
    r"(?P<year>[0-9]{4,7})-(?P<month>[0-9]{2})-(?P<day>[0-9]{2})"
    # JSON has a T between day and hour, PostgreSQL's text a blank.
    r"(?:[T ](?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})"
    r"(?:\.(?P<fraction>[0-9]{1,6}))?(?P<zone>Z|[+-][0-9]{2}(?::[0-9]{2}){0,2})?)?(?P<era> BC)?"
)


def is_far(value: Any) -> bool:
    """Whether this is PostgreSQL's text of a date or time beyond Python's years 1 to 9999."""
    match = _FAR.fullmatch(value) if isinstance(value, str) else None
    return match is not None and (match["era"] is not None or len(match["year"]) > 4)


def far_day(text: str) -> float:
    """The day number, counted as `date.toordinal` does, of a date only PostgreSQL can hold.

    >>> far_day("0001-12-31 BC"), far_day("10000-01-01") - date(9999, 12, 31).toordinal()
    (0, 1)
    """
    if text.endswith("infinity"):
        return -INFINITY if text.startswith("-") else INFINITY
    match = _FAR.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a date as PostgreSQL prints it")
    year = 1 - int(match["year"]) if match["era"] else int(match["year"])
    cycles, year_of_cycle = divmod(year - 1, 400)  # the calendar repeats every 400 years
    there = date(year_of_cycle + 1, int(match["month"]), int(match["day"]))
    return cycles * 146_097 + there.toordinal()


def far_moment(text: str) -> timedelta:
    """The time since 2000 of a timestamp only PostgreSQL can hold."""
    if text.endswith("infinity"):
        return -_NEVER if text.startswith("-") else _NEVER
    match = _FAR.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a timestamp as PostgreSQL prints it")
    days = int(far_day(text)) - EPOCH.toordinal()
    hours, minutes, seconds = (int(match[part] or 0) for part in ("hour", "minute", "second"))
    microseconds = int((match["fraction"] or "0").ljust(6, "0"))
    local = timedelta(days, seconds, microseconds, 0, minutes, hours)
    return local - _offset(match["zone"])


def _offset(zone: str | None) -> timedelta:
    if zone is None or zone == "Z":
        return timedelta()
    hours, minutes, seconds = (*map(int, zone[1:].split(":")), 0, 0)[:3]
    offset = timedelta(hours=hours, minutes=minutes, seconds=seconds)
    return -offset if zone[0] == "-" else offset


def clock(value: Any) -> int:
    """Microseconds since midnight; PostgreSQL's 24:00:00 exists as text only."""
    if value == "24:00:00":
        return 86_400_000_000
    seconds = (value.hour * 60 + value.minute) * 60 + value.second
    return int(seconds * 1_000_000 + value.microsecond)


_SINGLE = struct.Struct("f")


def single(value: float) -> float:
    """The nearest single-precision number, which is what a `real` column holds."""
    try:
        return float(_SINGLE.unpack(_SINGLE.pack(value))[0])
    except OverflowError:
        return INFINITY if value > 0 else -INFINITY


INVERTED = bytes(range(255, -1, -1))

NAMES: dict[str, Any] = {
    "EPOCH": EPOCH,
    "NAIVE_EPOCH": NAIVE_EPOCH,
    "INVERTED": INVERTED,
    "clock": clock,
    "date": date,
    "datetime": datetime,
    "far_day": far_day,
    "far_moment": far_moment,
    "single": single,
}
"""What the source text of a kind may refer to."""


@lru_cache(maxsize=64)
def _function(expression: str) -> Callable[[Any], Any]:
    source = expression.format(v="v")
    return eval(f"lambda v: {source}", NAMES)  # type: ignore[no-any-return]


# ------------------------------------------------------------------------ the kinds

_INTEGER = Kind("an integer", _read_integer, "bigint", null=(-INFINITY, INFINITY))
_NUMERIC = Kind(
    "a number", _read_numeric, "numeric", reverse="{v}.copy_negate()", nan=True, strict=True
)
_DOUBLE = Kind("a number", _read_double, "double precision", nan=True, strict=True)
_REAL = Kind("a number", _read_real, "real", comparable="single({v})", nan=True, strict=True)
_BOOLEAN = Kind("true or false", _read_boolean, "boolean", null=(-2, 2))

# Compared as UTF-8 bytes, inverted; the end of a text sorts after every byte that may follow.
_REVERSE_TEXT = "{v}.encode().translate(INVERTED) + b'\\xff'"
_TEXT = Kind("a text", _read_text, "pg_catalog.text", reverse=_REVERSE_TEXT, text=True)
_TEXT_COLLATED = Kind("a text", _read_text, "pg_catalog.text", orders=False, text=True)
_TEXT_FOREIGN = Kind(
    "a text", _read_text, "pg_catalog.text", equates=False, orders=False, text=True
)

# PostgreSQL compares char(n) without the padding, and matches LIKE with it.
_UNPADDED = "{v}.rstrip(' ')"
_CHAR = Kind(
    "a text",
    _read_text,
    "pg_catalog.bpchar",
    comparable=_UNPADDED,
    reverse=_REVERSE_TEXT,
    text=True,
)
_CHAR_COLLATED = Kind(
    "a text", _read_text, "pg_catalog.bpchar", comparable=_UNPADDED, orders=False, text=True
)
_CHAR_FOREIGN = Kind(
    "a text", _read_text, "pg_catalog.bpchar", equates=False, orders=False, text=True
)

_SPAN = (timedelta(days=-999_999_999), timedelta(days=999_999_999))
_TIMESTAMPTZ = Kind(
    "a timestamp such as 2026-01-31T12:00:00Z",
    _read_timestamptz,
    "pg_catalog.timestamptz",
    comparable="({v} - EPOCH if {v}.__class__ is datetime else far_moment({v}))",
    null=_SPAN,
)
_TIMESTAMP = Kind(
    "a timestamp without time zone, such as 2026-01-31T12:00:00",
    _read_timestamp,
    "timestamp",
    comparable="({v} - NAIVE_EPOCH if {v}.__class__ is datetime else far_moment({v}))",
    null=_SPAN,
)
_DATE = Kind(
    "a date such as 2026-01-31",
    _read_date,
    "pg_catalog.date",
    comparable="({v}.toordinal() if {v}.__class__ is date else far_day({v}))",
)
_TIME = Kind(
    "a time such as 12:30:00", _read_time, "time", comparable="clock({v})", null=(-1e15, 1e15)
)
_UUID = Kind(
    "a UUID", _read_uuid, "pg_catalog.uuid", comparable="{v}.int", null=(-INFINITY, INFINITY)
)
_BYTEA = Kind(
    "bytes, in JSON as \\x and hexadecimal digits",
    _read_bytes,
    "pg_catalog.bytea",
    # Bytes may hold any value, so the end needs a character that no byte decodes to.
    reverse="{v}.translate(INVERTED).decode('latin-1') + '\\u0100'",
)
_ENUM = Kind("one of the type's labels", _read_text, orders=False)
# It may be a composite type: to SQL, a value of NULLs only is NULL itself.
_OPAQUE = Kind(
    "a value in PostgreSQL's text form", _read_text, equates=False, orders=False,
    null_doubt="{v}.__class__ is dict",
)  # fmt: skip
_INCOMPARABLE = Kind("nothing", _read_nothing, equates=False, orders=False, strict=True)
# In an image, the null of JSON looks like NULL.
_JSON = replace(_INCOMPARABLE, null_doubt="{v} is None")

_BY_TYPE = {
    "smallint": _INTEGER,
    "integer": _INTEGER,
    "bigint": _INTEGER,
    "numeric": _NUMERIC,
    "real": _REAL,
    "double precision": _DOUBLE,
    "boolean": _BOOLEAN,
    "timestamp with time zone": _TIMESTAMPTZ,
    "timestamp without time zone": _TIMESTAMP,
    "timestamp": _TIMESTAMP,
    "date": _DATE,
    "time without time zone": _TIME,
    "time": _TIME,
    "uuid": _UUID,
    "bytea": _BYTEA,
    "json": _JSON,
    "jsonb": _JSON,
    "xml": _INCOMPARABLE,
}

# Collations that come with PostgreSQL are deterministic: equal means equal bytes. A collation of a
# user may not be, and its name does not show it.
_DETERMINISTIC = re.compile(
    r"default|POSIX|unicode|[a-z]{2,3}([_-][A-Za-z]+)*-x-icu|[a-z]{2,3}_[A-Z]{2}(\.\w+)?(@\w+)?"
)


def kind_of(column: Column) -> Kind:
    """How memory treats a column.

    >>> kind_of(Column("id", "bigint", "bigint")).orders
    True
    >>> kind_of(Column("name", "text", "text", "de-x-icu")).orders
    False
    """
    if column.type in ("text", "character varying", "name"):
        return _by_collation(column, _TEXT, _TEXT_COLLATED, _TEXT_FOREIGN)
    if column.type == "character":
        return _by_collation(column, _CHAR, _CHAR_COLLATED, _CHAR_FOREIGN)
    if column.enum:
        return _ENUM
    if column.type.endswith("[]"):
        return _INCOMPARABLE
    return _BY_TYPE.get(column.type, _OPAQUE)


def compares(column: Column) -> bool:
    """Whether it can be compared with constants. A column of a range or composite type that a user
    made cannot: to read the constant, PostgreSQL would call conditions of domains, which are code
    of that user, with our rights."""
    is_known = "." not in column.type or column.enum or bool(column.operators)
    return is_known and kind_of(column).compares


def _by_collation(column: Column, by_code_point: Kind, deterministic: Kind, foreign: Kind) -> Kind:
    if column.collation == "C":
        return by_code_point
    if column.collation is not None and _DETERMINISTIC.fullmatch(column.collation):
        return deterministic
    return foreign


def read(kind: Kind, value: Any) -> Value:
    """Read a constant. A ValueError has what was expected and what was given."""
    if isinstance(value, str | bytes) and len(value) > limits.FILTER_TEXT_CHARS_MAX:
        raise ValueError(f"longer than {limits.FILTER_TEXT_CHARS_MAX:,} characters")
    try:
        return kind.read(value)
    except (TypeError, ValueError, AttributeError, OverflowError, InvalidOperation):
        raise ValueError(f"expected {kind.expects}, got {value!r:.100}") from None
