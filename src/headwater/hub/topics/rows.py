"""Reads rows of topics by key: the ids in signals, and the statement that reads the rows.

An id is the text of a key, or a JSON array of its columns. It is converted to the type of the key:
so `042` and `42` are the same row, and an id that is not a valid key is never sent to the database.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import msgspec

from headwater.database import Connection
from headwater.hub.reading.snapshot_queries import SnapshotQuery, ask_in_flush, images
from headwater.hub.reading.tables import KnownTable
from headwater.limits import WINDOW_ASK_KEYS_MAX
from headwater.live.filters.sql import Sql, enum_type, identifier
from headwater.live.statements import select_keys
from headwater.log.images import python_type
from headwater.model import Key, Row, Table, Value

_TOPIC_ASK_KEYS_MAX = 10_000
"""Keys of one table that one statement of a flush reads."""


_INTEGERS = {"smallint": 2**15, "integer": 2**31, "bigint": 2**63}


class KeyReader:
    """Reads the ids of one table."""

    def __init__(self, table: Table) -> None:
        by_name = {column.name: column for column in table.columns}
        self._table = table
        self._types = [by_name[name].type for name in table.key]
        self._padded = "character" in self._types

    def __call__(self, id: str) -> Key | None:
        """The key of an id; None if it is not a valid key."""
        values: list[Any] = [id]
        if len(self._types) > 1:
            try:
                values = msgspec.json.decode(id, type=list)
            except (msgspec.DecodeError, RecursionError):
                return None
            if len(values) != len(self._types):
                return None
        try:
            return tuple(map(_read, values, self._types))
        except (ValueError, TypeError, OverflowError):
            return None

    def of_row(self, row: Row) -> Key:
        """The key of a row, in the same form."""
        return self.of_key(self._table.key_of(row))

    def of_key(self, key: Key) -> Key:
        if not self._padded:
            return key
        return tuple(value.rstrip(" ") if isinstance(value, str) else value for value in key)


def _read(value: Any, type_: str) -> Value:
    """ValueError, TypeError or OverflowError if it is not a value of the type."""
    if value is None or isinstance(value, dict | list):
        raise ValueError("not one value")
    if type_ == "character":
        return str(value).rstrip(" ")
    if type_ == "bytea":
        return bytes.fromhex(str(value).removeprefix("\\x"))
    if type_ in _INTEGERS:
        return _read_integer(str(value), _INTEGERS[type_])
    wanted = python_type(type_)
    found = value if wanted is Any else msgspec.convert(value, wanted, strict=False)
    if isinstance(found, str) and "\x00" in found:
        raise ValueError("a text has a NUL, which PostgreSQL cannot store")
    return found


def _read_integer(text: str, bound: int) -> int:
    if _INTEGER.fullmatch(text) is None:
        raise ValueError("not an integer")
    found = int(text)
    if not -bound <= found < bound:
        raise ValueError("out of range")
    return found


_INTEGER = re.compile(r"-?[0-9]{1,30}")


def of_keys(known: KnownTable, keys: Sequence[Key]) -> SnapshotQuery:
    """The rows with these keys, whole."""
    table = known.table
    if len(table.key) > 1:
        return SnapshotQuery(known, images(known, select_keys(table, tuple(keys))))
    columns = ", ".join(identifier(column.name) for column in table.columns)
    (key,) = (column for column in table.columns if column.name == table.key[0])
    # The array is sent without a type: so PostgreSQL uses the type of the column, and its index. An
    # enumeration needs the type (`enum_type`).
    cast = f"::{enum_type(key)}[]" if enum_type(key) else ""
    rows = Sql(
        f"select {columns} from {identifier(table.schema)}.{identifier(table.name)}"
        f" where {identifier(key.name)} {key.operator('=')} any (%s{cast})",
        (array([values[0] for values in keys]),),
    )
    return SnapshotQuery(known, images(known, rows))


def array(values: Sequence[Value]) -> str:
    """Values as the text of an array.

    >>> print(array([7, 'a "b" c']))
    {"7","a \\"b\\" c"}
    """
    return "{" + ",".join(map(_element, values)) + "}"


def _element(value: Value) -> str:
    match value:
        case bytes():
            text = "\\x" + value.hex()
        case _ if hasattr(value, "isoformat"):
            text = value.isoformat()
        case _:
            text = str(value)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


Found: TypeAlias = Mapping[Key, Row] | Exception
Fetch: TypeAlias = Callable[
    [Connection, Sequence[tuple[KnownTable, Sequence[Key]]]],
    Awaitable[tuple[list[Found], int]],
]


async def fetch(
    connection: Connection, wanted: Sequence[tuple[KnownTable, Sequence[Key]]]
) -> tuple[list[Found], int]:
    """For each table the rows with these keys, in the snapshot of the connection's transaction, or
    the error; and the number of statements: one for each table, more for very many keys."""
    questions = [
        (at, of_keys(known, part))
        for at, (known, keys) in enumerate(wanted)
        for part in _parts(known, keys)
    ]
    found: list[dict[Key, Row] | Exception] = [{} for _ in wanted]
    if not questions:
        return list(found), 0
    answers = await ask_in_flush(connection, [question for _, question in questions])
    for (at, question), answer in zip(questions, answers, strict=True):
        rows = found[at]
        if isinstance(answer, Exception):
            found[at] = answer
        elif not isinstance(rows, Exception):
            reader = KeyReader(question.known.table)
            rows.update((reader.of_row(row), row) for row in answer)
    return list(found), len(questions)


def _parts(known: KnownTable, keys: Sequence[Key]) -> Iterator[list[Key]]:
    size = _TOPIC_ASK_KEYS_MAX if len(known.table.key) == 1 else WINDOW_ASK_KEYS_MAX
    rest = iter(keys)
    while part := list(islice(rest, size)):
        yield part
