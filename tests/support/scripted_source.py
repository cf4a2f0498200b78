"""A source whose database is a generated history, for tests of mirrors and runners.

It is a real implementation of the contract in `headwater.capture.source` over lists in memory: the
history is a list of commits made from a seed, of which a number is visible. Tests advance that
number, so the same history can be read by processes that are killed and started again. What a table
contains after each commit is known exactly, and is the judge of its mirror.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from headwater.capture.running.supervisor import Supervisor
from headwater.capture.source import (
    UNCHANGED,
    Cell,
    Chunk,
    Health,
    Item,
    Problem,
    Progress,
    RowChanges,
    SchemaChange,
    SourceColumn,
    SourceDefinition,
    SourceKey,
    SourceRow,
    SourceTable,
    TransactionPart,
)
from headwater.errors import PositionLost, SourceUnavailable

Rows = dict[str, SourceRow]
"""Of one table, by the text of the key."""

BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)


def table(name: str, *extra: str) -> SourceTable:
    columns = [
        SourceColumn("id", "bigint", nullable=False),
        SourceColumn("name", "text"),
        SourceColumn("amount", "numeric(12,2)"),
        SourceColumn("note", "text"),
        *(SourceColumn(column, "integer") for column in extra),
    ]
    return SourceTable(name, name, tuple(columns), ("id",))


class Commit(msgspec.Struct, frozen=True):
    """A transaction, with the schema changes that came before it, and all rows after it."""

    changes: tuple[RowChanges, ...]
    schema: tuple[SchemaChange, ...] = ()
    after: dict[str, Rows] = {}


class History:
    """Commits made from a seed. `state(n)` is what the tables contain after `n` commits."""

    def __init__(
        self,
        seed: int,
        commits: int,
        *,
        tables: Iterable[str] = ("orders", "customers"),
        keys: int = 40,
        rows: int = 30,
        changes_max: int = 8,
        schema_changes: bool = False,
        truncates: bool = True,
    ) -> None:
        self._random = random.Random(seed)
        self._keys = keys
        self._changes_max = changes_max
        self._truncates = truncates
        self.first = {name: table(name) for name in tables}
        self._tables = dict(self.first)
        self._rows: dict[str, Rows] = {
            name: {key: self._row(name, key) for key in self._some_keys(rows)} for name in tables
        }
        self.begin = {name: dict(rows_) for name, rows_ in self._rows.items()}
        self.commits = [self._commit(schema_changes) for _ in range(commits)]

    def state(self, commits: int) -> dict[str, Rows]:
        return self.commits[commits - 1].after if commits else self.begin

    def tables(self, commits: int) -> dict[str, SourceTable]:
        found = dict(self.first)
        for commit in self.commits[:commits]:
            found.update({change.table.name: change.table for change in commit.schema})
        return found

    def _some_keys(self, count: int) -> list[str]:
        return [str(k) for k in self._random.sample(range(self._keys), min(count, self._keys))]

    def _row(self, name: str, key: str) -> SourceRow:
        return (key, *(self._value(column) for column in self._tables[name].columns[1:]))

    def _value(self, column: SourceColumn) -> str | None:
        chosen = self._random
        match column.type:
            case "integer":
                return str(chosen.randrange(1000))
            case "numeric(12,2)":
                return f"{chosen.randrange(100_000) / 100:.2f}"
        if column.name == "note" and chosen.random() < 0.3:
            return None
        return chosen.choice(["", "a", 'quoted "b"', "back\\slash", "NULL", "ü€😀", "{x,y}"]) + str(
            chosen.randrange(100)
        )

    def _commit(self, schema_changes: bool) -> Commit:
        schema = []
        if schema_changes and self._random.random() < 0.1:
            schema.append(self._schema_change())
        count = self._random.randint(1, self._changes_max)
        changes = [change for _ in range(count) for change in self._change()]
        after = {name: dict(rows) for name, rows in self._rows.items()}
        return Commit(tuple(changes), tuple(schema), after)

    def _schema_change(self) -> SchemaChange:
        name = self._random.choice(sorted(self._tables))
        old = self._tables[name]
        names = [column.name for column in old.columns]
        if len(names) > 4 and self._random.random() < 0.5:
            gone = names.index(self._random.choice(names[4:]))
            columns = old.columns[:gone] + old.columns[gone + 1 :]
            self._rows[name] = {k: r[:gone] + r[gone + 1 :] for k, r in self._rows[name].items()}
            copies = False
        else:
            column = SourceColumn(f"extra{self._random.randrange(10_000)}", "integer")
            columns = (*old.columns, column)
            self._rows[name] = {k: (*r, "7") for k, r in self._rows[name].items()}
            copies = True
        self._tables[name] = msgspec.structs.replace(old, columns=columns)
        return SchemaChange(self._tables[name], copies)

    def _change(self) -> Iterable[RowChanges]:
        """One change, or a run of changes with the same operation."""
        chosen = self._random
        name = chosen.choice(sorted(self._tables))
        rows = self._rows[name]
        kind = chosen.choices(
            ["insert", "update", "delete", "rekey", "truncate"],
            [4, 5, 2, 1, 0.05 if self._truncates else 0],
        )[0]
        if kind == "insert":
            free = [str(k) for k in range(self._keys) if str(k) not in rows]
            keys = chosen.sample(free, min(len(free), chosen.choice([1, 1, 3])))
            new = [self._row(name, key) for key in keys]
            rows.update(zip(keys, new, strict=True))
            return [RowChanges(name, "insert", new)] if new else []
        if kind == "truncate":
            rows.clear()
            return [RowChanges(name, "truncate")]
        if not rows:
            return []
        if kind == "delete":
            keys = chosen.sample(sorted(rows), min(len(rows), chosen.choice([1, 1, 2])))
            gone = [self._before(rows.pop(key)) for key in keys]
            return [RowChanges(name, "delete", (), gone)]
        if kind == "rekey":
            return self._rekey(name, rows)
        keys = [chosen.choice(sorted(rows)) for _ in range(chosen.choice([1, 1, 4]))]
        pairs = [self._update(name, rows, key, key) for key in keys]
        after = [pair[1] for pair in pairs]
        if chosen.random() < 0.5:
            return [RowChanges(name, "update", after)]
        return [RowChanges(name, "update", after, [pair[0] for pair in pairs])]

    def _rekey(self, name: str, rows: Rows) -> list[RowChanges]:
        free = [str(k) for k in range(self._keys) if str(k) not in rows]
        if not free:
            return []
        key = self._random.choice(sorted(rows))
        before, after = self._update(name, rows, key, self._random.choice(free))
        return [RowChanges(name, "update", [after], [before])]

    def _update(
        self, name: str, rows: Rows, key: str, to: str
    ) -> tuple[SourceRow | None, SourceRow]:
        """The row before, and after as the source sends it: unchanged values may be left out."""
        old = rows.pop(key)
        new = self._row(name, to)
        if self._random.random() < 0.3:
            rows[to] = (*new[:3], old[3], *new[4:])
            return self._before(old), (*new[:3], UNCHANGED, *new[4:])
        rows[to] = new
        return self._before(old), new

    def _before(self, row: SourceRow) -> SourceRow:
        if self._random.random() < 0.5:
            return row
        cells: list[Cell] = [UNCHANGED] * len(row)
        cells[0] = row[0]
        return tuple(cells)


class ScriptedSource:
    """Reads a history, of which `visible()` commits have happened. Each test decides by `rng` how
    parts, waits and failures fall."""

    kind = "sqlite"
    filters_rows = False

    def __init__(
        self,
        definition: SourceDefinition,
        history: History,
        visible: Callable[[], int],
        rng: random.Random,
        *,
        failures: float = 0.0,
        oldest: int = 0,
    ) -> None:
        self.definition = definition
        self._history = history
        self._visible = visible
        self._random = rng
        self._failures = failures
        self.oldest = oldest
        self._described: dict[str, SourceTable] = {}
        self.acknowledged: list[int] = []
        self.removed = False
        self.problems: list[Problem] = []

    async def check(self) -> list[Problem]:
        return self.problems

    async def tables(self) -> list[SourceTable]:
        found = self._history.tables(self._visible())
        self._described = dict(found)
        wanted = {spec.name for spec in self.definition.tables} or set(found)
        return [found[name] for name in sorted(wanted)]

    async def start(self) -> str:
        self.oldest = min(self.oldest, self._visible())
        return str(self._visible())

    async def snapshot(self, table: SourceTable, after: SourceKey | None, rows: int) -> Chunk:
        low = self._visible()
        await self._wait()
        moment = self._visible()
        await self._wait()
        high = self._visible()
        state = self._history.state(moment)[table.name]
        keys = sorted(int(key) for key in state if after is None or int(key) > int(after[0]))
        chosen = [state[str(key)] for key in keys[:rows]]
        last = (str(keys[rows - 1]),) if len(keys) > rows else None
        return Chunk(self._shaped(table, moment, chosen), last, str(low), str(high))

    def _shaped(self, wanted: SourceTable, moment: int, rows: list[SourceRow]) -> list[SourceRow]:
        """The rows with the columns that the runner asked for."""
        present = [c.name for c in self._history.tables(moment)[wanted.name].columns]
        places = [present.index(c.name) if c.name in present else None for c in wanted.columns]
        return [tuple(None if i is None else row[i] for i in places) for row in rows]

    async def changes(self, after: str) -> AsyncGenerator[Item, None]:
        at = int(after)
        if at < self.oldest:
            raise PositionLost(f"the changes after {after} no longer exist")
        known = self._described
        while True:
            if at >= self._visible():
                yield Progress(str(at))
                while at >= self._visible():  # noqa: ASYNC110 - another process may advance it
                    await asyncio.sleep(0.002)
            at += 1
            commit = self._history.commits[at - 1]
            for schema in self._shapes(known, at):
                yield schema
            for part in self._parts(commit, at):
                await self._wait()
                yield part

    def _shapes(self, known: dict[str, SourceTable], at: int) -> Iterable[SchemaChange]:
        """Where the rows of a commit have other columns than the reader knows."""
        commit = self._history.commits[at - 1]
        copies = {change.table.name: change.copies for change in commit.schema}
        for name, shape in self._history.tables(at).items():
            if known[name] != shape:
                known[name] = shape
                yield SchemaChange(shape, copies.get(name, True))

    def _parts(self, commit: Commit, at: int) -> list[TransactionPart]:
        committed = BEGINNING + timedelta(seconds=at)
        wanted = {spec.name for spec in self.definition.tables} or set(self._history.first)
        changes = [change for change in commit.changes if change.table in wanted]
        parts, i = [], 0
        while i < len(changes):
            size = self._random.randint(1, 4)
            parts.append(TransactionPart(changes[i : i + size]))
            i += size
        if parts and self._random.random() < 0.5:
            parts[-1] = msgspec.structs.replace(parts[-1], position=str(at), committed_at=committed)
            return parts
        return [*parts, TransactionPart((), str(at), committed)]

    async def acknowledge(self, upto: str) -> None:
        self.acknowledged.append(int(upto))

    async def health(self) -> Health:
        return Health()

    def contains(self, position: str, mark: str) -> bool:
        return int(position) >= int(mark)

    async def remove(self) -> None:
        self.removed = True

    async def close(self) -> None:
        return None

    async def _wait(self) -> None:
        if self._random.random() < self._failures:
            raise SourceUnavailable("the scripted source failed, as it was asked to")
        for _ in range(self._random.choice([0, 0, 1, 3])):
            await asyncio.sleep(0)
        if self._random.random() < 0.05:
            await asyncio.sleep(0.002)


class FileSource(ScriptedSource):
    """For a process of its own: the number of visible commits is in one file, and the position that
    was acknowledged in another. The source forgets everything before that."""

    def __init__(self, definition: SourceDefinition, history: History, folder: Path) -> None:
        self._visible_file = folder / "visible"
        self._acknowledged_file = folder / "acknowledged"
        oldest = _number(self._acknowledged_file)
        super().__init__(
            definition, history, lambda: _number(self._visible_file), random.Random(), oldest=oldest
        )

    async def acknowledge(self, upto: str) -> None:
        await super().acknowledge(upto)
        new = self._acknowledged_file.with_suffix(".new")
        new.write_text(upto)
        new.rename(self._acknowledged_file)


def _number(file: Path) -> int:
    return int(file.read_text()) if file.exists() else 0


def main(url: str, folder: str, seed: str, commits: str, chunk_rows: str) -> None:
    """Run the source `shop` until the process is killed."""
    history = History(int(seed), int(commits))

    def open_source(definition: SourceDefinition) -> FileSource:
        return FileSource(definition, history, Path(folder))

    supervisor = Supervisor(
        url, open_source=open_source, chunk_rows=int(chunk_rows), retry_seconds=0.02
    )
    asyncio.run(supervisor.run())


if __name__ == "__main__":
    main(*sys.argv[1:])
