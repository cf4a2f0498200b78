"""The progress of a read of tables, and its estimate: over a database that is made up, and of which
every byte takes the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headwater import limits
from headwater.errors import CaptureError, HeadwaterError
from headwater.model import Position, Table
from headwater.pipeline.lake import shapes, snapshots
from headwater.pipeline.lake.snapshots import Places, TableSnapshot
from headwater.pipeline.snapshots import table_reads, writer
from headwater.pipeline.snapshots.catalog_marks import CatalogMark
from headwater.pipeline.snapshots.chunks import Chunk, RowSource, StoredRelation, chunks_of
from headwater.pipeline.snapshots.database_snapshot import DatabaseSnapshot, SnapshotTable
from headwater.pipeline.snapshots.reader import ExportedSnapshot
from headwater.pipeline.snapshots.table_reads import FailedTable, ReadProgress, TableReads
from headwater.pipeline.snapshots.unfinished import UnfinishedSnapshots
from headwater.pipeline.snapshots.writer import WrittenChunk

BYTES_PER_SECOND = 100

BLOCKS = 10
"""Each table has this many, and each chunk is one block."""


class World:
    """Tables, each with its bytes. Those of `failing` have a block that cannot be read; those of
    `unknown` are not captured; those of `unexaminable` cannot be compared with the lake."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.sizes: dict[str, int] = {}
        self.failing: set[str] = set()
        self.unknown: set[str] = set()
        self.unexaminable: set[str] = set()
        self.seconds = 1000.0
        self.places = Places(*(f"{folder}/{name}" for name in Places.__struct_fields__))
        clock = SimpleNamespace(monotonic=lambda: self.seconds)
        patch.setattr(table_reads, "time", clock)
        patch.setattr(table_reads, "database_snapshot", self._snapshot)
        planner = SimpleNamespace(now=lambda **_: None, close=lambda: None)
        patch.setattr(table_reads, "Planner", lambda _: planner)
        patch.setattr(shapes, "save", lambda *_: 0)
        patch.setattr(writer, "write_chunks", self._write)
        # A wave is two chunks of the largest table.
        patch.setattr(limits, "SNAPSHOT_READERS_MAX", 1)
        patch.setattr(limits, "SNAPSHOT_CHUNK_BYTES", 1)

    def start(self, **sizes: int) -> None:
        self.sizes = sizes
        nothing: Any = None
        self.reads = TableReads(self.places, nothing, "", self._catch_up, self._examine)
        self.reads._began = self.seconds

    def read(self) -> tuple[list[ReadProgress], dict[str, str]]:
        """The progress, and what became of each table."""
        progress, ended = [], {}
        for outcome in self.reads.read(list(self.sizes)):
            match outcome:
                case ReadProgress():
                    progress.append(outcome)
                case FailedTable(name):
                    ended[str(name)] = "failed"
                case TableSnapshot(relation):
                    ended[list(self.sizes)[relation - 1]] = "read"
        return progress, ended

    def _catch_up(self, rows: Any, since: Position, until: TableSnapshot) -> None:
        """Chunks of an earlier run are of no use."""

    def _examine(self, found: TableSnapshot) -> TableSnapshot:
        if list(self.sizes)[found.relation - 1] in self.unexaminable:
            raise OSError("the lake could not be read")
        return found

    @contextmanager
    def _snapshot(
        self, url: str, names: Sequence[str], *, skipped: dict[str, HeadwaterError]
    ) -> Iterator[DatabaseSnapshot]:
        at = datetime.fromtimestamp(self.seconds, UTC)
        nothing: Any = None
        exported = ExportedSnapshot(url, "exported")
        found = DatabaseSnapshot(nothing, Position.parse("a-10:10:"), at, exported)
        for name in names:
            if name in self.unknown:
                skipped[name] = CaptureError(f"{name} is not captured")
            else:
                found.tables[name] = self._table(name)
        yield found

    def _table(self, name: str) -> SnapshotTable:
        relation = list(self.sizes).index(name) + 1
        stored = StoredRelation(relation, name, 7, BLOCKS, self.sizes[name])
        source = RowSource(relation, 1, "to_jsonb(o)", ("id",), (), (stored,))
        shape = Table(1, "public", name, (), ("id",), relation)
        return SnapshotTable(shape, name, source, CatalogMark("mark", 1))

    def _write(
        self, spark: None, exported: object, chunks: Sequence[Chunk], *_: object
    ) -> Iterator[WrittenChunk]:
        for chunk in chunks:
            self.seconds += chunk.bytes / BYTES_PER_SECOND
            name = list(self.sizes)[chunk.relation - 1]
            yield WrittenChunk(chunk, (), "torn" if name in self.failing else "")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def check(progress: Sequence[ReadProgress], world: World, total: int) -> None:
    """The estimate is exact, because every byte takes the same time; nothing goes backwards."""
    assert progress[0].seconds_left is None, "nothing is known before the first bytes"
    assert all(a.bytes_done <= b.bytes_done for a, b in pairwise(progress))
    assert all(a.tables_done <= b.tables_done for a, b in pairwise(progress))
    for each in progress[1:]:
        assert each.bytes == total
        assert each.seconds_left == pytest.approx((total - each.bytes_done) / BYTES_PER_SECOND)
    last = progress[-1]
    assert (last.bytes_done, last.seconds_left) == (total, 0)
    assert (last.tables, last.tables_done) == (len(world.sizes), len(world.sizes))


def test_tables_of_different_sizes(world: World) -> None:
    world.start(a=1000, b=200, c=5000)
    progress, ended = world.read()
    check(progress, world, 6200)
    assert ended == {"a": "read", "b": "read", "c": "read"}
    assert len(progress) > 10
    assert progress[0] == ReadProgress(3, 0, 6200, 0, None)


def test_tables_that_are_not_examined_yet_count_like_the_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SNAPSHOT_GROUP_TABLES", 2)
    world.start(a=1000, b=1000, c=1000, d=1000, e=1000)
    progress, ended = world.read()
    check(progress, world, 5000)
    assert set(ended.values()) == {"read"}


def test_larger_tables_that_come_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate cannot know them; it is right again as soon as they are examined."""
    monkeypatch.setattr(limits, "SNAPSHOT_GROUP_TABLES", 1)
    world.start(a=1000, b=9000)
    progress, _ = world.read()
    totals = list(dict.fromkeys(each.bytes for each in progress))
    assert totals == [2000, 10_000]
    check([progress[0], *(each for each in progress if each.bytes == 10_000)], world, 10_000)


def test_tables_that_are_not_read_take_no_time(world: World) -> None:
    world.start(a=1000, b=1000, c=1000, d=1000)
    world.unknown = {"b", "c", "d"}
    progress, ended = world.read()
    check(progress, world, 1000)
    assert ended == {"a": "read", "b": "failed", "c": "failed", "d": "failed"}


def test_a_table_that_fails(world: World) -> None:
    """Its other chunks are not read any more."""
    world.start(a=1000, b=1000)
    world.failing = {"a"}
    progress, ended = world.read()
    assert ended == {"a": "failed", "b": "read"}
    last = progress[-1]
    assert last.bytes_done == last.bytes < 2000
    assert (last.seconds_left, last.tables_done) == (0, 2)


def test_a_table_that_cannot_be_examined(world: World) -> None:
    """The tables that were read beside it are in the lake."""
    world.start(a=1, b=1, c=1)
    world.unexaminable = {"b"}
    progress, ended = world.read()
    check(progress, world, 3)
    assert ended == {"a": "read", "b": "failed", "c": "read"}
    assert {each.relation for each in snapshots.load(world.places)} == {1, 3}


def test_empty_tables(world: World) -> None:
    world.start(a=0, b=0)
    progress, ended = world.read()
    assert {each.seconds_left for each in progress} == {None}
    assert progress[-1] == ReadProgress(2, 2, 0, 0, None)
    assert set(ended.values()) == {"read"}


def test_a_table_that_is_read_twice(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it was read by an earlier run. That turns out to be of no use: it is read again."""
    world.start(a=1000)
    chunks = [each for each in chunks_of(world._table("a").source) if each.end <= BLOCKS // 2]
    UnfinishedSnapshots(world.places.unfinished).save(
        "1-0", Position.parse("a-9:9:"), [WrittenChunk(each, ()) for each in chunks]
    )
    monkeypatch.setattr(world.reads, "_rows", lambda _: None)
    progress, ended = world.read()
    assert ended == {"a": "read"}
    assert [each.bytes for each in progress if not each.bytes_done] == [500]
    last = progress[-1]
    assert last == msgspec.structs.replace(last, bytes=1500, bytes_done=1500, seconds_left=0)
    for each in progress[1:]:
        assert each.seconds_left == pytest.approx((each.bytes - each.bytes_done) / BYTES_PER_SECOND)
    assert {each.bytes for each in progress} == {500, 1500}


def test_a_table_of_which_another_process_saves_parts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both times that it is read there are parts, which are of no use. It has an outcome."""
    world.start(a=1000, b=1000)
    part = chunks_of(world._table("a").source)[0]
    UnfinishedSnapshots(world.places.unfinished).save(
        "1-0", Position.parse("a-9:9:"), [WrittenChunk(part, ())]
    )
    monkeypatch.setattr(world.reads, "_rows", lambda _: None)
    # As if it saved them again at that moment.
    monkeypatch.setattr(world.reads._unfinished, "forget", lambda _: None)
    _, ended = world.read()
    assert ended == {"a": "failed", "b": "read"}
    assert world.reads._progress().tables_done == 2


@pytest.mark.parametrize("error", [OSError("the lake could not be read"), CaptureError("no")])
def test_a_table_that_cannot_be_caught_up(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Its finished parts stay for the next run. Other tables with such parts are not affected."""
    world.start(a=1000, b=1000)
    saved = UnfinishedSnapshots(world.places.unfinished)
    parts = [chunks_of(world._table(name).source)[0] for name in world.sizes]
    saved.save("1-0", Position.parse("a-9:9:"), [WrittenChunk(each, ()) for each in parts])
    monkeypatch.setattr(world.reads, "_rows", lambda _: None)

    def catch_up(rows: Any, since: Position, until: TableSnapshot) -> None:
        if until.relation == 1:
            raise error

    monkeypatch.setattr(world.reads, "_catch_up", catch_up)
    assert world.read()[1] == {"a": "failed", "b": "read"}
    sources = [world._table(name).source for name in world.sizes]
    assert set(saved.load(sources, Position.parse("a-10:10:"), world.places.rows)) == {1}
