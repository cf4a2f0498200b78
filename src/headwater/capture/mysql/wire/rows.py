"""Rows of a captured table, from the bytes of a rows event.

`RowReader` is made once for each table map. It gives the values of the mirrored columns, in the
order of the mirror, and passes over the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headwater.capture.mysql.wire.columns import Reader
from headwater.capture.mysql.wire.events import UPDATE_1, UPDATE_2, WITH_EXTRA_DATA, length
from headwater.capture.source import UNCHANGED, Cell, SourceRow


class Images(NamedTuple):
    """The rows of one event: what an insert or update wrote, what an update or delete replaced.
    `complete` is false where the server left columns out (`binlog_row_image` is not FULL)."""

    after: list[SourceRow]
    before: list[SourceRow]
    complete: bool


class RowReader:
    """`readers` are for all columns of the table map. `places` says where each mirrored column of a
    row comes from."""

    def __init__(self, readers: Sequence[Reader], places: Sequence[int]) -> None:
        self._readers = list(readers)
        self._places = tuple(places)
        self._identity = self._places == tuple(range(len(readers)))
        self._null_bytes = (len(readers) + 7) // 8

    def read(self, type: int, body: bytes, place: int) -> Images:
        """From the place after the table id and flags, to the end of the body."""
        if type in WITH_EXTRA_DATA:
            place += int.from_bytes(body[place : place + 2], "little")
        count, place = length(body, place)
        size = (count + 7) // 8
        everything = (1 << count) - 1
        first = int.from_bytes(body[place : place + size], "little") & everything
        place += size
        second = first
        is_update = type in (UPDATE_1, UPDATE_2)
        if is_update:
            second = int.from_bytes(body[place : place + size], "little") & everything
            place += size
        complete = first == everything == second
        if complete and is_update:
            return self._updates(body, place)
        if complete:
            return Images(self._rows(body, place), [], True)
        return self._partial(body, place, (first, second) if is_update else (first,))

    def _rows(self, body: bytes, place: int) -> list[SourceRow]:
        rows, end = list[SourceRow](), len(body)
        row = self._row
        while place < end:
            values, place = row(body, place)
            rows.append(values)
        return rows

    def _updates(self, body: bytes, place: int) -> Images:
        after, before, end = list[SourceRow](), list[SourceRow](), len(body)
        row = self._row
        while place < end:
            values, place = row(body, place)
            before.append(values)
            values, place = row(body, place)
            after.append(values)
        return Images(after, before, True)

    def _row(self, body: bytes, place: int) -> tuple[SourceRow, int]:
        nulls = int.from_bytes(body[place : place + self._null_bytes], "little")
        place += self._null_bytes
        values = list[Cell]()
        append = values.append
        if nulls:
            for read in self._readers:
                if nulls & 1:
                    append(None)
                else:
                    value, place = read(body, place)
                    append(value)
                nulls >>= 1
        else:
            for read in self._readers:
                value, place = read(body, place)
                append(value)
        if self._identity:
            return tuple(values), place
        return tuple([values[i] for i in self._places]), place

    def _partial(self, body: bytes, place: int, masks: tuple[int, ...]) -> Images:
        images: list[list[SourceRow]] = [[] for _ in masks]
        while place < len(body):
            for mask, image in zip(masks, images, strict=True):
                values, place = self._partial_row(body, place, mask)
                image.append(values)
        if len(images) == 2:
            return Images(images[1], images[0], False)
        return Images(images[0], [], False)

    def _partial_row(self, body: bytes, place: int, mask: int) -> tuple[SourceRow, int]:
        size = (mask.bit_count() + 7) // 8
        nulls = int.from_bytes(body[place : place + size], "little")
        place += size
        values: list[Cell] = [UNCHANGED] * len(self._readers)
        for i, read in enumerate(self._readers):
            if not mask >> i & 1:
                continue
            if nulls & 1:
                values[i] = None
            else:
                values[i], place = read(body, place)
            nulls >>= 1
        return tuple([values[i] for i in self._places]), place
