"""What a batch adds to the groups of a view, as arrays of texts and integers for PostgreSQL; or as
rows of the staging tables, where tasks write it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
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
        ids = [digest(key) for key in zip(*keys, strict=True)]
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


def staged(
    result: ViewResult, tables: Sequence[str], batch: pa.RecordBatch
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """What a batch adds, as rows for the staging tables: that of the groups, then one for each
    aggregate that stores values."""
    groups, *others = tables
    for part in GroupDeltas.of(result, pa.Table.from_batches([batch])):
        columns: dict[str, pa.Array] = {
            "id": pa.array(part.ids, pa.string()),
            "rows": pa.array(part.rows, pa.int64()),
        }
        columns |= {f"k{at}": pa.array(key, pa.string()) for at, key in enumerate(part.keys)}
        for name, totals in part.totals.items():
            kind = pa.int64() if name.endswith("_total") else pa.string()
            columns[name] = pa.array(totals, kind)
        yield groups, pa.RecordBatch.from_pydict(columns)
        for table, (ids, values, weights) in zip(others, part.values.values(), strict=True):
            yield table, _summed(ids, values, weights)


def _summed(ids: list[str], values: list[str | None], weights: list[int]) -> pa.RecordBatch:
    """The values of groups, each once with its count."""
    rows = pa.table(
        {
            "id": pa.array(ids, pa.string()),
            "value": pa.array(values, pa.string()),
            "n": pa.array(weights, pa.int64()),
        }
    )
    found = rows.group_by(["id", "value"]).aggregate([("n", "sum")])
    columns = [found.column(name).combine_chunks() for name in ("id", "value", "n_sum")]
    return pa.RecordBatch.from_arrays(columns, ["id", "value", "n"])


def _values(ids: list[str], lists: pa.Array) -> tuple[list[str], list[str | None], list[int]]:
    parents = pc.list_parent_indices(lists).to_pylist()
    flat = pc.list_flatten(lists)
    return (
        [ids[parent] for parent in parents],
        texts(flat.field("value")),
        flat.field("weight").to_pylist(),
    )


def digest(key: Iterable[str | None]) -> str:
    """The id of a group. It must never change.

    >>> digest(["west", None])
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


def key_texts(column: pa.Array) -> list[str | None]:
    """The same for values that are compared as texts: Spark's joins and groups have one zero.

    >>> key_texts(pa.array([-0.0, 1.5]))
    ['0', '1.5']
    """
    return texts(pc.add(column, 0.0) if pa.types.is_floating(column.type) else column)
