"""Estimates the memory of a value: quickly, and always with the same result for a value.

The same result is more important than an exact one: the size that was added for a row is subtracted
when it leaves, so sums stay right. `sys.getsizeof` does not have this property: a text grows when
it is first encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import lru_cache
from typing import Any

import msgspec

from headwater.model import Key, Table

VALUE_BYTES = 64
"""Bytes of any value with its place in a tuple, without its content."""

ENTRY_BYTES = 200
"""Bytes of a row in a window without its values: two tuples and a place in a dict."""

MEMBER_BYTES = 120
"""Bytes of a key in a set without its values."""

_JSON_FACTOR = 8
"""A JSON document takes about this many times its text as Python objects."""

_FIXED = frozenset(
    (
        "smallint", "integer", "bigint", "real", "double precision", "boolean", "date", "uuid",
        "timestamp with time zone", "timestamp without time zone", "time without time zone",
    )
)  # fmt: skip
"""Types whose values all have about the same size."""


def size_of(value: Any) -> int:
    """Bytes beyond VALUE_BYTES.

    >>> size_of("abc"), size_of("äöü"), size_of(None), size_of([1, 2])
    (3, 12, 0, 40)
    """
    kind = type(value)
    if kind is str:
        # Up to four bytes a character, and its UTF-8 beside it.
        return len(value) if value.isascii() else 4 * len(value)
    if value is None:
        return 0
    if kind is bytes:
        return len(value)
    if kind is Decimal:
        return int(value.__sizeof__())
    if kind is int:
        return int(value.bit_length()) >> 3
    if kind is list or kind is dict:
        try:
            return _JSON_FACTOR * len(msgspec.json.encode(value))
        except (OverflowError, TypeError, ValueError):
            return _JSON_FACTOR * len(repr(value))
    return 0


def sizes(
    table: Table, fixed: int, columns: Iterable[str], places: Mapping[str, tuple[int, int]]
) -> Callable[[tuple[Any, ...]], int]:
    """A function for the size of entries: `fixed`, plus the sizes of the values of these columns
    whose sizes vary. `places` has the index of a value, and how often it is stored."""
    of_column = {column.name: column.type for column in table.columns}
    parts = [str(fixed)]
    for name in columns:
        if of_column[name] not in _FIXED:
            at, times = places[name]
            # No call for ASCII texts: this runs twice for every change of a row.
            usual = f"len(v) if type(v := entry[{at}]) is str and v.isascii() else size_of(v)"
            parts.append(f"({usual})" if times == 1 else f"{times} * ({usual})")
    source = f"lambda entry: {' + '.join(parts)}"
    return eval(source, {"size_of": size_of})  # type: ignore[no-any-return]


@lru_cache(maxsize=1024)
def key_sizes(table: Table) -> Callable[[Key], int]:
    """The size of a key of the table in a set of keys."""
    places = {name: (place, 1) for place, name in enumerate(table.key)}
    # Equal numbers may be written with more digits or fewer, and an index bounds them.
    numbers = {column.name for column in table.columns if column.type == "numeric"}
    columns = [name for name in table.key if name not in numbers]
    return sizes(table, MEMBER_BYTES + VALUE_BYTES * len(table.key), columns, places)
