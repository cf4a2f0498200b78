"""Marks against a log in memory: random transactions, readers, copies and returns to them. Which
rows a position had when it was given out, and which it has now, decides."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest

from headwater.limits import MARK_LATE_MAX
from headwater.log.marks import Stamp, agrees, digest, marked, read_on
from headwater.model import Mark, Position
from tests.generated import size


class Log:
    """Committed rows, and those of transactions that are running."""

    def __init__(self) -> None:
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

    def snapshot(self, mark: Mark | None = None) -> Position:
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
        return self.snapshot(read_on(since, position, new))

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
    chance, log, at = random.Random(seed), Log(), 10**15
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


def test_transactions_that_are_late_are_bounded() -> None:
    since = Position("a", 1, 2001, tuple(range(1, 2001)))
    rows = [Stamp(xid, xid, 7) for xid in range(1, 2001)]
    mark = read_on(since, Position("a", 2001, 2001), rows)
    assert mark is not None
    assert mark.late == tuple(range(2001 - MARK_LATE_MAX, 2001))
    text = str(Position("a", 2001, 2001, (), mark))
    assert str(Position.parse(text)) == text
    with pytest.raises(ValueError, match="is not a position"):
        Position.parse(f"{text},7")


def test_a_mark_whose_rows_are_forgotten_is_accepted() -> None:
    """Only the newest trimmed rows are remembered; (8, 1) is the oldest of them."""
    mark = Mark(5, 1, 3, digest([Stamp(5, 1, 7), Stamp(8, 2, 7), Stamp(9, 3, 7)]))
    position = Position("a", 20, 20, (), mark)
    assert agrees(position, ([8, 9], [2, 3], [7, 7], 8, 1))
    assert not agrees(position, ([8, 9], [2, 3], [7, 7], None, None))
    assert not agrees(position, ([6, 8, 9], [2, 3, 4], [7, 7, 7], 8, 1))
