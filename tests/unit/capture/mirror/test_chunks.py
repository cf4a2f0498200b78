"""The rows of a copy are those of the source, wherever chunks are read in a history.

The copy is modelled here in memory: a target, one chunk at a time, and a tail that is behind the
source. PostgreSQL takes part in `tests/property/test_mirror_histories.py`.
"""

from __future__ import annotations

import random

import pytest

from headwater.capture.mirror.chunks import PendingChunk
from headwater.capture.mirror.runs import (
    Delete,
    Insert,
    Recopy,
    Rekey,
    Run,
    Splitter,
    Truncate,
    Update,
    merge,
    tables_of,
)
from headwater.capture.source import UNCHANGED, Chunk, SourceRow
from tests.support.scripted_source import History

SPLITTER = Splitter((0,), (1, 2, 3))


class CopyModel:
    """What `CopyWriter` does, with a dictionary in place of the target."""

    def __init__(self) -> None:
        self.target: dict[str, SourceRow] = {}
        self.pending: PendingChunk | None = None
        self.needs_copy = False

    def apply(self, run: Run) -> None:
        left = run if self.pending is None else self.pending.absorb(run)
        match left:
            case Insert(rows):
                self.target.update({str(row[0]): row for row in rows})
            case Update(rows):
                for row in rows:
                    if row[0] in self.target:
                        self.target[str(row[0])] = merge(self.target[str(row[0])], row)
            case Delete(keys):
                for key in keys:
                    self.target.pop(key[0], None)
            case Truncate():
                self.target.clear()
            case Recopy():
                self.needs_copy = True
            case Rekey(key, row):
                self._rekey(key[0], row)

    def _rekey(self, key: str, row: SourceRow) -> None:
        old = self.target.get(key)
        if UNCHANGED in row and old is None:
            self.needs_copy = True
            return
        self.target.pop(key, None)
        self.target[str(row[0])] = merge(old or row, row)


@pytest.mark.parametrize("block", range(20))
def test_a_copy_equals_the_source(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        copy(seed)


def copy(seed: int) -> None:
    rng = random.Random(seed)
    history = History(
        seed, 40, tables=("orders",), keys=rng.choice([4, 8, 20]), rows=10, changes_max=4
    )
    chunk_rows = rng.choice([1, 2, 5])
    model, cursor, complete = CopyModel(), -1, False
    tail = visible = rng.randrange(5)
    while not complete and visible <= 40:
        if model.pending is None:
            model.pending = read(rng, history, cursor, chunk_rows, tail)
            visible = int(model.pending.high)
        while tail < visible:
            tail += 1
            apply(model, history, tail)
            if model.needs_copy:
                model, cursor = CopyModel(), -1
        if model.pending is None or rng.random() < 0.2:
            model.pending = None  # a crash: the target and the position stay
            continue
        for key, row in model.pending.rows.items():
            model.target[key[0]] = row
        complete = model.pending.last is None
        cursor = -1 if model.pending.last is None else int(model.pending.last[0])
        model.pending = None
    if complete:
        assert model.target == history.state(tail)["orders"], f"seed {seed}"


def read(rng: random.Random, history: History, after: int, rows: int, tail: int) -> PendingChunk:
    low = min(40, tail + rng.randrange(4))
    moment = min(40, low + rng.randrange(4))
    high = min(40, moment + rng.randrange(3))
    state = history.state(moment)["orders"]
    keys = sorted(int(key) for key in state if int(key) > after)
    last = (str(keys[rows - 1]),) if len(keys) > rows else None
    found = [state[str(key)] for key in keys[:rows]]
    return PendingChunk(Chunk(found, last, str(low), str(high)), (0,))


def apply(model: CopyModel, history: History, at: int) -> None:
    for _, group in tables_of(history.commits[at - 1].changes):
        for run in SPLITTER.runs(group):
            model.apply(run)
