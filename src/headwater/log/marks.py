"""Marks: by them a position is recognised as of a history that no longer exists.

A server whose files are replaced by an earlier copy gives the same transaction ids and numbers out
again, for other changes. Nothing else tells the two histories apart: cluster and timeline are the
same. But each row of the log has the time when it was written, which no history repeats. So a
position carries a digest of the rows that it was the first to contain: those of the last read that
brought any. When it is used, the log is asked for the same rows.

Why that is enough. Call the position before that read Q. A log that has one of the rows has
everything that ended before it, and so everything in Q, as it was. All that ended between Q and
the position has an id from Q's `xmax` on, or was running at Q: of exactly these the rows are asked
for, also of those that had none.

Of a read of many rows the newest `limits.MARK_ROWS` are enough, with the last row of each older
transaction in it: no id below one that has committed is given out again. At most
`limits.MARK_EARLIER_MAX` of these are listed. A position that was not reached by reading on has a
mark of the newest rows alone. Rows that were trimmed stay known by number and time in
`headwater.trimmed`. Pure, but for the text of two statements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any, NamedTuple

from headwater.errors import ResyncRequired
from headwater.limits import MARK_COVERED_MAX, MARK_EARLIER_MAX, MARK_LATE_MAX, MARK_ROWS
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


def read_on(since: Position, position: Position, stamps: Iterable[Stamp]) -> Mark | None:
    """The mark of a position that was reached by a read from `since`, which brought these rows.

    >>> since, position = Position("a", 5, 9, (5, 7)), Position("a", 14, 14)
    >>> mark = read_on(since, position, [Stamp(5, 1, 70), Stamp(5, 2, 70), Stamp(9, 3, 71)])
    >>> mark.xid, mark.seq, mark.rows, mark.late
    (9, 0, 2, (5, 7))
    >>> mark.digest == digest([Stamp(5, 2, 70), Stamp(9, 3, 71)])
    True
    """
    found = sorted(stamps)
    if since.mark is not None and not (found and found[-1].xid >= since.xmax):
        # Nothing new but what was running at `since`: the rows of its mark remain the newest.
        ended = [xid for xid in since.xip if xid < since.mark.xid and position.contains(xid)]
        if not found:
            ended = ended[: MARK_LATE_MAX - len(since.mark.late)]
        mark = _extended(since.mark, found, ended)
        if len(mark.late) <= MARK_LATE_MAX and mark.rows <= MARK_COVERED_MAX:
            return mark
    if not found:
        return None
    newest = [stamp for stamp in found if stamp.xid >= since.xmax]
    if len(newest) <= MARK_ROWS:
        return _extended(Mark(since.xmax, 0, 0, 0), found, _ended(position, since))
    first = newest[-MARK_ROWS]
    earlier = {stamp.xid: stamp for stamp in newest if stamp.xid < first.xid}
    listed = sorted(earlier, key=lambda xid: earlier[xid].seq)[-MARK_EARLIER_MAX:]
    late = [*_ended(position, since), *sorted(listed)][-MARK_LATE_MAX:]
    return _extended(Mark(first.xid, first.seq, 0, 0), found, late)


def _extended(mark: Mark, found: Iterable[Stamp], late: Sequence[int]) -> Mark:
    """The mark with those of the rows that are from its begin on, and with transactions from
    before, each with its last row."""
    found = list(found)
    last = {stamp.xid: stamp for stamp in found}
    covered = [stamp for stamp in found if stamp >= (mark.xid, mark.seq)]
    covered += (last[xid] for xid in late if xid in last)
    return Mark(
        mark.xid,
        mark.seq,
        mark.rows + len(covered),
        (mark.digest + digest(covered)) % _DIGESTS,
        tuple(sorted([*mark.late, *late])),
    )


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
       where xid < %(xmax)s::xid8
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
             and pg_visible_in_snapshot(xid, %(snapshot)s::pg_snapshot)
           limit %(rows)s + 1)) rows) stamps (xid, seq, at)) covered
    left join (
      select xid::text::bigint, seq from headwater.trimmed
      where installation = (select id from headwater.installation)
      order by trimmed.xid desc, seq desc offset {MARK_ROWS - 1} limit 1) oldest on true"""
"""The rows that a position's mark covers; and the oldest row that is remembered of those trimmed,
once older ones are forgotten."""


def to_mark(position: Position, since: Position | None = None) -> dict[str, Any]:
    """The values for `NEWEST`. `since` is an earlier position."""
    return _values(position, _ended(position, since))


def marked(
    position: Position,
    rows: Iterable[tuple[bool, int, int, int]],
    since: Position | None = None,
) -> Position:
    """The position with a mark, from the answer to `NEWEST`."""
    newest, last = list[Stamp](), dict[int, Stamp]()
    for is_late, *fields in rows:
        stamp = Stamp(*fields)
        if is_late:
            last[stamp.xid] = stamp
        else:
            newest.append(stamp)
    # Fewer than were asked for are all there are, and a mark of all is the safest.
    first = min(newest) if len(newest) == MARK_ROWS else Stamp(0, 0, 0)
    late = [xid for xid in _ended(position, since) if xid < first.xid]
    covered = [*newest, *(last[xid] for xid in late if xid in last)]
    mark = Mark(first.xid, first.seq, len(covered), digest(covered), tuple(late))
    return Position(position.log, position.xmin, position.xmax, position.xip, mark)


def _ended(position: Position, since: Position | None) -> list[int]:
    """What was running at the earlier position, and is not any more."""
    found = () if since is None else since.xip
    return [xid for xid in found if position.contains(xid)][-MARK_LATE_MAX:]


def to_check(position: Position) -> dict[str, Any]:
    """The values for `COVERED`."""
    assert position.mark is not None
    mark = position.mark
    rows = min(mark.rows, MARK_COVERED_MAX)
    return _values(position, mark.late) | {"xid": str(mark.xid), "seq": mark.seq, "rows": rows}


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


def _values(position: Position, late: Sequence[int]) -> dict[str, Any]:
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
