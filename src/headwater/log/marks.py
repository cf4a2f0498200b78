"""Marks: they show that a position belongs to a history that no longer exists.

A server whose files are replaced by an earlier copy uses the same transaction ids and numbers a
second time, for other changes. The cluster and its timeline are the same in both histories. But
each row of the log has the time when it was written, which differs. So a position carries a digest
of the rows that it was the first to contain: those of the last read that found any. When a client
uses the position, the log is queried for the same rows.

Why that is enough. Call the position before that read Q. A log that has one of the rows has
everything that ended before it, and so everything in Q, unchanged. Every transaction that ended
between Q and the position has an id from Q's `xmax` on, or was running at Q. The query covers
exactly these transactions, also those without rows.

For a read of many rows, the newest `limits.MARK_ROWS` are enough, with the last row of each older
transaction in it: the server never reuses an id below one that has committed. At most
`_MARK_EARLIER_MAX` of these are listed. A position that was not reached by a read has a mark of the
newest rows alone. The numbers and times of trimmed rows stay in `headwater.trimmed`. Pure: two
statements are given as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any, NamedTuple

from headwater.limits import MARK_COVERED_MAX, MARK_LATE_MAX, MARK_ROWS
from headwater.log.between import UNTIL, until_parameters
from headwater.model import Position, PositionMark

_MARK_EARLIER_MAX = 32
"""Transactions of a read that are older than its newest `MARK_ROWS` rows, and that its mark lists:
those that wrote last."""


_DIGESTS = 1 << 48
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class Stamp(NamedTuple):
    """Identifies a row of the log in every history; `at` is in microseconds."""

    xid: int
    seq: int
    at: int

    @classmethod
    def of(cls, xid: int, seq: int, at: datetime) -> Stamp:
        return cls(xid, seq, (at - _EPOCH) // _MICROSECOND)


def digest(stamps: Iterable[Stamp]) -> int:
    """The digest of a set of rows. For two sets without a common row, add their digests."""
    return sum(map(_digest, stamps)) % _DIGESTS


def _digest(stamp: Stamp) -> int:
    return int.from_bytes(blake2b(b"%d.%d.%d" % stamp, digest_size=6).digest())


def mark_of_read(
    since: Position, position: Position, stamps: Iterable[Stamp]
) -> PositionMark | None:
    """The mark of a position that was reached by a read from `since`, which found these rows.

    >>> since, position = Position("a", 5, 9, (5, 7)), Position("a", 14, 14)
    >>> mark = mark_of_read(since, position, [Stamp(5, 1, 70), Stamp(5, 2, 70), Stamp(9, 3, 71)])
    >>> mark.xid, mark.seq, mark.rows, mark.late
    (9, 0, 2, (5, 7))
    >>> mark.digest == digest([Stamp(5, 2, 70), Stamp(9, 3, 71)])
    True
    """
    found = sorted(stamps)
    if since.mark is not None and not (found and found[-1].xid >= since.xmax):
        # Only transactions that were running at `since`: the rows of its mark are still the newest.
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
        return _extended(PositionMark(since.xmax, 0, 0, 0), found, _ended(position, since))
    first = newest[-MARK_ROWS]
    earlier = {stamp.xid: stamp for stamp in newest if stamp.xid < first.xid}
    listed = sorted(earlier, key=lambda xid: earlier[xid].seq)[-_MARK_EARLIER_MAX:]
    late = [*_ended(position, since), *sorted(listed)][-MARK_LATE_MAX:]
    return _extended(PositionMark(first.xid, first.seq, 0, 0), found, late)


def _extended(mark: PositionMark, found: Iterable[Stamp], late: Sequence[int]) -> PositionMark:
    """The mark with the rows from its begin on, and with the last row of each transaction in
    `late`, which began before."""
    found = list(found)
    last = {stamp.xid: stamp for stamp in found}
    covered = [stamp for stamp in found if stamp >= (mark.xid, mark.seq)]
    covered += (last[xid] for xid in late if xid in last)
    return PositionMark(
        mark.xid,
        mark.seq,
        mark.rows + len(covered),
        (mark.digest + digest(covered)) % _DIGESTS,
        tuple(sorted([*mark.late, *late])),
    )


# -------------------------------------------------------------------- statements

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
       where {UNTIL}
       order by xid desc, seq desc limit {MARK_ROWS})) newest"""
"""The newest rows of a position, and the last row of each transaction in `late`."""

COVERED = f"""
    select covered.*, oldest.* from (
      select array_agg(xid), array_agg(seq), array_agg(at) from (
        select {_STAMP} from (
          select last.* from {_LATE}
          union all
          (select xid, seq, at from {_ROWS}
           where (xid, seq) >= (%(xid)s::xid8, %(seq)s::bigint) and {UNTIL}
           limit %(rows)s + 1)) rows) stamps (xid, seq, at)) covered
    left join (
      select xid::text::bigint, seq from headwater.trimmed
      where installation = (select id from headwater.installation)
      order by trimmed.xid desc, seq desc offset {MARK_ROWS - 1} limit 1) oldest on true"""
"""The rows that a position's mark covers. Also the oldest row in `headwater.trimmed`, if rows were
removed from there."""


def newest_parameters(position: Position, since: Position | None = None) -> dict[str, Any]:
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
    # Fewer rows than the limit are all rows, and a mark of all is the safest.
    first = min(newest) if len(newest) == MARK_ROWS else Stamp(0, 0, 0)
    late = [xid for xid in _ended(position, since) if xid < first.xid]
    covered = [*newest, *(last[xid] for xid in late if xid in last)]
    mark = PositionMark(first.xid, first.seq, len(covered), digest(covered), tuple(late))
    return Position(position.log, position.xmin, position.xmax, position.xip, mark)


def _ended(position: Position, since: Position | None) -> list[int]:
    """The transactions that were running at the earlier position and have ended."""
    found = () if since is None else since.xip
    return [xid for xid in found if position.contains(xid)][-MARK_LATE_MAX:]


def covered_parameters(position: Position) -> dict[str, Any]:
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
    # Rows that are missing may have been removed from `headwater.trimmed`: then accept.
    if oldest[0] is None or len(found) >= mark.rows:
        return False
    return (mark.xid, mark.seq) < tuple(oldest) or any(xid < oldest[0] for xid in mark.late)


def _values(position: Position, late: Sequence[int]) -> dict[str, Any]:
    return until_parameters(position) | {"late": list(map(str, late))}
