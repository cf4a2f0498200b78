"""Reads tables from the database into snapshots of the lake: many tables in one exported snapshot,
in parallel, and resumable.

Spark's tasks read and write chunks, some of them at a time (a wave). After each wave, the driver
commits the tables that are complete, all of them at once, and saves the finished chunks of the
others. A run that was killed is continued by the next one that reads the table: it reads the other
chunks at its own position, and brings the finished ones up to it by the changes in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Protocol, TypeAlias

import msgspec
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from headwater import limits
from headwater.errors import CaptureError, HeadwaterError
from headwater.model import Position
from headwater.pipeline.failpoints import failpoint
from headwater.pipeline.lake import delta, shapes, snapshots
from headwater.pipeline.lake.snapshots import Places, TableSnapshot
from headwater.pipeline.snapshots import writer
from headwater.pipeline.snapshots.chunks import Chunk, chunks_of, moved_chunks
from headwater.pipeline.snapshots.database_snapshot import (
    DatabaseSnapshot,
    SnapshotTable,
    database_snapshot,
)
from headwater.pipeline.snapshots.unfinished import (
    FinishedChunk,
    UnfinishedSnapshots,
    blocks_of,
    oldest,
)
from headwater.pipeline.snapshots.writer import WrittenChunk
from headwater.pipeline.spark import log_file
from headwater.pipeline.stream.planning import Planner

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class FailedTable(msgspec.Struct, frozen=True):
    """A table that could not be read."""

    table: str | int
    error: HeadwaterError


class ReadProgress(msgspec.Struct, frozen=True):
    """How much is read. Bytes are estimated from the sizes of the relations, and those of tables
    that are not examined yet from the tables before."""

    tables: int
    tables_done: int
    bytes: int
    bytes_done: int
    seconds_left: float | None = None


Outcome: TypeAlias = TableSnapshot | FailedTable | ReadProgress


class CatchUp(Protocol):
    """Brings rows that were read at a position up to a snapshot, by the changes in between."""

    def __call__(self, rows: DataFrame, since: Position, until: TableSnapshot) -> DataFrame | None:
        """The rows (`key`, `image`, `shape`); None where the changes are not all known."""


class TableReads:
    """Reads tables. The lake's `catch_up` is needed where chunks of an earlier run are used;
    `examine` sees each snapshot before it is added to the list."""

    def __init__(
        self,
        places: Places,
        spark: SparkSession,
        url: str,
        catch_up: CatchUp,
        examine: Callable[[TableSnapshot], TableSnapshot],
    ) -> None:
        self._places = places
        self._spark = spark
        self._url = url
        self._catch_up = catch_up
        self._examine = examine
        self._unfinished = UnfinishedSnapshots(places.unfinished)
        self._tables = self._tables_done = self._unexamined = 0
        self._examined = self._bytes = self._bytes_done = 0
        self._began = time.monotonic()

    def read(self, names: Sequence[str | int]) -> Iterator[Outcome]:
        """Read tables, given by names or relations. Yields each when it is in the lake, and between
        them the progress; the caller may stop after each."""
        self._tables, waiting = len(names), iter(names)
        self._unexamined = len(names)
        snapshots.create(self._places)
        while group := list(islice(waiting, limits.SNAPSHOT_GROUP_TABLES)):
            again: list[str | int] = []
            self._unexamined -= len(group)
            yield from self._read_group(group, again)
            useless: list[str | int] = []
            if again:
                yield from self._read_group(again, useless)
            for name in useless:
                self._tables_done += 1
                yield FailedTable(name, _not_caught_up(name))

    def _read_group(self, names: Sequence[str | int], again: list[str | int]) -> Iterator[Outcome]:
        """Read tables in one snapshot of the database. Those whose finished chunks turn out to be
        of no use are added to `again`."""
        skipped: dict[str | int, HeadwaterError] = {}
        resumed: list[tuple[_TableRead, TableSnapshot]] = []
        with closing(Planner(self._url)) as planner:
            planner.now()  # waits for capture from the WAL while no table is locked
        with database_snapshot(self._url, names, skipped=skipped) as now:
            # Makes the position durable: a crash of the server must not lose what the lake has.
            with closing(Planner(self._url)) as planner:
                planner.now(holds_snapshot=True)
            shapes.save(
                self._places.shapes,
                [shapes.row_of(each.table, now.at) for each in now.tables.values()],
            )
            for name, error in skipped.items():
                self._tables_done += 1
                yield FailedTable(name, error)
            for outcome in self._read_waves(now):
                if isinstance(outcome, tuple):
                    resumed.append(outcome)
                else:
                    yield outcome
        for read, snapshot in resumed:
            ended = self._caught_up(read, snapshot)
            if not isinstance(ended, FailedTable):
                self._unfinished.forget([snapshot.relation])
            if ended is None:
                again.append(read.name)
                continue
            self._tables_done += 1
            yield ended

    def _read_waves(
        self, now: DatabaseSnapshot
    ) -> Iterator[Outcome | tuple[_TableRead, TableSnapshot]]:
        """Read the tables of a database snapshot. A table with chunks of an earlier run is given
        with its read, because it is not complete yet."""
        reads, number = self._planned(now), snapshots.number_of(now.at)
        rows, turn = DeltaTable(self._places.rows), 0
        while reads:
            yield self._progress()
            wave = _next_wave(reads.values())
            for written in writer.write_chunks(
                self._spark, now.exported, wave, self._places.rows, number
            ):
                reads[written.chunk.relation].take(written)
                self._bytes_done += written.chunk.bytes
            done = [reads.pop(each) for each in list(reads) if reads[each].is_done]
            self._save(f"{number}-{turn}", now, [*reads.values(), *done])
            failpoint("wave")
            yield from self._commit(rows, [each for each in done if each.is_direct], now, number)
            for read in done:
                if read.error:
                    self._tables_done += 1
                    self._bytes -= sum(each.bytes for each in read.left.values())
                    yield FailedTable(read.name, read.failure())
                elif read.finished:
                    yield read, read.snapshot(now, number)
            turn += 1
        yield self._progress()

    def _save(self, name: str, now: DatabaseSnapshot, reads: Sequence[_TableRead]) -> None:
        """Save the new chunks of tables that are not committed now."""
        new = [chunk for read in reads if not read.is_direct for chunk in read.new_chunks()]
        self._unfinished.save(name, now.position, new)

    def _commit(
        self, rows: DeltaTable, complete: list[_TableRead], now: DatabaseSnapshot, number: int
    ) -> Iterator[TableSnapshot | FailedTable]:
        """Add complete tables to the lake: their rows in one commit, then they in the list in
        another. Rows of a table that could not be examined stay without an entry in the list until
        `snapshots.remove`."""
        if not complete:
            return
        delta.add(rows, [file for read in complete for file in read.files()])
        failpoint("rows")
        outcomes = [self._outcome(read, read.snapshot(now, number)) for read in complete]
        made = [each for each in outcomes if isinstance(each, TableSnapshot)]
        if made:
            snapshots.add_to_list(self._places, made)
        listed = {each.relation for each in made}
        if saved := [r.relation for r in complete if r.was_saved and r.relation in listed]:
            self._unfinished.forget(saved)
        self._tables_done += len(outcomes)
        yield from outcomes

    def _outcome(self, read: _TableRead, snapshot: TableSnapshot) -> TableSnapshot | FailedTable:
        try:
            return self._examine(snapshot)
        except Exception as error:
            return read.failed(error)

    def _planned(self, now: DatabaseSnapshot) -> dict[int, _TableRead]:
        sources = [each.source for each in now.tables.values()]
        finished = self._unfinished.load(sources, now.position, self._places.rows)
        reads: dict[int, _TableRead] = {}
        for name, table in now.tables.items():
            reads[table.table.oid] = _TableRead(name, table, finished.get(table.table.oid, []))
        self._bytes += sum(each.bytes for read in reads.values() for each in read.left.values())
        self._examined += len(reads)
        return reads

    def _caught_up(
        self, read: _TableRead, snapshot: TableSnapshot
    ) -> TableSnapshot | FailedTable | None:
        """A table of which some chunks were read at an earlier position; None if they are of no
        use."""
        files = [file for each in read.finished for file in each.files] + read.files()
        try:
            rows = self._rows(files)
            found = self._catch_up(rows, oldest(read.finished), snapshot)
            return (
                None
                if found is None
                else snapshots.write_frame(self._places, snapshot, found, self._examine)
            )
        except Exception as error:
            return read.failed(error)

    def _rows(self, files: Sequence[AddAction]) -> DataFrame:
        if not files:
            return self._spark.range(0).selectExpr(
                "cast(null as string) as key", "cast(null as string) as image", "id as shape"
            )
        paths = [f"{self._places.rows}/{file.path}" for file in files]
        return self._spark.read.parquet(*paths).select("key", "image", "shape")

    def _progress(self) -> ReadProgress:
        done, total, left = self._bytes_done, self._bytes, None
        if self._examined:
            total += self._bytes * self._unexamined // self._examined
        if done:
            passed = time.monotonic() - self._began
            left = passed * max(0, total - done) / done
        return ReadProgress(self._tables, self._tables_done, total, done, left)


class _TableRead:
    """A table while it is read: the chunks that are left, and those that are done. `finished` are
    chunks of an earlier run."""

    def __init__(
        self, name: str | int, table: SnapshotTable, finished: list[FinishedChunk]
    ) -> None:
        self.name = name
        self.relation = table.source.relation
        self.finished = finished
        self.error = ""
        self.was_saved = False
        done = blocks_of(finished)
        self.left: dict[str, Chunk] = {
            each.statement: each for each in chunks_of(table.source, done=done)
        }
        if finished:
            moved = moved_chunks(table.source, done, oldest(finished))
            self.left |= {each.statement: each for each in moved}
        self._table = table
        self._written: list[WrittenChunk] = []
        self._saved = 0

    @property
    def is_done(self) -> bool:
        return bool(self.error) or not self.left

    @property
    def is_direct(self) -> bool:
        """Whether all its rows were read at the present position."""
        return not self.left and not self.finished and not self.error

    def take(self, written: WrittenChunk) -> None:
        del self.left[written.chunk.statement]
        if written.error:
            self.error = written.error
        else:
            self._written.append(written)

    def new_chunks(self) -> list[WrittenChunk]:
        """The finished chunks since the last call, which a later run can use."""
        new, self._saved = self._written[self._saved :], len(self._written)
        self.was_saved = True
        return [each for each in new if each.chunk.is_whole]

    def files(self) -> list[AddAction]:
        return [file for each in self._written for file in each.files]

    def snapshot(self, now: DatabaseSnapshot, number: int) -> TableSnapshot:
        table, catalog = self._table.table, self._table.catalog
        rows = sum(each.rows for each in self._written)
        return TableSnapshot(
            table.oid,
            number,
            now.position,
            now.at,
            table.id,
            rows,
            "table",
            catalog.mark,
            catalog.altered_in,
        )

    def failed(self, error: Exception) -> FailedTable:
        """Its outcome, if what was read could not become a snapshot."""
        if isinstance(error, HeadwaterError):
            return FailedTable(self.name, error)
        what = log_file.cause(str(error)) or type(error).__name__
        failure = CaptureError(
            f"no snapshot of {self._table.table.label} could be made: {what}",
            hint=log_file.record(error),
        )
        return FailedTable(self.name, failure)

    def failure(self) -> HeadwaterError:
        return CaptureError(
            f"{self._table.table.label} could not be read: {self.error}",
            hint="It is tried again. Finished parts are not read again.",
        )


def _not_caught_up(name: str | int) -> HeadwaterError:
    return CaptureError(
        f"table {name} could not be read: another process reads it at the same time, and parts of"
        " both are of no use together",
        hint="It is tried again.",
    )


def _next_wave(reads: Iterable[_TableRead]) -> list[Chunk]:
    """Chunks that are left, up to a bound of bytes; at least one, if there are any."""
    bound = 2 * limits.SNAPSHOT_READERS_MAX * limits.SNAPSHOT_CHUNK_BYTES
    wave: list[Chunk] = []
    size = 0
    for chunk in (chunk for read in reads for chunk in read.left.values()):
        if wave and size + chunk.bytes > bound:
            break
        wave.append(chunk)
        size += chunk.bytes
    return wave
