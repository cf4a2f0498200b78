"""The log as a PySpark data source: `spark.readStream.format("headwater")`.

Offsets are positions: what lies between two of them is the same rows for ever, so a batch that is
replayed after a crash is the batch it was. Rows come in the order of `seq`, several parts beside
each other; a batch takes at most `maxRows`. What a stream needs to be told it is told by options:

    url          the database; or HEADWATER_URL
    tables       names with commas between them; all if left out
    since        "beginning" (of what the log holds), "now", or a position; for a new stream
    maxRows      rows of one batch at most
    until        for a batch read: a position to stop at, else now
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
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

from headwater.errors import ConfigError
from headwater.limits import SPARK_BATCH_CHANGES
from headwater.model import Position
from headwater.pipeline.offsets import Offset
from headwater.pipeline.planning import Planner
from headwater.pipeline.reading import EVENTS, Part, read

OPTIONS = ("url", "tables", "since", "until", "maxrows")


class HeadwaterSource(DataSource):
    """The data source; Spark makes one for every read."""

    @classmethod
    def name(cls) -> str:
        return "headwater"

    def schema(self) -> StructType:
        return from_arrow_schema(EVENTS)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        return LogStream(Options.of(self.options))

    def reader(self, schema: StructType) -> DataSourceReader:
        return LogBatch(Options.of(self.options))


class Options(msgspec.Struct, frozen=True):
    """What a read was told."""

    url: str
    tables: tuple[str, ...] = ()
    since: str = "beginning"
    until: str | None = None
    rows_max: int = SPARK_BATCH_CHANGES

    @classmethod
    def of(cls, options: Any) -> Options:
        """ConfigError for what is missing or unknown."""
        given = {str(name).lower(): str(value) for name, value in dict(options).items()}
        unknown = [name for name in given if name not in OPTIONS]
        if unknown:
            raise ConfigError(
                f"format headwater has no option {unknown[0]}",
                hint="It has url, tables, since, until and maxRows.",
            )
        url = given.get("url") or os.environ.get("HEADWATER_URL")
        if not url:
            raise ConfigError(
                "format headwater needs a database",
                hint='.option("url", "postgresql://…"), or HEADWATER_URL.',
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


class Task(InputPartition):
    """A part of the log, for one task."""

    def __init__(self, part: Part) -> None:
        super().__init__(msgspec.to_builtins(part))


def _read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    return read(msgspec.convert(partition.value, Part))


class _Log:
    """What both kinds of read have in common."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._planner = Planner(options.url, options.tables)

    def _begin(self) -> Position:
        match self._options.since:
            case "beginning":
                return self._planner.beginning()
            case "now":
                return self._planner.now()
        return _position(self._options.since, "since")

    def _tasks(self, start: Offset, end: Offset) -> list[Task]:
        relations = self._planner.relations()
        times = self._planner.has_commit_times()
        return [
            Task(Part(self._options.url, each, relations, times))
            for each in self._planner.parts(start, end)
        ]


def _position(text: str, name: str) -> Position:
    try:
        return Position.parse(text)
    except ValueError as error:
        raise ConfigError(
            f"{name}: {error}", hint='Write "beginning", "now" or a position.'
        ) from error


class LogStream(_Log, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The log as a stream."""

    _target: Position | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return Offset(self._begin()).to_dict()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.rows_max)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        rows_max = None if isinstance(limit, ReadAllAvailable) else self._options.rows_max
        if isinstance(limit, ReadMaxRows):
            rows_max = limit.max_rows
        return self._planner.latest(Offset.from_dict(start), rows_max, self._target).to_dict()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._planner.now()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return self._tasks(Offset.from_dict(start), Offset.from_dict(end))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition)

    def stop(self) -> None:
        self._planner.close()


class LogBatch(_Log, DataSourceReader):
    """The log between two positions, once."""

    def partitions(self) -> Sequence[InputPartition]:
        try:
            since = Offset(self._begin())
            until = self._options.until
            end = self._planner.now() if until is None else _position(until, "until")
            return self._tasks(since, Offset(end))
        finally:
            self._planner.close()

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(partition)
