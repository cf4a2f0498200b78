"""What a change of a source becomes, for each state that its table can be in.

| table | writer |
|---|---|
| live | `ExactWriter`: a row that is not as expected ends the transaction |
| being copied | `CopyWriter`: changes what is there, in the chunk at hand or in the copy's target |
| live, with rows left out here | `TolerantWriter`: changes what is there |
| feed only | `FeedWriter` in `feeds.py`: appends to the log |
| dropped or removed | none |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, cast

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
)
from headwater.capture.mirror.statements import Statement, TableStatements
from headwater.capture.mirror.tables import Mirror
from headwater.capture.source import UNCHANGED, RowChanges, SourceRow

FilterRuns: TypeAlias = Callable[[Run], Sequence[Run]]
"""Leaves out rows that a definition's predicate does not match (`running/filters.py`)."""


class Sender(Protocol):
    """Where statements go. `send` does not wait for the answer, `find` does."""

    async def send(self, statement: Statement) -> None: ...
    async def find(self, statement: Statement) -> tuple[Any, ...] | None: ...


class TableWriter(Protocol):
    needs_copy: bool
    """The table can only be continued with a new copy, from its beginning."""

    async def write(self, sender: Sender, changes: Sequence[RowChanges]) -> None:
        """Changes of this table with the same operation."""
        ...


class ExactWriter:
    """Applies changes to a table that equals its source."""

    needs_copy = False

    def __init__(self, mirror: Mirror) -> None:
        self._statements = mirror.statements()
        self._splitter = Splitter(self._statements.key, self._statements.others)

    async def write(self, sender: Sender, changes: Sequence[RowChanges]) -> None:
        for run in self._splitter.runs(changes):
            statement = self._statement(run)
            if statement is not None:
                await sender.send(statement)

    def _statement(self, run: Run) -> Statement | None:
        table = self._statements
        match run:
            case Insert(rows):
                return table.insert(_values(rows))
            case Update(rows, columns):
                return table.update(_values(rows), columns, exact=True)
            case Rekey(key, row):
                carried = tuple(i for i, cell in enumerate(row) if cell is not UNCHANGED)
                return table.rekey(key, _values([row])[0], carried)
            case Delete(keys):
                return table.delete(keys, exact=True)
            case Truncate():
                return table.truncate()
            case Recopy():
                raise AssertionError("only filters copy a table again")


class TolerantWriter:
    """Applies changes to rows of which some may not be there."""

    def __init__(
        self, mirror: Mirror, filter_runs: FilterRuns | None = None, table: str | None = None
    ) -> None:
        self.needs_copy = False
        self._statements = mirror.statements(table)
        self._splitter = Splitter(self._statements.key, self._statements.others)
        self._filter = filter_runs

    async def write(self, sender: Sender, changes: Sequence[RowChanges]) -> None:
        for run in self._splitter.runs(changes):
            for wanted in (run,) if self._filter is None else self._filter(run):
                await self._apply(sender, wanted)

    async def _apply(self, sender: Sender, run: Run) -> None:
        table = self._statements
        match run:
            case Insert(rows):
                await sender.send(table.insert(_values(rows), upsert=True))
            case Update(rows, columns):
                statement = table.update(_values(rows), columns, exact=False)
                if statement is not None:
                    await sender.send(statement)
            case Delete(keys):
                await sender.send(table.delete(keys, exact=False))
            case Truncate():
                await sender.send(table.truncate())
            case Rekey():
                await self._rekey(sender, run, table)
            case Recopy():
                self.needs_copy = True

    async def _rekey(self, sender: Sender, run: Rekey, table: TableStatements) -> None:
        row: SourceRow = run.row
        if UNCHANGED in row:
            old = await sender.find(table.find(run.key))
            if old is None:
                # Its other values are not known here, and no later chunk needs to contain it.
                self.needs_copy = True
                return
            row = merge(old, row)
        if self._splitter.key_of(row) != run.key:
            await sender.send(table.delete([run.key], exact=False))
        await sender.send(table.insert(_values([row]), upsert=True))


class CopyWriter(TolerantWriter):
    """Applies changes to a table while it is copied."""

    def __init__(self, mirror: Mirror, filter_runs: FilterRuns | None = None) -> None:
        target = mirror.staging if mirror.state == "recopying" else mirror.table
        super().__init__(mirror, filter_runs, target)
        self.pending: PendingChunk | None = None

    @property
    def key(self) -> tuple[int, ...]:
        return self._statements.key

    async def _apply(self, sender: Sender, run: Run) -> None:
        left = run if self.pending is None else self.pending.absorb(run)
        if left is not None:
            await super()._apply(sender, left)

    async def write_chunk(self, sender: Sender) -> int:
        """Write the rows of the chunk over what the target has. Returns how many."""
        assert self.pending is not None
        rows = list(self.pending.rows.values())
        if rows:
            await sender.send(self._statements.insert(_values(rows), upsert=True))
        self.pending = None
        return len(rows)


def _values(rows: Sequence[SourceRow]) -> Sequence[Sequence[str | None]]:
    """Rows of which only the values that are there are used."""
    return cast("Sequence[Sequence[str | None]]", rows)
