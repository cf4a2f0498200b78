"""Divides tables into chunks: ranges of blocks that tasks read, each of a bounded size.

A table is one relation, or several: its partitions, or its inheritance children. A range of blocks
is read without an index, in the order of the disk (a TID range scan), whatever the key is. The size
of a chunk is estimated from that of the relation with its large values (TOAST).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import msgspec
from psycopg import sql

from headwater import limits
from headwater.model import Position
from headwater.pipeline.lake.keys import key_expression


class StoredRelation(msgspec.Struct, frozen=True):
    """A relation with rows of a table: the table itself, a partition, or an inheritance child.
    `blocks` is None where rows are not stored in blocks (a foreign table). `bytes` includes large
    values, which are stored apart."""

    oid: int
    label: str
    filenode: int
    blocks: int | None
    bytes: int


class RowSource(msgspec.Struct, frozen=True):
    """How the rows of a table are read: their shape, SQL for the image of a row `o`, its key, and
    the relations that have rows. `columns` are those of the image, where there are several."""

    relation: int
    shape: int
    image: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    stored: tuple[StoredRelation, ...]


class Chunk(msgspec.Struct, frozen=True):
    """Some blocks of a relation, from `first` to before `end`."""

    relation: int
    shape: int
    member: int
    filenode: int
    first: int
    end: int
    bytes: int
    statement: str
    is_whole: bool = True
    """Whether it has every row of its blocks."""


Blocks: TypeAlias = tuple[int, int]
"""A range of blocks: the first, and the one after the last."""


def chunks_of(
    source: RowSource,
    chunk_bytes: int | None = None,
    done: Mapping[int, Iterable[Blocks]] | None = None,
) -> list[Chunk]:
    """A table in chunks of about this size, or of one block where a block has more. An empty
    relation has none. `done` has blocks of its relations that need not be read."""
    return [
        _chunk(source, member, first, end)
        for member in source.stored
        for first, end in _ranges(
            member, chunk_bytes or limits.SNAPSHOT_CHUNK_BYTES, (done or {}).get(member.oid, ())
        )
    ]


def moved_chunks(
    source: RowSource, done: Mapping[int, Iterable[Blocks]], since: Position
) -> list[Chunk]:
    """Of blocks that are done, the rows that were written after a position: an update that changes
    no value moves a row to another block, and is not in the log."""
    low = since.xmin % 2**32
    written = sql.SQL(
        f" and mod(o.xmin::text::bigint - {low} + 4294967296, 4294967296) < 2147483648"
    )
    return [
        _chunk(source, member, first, end, written)
        for member in source.stored
        for first, end in _merged(done.get(member.oid, ()))
    ]


def _merged(done: Iterable[Blocks]) -> Iterator[Blocks]:
    """Ranges without those between that adjoin."""
    open_: Blocks | None = None
    for first, end in sorted(done):
        if open_ is not None and first <= open_[1]:
            open_ = open_[0], max(end, open_[1])
            continue
        if open_ is not None:
            yield open_
        open_ = first, end
    if open_ is not None:
        yield open_


def _ranges(member: StoredRelation, chunk_bytes: int, done: Iterable[Blocks]) -> Iterator[Blocks]:
    if member.blocks is None:
        yield 0, 1
        return
    step = max(1, member.blocks * chunk_bytes // max(1, member.bytes))
    for begin, limit in left(member.blocks, done):
        for first in range(begin, limit, step):
            yield first, min(first + step, limit)


def left(blocks: int, done: Iterable[Blocks]) -> Iterator[Blocks]:
    """The ranges of this many blocks that are not done.

    >>> list(left(10, [(7, 8), (0, 3)]))
    [(3, 7), (8, 10)]
    """
    begin = 0
    for first, end in sorted(done):
        if begin < min(first, blocks):
            yield begin, min(first, blocks)
        begin = max(begin, end)
    if begin < blocks:
        yield begin, blocks


def _chunk(
    source: RowSource,
    member: StoredRelation,
    first: int,
    end: int,
    written: sql.SQL | None = None,
) -> Chunk:
    size = member.bytes * (end - first) // max(1, member.blocks or 1)
    text = _statement(source, member, _condition(member, first, end, written)).as_string()
    return Chunk(
        source.relation,
        source.shape,
        member.oid,
        member.filenode,
        first,
        end,
        size if written is None else 0,
        text,
        written is None,
    )


def _statement(
    source: RowSource, member: StoredRelation, condition: sql.Composable
) -> sql.Composed:
    """Key and image of each row. The image is computed once for both (`offset 0`)."""
    rows = sql.SQL("only {label} o where {condition}").format(
        label=sql.SQL(member.label), condition=condition
    )
    if source.columns:
        # The columns of the table, in its order: a partition may have another one.
        names = sql.SQL(", ").join(
            sql.SQL("o.{}").format(sql.Identifier(n)) for n in source.columns
        )
        rows = sql.SQL("(select {names} from {rows}) o").format(names=names, rows=rows)
    return sql.SQL(
        "select {key} as key, i.image::text as image from"
        " (select {image} as image from {rows} offset 0) i"
    ).format(key=key_expression("i.image", source.key), image=sql.SQL(source.image), rows=rows)


def _condition(
    member: StoredRelation, first: int, end: int, written: sql.SQL | None
) -> sql.Composable:
    if member.blocks is None:
        return sql.SQL("true")
    blocks = sql.SQL(f"o.ctid >= '({first},0)'::tid and o.ctid < '({end},0)'::tid")
    return blocks if written is None else blocks + written
