"""What a batch adds to the groups of a view, as arrays of texts and integers for PostgreSQL."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater.pipeline.views.results import ViewResult

GROUPS_AT_ONCE = 10_000
"""Groups of a view that one statement writes. All groups of a batch are in one transaction."""


class GroupDeltas(msgspec.Struct, frozen=True):
    """A part of what a batch adds: for each group its digest, key, rows and totals; for each
    aggregate that stores values, the values with the digests of their groups."""

    ids: list[str]
    keys: list[list[str | None]]
    rows: list[int]
    totals: dict[str, list[Any]]
    values: dict[int, tuple[list[str], list[str | None], list[int]]]

    @classmethod
    def of(cls, result: ViewResult, changes: pa.Table) -> Iterator[GroupDeltas]:
        """The changes, in parts for one statement each."""
        for at in range(0, changes.num_rows, GROUPS_AT_ONCE):
            yield cls._part(result, changes.slice(at, GROUPS_AT_ONCE))

    @classmethod
    def _part(cls, result: ViewResult, changes: pa.Table) -> GroupDeltas:
        columns = {name: changes.column(name).combine_chunks() for name in changes.column_names}
        keys = [texts(columns[f"k{at}"]) for at in range(len(result.key))]
        ids = [_digest(key) for key in zip(*keys, strict=True)]
        totals: dict[str, list[Any]] = {}
        values = {}
        for at, each in enumerate(result.aggregates):
            if each.has_values:
                values[at] = _values(ids, columns[f"a{at}_values"])
                continue
            totals[f"a{at}_total"] = [n or 0 for n in columns[f"a{at}_total"].to_pylist()]
            if each.kind != "count":
                totals[f"a{at}_added"] = texts(columns[f"a{at}_added"])
                totals[f"a{at}_removed"] = texts(columns[f"a{at}_removed"])
        return cls(ids, keys, columns["rows"].to_pylist(), totals, values)


def _values(ids: list[str], lists: pa.Array) -> tuple[list[str], list[str | None], list[int]]:
    parents = pc.list_parent_indices(lists).to_pylist()
    flat = pc.list_flatten(lists)
    return (
        [ids[parent] for parent in parents],
        texts(flat.field("value")),
        flat.field("weight").to_pylist(),
    )


def _digest(key: Iterable[str | None]) -> str:
    """The id of a group. It must never change.

    >>> _digest(["west", None])
    'b77ddd3e642e13d9d2c836f30eb06038'
    """
    return hashlib.blake2b(msgspec.json.encode(list(key)), digest_size=16).hexdigest()


def texts(column: pa.Array) -> list[str | None]:
    """Values as texts that PostgreSQL reads.

    >>> texts(pa.array([True, None])), texts(pa.array([b"a"]))
    (['true', None], ['\\\\x61'])
    """
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return [None if each is None else f"\\x{each.hex()}" for each in column.to_pylist()]
    found: list[str | None] = column.cast(pa.string()).to_pylist()
    return found
