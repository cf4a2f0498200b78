"""Changes of a feed-only table: they are appended to the log with the shape of a table that has no
rows. Images are written by the server, so they are as capture would write them. Values that a
source left out are left out of the image, and a row before an update is only logged if it is
complete. With a predicate, an update by which a row begins to match is an insert, and one by which
it no longer matches is a delete; a row before that is not known is taken to have matched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple, TypeAlias, cast

from headwater.capture.mirror.arrays import array_text
from headwater.capture.mirror.runs import Delete, Insert, Rekey, Run
from headwater.capture.mirror.statements import Statement, quoted
from headwater.capture.mirror.tables import Mirror
from headwater.capture.mirror.writers import FilterRuns, Sender
from headwater.capture.source import UNCHANGED, RowChanges, SourceRow

Carried: TypeAlias = tuple[int, ...] | None
"""The columns of an image; None if there is no image."""


class _Change(NamedTuple):
    op: str
    before: SourceRow | None
    after: SourceRow | None


class FeedWriter:
    """Appends changes of one table to the log."""

    needs_copy = False

    def __init__(self, mirror: Mirror, filter_runs: FilterRuns | None = None) -> None:
        self._mirror = mirror
        self._filter = filter_runs
        self._key = mirror.statements().key
        self._text = cache(self._append_text)

    async def write(self, sender: Sender, changes: Sequence[RowChanges]) -> None:
        found = [change for group in changes for change in self._changes(group)]
        for (op, before, after), run in groupby(found, key=_form):
            rows = list(run)
            values = [
                *_arrays([row.before for row in rows], before),
                *_arrays([row.after for row in rows], after),
            ]
            await sender.send(Statement(self._text(op, before, after), values))

    def _changes(self, group: RowChanges) -> Iterator[_Change]:
        match group.op:
            case "insert":
                yield from (_Change("I", None, row) for row in group.after if self._wants(row))
            case "delete":
                rows = (row for row in group.before if row is not None and self._wants(row))
                yield from (_Change("D", row, None) for row in rows)
            case "truncate":
                yield _Change("T", None, None)
            case "update":
                before = group.before or [None] * len(group.after)
                for old, new in zip(before, group.after, strict=True):
                    yield from self._update(old, new)

    def _update(self, old: SourceRow | None, new: SourceRow) -> Iterator[_Change]:
        """A change of a key is a delete and an insert, as in every table."""
        before = self._key_only(new) if old is None else old
        was_wanted, is_wanted = self._wants(before), self._wants(new)
        if was_wanted and is_wanted and all(before[i] == new[i] for i in self._key):
            yield _Change("U", None if UNCHANGED in before else before, new)
            return
        if was_wanted:
            yield _Change("D", before, None)
        if is_wanted:
            yield _Change("I", None, new)

    def _key_only(self, row: SourceRow) -> SourceRow:
        return tuple([cell if i in self._key else UNCHANGED for i, cell in enumerate(row)])

    def _wants(self, row: SourceRow) -> bool:
        """Whether a row matches the predicate, or does not carry enough to say that it does not."""
        if self._filter is None:
            return True
        run: Run = Insert([row])
        if UNCHANGED in row:
            run = Rekey(tuple([str(row[i]) for i in self._key]), row)
        return any(not isinstance(each, Delete) for each in self._filter(run))

    def _append_text(self, op: str, before: Carried, after: Carried) -> str:
        relation = f"{self._mirror.relid}::oid"
        if op == "T":
            return f"select headwater.append_changes({relation}, 'T', '{{}}', '{{}}')"
        sides = [("b", before), ("a", after)]
        places = [(side, i) for side, carried in sides for i in carried or ()]
        arrays = ", ".join(f"${n}::{self._array_type(i)}[]" for n, (_, i) in enumerate(places, 1))
        names = ", ".join(f"{side}{i}" for side, i in places)
        images = ", ".join(
            f"array_agg({self._image(side, carried)} order by v.n)" for side, carried in sides
        )
        return (
            f"select headwater.append_changes({relation}, '{op}', {images})"
            f" from unnest({arrays}) with ordinality v ({names}, n)"
        )

    def _array_type(self, i: int) -> str:
        column = self._mirror.columns[i]
        return column.type if column.direct else "pg_catalog.text"

    def _image(self, side: str, carried: Carried) -> str:
        if carried is None:
            return "null::json"
        columns = ", ".join(
            f"v.{side}{i}::{self._mirror.columns[i].type} as {quoted(self._mirror.columns[i].name)}"
            for i in carried
        )
        return f"(select row_to_json(x) from (select {columns}) x)"


def _arrays(rows: Sequence[SourceRow | None], carried: Carried) -> list[str | int | None]:
    """One array for each column that all of these rows carry."""
    columns = cast(
        "Sequence[Sequence[str | None]]", list(zip(*rows, strict=True)) if carried else ()
    )
    return [array_text(columns[i]) for i in carried or ()]


def _form(change: _Change) -> tuple[str, Carried, Carried]:
    return change.op, _carried(change.before), _carried(change.after)


def _carried(row: SourceRow | None) -> Carried:
    if row is None:
        return None
    return tuple(i for i, cell in enumerate(row) if cell is not UNCHANGED)
