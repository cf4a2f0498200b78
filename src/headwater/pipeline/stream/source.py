"""The log as a PySpark data source: `spark.readStream.format("headwater")`.

Offsets are positions. The rows between two of them never change, so a batch that is repeated after
a crash is the same batch. Rows come in the order of `seq`, in several parts side by side; a batch
has at most `maxRows`. The options:

    url          the database; or HEADWATER_URL
    tables       names with commas between them; all if left out
    since        "beginning" (of the log), "now", a position or a time; for a stream, where a new
                 one begins
    maxRows      for a stream: the most rows in one batch
    until        for a batch read: a position or a time to stop at, else now

A time is that of transactions, `committed_at`: from `since` on, and before `until`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from headwater.errors import ConfigError, HeadwaterError, ResyncRequired
from headwater.limits import SPARK_BATCH_CHANGES
from headwater.model import Position
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.planning import Planner
from headwater.pipeline.stream.worker import EVENTS, LogSlice, read

OPTIONS = ("url", "tables", "since", "until", "maxrows")


class HeadwaterSource(DataSource):
    """The data source; Spark makes one for every read."""

    @classmethod
    def name(cls) -> str:
        return "headwater"

    def schema(self) -> StructType:
        return from_arrow_schema(EVENTS)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        with _with_hint():
            return LogStreamReader(Options.of(self.options, streaming=True))

    def reader(self, schema: StructType) -> DataSourceReader:
        with _with_hint():
            return LogBatchReader(Options.of(self.options))


class Options(msgspec.Struct, frozen=True):
    """The options of a read."""

    url: str
    tables: tuple[str, ...] = ()
    since: str = "beginning"
    until: str | None = None
    rows_max: int = SPARK_BATCH_CHANGES

    @classmethod
    def of(cls, options: Any, *, streaming: bool = False) -> Options:
        """ConfigError for what is missing, unknown or out of place."""
        given = {str(name).lower(): str(value) for name, value in dict(options).items()}
        unknown = [name for name in given if name not in OPTIONS]
        if unknown:
            raise ConfigError(
                f"format headwater has no option {unknown[0]}",
                hint="It has url, tables, since, until and maxRows.",
            )
        out_of_place = "until" if streaming else "maxrows"
        if out_of_place in given:
            raise ConfigError(
                "until: a stream has no end" if streaming else "maxRows: a batch is read at once",
                hint="Use spark.read for until, spark.readStream for maxRows.",
            )
        url = given.get("url") or os.environ.get("HEADWATER_URL")
        if not url:
            raise ConfigError(
                "format headwater needs a database",
                hint='Set .option("url", "postgresql://…"), or HEADWATER_URL.',
            )
        names = (name.strip() for name in given.get("tables", "").split(","))
        return cls(
            url,
            tuple(name for name in names if name),
            given.get("since", "beginning"),
            given.get("until"),
            _rows_max(given.get("maxrows", str(SPARK_BATCH_CHANGES))),
        )


def _rows_max(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"maxRows: {text!r} is not a number of rows", hint="Write 1 or more.")
    return int(text)


class LogPartition(InputPartition):
    """A part of the log, for one task."""

    def __init__(self, part: LogSlice) -> None:
        super().__init__(msgspec.to_builtins(part))


def _read(partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
    # Spark calls this for a batch read without parts, too.
    if partition is None or partition.value is None:
        return
    with _with_hint():
        yield from read(msgspec.convert(partition.value, LogSlice))


@contextmanager
def _with_hint() -> Iterator[None]:
    """Spark shows only the message of an error, so the hint is appended to it."""
    try:
        yield
    except HeadwaterError as error:
        if error.hint is not None:
            error.args = (f"{error}. {error.hint}",)
        raise


class _LogReader:
    """What stream reads and batch reads share."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._planner = Planner(options.url, options.tables)

    def _begin(self) -> Position:
        match self._options.since:
            case "beginning":
                return self._planner.beginning()
            case "now":
                return self._planner.now()
        moment = _moment(self._options.since)
        if moment is not None:
            return self._planner.before(moment)
        return _position(self._options.since, "since")

    def _tasks(self, start: Offset, end: Offset) -> list[LogPartition]:
        parts = self._planner.parts(
            start, end, not_before=_moment(self._options.since), before=_moment(self._options.until)
        )
        return [LogPartition(part) for part in parts]


def _position(text: str, name: str) -> Position:
    try:
        return Position.parse(text)
    except ValueError as error:
        raise ConfigError(
            f"{name}: {error}",
            hint='Write a position or a time (2026-11-15T10:00:00Z); since also takes "beginning" '
            'and "now".',
        ) from error


def _moment(text: str | None) -> datetime | None:
    """The time that an option names; without a zone it is UTC. None for anything else.

    >>> _moment("2026-11-15 10:00"), _moment("now")
    (datetime.datetime(2026, 11, 15, 10, 0, tzinfo=datetime.timezone.utc), None)
    """
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


class LogStreamReader(_LogReader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The log as a stream."""

    _target: Position | None = None

    @cached_property
    def _initial(self) -> Offset:
        """The first offset. Spark asks for it several times, and it must stay the same."""
        return Offset(self._begin())

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        with _with_hint():
            return self._initial.to_dict()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.rows_max)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        rows_max = None if isinstance(limit, ReadAllAvailable) else self._options.rows_max
        if isinstance(limit, ReadMaxRows):
            rows_max = limit.max_rows
        with _with_hint():
            return self._planner.latest(_offset(start), rows_max, self._target).to_dict()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        with _with_hint():
            self._target = self._planner.now()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        with _with_hint():
            first, last = _offset(start), _offset(end)
            _check_same_begin(first, last)
            return self._tasks(first, last)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition)

    def stop(self) -> None:
        self._planner.close()


def _check_same_begin(start: Offset, end: Offset) -> None:
    """Raise ResyncRequired where changes would be skipped. Spark stores where a batch ends. For an
    unfinished first batch it asks again where the stream begins; `now` is then another position."""
    reached = end.until or end.position
    if reached.covers(start.position) and (end.until is None or start.position == end.position):
        return
    raise ResyncRequired(
        "the first batch of this stream was not finished, and the position at which it began is no"
        " longer known",
        hint="Start with another checkpoint, and set since= to the position to begin at.",
    )


class LogBatchReader(_LogReader, DataSourceReader):
    """The log between two positions or times, once."""

    def partitions(self) -> Sequence[InputPartition]:
        until = self._options.until
        try:
            with _with_hint():
                since = self._begin()
                if until is None or _moment(until):
                    end = self._planner.now()
                else:
                    end = _position(until, "until")
                    self._planner.check(end)
                return [] if since.covers(end) else self._tasks(Offset(since), Offset(end))
        finally:
            self._planner.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition)


def _offset(fields: dict[str, Any]) -> Offset:
    try:
        return Offset.from_dict(fields)
    except ValueError as error:
        raise ConfigError(
            str(error), hint="The checkpoint was not made by format headwater. Use another one."
        ) from error
