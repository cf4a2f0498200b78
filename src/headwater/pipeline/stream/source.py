"""The log as a PySpark data source: `spark.readStream.format("headwater")`.

Offsets are positions. The rows between two of them never change, so a batch that is repeated after
a crash is the same batch. Rows come in the order of `seq`, in several parts side by side; a batch
has at most `maxRows`. The options:

    url          the database; or HEADWATER_URL
    tables       names with commas between them; all if left out
    since        "beginning" (of the log), "now", a position or a time; for a stream, where a new
                 one begins. The pipeline's own streams begin at an offset of a checkpoint.
    maxRows      for a stream: the most rows in one batch
    until        for a batch read: a position or a time to stop at, else now
    emit         "changes", or for a stream "parts": what tasks need to read them (`parts`)

A time is that of transactions, `committed_at`: from `since` on, and before `until`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
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

from headwater.errors import ConfigError, ResyncRequired
from headwater.limits import SPARK_BATCH_CHANGES
from headwater.model import Position
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.parts import (
    PARTS,
    error_with_hint,
    freeze_modules,
    part_row,
    rows_of,
)
from headwater.pipeline.stream.planning import Planner
from headwater.pipeline.stream.waiting import WaitPace
from headwater.pipeline.stream.worker import EVENTS, LogSlice

OPTIONS = ("url", "tables", "since", "until", "maxrows", "emit")

_SPARK_WAIT_SECONDS = 10.0
"""How long a stream of parts waits for changes before Spark asks again. Other streams do not wait:
they may be one of several sources of a query."""

_EMITTED = {"changes": EVENTS, "parts": PARTS}


class HeadwaterSource(DataSource):
    """The data source; Spark makes one for every read."""

    @classmethod
    def name(cls) -> str:
        return "headwater"

    def schema(self) -> StructType:
        with error_with_hint():
            return from_arrow_schema(_EMITTED[_emitted(self.options)])

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        with error_with_hint():
            return LogStreamReader(Options.of(self.options, streaming=True))

    def reader(self, schema: StructType) -> DataSourceReader:
        with error_with_hint():
            return LogBatchReader(Options.of(self.options))


class Options(msgspec.Struct, frozen=True):
    """The options of a read."""

    url: str
    tables: tuple[str, ...] = ()
    since: str = "beginning"
    until: str | None = None
    rows_max: int = SPARK_BATCH_CHANGES
    emit: str = "changes"

    @classmethod
    def of(cls, options: Any, *, streaming: bool = False) -> Options:
        """ConfigError for what is missing, unknown or out of place."""
        given = {str(name).lower(): str(value) for name, value in dict(options).items()}
        unknown = [name for name in given if name not in OPTIONS]
        if unknown:
            raise ConfigError(
                f"format headwater has no option {unknown[0]}",
                hint="It has url, tables, since, until, maxRows and emit.",
            )
        out_of_place = "until" if streaming else "maxrows"
        if out_of_place in given:
            raise ConfigError(
                "until: a stream has no end" if streaming else "maxRows: a batch is read at once",
                hint="Use spark.read for until, spark.readStream for maxRows.",
            )
        emit = _emitted(options)
        if emit == "parts" and not streaming:
            raise ConfigError(
                "emit: a batch read has no parts", hint='Use spark.readStream for emit="parts".'
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
            emit,
        )


def _emitted(options: Any) -> str:
    given = {str(name).lower(): str(value) for name, value in dict(options).items()}
    emit = given.get("emit", "changes")
    if emit not in _EMITTED:
        raise ConfigError(f"emit: {emit!r} is unknown", hint="Write changes or parts.")
    return emit


def _rows_max(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"maxRows: {text!r} is not a number of rows", hint="Write 1 or more.")
    return int(text)


class LogPartition(InputPartition):
    """A part of the log, for one task. With a number, the task emits the part itself."""

    def __init__(self, part: LogSlice, number: int | None = None) -> None:
        super().__init__({"part": msgspec.to_builtins(part), "number": number})


def _read(partition: InputPartition | None) -> Iterator[pa.RecordBatch]:
    # Spark calls this for a batch read without parts, too.
    if partition is None or partition.value is None:
        return
    freeze_modules()
    part = msgspec.convert(partition.value["part"], LogSlice)
    number = partition.value["number"]
    if number is None:
        yield from rows_of(part)
    else:
        yield part_row(number, part)


class _LogReader:
    """What stream reads and batch reads share."""

    def __init__(self, options: Options) -> None:
        self._options = options
        pace = WaitPace() if options.emit == "parts" else None
        self._planner = Planner(options.url, options.tables, pace=pace)

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
        if self._options.emit == "parts":
            return [LogPartition(part, number) for number, part in enumerate(parts)]
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
    _planned: tuple[Offset, Offset, list[LogPartition]] | None = None

    @cached_property
    def _initial(self) -> Offset:
        """The first offset. Spark asks for it several times, and it must stay the same."""
        if self._options.since.startswith("{"):
            return _offset(_fields(self._options.since))
        return Offset(self._begin())

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        with error_with_hint():
            return self._initial.to_dict()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._options.rows_max)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        rows_max = None if isinstance(limit, ReadAllAvailable) else self._options.rows_max
        if isinstance(limit, ReadMaxRows):
            rows_max = limit.max_rows
        with error_with_hint():
            return self._end(_offset(start), rows_max).to_dict()

    def _end(self, start: Offset, rows_max: int | None) -> Offset:
        if self._options.emit == "changes" or self._target is not None:
            return self._planner.latest(start, rows_max, self._target)
        return self._planner.next(start, rows_max, _SPARK_WAIT_SECONDS)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        with error_with_hint():
            self._target = self._planner.now()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        with error_with_hint():
            first, last = _offset(start), _offset(end)
            if self._planned is None or self._planned[:2] != (first, last):
                _check_same_begin(first, last)
                self._planned = first, last, self._tasks(first, last)
            return self._planned[2]

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
            with error_with_hint():
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


def _fields(text: str) -> dict[str, Any]:
    """The offset that the option `since` has as JSON."""
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:
        found = None
    return found if isinstance(found, dict) else {}


def _offset(fields: dict[str, Any]) -> Offset:
    try:
        return Offset.from_dict(fields)
    except ValueError as error:
        raise ConfigError(
            str(error), hint="The checkpoint was not made by format headwater. Use another one."
        ) from error
