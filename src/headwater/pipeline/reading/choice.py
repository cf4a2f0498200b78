"""Chooses the engine of a request: Spark, or delta-rs' own (DataFusion) for single rows and small
tables. The choice is made from the statistics of the Delta tables, before anything is read: the
files in which the request may find something, and their bytes.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from deltalake import DeltaTable

from headwater import limits
from headwater.live.filters.text import parse_conditions
from headwater.model import Table
from headwater.pipeline.lake import delta
from headwater.pipeline.lake.keys import key_text
from headwater.pipeline.lake.moments import Moment, aware
from headwater.pipeline.reading import state
from headwater.pipeline.reading.event_query import EventQuery
from headwater.pipeline.reading.key_filter import keys_of
from headwater.pipeline.reading.points import PointAnswer, PointReader
from headwater.pipeline.reading.requests import AsOfRequest, LakeRequest, RowHistoryRequest
from headwater.pipeline.reading.resolver import days


class PlannedRead(msgspec.Struct, frozen=True):
    """The files of one Delta table of the lake in which a request may find something."""

    table: str
    files: int
    bytes: int
    of_files: int
    """The files that the table has."""


class ReadPlan(msgspec.Struct, frozen=True):
    """What a request reads, by which engine, and why. `log` says that the end of the log is read
    too; `keys` are the rows that it names, None for all."""

    engine: Literal["datafusion", "spark"]
    reason: str
    reads: tuple[PlannedRead, ...] = ()
    log: bool = False
    keys: tuple[Any, ...] | None = None

    @property
    def bytes(self) -> int:
        return sum(read.bytes for read in self.reads)


def plan(reader: PointReader, request: LakeRequest, *, relation: int | None = None) -> ReadPlan:
    """How a request is answered. The errors of the request, where it names no table or no key of
    it. With a `relation`, of that table, whatever its name was then."""
    match request:
        case RowHistoryRequest():
            return _chosen(reader, _history_reads(reader, request, relation), (request.key,))
        case AsOfRequest():
            return _plan_state(reader, request, relation)
    return ReadPlan("spark", "it counts the changes of many rows")


def run(reader: PointReader, request: LakeRequest, chosen: ReadPlan) -> PointAnswer:
    """The answer to a request that is not for Spark."""
    if isinstance(request, RowHistoryRequest):
        return reader.history(request.table, request.key, plain=request.plain)
    assert isinstance(request, AsOfRequest), "audits are for Spark"
    return reader.as_of(
        request.table, request.when, chosen.keys, as_text=request.as_text, limit=request.limit
    )


# ------------------------------------------------------------------------ the choice


def _plan_state(reader: PointReader, request: AsOfRequest, relation: int | None) -> ReadPlan:
    when = aware(request.when)
    if relation is None:
        known = reader.resolver.shapes(request.table)
        relation = reader.resolver.relation(known, request.table, when)
    tables = reader.resolver.tables(request.table, relation)
    keys: tuple[Any, ...] | None = None
    if request.key is not None:
        keys = (request.key,)
    if request.where:
        named = None if keys is not None else _keys_of(request, tables)
        if named is None:
            return ReadPlan("spark", "its filter is not one over the whole key, by = or in")
        keys = tuple(named)
    texts = None if keys is None else [key_text(tables[-1], key) for key in keys]
    reads = _state_reads(reader, relation, when, texts)
    if keys is None and reader.log is not None and reader.has_log:
        most = limits.LAKE_SMALL_LOG_CHANGES
        changes, waiting = reader.log.measured(relation, most + 1)
        if changes > most:
            reason = f"the end of the log has more than {most:,} changes of it"
            return ReadPlan("spark", reason, reads, True, keys)
        return _chosen(reader, reads, keys, waiting)
    return _chosen(reader, reads, keys)


def _keys_of(request: AsOfRequest, tables: list[Table]) -> list[tuple[Any, ...]] | None:
    """The keys that the filter names, if the table always had the same key."""
    last = tables[-1]
    columns = {tuple(c for c in each.columns if c.name in last.key) for each in tables}
    if len(columns) > 1 or any(each.key != last.key for each in tables):
        return None
    return keys_of(parse_conditions(list(request.where)), last, request.as_text)


def _chosen(
    reader: PointReader,
    reads: tuple[PlannedRead, ...],
    keys: tuple[Any, ...] | None,
    of_log: int = 0,
) -> ReadPlan:
    """The engine for these files, and for the bytes that all rows have in the end of the log."""
    total = of_log + sum(read.bytes for read in reads)
    what, most = ("single rows", limits.LAKE_POINT_BYTES_MAX)
    if keys is None:
        what, most = ("a small table", limits.LAKE_SMALL_TABLE_BYTES)
    if total > most:
        reason = f"it may read {_size(total)}, more than the {_size(most)} for {what}"
        return ReadPlan("spark", reason, reads, reader.has_log, keys)
    reason = f"it asks for {what}, and reads at most {_size(total)}"
    return ReadPlan("datafusion", reason, reads, reader.has_log, keys)


def _size(count: int) -> str:
    """
    >>> _size(2048), _size(3_500_000)
    ('2 KiB', '3.3 MiB')
    """
    for unit, scale in (("GiB", 1024**3), ("MiB", 1024**2)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1024:.0f} KiB"


# ------------------------------------------------------------------------ what is read


def _state_reads(
    reader: PointReader, relation: int, when: Moment, texts: list[str] | None
) -> tuple[PlannedRead, ...]:
    """The events between the moment and the nearest snapshot, and the rows of that snapshot. If
    there is none, the events of these rows."""
    taken = reader.resolver.snapshots(relation)
    nearest = state.nearest(taken, when)
    own = _any_key(texts)
    if not nearest:
        return (_read(reader.events, "events", f"relation = {relation}{own}"),)
    snapshot = nearest[0]
    between = state.summary(snapshot, when, days(snapshot, taken, when))
    stored = delta.open_table(reader.paths.snapshots.rows)
    reads = [_read(reader.events, "events", _among(between))]
    if stored is not None:
        where = f"relation = {relation} and snapshot = {snapshot.snapshot}{own}"
        reads.append(_read(stored, "snapshots/rows", where))
    return tuple(reads)


def _history_reads(
    reader: PointReader, request: RowHistoryRequest, relation: int | None
) -> tuple[PlannedRead, ...]:
    """The events of the row, and its images in snapshots."""
    _, steps = reader.resolver.steps(request.table, request.key, relation=relation)
    assert steps.key is not None
    reads = [_read(reader.events, "events", steps.file_condition())]
    stored = delta.open_table(reader.paths.snapshots.rows)
    if stored is not None:
        where = f"relation = {steps.relations[0]}{_any_key([steps.key])}"
        reads.append(_read(stored, "snapshots/rows", where))
    return tuple(reads)


def _any_key(texts: list[str] | None) -> str:
    return "" if texts is None else f" and key in ({', '.join(map(delta.quoted, texts))})"


def _among(query: EventQuery) -> str:
    bounds = zip((">=", "<="), query.days, strict=True)
    on_days = [f"day {sign} '{day.isoformat()}'" for sign, day in bounds if day is not None]
    return " and ".join([*on_days, f"({query.file_condition()})"])


def _read(table: DeltaTable, name: str, where: str) -> PlannedRead:
    sizes = delta.file_sizes(table)
    chosen = delta.chosen_files(table, where)
    found = sum(sizes[uri.rpartition("/")[2]] for uri in chosen)
    return PlannedRead(name, len(chosen), found, len(sizes))
