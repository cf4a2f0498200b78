"""The history of a row: its versions, one after the other.

A version is valid from the time of its transaction to the time of the next version. A version that
its own transaction replaced was never visible: its two times are the same. A changed key ends one
row and begins another. A row from before its first change is known by the before-image of that
change, or by the first snapshot that has it: a version with `op` `before` and an unknown beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pyarrow as pa

from headwater.model import Column, Position, Table
from headwater.pipeline.lake.gaps import LakeGap
from headwater.pipeline.lake.moments import Moment, instant, of_log_sql, within_sql
from headwater.pipeline.lake.schemas import ImageReader, arrow_schema, arrow_type, split
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading.event_query import KEY, AnswerRow, Ask, EventQuery

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_VERSIONS_AT_ONCE = 1_000
"""Versions of a row that become a batch of Arrow."""

_UTC = pa.timestamp("us", tz="UTC")

VERSIONS = pa.schema(
    [
        pa.field("seq", pa.int64()),
        pa.field("xid", pa.int64()),
        pa.field("op", pa.string()),
        pa.field("valid_from", _UTC),
        pa.field("valid_to", _UTC),
        pa.field("user_id", pa.string()),
        pa.field("function_name", pa.string()),
        pa.field("trace_id", pa.string()),
        pa.field("before", pa.string()),
        pa.field("after", pa.string()),
        pa.field("shape", pa.int64()),
        pa.field("source", pa.string()),
        pa.field("source_position", pa.string()),
        pa.field("source_committed_at", _UTC),
        pa.field("changed", pa.list_(pa.field("element", pa.string()))),
    ]
)
"""A version; the row itself follows as `row`, NULL for a deleted row."""


def steps(relation: int, key: str) -> EventQuery:
    """The events of a table that concern one row, in order."""
    renamed = {"valid_from": "committed_at"}
    names = ("relation", *(name for name in VERSIONS.names if name not in ("valid_to", "changed")))
    return EventQuery(
        relations=(relation,),
        any_of=(f"key = {KEY}", "op = 'truncate'"),
        columns={name: renamed.get(name, name) for name in names},
        order=("seq",),
        key=key,
        among=f"relation = {relation} and (key = {KEY} or op = 'truncate')",
    )


def first_of(query: EventQuery) -> EventQuery:
    """The first of these steps."""
    return msgspec.structs.replace(query, limit=1)


def start(
    first: AnswerRow | None,
    taken: Sequence[TableSnapshot],
    images: Callable[[Sequence[TableSnapshot]], Iterable[AnswerRow]],
) -> AnswerRow | None:
    """The row before its first step, if it existed: by the before-image of that step, else by the
    first snapshot without the step that has the row. `images` are those of the row in snapshots:
    `snapshot`, `image` and `shape`."""
    blank: AnswerRow = dict.fromkeys(VERSIONS.names)
    if first is not None and first["before"] is not None:
        return blank | {"seq": 0, "op": _BEFORE, "after": first["before"], "shape": first["shape"]}
    earlier = [each for each in taken if first is None or not each.position.contains(first["xid"])]
    found = {row["snapshot"]: row for row in (images(earlier) if earlier else ())}
    for each in earlier:
        if (row := found.get(each.snapshot)) is not None:
            return blank | {"seq": 0, "op": _BEFORE, "after": row["image"], "shape": row["shape"]}
    return None


def versions(begun: AnswerRow | None, found: Iterable[AnswerRow]) -> Iterator[AnswerRow]:
    """The versions of a row: its beginning, and the steps that concern it in order."""
    held = begun
    for step in found:
        # A truncate ends this row only if the row existed.
        if step["op"] == "truncate" and not _is_alive(held):
            continue
        if held is not None:
            yield held | {"valid_to": step["valid_from"] if _is_alive(held) else None}
        held = step
    if held is not None:
        yield held | {"valid_to": None}


_BEFORE = "before"


def _is_alive(version: AnswerRow | None) -> bool:
    return version is not None and version["op"] in ("insert", "update", _BEFORE)


class KnownRow(NamedTuple):
    """A row at a moment: its image (None if it did not exist), and the shapes that the table had
    from the change that has the image to the moment."""

    image: str | None
    passed: tuple[int, ...]


def row_at(
    ask: Ask, relation: int, key: str, when: Moment, missed: Sequence[LakeGap]
) -> KnownRow | None:
    """A row at a moment from its own changes: the last change up to the moment has it as `after`,
    else the first change after the moment has it as `before`. None where neither helps: the row
    never changed, or there is a reset or a gap in between. For a position, only changes of its log
    count."""
    own_log = (of_log_sql(when.log),) if isinstance(when, Position) else ()
    inside = within_sql(when)
    every = EventQuery(relations=(relation,), where=own_log, columns=_ROW_COLUMNS, limit=1, key=key)

    def one(
        *where: str, order: tuple[str, ...], any_of: tuple[str, ...] = ("true",)
    ) -> AnswerRow | None:
        found = ask(
            msgspec.structs.replace(every, where=(*own_log, *where), order=order, any_of=any_of)
        )
        return found[0] if found else None

    relevant = (f"key = {KEY}", "op = 'truncate'", "op = 'reset'")
    last = one(inside, order=("-committed_at", "-seq"), any_of=relevant)
    if last is not None and last["op"] != "reset" and _reaches(last, when, missed):
        own = of_log_sql(_log_of(last))
        since = f"committed_at >= '{instant(last['committed_at'])}'"
        if one(inside, f"not {own}", since, order=("-committed_at", "-seq")) is None:
            later = (*own_log, inside, own, f"seq >= {last['seq']}")
            shapes = EventQuery(
                relations=(relation,), where=later, columns={"shape": "shape"}, spans=True
            )
            return KnownRow(last["after"], _in_order(ask(shapes), last["shape"]))
    first = one(f"not {inside}", order=("committed_at", "seq"), any_of=relevant)
    if first is None or first["op"] in ("reset", "truncate") or not _reaches(first, when, missed):
        return None
    present = one(inside, order=("-committed_at", "-seq"))
    if present is None or _log_of(present) != _log_of(first) or present["shape"] != first["shape"]:
        return None  # it was not captured yet, or altered or restored in between
    return KnownRow(first["before"], (first["shape"],))


_ROW_COLUMNS = {
    name: name for name in ("op", "seq", "shape", "before", "after", "committed_at", "position")
}


def _log_of(change: AnswerRow) -> str:
    log: str = change["position"].partition("-")[0]
    return log


def _reaches(change: AnswerRow, when: Moment, missed: Sequence[LakeGap]) -> bool:
    """Whether the lake has everything between a change and a moment."""
    at = change["committed_at"]
    return all(
        (gap.is_after(when) and at >= gap.until_at) or (gap.is_before(when) and at <= gap.since_at)
        for gap in missed
    )


def _in_order(spans: Iterable[AnswerRow], first: int) -> tuple[int, ...]:
    """The shapes of changes in order, beginning with `first`. It may be the last one again, where
    an alteration was taken back."""
    found = [span["shape"] for span in sorted(spans, key=lambda span: int(span["last"]))]
    return tuple(found) if found[0] == first else (first, *found)


def combined(tables: Sequence[Table]) -> Table:
    """A table with the columns of all its shapes, which are given with the latest last. A column
    whose type changed is read as text."""
    columns: dict[str, Column] = {}
    for table in reversed(tables):
        for column in table.columns:
            known = columns.setdefault(column.name, column)
            if arrow_type(known) != arrow_type(column):
                columns[column.name] = Column(column.name, "text", "text", "C")
    last = tables[-1]
    return Table(last.id, last.schema, last.name, tuple(columns.values()), last.key, last.oid)


def typed(found: Iterable[AnswerRow], table: Table) -> Iterator[pa.RecordBatch]:
    """The versions with their rows in the table's types, and the columns that changed."""
    schema = schema_of(table)
    reader = ImageReader(table)
    rows = iter(found)
    while part := list(islice(rows, _VERSIONS_AT_ONCE)):
        columns = {
            name: [row[name] for row in part] for name in VERSIONS.names if name != "changed"
        }
        columns["changed"] = [changed(row["before"], row["after"]) for row in part]
        arrays = [pa.array(columns[field.name], field.type) for field in VERSIONS]
        row = reader.rows(columns["after"], columns["shape"])
        yield pa.RecordBatch.from_arrays([*arrays, row], schema=schema)


def plain_values(found: Sequence[AnswerRow]) -> list[AnswerRow]:
    """The versions as values of Python, without their typed rows."""
    names = [name for name in VERSIONS.names if name != "changed"]
    return [
        {name: row[name] for name in names} | {"changed": changed(row["before"], row["after"])}
        for row in found
    ]


def typed_values(found: Sequence[AnswerRow], table: Table) -> list[AnswerRow]:
    """The same with their rows in the table's types."""
    reader = ImageReader(table)
    rows = reader.values([row["after"] for row in found], [row["shape"] for row in found])
    return [plain | {"row": row} for plain, row in zip(plain_values(found), rows, strict=True)]


def schema_of(table: Table) -> pa.Schema:
    """The versions of a row of this table."""
    return VERSIONS.append(pa.field("row", pa.struct(list(arrow_schema(table)))))


def typed_frame(found: DataFrame, begun: AnswerRow | None, table: Table) -> DataFrame:
    """The versions in Spark, of steps: for a row with very many."""
    from pyspark.sql.pandas.types import from_arrow_schema

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from typed(versions(begun, rows), table)

    in_order = found.repartition(1).sortWithinPartitions("seq")
    return in_order.mapInArrow(read, from_arrow_schema(schema_of(table)))


def changed(before: str | None, after: str | None) -> list[str] | None:
    """The columns of an update whose values differ; None for other operations.

    >>> changed('{"id":1,"amount":2.50}', '{"id":1,"amount":2.5}')
    ['amount']
    """
    if before is None or after is None:
        return None
    old = split(before)
    return [name for name, text in split(after).items() if old.get(name) != text]


def difference(before: str | None, after: str | None) -> list[tuple[str, str | None, str | None]]:
    """For people: column, old and new value as JSON, of those that differ."""
    old, new = split(before or "{}"), split(after or "{}")
    names = reduce(lambda seen, name: {**seen, name: None}, [*new, *old], dict[str, None]())
    return [(n, old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)]
