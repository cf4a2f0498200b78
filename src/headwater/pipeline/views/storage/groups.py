"""What a batch adds to the groups of a view, as rows for the statements that write it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from headwater.pipeline.views.results import ViewResult

GROUPS_AT_ONCE = 10_000
"""Groups of a view that one statement shows. All groups of a batch are in one transaction."""


def group_rows(
    result: ViewResult, tables: Sequence[str], batch: pa.RecordBatch
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """What a batch of partial aggregates adds, as rows for the staging tables: that of the groups,
    then one for each aggregate that stores values. A group may come several times."""
    groups, *others = tables
    keys = [texts(batch.column(f"k{at}")) for at in range(len(result.key))]
    ids = pa.array([digest(key) for key in zip(*keys, strict=True)], pa.string())
    columns: dict[str, pa.Array] = {"id": ids, "rows": batch.column("rows")}
    columns |= {f"k{at}": pa.array(key, pa.string()) for at, key in enumerate(keys)}
    lists: list[pa.Array] = []
    for at, each in enumerate(result.aggregates):
        for part in each.needs[1:]:
            column = batch.column(f"a{at}_{part}")
            if part == "values":
                lists.append(column)
            else:
                is_count = part == "total"
                columns[f"a{at}_{part}"] = (
                    column if is_count else pa.array(texts(column), pa.string())
                )
    yield groups, pa.RecordBatch.from_pydict(columns)
    for table, values in zip(others, lists, strict=True):
        yield table, _summed(ids, values)


def _summed(ids: pa.Array, lists: pa.Array) -> pa.RecordBatch:
    """The values of groups, each once with its count."""
    flat = pc.list_flatten(lists)
    rows = pa.table(
        {
            "id": ids.take(pc.list_parent_indices(lists)),
            "value": pa.array(texts(flat.field("value")), pa.string()),
            "n": flat.field("weight").cast(pa.int64()),
        }
    )
    found = rows.group_by(["id", "value"]).aggregate([("n", "sum")])
    columns = [found.column(name).combine_chunks() for name in ("id", "value", "n_sum")]
    return pa.RecordBatch.from_arrays(columns, ["id", "value", "n"])


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
