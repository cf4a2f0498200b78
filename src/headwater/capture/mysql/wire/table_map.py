"""The table map: which columns the rows that follow it have, as the table was when they were
written.

With `binlog_row_metadata=FULL` it has the names, signs, character sets, members and the key as
well, so that rows are read rightly whatever the catalog says by now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headwater.capture.mysql.wire.events import TableMap, WireColumn, length

(TINY, SHORT, LONG, FLOAT, DOUBLE, TIMESTAMP, LONGLONG, INT24, DATE, TIME, DATETIME, YEAR, NEWDATE,
 VARCHAR, BIT, TIMESTAMP2, DATETIME2, TIME2) = (
    1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19,
)  # fmt: skip
(BLOB_COMPRESSED, VARCHAR_COMPRESSED, JSON, NEWDECIMAL, ENUM, SET, TINY_BLOB, MEDIUM_BLOB,
 LONG_BLOB, BLOB, VAR_STRING, STRING, GEOMETRY) = (
    140, 141, 245, 246, 247, 248, 249, 250, 251, 252, 253, 254, 255,
)  # fmt: skip

_ONE_BYTE = frozenset((
    FLOAT, DOUBLE, BLOB, GEOMETRY, JSON, TIME2, DATETIME2, TIMESTAMP2, BLOB_COMPRESSED, TINY_BLOB,
    MEDIUM_BLOB, LONG_BLOB,
))  # fmt: skip
_TWO_BYTES = frozenset((
    VARCHAR, VAR_STRING, BIT, NEWDECIMAL, STRING, ENUM, SET, VARCHAR_COMPRESSED,
))  # fmt: skip
_NUMERIC = frozenset((TINY, SHORT, INT24, LONG, LONGLONG, NEWDECIMAL, FLOAT, DOUBLE, YEAR))
_CHARACTER = frozenset((STRING, VAR_STRING, VARCHAR, BLOB, BLOB_COMPRESSED, VARCHAR_COMPRESSED))
_MEMBERS = frozenset((ENUM, SET))


def read_table_map(body: bytes, *, mariadb: bool) -> TableMap:
    schema_size = body[8]
    schema = body[9 : 9 + schema_size].decode()
    place = 10 + schema_size
    table_size = body[place]
    table = body[place + 1 : place + 1 + table_size].decode()
    count, place = length(body, place + 2 + table_size)
    codes, place = body[place : place + count], place + count
    size, place = length(body, place)
    types = list(_types(codes, body[place : place + size]))
    place += size
    nulls = int.from_bytes(body[place : place + (count + 7) // 8], "little")
    metadata = _metadata(body, place + (count + 7) // 8)
    columns = [WireColumn(type, meta, bool(nulls >> i & 1)) for i, (type, meta) in enumerate(types)]
    return TableMap(schema, table, *_described(columns, metadata, mariadb))


def _types(codes: bytes, metas: bytes) -> Iterator[tuple[int, int]]:
    place = 0
    for code in codes:
        if code in _ONE_BYTE:
            yield code, metas[place]
            place += 1
        elif code in _TWO_BYTES:
            first, second = metas[place], metas[place + 1]
            place += 2
            yield _two_bytes(code, first, second)
        else:
            yield code, 0


def _two_bytes(code: int, first: int, second: int) -> tuple[int, int]:
    """A string's first byte is its real type; of a long one, two bits of it belong to the size."""
    if code == STRING:
        if first in _MEMBERS:
            return first, second
        return STRING, ((first & 0x30) ^ 0x30) << 4 | second
    if code == NEWDECIMAL:
        return code, first << 8 | second
    return code, second << 8 | first


def _metadata(body: bytes, place: int) -> dict[int, bytes]:
    found = dict[int, bytes]()
    while place < len(body):
        field = body[place]
        size, place = length(body, place + 1)
        found[field] = body[place : place + size]
        place += size
    return found


def _described(
    columns: list[WireColumn], metadata: dict[int, bytes], mariadb: bool
) -> tuple[tuple[WireColumn, ...], tuple[int, ...] | None]:
    if 4 not in metadata:
        return tuple(columns), None
    character = _CHARACTER | {GEOMETRY} if mariadb else _CHARACTER
    signs = _signs(columns, metadata.get(1, b""))
    collations = _collations(columns, metadata, 2, 3, character.__contains__)
    collations |= _collations(columns, metadata, 10, 11, _MEMBERS.__contains__)
    members = _members(columns, metadata.get(5, b""), SET)
    members |= _members(columns, metadata.get(6, b""), ENUM)
    names = _names(metadata[4])
    described = tuple(
        column._replace(
            name=names[i],
            unsigned=signs.get(i, False),
            collation=collations.get(i),
            members=members.get(i),
        )
        for i, column in enumerate(columns)
    )
    return described, _key(metadata)


def _signs(columns: list[WireColumn], data: bytes) -> dict[int, bool]:
    places = [i for i, column in enumerate(columns) if column.type in _NUMERIC]
    return {
        i: bool(data[n // 8] >> (7 - n % 8) & 1) for n, i in enumerate(places) if n // 8 < len(data)
    }


def _collations(
    columns: list[WireColumn],
    metadata: dict[int, bytes],
    default_field: int,
    list_field: int,
    has_collation: Callable[[int], bool],
) -> dict[int, int]:
    """Either a default and the columns that differ from it, or one collation for each column."""
    places = [i for i, column in enumerate(columns) if has_collation(column.type)]
    if list_field in metadata:
        return dict(zip(places, _numbers(metadata[list_field]), strict=False))
    if default_field not in metadata:
        return {}
    default, *pairs = _numbers(metadata[default_field])
    different = dict(zip(pairs[::2], pairs[1::2], strict=True))
    return {i: different.get(n, default) for n, i in enumerate(places)}


def _numbers(data: bytes) -> list[int]:
    numbers, place = list[int](), 0
    while place < len(data):
        number, place = length(data, place)
        numbers.append(number)
    return numbers


def _names(data: bytes) -> list[str]:
    names, place = list[str](), 0
    while place < len(data):
        size, place = length(data, place)
        names.append(data[place : place + size].decode())
        place += size
    return names


def _members(columns: list[WireColumn], data: bytes, type: int) -> dict[int, tuple[bytes, ...]]:
    places = [i for i, column in enumerate(columns) if column.type == type]
    found, place = dict[int, tuple[bytes, ...]](), 0
    for i in places:
        if place >= len(data):
            break
        count, place = length(data, place)
        members = list[bytes]()
        for _ in range(count):
            size, place = length(data, place)
            members.append(data[place : place + size])
            place += size
        found[i] = tuple(members)
    return found


def _key(metadata: dict[int, bytes]) -> tuple[int, ...] | None:
    if 8 in metadata:
        return tuple(_numbers(metadata[8]))
    if 9 in metadata:
        return tuple(_numbers(metadata[9])[::2])
    return ()
