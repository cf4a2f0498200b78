"""Images of rows from the write-ahead log, the same texts that triggers write with `row_to_json`.

The server sends each value as the text that it prints, under settings that `connecting` pins. How
such a text becomes JSON depends on the type: `headwater.wal_kind` names one of the kinds below. A
value of kind `server` is an array, a composite or a type with its own cast to json: only the server
can write it, so the caller asks it first. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from json.encoder import encode_basestring
from typing import TypeAlias, cast

import msgspec

from headwater.capture.postgres.wal.pgoutput import Row

quoted: Callable[[str], str] = encode_basestring
"""A text as JSON, with the escapes that PostgreSQL uses."""

ServerValues: TypeAlias = Mapping[tuple[str, str], str]
"""By type and text, what the server wrote for a value."""


class ImageColumn(msgspec.Struct, frozen=True, array_like=True):
    """A column of the table, in its order."""

    name: str
    kind: str
    type: str


class NotWritten(LookupError):
    """The server cannot write a value: its type has changed since."""


class ImageWriter:
    """Writes the images of a relation's rows. `names` are the columns in the order of its rows."""

    def __init__(self, columns: Sequence[ImageColumn], names: Sequence[str]) -> None:
        places = {name: place for place, name in enumerate(names)}
        self._parts: list[tuple[str, int, Callable[[str], str] | None, str]] = []
        for number, column in enumerate(columns):
            head = f"{',' if number else '{'}{quoted(column.name)}:"
            write = _WRITERS.get(column.kind)
            self._parts.append((head, places[column.name], write, column.type))
        self.server_columns = [
            (places[column.name], column.type) for column in columns if column.kind == "server"
        ]
        """The place and the type of columns that only the server can write."""

    def image(self, row: Row, values: ServerValues) -> str:
        """The row as JSON. `values` has those of `server_columns`."""
        texts: list[str] = []
        add = texts.append
        for head, place, write, type_ in self._parts:
            cell = row[place]
            add(head)
            if cell is None:
                add("null")
            elif write is not None:
                add(write(cell))  # type: ignore[arg-type]
            else:
                try:
                    add(values[type_, cast(str, cell)])
                except KeyError:
                    raise NotWritten(type_) from None
        return "".join(texts) + ("}" if texts else "{}")


def _as_is(text: str) -> str:
    return text


def _boolean(text: str) -> str:
    return "true" if text == "t" else "false"


def _number(text: str) -> str:
    """
    >>> [_number(text) for text in ("1.50", "-1e+20", "NaN", "-Infinity")]
    ['1.50', '-1e+20', '"NaN"', '"-Infinity"']
    """
    return text if text[-1].isdigit() else f'"{text}"'


def _timestamp(text: str) -> str:
    """
    >>> [_timestamp(text) for text in ("2026-01-02 03:04:05.6", "0044-03-15 12:00:00 BC")]
    ['"2026-01-02T03:04:05.6"', '"0044-03-15T12:00:00 BC"']
    """
    return f'"{text.replace(" ", "T", 1)}"'


def _timestamptz(text: str) -> str:
    """The session's time zone is UTC.

    >>> [_timestamptz(text) for text in ("2026-01-02 03:04:05+00", "infinity")]
    ['"2026-01-02T03:04:05+00:00"', '"infinity"']
    """
    return f'"{text.replace(" ", "T", 1).replace("+00", "+00:00")}"'


_WRITERS: dict[str, Callable[[str], str]] = {
    "boolean": _boolean,
    "integer": _as_is,
    "number": _number,
    "timestamp": _timestamp,
    "timestamptz": _timestamptz,
    "json": _as_is,
    "text": quoted,
}
