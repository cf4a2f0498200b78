"""What a user may see of a row's past: what a change feed would show. Pure.

Versions that the user's filter does not match are hidden; a row that begins to match is an insert,
one that ceases to match a delete. Where the right ends some time ago, the version that was valid
then is shown as a row that was there before: a feed shows it as the image before a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from headwater.errors import Forbidden, InvalidQuery
from headwater.live.filters.check import check
from headwater.live.filters.compile import compile_filter
from headwater.live.filters.filter import EVERYTHING, Filter
from headwater.live.needs import Undecided
from headwater.log.images import ImageDecoder
from headwater.model import Origin, Row, Table
from headwater.protocol import Wire


class PastVersion(msgspec.Struct, frozen=True, omit_defaults=True):
    """A version of a row; its fields are named as those of a change in a feed. `valid_to` is None
    for the version that is valid now, and for one without a row that the user may see: when such a
    row changes again is hidden too."""

    seq: int
    op: str
    valid_from: datetime | None
    valid_to: datetime | None
    before: Row | None = None
    after: Row | None = None
    changed: tuple[str, ...] | None = None
    user_id: str | None = None
    function_name: str | None = None
    trace_id: str | None = None
    origin: Origin | None = None


class RowGuard:
    """Decodes the images of one table in any of its shapes, which `table_of` returns, and hides
    those that the filter does not match. Forbidden where memory cannot decide."""

    def __init__(self, table_of: Callable[[int], Table], where: Filter) -> None:
        self._table_of = table_of
        self._where = where

    def seen(self, image: str | None, shape: int) -> Row | None:
        """The row in the shape of its image; None if there is none to see."""
        if image is None:
            return None
        row = self.decoded(image, shape)
        return row if self.matches(row, self._table_of(shape)) else None

    def decoded(self, image: str, shape: int) -> Row:
        return ImageDecoder(self._table_of(shape))(image)

    def matches(self, row: Row, table: Table) -> bool:
        if self._where == EVERYTHING:
            return True
        try:
            return bool(compile_filter(check(self._where, table), table)(row))
        except (Undecided, InvalidQuery) as error:
            raise Forbidden(
                f"it cannot be decided which rows of {table.label} you might see then",
                hint="Let the authorize hook filter by columns that the table always had, and whose"
                " equality memory can decide.",
            ) from error

    def wire(self, row: Row | None, shape: int) -> Row | None:
        """The row as it is sent."""
        return None if row is None else dict(Wire(self._table_of(shape)).row(row))


def seen_versions(
    versions: Sequence[Mapping[str, Any]], guard: RowGuard, since: datetime | None
) -> Iterator[PastVersion]:
    """The versions that a user may see, in the order given: the newest first. `since` is how far
    back the right goes."""
    for version in versions:
        begun = version["valid_from"]
        is_early = since is not None and (begun is None or begun < since)
        if is_early and version["valid_to"] is not None and version["valid_to"] < since:
            return
        shape = version["shape"]
        before = None if is_early else guard.seen(version["before"], shape)
        after = guard.seen(version["after"], shape)
        found = _seen(version, before, after, guard, is_early=is_early)
        if found is not None:
            yield found
        if is_early:
            return


def _seen(
    version: Mapping[str, Any],
    before: Row | None,
    after: Row | None,
    guard: RowGuard,
    *,
    is_early: bool,
) -> PastVersion | None:
    # A truncate has no image: whether the user could see the row is not known from it.
    if before is None and after is None:
        return None
    shape, ends = version["shape"], None if after is None else version["valid_to"]
    if is_early or version["op"] == "before":
        return PastVersion(0, "before", None, ends, after=guard.wire(after, shape))
    op = version["op"] if None not in (before, after) else "insert" if before is None else "delete"
    changed = version["changed"] if op == "update" else None
    source = version["source"]
    return PastVersion(
        version["seq"],
        op,
        version["valid_from"],
        ends,
        guard.wire(before, shape),
        guard.wire(after, shape),
        None if changed is None else tuple(changed),
        version["user_id"],
        version["function_name"],
        version["trace_id"],
        None
        if source is None
        else Origin(source, version["source_position"], version["source_committed_at"]),
    )
