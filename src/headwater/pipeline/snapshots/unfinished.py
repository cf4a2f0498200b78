"""The finished chunks of snapshots that are not complete: after a crash they are not read again.

Each has the position that it was read at. The remaining chunks are read at a later one, and the
changes between the two bring the first up to it: a row without a change between them is still in
the same block, or else the relation has other files. So chunks can only be used as long as the
relation has the same files (not after TRUNCATE, VACUUM FULL, CLUSTER or a rewrite) and the same
shape. An update that changes no value moves a row without a change in the log: these rows are read
again (`chunks.moved_chunks`). The files of a chunk belong to no table yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import reduce

import msgspec
import pyarrow.fs as pafs
from deltalake.transaction import AddAction

from headwater.model import Position
from headwater.pipeline.files import FileLocation
from headwater.pipeline.snapshots.chunks import Blocks, RowSource
from headwater.pipeline.snapshots.writer import WrittenChunk


class FinishedChunk(msgspec.Struct, frozen=True):
    """Blocks of a relation that were read at a position."""

    relation: int
    shape: int
    member: int
    filenode: int
    first: int
    end: int
    position: str
    files: tuple[AddAction, ...]


class UnfinishedSnapshots:
    """The finished chunks in a folder: a file for each time that chunks were saved."""

    def __init__(self, path: str) -> None:
        self._place = FileLocation.of(path)

    def save(self, name: str, position: Position, chunks: Iterable[WrittenChunk]) -> None:
        finished = [
            FinishedChunk(
                each.chunk.relation,
                each.chunk.shape,
                each.chunk.member,
                each.chunk.filenode,
                each.chunk.first,
                each.chunk.end,
                str(position),
                each.files,
            )
            for each in chunks
        ]
        if finished:
            self._place.write(f"{name}.json", msgspec.json.encode(finished))

    def load(
        self, sources: Iterable[RowSource], now: Position, rows: str
    ) -> dict[int, list[FinishedChunk]]:
        """The chunks that can be used at a position, by table. `rows` is the path of the table of
        rows, for which their files were written."""
        wanted = {
            (source.relation, source.shape, member.oid, member.filenode)
            for source in sources
            for member in source.stored
            if member.blocks is not None and member.filenode
        }
        found: dict[int, list[FinishedChunk]] = {}
        for each in self._all():
            identity = each.relation, each.shape, each.member, each.filenode
            if identity in wanted and now.covers(Position.parse(each.position)):
                found.setdefault(each.relation, []).append(each)
        place = FileLocation.of(rows)
        return {table: each for table, each in found.items() if _exist(place, each)}

    def forget(self, relations: Collection[int]) -> None:
        """Remove the chunks of tables. Their files are removed with the unused ones of the lake."""
        for name in self._names():
            chunks = self._read(name)
            staying = [each for each in chunks if each.relation not in relations]
            if not staying:
                self._place.system.delete_file(self._place.below(name))
            elif len(staying) < len(chunks):
                self._place.write(name, msgspec.json.encode(staying))

    def _all(self) -> Iterable[FinishedChunk]:
        for name in self._names():
            yield from self._read(name)

    def _names(self) -> list[str]:
        found = (info.base_name for info in self._place.files(""))
        return sorted(name for name in found if name.endswith(".json"))

    def _read(self, name: str) -> list[FinishedChunk]:
        try:
            return msgspec.json.decode(self._place.read(name), type=list[FinishedChunk])
        except FileNotFoundError:  # another process has finished these snapshots
            return []


def blocks_of(chunks: Iterable[FinishedChunk]) -> dict[int, list[Blocks]]:
    """The blocks of each relation that were read."""
    found: dict[int, list[Blocks]] = {}
    for each in chunks:
        found.setdefault(each.member, []).append((each.first, each.end))
    return found


def oldest(chunks: Sequence[FinishedChunk]) -> Position:
    """The oldest position that chunks were read at: every other one covers it."""
    positions = [Position.parse(each.position) for each in chunks]
    return reduce(lambda found, other: found if other.covers(found) else other, positions)


def _exist(place: FileLocation, chunks: Iterable[FinishedChunk]) -> bool:
    """Whether every file is there: unused files are removed after some days."""
    files = [file for each in chunks for file in each.files]
    found = place.system.get_file_info([place.below(file.path) for file in files])
    return all(
        info.type == pafs.FileType.File and info.size == file.size
        for file, info in zip(files, found, strict=True)
    )
