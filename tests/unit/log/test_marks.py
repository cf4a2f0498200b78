"""Marks against a log in memory: random transactions, readers, copies and returns to them. Which
rows a position had when it was given out, and which it has now, decides."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest

from headwater.limits import MARK_COVERED_MAX, MARK_LATE_MAX, MARK_ROWS
from headwater.log import marks
from headwater.log.marks import Stamp, agrees, covered_parameters, digest, mark_of_read, marked
from headwater.model import Position, PositionMark
from tests.support.generators.sizes import size


class Log:
    """Committed rows, and those of transactions that are running."""

    def __init__(self, mark_rows: int) -> None:
        self.mark_rows = mark_rows
        self.rows: set[Stamp] = set()
        self.running: dict[int, list[Stamp]] = {}
        self.next_xid, self.next_seq, self.ended = 1, 1, 0
        self.opened = self.snapshot()

    def begin(self) -> None:
        self.running[self.next_xid] = []
        self.next_xid += 1

    def write(self, xid: int, at: int) -> None:
        self.running[xid].append(Stamp(xid, self.next_seq, at))
        self.next_seq += 1

    def end(self, xid: int, *, commits: bool) -> None:
        rows = self.running.pop(xid)
        self.rows |= set(rows if commits else ())
        self.ended = max(self.ended, xid)

    def crash(self) -> None:
        """What was running is gone, and ids that left no trace are given out again."""
        self.running.clear()
        self.next_xid = self.ended + 1
        self.opened = self.snapshot()

    def snapshot(self, mark: PositionMark | None = None) -> Position:
        xmax = self.ended + 1
        xip = tuple(sorted(xid for xid in self.running if xid < xmax))
        return Position("a", min(xip, default=xmax), xmax, xip, mark)

    def within(self, position: Position) -> list[Stamp]:
        return sorted(row for row in self.rows if position.contains(row.xid))

    def now(self) -> Position:
        position = self.snapshot()
        return marked(position, [(False, *row) for row in self.within(position)])

    def read(self, since: Position) -> Position:
        position = self.snapshot()
        new = [row for row in self.within(position) if not since.contains(row.xid)]
        if new and not since.covers(self.opened):
            return self.now()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(marks, "MARK_ROWS", self.mark_rows)
            return self.snapshot(mark_of_read(since, position, new))

    def is_behind(self, position: Position) -> bool:
        return not self.snapshot().covers(position)

    def accepts(self, position: Position) -> bool:
        """As `read.check` does, with the rows that `marks.COVERED` asks for."""
        if self.is_behind(position):
            return False
        mark, rows = position.mark, self.within(position)
        assert mark is not None
        found = [
            row for row in rows if row[:2] >= (mark.xid, mark.seq) and row.xid not in mark.late
        ]
        found += (max(own) for xid in mark.late if (own := [row for row in rows if row.xid == xid]))
        answer = list(zip(*found, strict=True)) if found else [None, None, None]
        return agrees(position, (*answer, None, None))


HISTORIES = size("marks", 25, large=5_000)


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_a_position_is_accepted_where_its_history_exists(seed: int) -> None:
    mark_rows = (MARK_ROWS, 2, 1)[seed % 3]  # with few, most reads bring more than a mark covers
    chance, log, at = random.Random(seed), Log(mark_rows), 10**15
    copies = [deepcopy(log)]
    readers = [log.now()] * 3
    given: list[tuple[Position, list[Stamp]]] = []
    refused = 0
    for _ in range(400):
        at += chance.randint(1, 1000)
        step = chance.choices(["write", "end", "read", "copy", "return"], [12, 6, 6, 1, 1])[0]
        if step == "write":
            if len(log.running) < chance.randint(1, 5):
                log.begin()
            for _ in range(chance.randint(0, 2)):
                log.write(chance.choice(list(log.running)), at)
        elif step == "end" and log.running:
            log.end(chance.choice(list(log.running)), commits=chance.random() < 0.8)
        elif step == "read":
            number = chance.randrange(len(readers))
            readers[number] = log.read(readers[number])
            position = chance.choice([readers[number], readers[number], log.now()])
            given.append((Position.parse(str(position)), log.within(position)))
        elif step == "copy":
            copies.append(deepcopy(log))
        elif step == "return":
            log = deepcopy(chance.choice(copies[-4:]))
            log.crash()
            readers = [each if log.accepts(each) else log.now() for each in readers]
        for position, rows in chance.sample(given, min(len(given), 5)):
            holds = log.within(position) == rows and not log.is_behind(position)
            refused += not holds and not log.is_behind(position)
            assert log.accepts(position) == holds, (position, rows)
    assert refused


def test_a_mark_of_fewer_rows_than_a_read_knows_its_older_transactions() -> None:
    """2 ends after 3; the copy has only 3, which is all that the newest row shows."""
    log = Log(mark_rows=1)
    since = log.now()
    for xid in (1, 2, 3):
        log.begin()
        log.write(xid, 7)
    log.end(1, commits=True)
    log.end(3, commits=True)
    copy = deepcopy(log)
    log.end(2, commits=True)
    position = log.read(since)
    assert position.mark is not None
    assert (position.mark.xid, position.mark.late) == (3, (1, 2))
    copy.crash()
    assert log.accepts(position)
    assert not copy.is_behind(position)
    assert not copy.accepts(position)


def test_transactions_that_are_late_are_bounded() -> None:
    since = Position("a", 1, 2001, tuple(range(1, 2001)))
    rows = [Stamp(xid, xid, 7) for xid in range(1, 2001)]
    mark = mark_of_read(since, Position("a", 2001, 2001), rows)
    assert mark is not None
    assert mark.late == tuple(range(2001 - MARK_LATE_MAX, 2001))
    assert mark.rows == MARK_LATE_MAX
    text = str(Position("a", 2001, 2001, (), mark))
    assert str(Position.parse(text)) == text
    with pytest.raises(ValueError, match="is not a position"):
        Position.parse(f"{text},7")


def test_a_mark_whose_rows_are_forgotten_is_accepted() -> None:
    """Only the newest trimmed rows are remembered; (8, 1) is the oldest of them."""
    mark = PositionMark(5, 1, 3, digest([Stamp(5, 1, 7), Stamp(8, 2, 7), Stamp(9, 3, 7)]))
    position = Position("a", 20, 20, (), mark)
    assert agrees(position, ([8, 9], [2, 3], [7, 7], 8, 1))
    assert not agrees(position, ([8, 9], [2, 3], [7, 7], None, None))
    assert not agrees(position, ([6, 8, 9], [2, 3, 4], [7, 7, 7], 8, 1))


def test_the_rows_of_a_mark_are_bounded() -> None:
    """However much a read brings, and however often a mark is extended."""
    since, seq = Position("a", 5, 5), 0
    for round in range(5):
        # The first read brings new transactions, later ones only those that were running.
        xmax = 5 + 300 if round == 0 else since.xmax
        running = tuple(range(6 + round, 11))
        position = Position("a", min(running), xmax, running)
        new = [xid for xid in range(5, xmax) if position.contains(xid) and not since.contains(xid)]
        rows = [Stamp(xid, seq := seq + 1, 7) for xid in new for _ in range(2_000 // len(new))]
        mark = mark_of_read(since, position, rows)
        assert mark is not None
        assert 0 < mark.rows <= MARK_COVERED_MAX
        assert len(str(mark)) < 1_000
        since = Position("a", position.xmin, xmax, running, mark)


def test_a_mark_of_a_client_asks_for_no_more_rows() -> None:
    position = Position.parse("a-900:900:~0.0.50000.000000000000")
    assert covered_parameters(position)["rows"] <= MARK_COVERED_MAX
