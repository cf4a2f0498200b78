"""Marks: by them a position is recognised as of a history that no longer exists.

A server whose files are replaced by an older copy of themselves gives the same transaction ids and
numbers out again, for other changes. Nothing else tells the two histories apart: cluster and
timeline are the same. But each row of the log has the time when it was written, which no history
repeats. So a position carries a digest of the rows that it was the first to contain: those of the
last read that brought any. When it is used, the log is asked for the same rows.

Why that is enough. Everything else in the position was visible before these rows were, so a copy
that has them has everything. And what is written after such a copy has higher transaction ids than
all in it: were one of them in the position, it would be among the rows that are asked for.

A position that was not reached by reading on has a mark of the newest `limits.MARK_ROWS` rows. Rows
that were trimmed stay known by number and time in `headwater.trimmed`. Pure, but for the text of
two statements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any, NamedTuple

from headwater.errors import ResyncRequired
from headwater.limits import LOG_PAGE_CHANGES, MARK_ROWS
from headwater.model import Mark, Position

_DIGESTS = 1 << 48
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class Stamp(NamedTuple):
    """What tells a row of the log from any other; `at` in microseconds."""

    xid: int
    seq: int
    at: int

    @classmethod
    def of(cls, xid: int, seq: int, at: datetime) -> Stamp:
        return cls(xid, seq, (at - _EPOCH) // _MICROSECOND)


def digest(stamps: Iterable[Stamp]) -> int:
    """Of a set of rows: the digest of two sets without a common row is the sum of theirs."""
    return sum(map(_digest, stamps)) % _DIGESTS


def _digest(stamp: Stamp) -> int:
    return int.from_bytes(blake2b(b"%d.%d.%d" % stamp, digest_size=6).digest())


def read_on(since: Position, stamps: Iterable[Stamp]) -> Mark | None:
    """The mark of a position that is `since` and these rows, as one read brought them.

    >>> since = Position("a", 5, 9, (5,))
    >>> read_on(since, []) is None
    True
    >>> mark = read_on(since, [Stamp(5, 1, 70), Stamp(9, 2, 70), Stamp(9, 3, 70), Stamp(12, 4, 71)])
    >>> mark.xid, mark.seq, mark.late
    (9, 3, (5,))
    >>> mark.digest == digest([Stamp(5, 1, 70), Stamp(9, 3, 70), Stamp(12, 4, 71)])
    True
    """
    found = sorted(stamps)
    if not found:
        return since.mark
    last = {stamp.xid: stamp for stamp in found}
    late = {xid: stamp for xid, stamp in last.items() if xid < since.xmax}
    if len(late) == len(last):
        # Nothing but what was running at `since`; the rows of its mark remain the newest.
        before = since.mark or Mark(since.xmax, 0, 0, 0)
        total = (before.digest + digest(late.values())) % _DIGESTS
        xids = tuple(sorted({*before.late, *late}))
        return Mark(before.xid, before.seq, before.rows + len(late), total, xids)
    first = last[next(stamp.xid for stamp in found if stamp.xid not in late)]
    covered = [stamp for stamp in found if stamp >= first and stamp.xid not in late]
    return _mark(first, covered, late.values())


def _mark(first: Stamp, covered: Collection[Stamp], late: Collection[Stamp]) -> Mark:
    rows, xids = (*covered, *late), tuple(sorted(stamp.xid for stamp in late))
    return Mark(first.xid, first.seq, len(rows), digest(rows), xids)


# -------------------------------------------------------------------- what the log is asked

_ROWS = """(
    select xid, seq, at from headwater.log
    union all
    select xid, seq, at from headwater.trimmed
    where installation = (select id from headwater.installation)) r"""

_LATE = f"""
    unnest(%(late)s::xid8[]) late (id) cross join lateral (
      select xid, seq, at from {_ROWS} where xid = late.id order by seq desc limit 1) last"""

_STAMP = "xid::text::bigint, seq, (extract(epoch from at) * 1000000)::bigint"

NEWEST = f"""
    select is_late, {_STAMP} from (
      select true as is_late, last.* from {_LATE}
      union all
      (select false, xid, seq, at from {_ROWS}
       where xid < %(xmax)s::xid8 and xid <> all(%(late)s::xid8[])
         and pg_visible_in_snapshot(xid, %(snapshot)s::pg_snapshot)
       order by xid desc, seq desc limit {MARK_ROWS})) newest"""
"""The newest rows of a position, and the last of each transaction that is late in it."""

COVERED = f"""
    select covered.*, oldest.* from (
      select array_agg(xid), array_agg(seq), array_agg(at) from (
        select {_STAMP} from (
          select last.* from {_LATE}
          union all
          (select xid, seq, at from {_ROWS}
           where (xid, seq) >= (%(xid)s::xid8, %(seq)s::bigint) and xid < %(xmax)s::xid8
             and xid <> all(%(late)s::xid8[])
             and pg_visible_in_snapshot(xid, %(snapshot)s::pg_snapshot)
           limit {LOG_PAGE_CHANGES + 1})) rows) stamps (xid, seq, at)) covered
    left join (
      select xid::text::bigint, seq from headwater.trimmed
      where installation = (select id from headwater.installation)
      order by trimmed.xid desc, seq desc offset {MARK_ROWS - 1} limit 1) oldest on true"""
"""The rows that a position's mark covers; and the oldest row that is remembered of those trimmed,
once older ones are forgotten."""


def to_mark(position: Position, since: Position | None = None) -> dict[str, Any]:
    """The values for `NEWEST`. `since` is an earlier position: what was running then is late."""
    late = () if since is None else tuple(xid for xid in since.xip if position.contains(xid))
    return _values(position, late)


def marked(position: Position, rows: Sequence[tuple[bool, int, int, int]]) -> Position:
    """The position with a mark, from the answer to `NEWEST`."""
    late = [Stamp(*stamp) for is_late, *stamp in rows if is_late]
    newest = [Stamp(*stamp) for is_late, *stamp in rows if not is_late]
    # Fewer than were asked for are all there are, and a mark of all is the safest.
    first = min(newest) if len(newest) == MARK_ROWS else Stamp(0, 0, 0)
    mark = _mark(first, newest, late)
    return Position(position.log, position.xmin, position.xmax, position.xip, mark)


def to_check(position: Position) -> dict[str, Any]:
    """The values for `COVERED`."""
    assert position.mark is not None
    mark = position.mark
    return _values(position, mark.late) | {"xid": str(mark.xid), "seq": mark.seq}


def agrees(position: Position, answer: tuple[Any, ...]) -> bool:
    """Whether the log has the rows that the position was the first to contain, and no others."""
    assert position.mark is not None
    mark, (xids, seqs, times, *oldest) = position.mark, answer
    found = list(map(Stamp, xids or (), seqs or (), times or ()))
    if digest(found) == mark.digest:
        return True
    # Nothing can be said where rows are missing that may be too old to be remembered.
    if oldest[0] is None or len(found) >= mark.rows:
        return False
    return (mark.xid, mark.seq) < tuple(oldest) or any(xid < oldest[0] for xid in mark.late)


def _values(position: Position, late: tuple[int, ...]) -> dict[str, Any]:
    return {
        "late": list(map(str, late)),
        "xmax": str(position.xmax),
        "snapshot": position.snapshot,
    }


def replaced(position: Position, way_out: str) -> ResyncRequired:
    """The error for a position whose history was replaced."""
    return ResyncRequired(
        f"position {position} is of a history that this database no longer has",
        hint="The database's files were replaced by an earlier copy, for example a volume "
        f"snapshot, or the server lost what it had not yet written to disk. {way_out}",
    )
