"""The tail: changes that are in the log of the database and not yet in the lake.

The lake is read at one version, which has an offset; the log from that offset to one fixed
position. So each change is in exactly one of the two, and repeated reads see the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

import msgspec
from deltalake import DeltaTable

from headwater.log import between
from headwater.model import Position
from headwater.pipeline.lake import delta
from headwater.pipeline.lake.events import OWN_SCHEMA, after_offset, event_frame
from headwater.pipeline.lake.moments import contained_sql
from headwater.pipeline.reading.event_query import AnswerRow, EventQuery
from headwater.pipeline.stream import worker
from headwater.pipeline.stream.offsets import Offset, Range
from headwater.pipeline.stream.planning import Planner
from headwater.pipeline.stream.worker import EVENTS, LogSlice

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Tail(msgspec.Struct, frozen=True):
    """The log after a version of the lake, up to a position. `has_rows` is False if there are no
    new changes: then it need not be read."""

    url: str
    version: int
    offset: Offset
    until: Position
    has_rows: bool


def look(path: str, url: str) -> Tail | None:
    """The log after the lake's events, as it is now; None if the lake has no offset. ResyncRequired
    if the log was trimmed after that offset."""
    table = delta.open_table(path)
    if table is None:
        return None
    with closing(Planner(url, patience=0)) as planner:
        return _look(planner, table, url)


def _look(planner: Planner, table: DeltaTable, url: str) -> Tail | None:
    found = delta.offset_of(table)
    if found is None:
        return None
    offset = Offset.from_dict(msgspec.json.decode(found))
    planner.check(offset.position)
    until = planner.now()
    is_new = planner.has_changes(offset.position, until)
    return Tail(url, table.version(), offset, until, is_new)


def changes(spark: SparkSession, tail: Tail) -> DataFrame:
    """The changes of the tail, as rows of `events`."""
    source = spark.read.format("headwater").option("url", tail.url)
    bounded = source.option("since", str(tail.offset.position)).option("until", str(tail.until))
    return event_frame(after_offset(bounded.load(), tail.offset))


# ------------------------------------------------------------------------ without Spark


class TailReader:
    """Answers questions about the changes of the tail, in SQL over one connection."""

    def __init__(self, tail: Tail, planner: Planner) -> None:
        self.tail = tail
        self._planner = planner
        self._commit_times = planner.has_commit_times()
        self._origins = planner.has_origins()

    def ask(self, query: EventQuery) -> list[AnswerRow]:
        return self._planner.ask(query.sql(f"({self._events(query.relations)}) events"))

    def measured(self, relation: int, most: int) -> tuple[int, int]:
        """The changes of a table, and the bytes in which the database stores them; not more than
        the first `most` of them are counted."""
        part = between.literal(self.tail.offset.position, self.tail.until)
        statement = _MEASURED.format(between=part, relation=relation, most=most)
        (found,) = self._planner.ask(statement)
        return found["changes"], found["bytes"]

    def check(self) -> None:
        """ResyncRequired if the log was trimmed since the tail was looked at: answers may lack
        changes."""
        self._planner.check(self.tail.offset.position)

    def _events(self, relations: tuple[int, ...]) -> str:
        """The changes of some tables as rows of `events`, in SQL."""
        offset, until = self.tail.offset, self.tail.until
        part = LogSlice(
            self.tail.url,
            Range(offset.position, until),
            relations,
            self._commit_times,
            origins=self._origins,
        )
        absent = (name for name in _ORIGIN if not self._origins)
        columns = [f"'{until}'::text as position", *(f"null::text as {name}" for name in absent)]
        where = f"schema_name <> '{OWN_SCHEMA}'"
        if offset.until is not None:
            where += f" and not ({contained_sql(offset.until)} and seq <= {offset.seq})"
        rows = worker.statement(part)
        return f"select changes.*, {', '.join(columns)} from ({rows}) changes where {where}"


_MEASURED = """
    select count(*) as changes, coalesce(sum(bytes), 0)::bigint as bytes
    from (
      select coalesce(pg_column_size(before), 0) + coalesce(pg_column_size(after), 0) as bytes
      from headwater.log
      where {between} and shape in (select id from headwater.shapes where relid = {relation})
      limit {most}
    ) l
"""

_ORIGIN = tuple(name for name in EVENTS.names if name.startswith("source"))


@contextmanager
def opened(
    table: DeltaTable, url: str, *, seconds: float | None = None
) -> Iterator[TailReader | None]:
    """The log after the events that the table has in the version it is at; None if it has no
    offset. A statement takes at most this many seconds."""
    with closing(Planner(url, patience=0)) as planner:
        milliseconds = 0 if seconds is None else max(1, int(seconds * 1000))
        planner.ask(_SESSION.format(milliseconds=milliseconds))
        found = _look(planner, table, url)
        yield None if found is None else TailReader(found, planner)


_SESSION = """
    select set_config('timezone', 'UTC', false),
           set_config('standard_conforming_strings', 'on', false),
           set_config('statement_timeout', '{milliseconds}', false)
"""
