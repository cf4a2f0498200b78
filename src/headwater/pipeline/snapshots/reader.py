"""Reads chunks as Arrow, in a snapshot that the driver has exported. Runs in Spark's tasks.

A task has one connection, for as long as it runs. It sees exactly the rows of the driver's
transaction, which stays open meanwhile and holds the locks. A task waits for its own lock only a
short time: behind a statement that waits for the driver's lock it would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

# Not its `dbapi`: that imports pandas.
import adbc_driver_manager as adbc
import adbc_driver_postgresql
import msgspec
import pyarrow as pa
from adbc_driver_postgresql import StatementOptions

from headwater import limits
from headwater.database import NO_TIMEOUTS, pinned_url, without_password
from headwater.errors import DatabaseError, TableLocked
from headwater.pipeline.snapshots.chunks import Chunk

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_BATCH_BYTES = 8 * 1024 * 1024
"""Bytes of rows that arrive from the server at a time. A larger row comes alone."""

_LOCK_NOT_AVAILABLE = "55P03"

IMAGES = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("image", pa.string(), nullable=False),
        pa.field("shape", pa.int64(), nullable=False),
    ]
)
"""A row of a table, with the shape it was read under."""

FORMATS = (
    "set local timezone = 'UTC'",
    "set local datestyle = 'ISO'",
    "set local intervalstyle = 'iso_8601'",
    "set local bytea_output = 'hex'",
    "set local extra_float_digits = 1",
    "set local lc_monetary = 'C'",
    "set local row_security = off",
)
"""The settings of capture, so that images are the same as those that triggers write. With row
security off, a role that may not see every row gets an error instead of a part of the rows."""


class ExportedSnapshot(msgspec.Struct, frozen=True):
    """A snapshot of the database by its name, which is valid while the driver's transaction is
    open."""

    url: str
    name: str


class ChunkReader:
    """A connection of a task to a snapshot."""

    def __init__(
        self, exported: ExportedSnapshot, *, statement_seconds: float | None = None
    ) -> None:
        self._exported = exported
        self._statement_seconds = statement_seconds
        self._database: Any = None
        self._connection: Any = None

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for each in (self._connection, self._database):
            if each is not None:
                with suppress(adbc.Error):
                    each.close()
        self._connection = self._database = None

    def rows(self, chunk: Chunk) -> Iterator[pa.RecordBatch]:
        """The rows of a chunk, in batches of bounded size."""
        for batch in self.answer(chunk.statement):
            yield _with_shape(batch, chunk.shape)

    def answer(self, statement_text: str) -> Iterator[pa.RecordBatch]:
        """The answer to a statement, in batches of bounded size. TableLocked while a table is
        being altered. After an error, the next statement is executed over a new connection."""
        try:
            with adbc.AdbcStatement(self._opened()) as statement:
                statement.set_options(
                    **{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)}
                )
                statement.set_sql_query(statement_text)
                handle, _ = statement.execute_query()
                with pa.RecordBatchReader.from_stream(handle) as answer:
                    yield from answer
        # OSError is how Arrow reports an error of the server while rows arrive.
        except (adbc.Error, OSError) as error:
            self.close()
            raise _translated(error, self._exported.url) from error

    def _opened(self) -> Any:
        if self._connection is None:
            self._database = adbc_driver_postgresql.connect(pinned_url(self._exported.url))
            self._connection = adbc.AdbcConnection(self._database)
            for statement in (*_SESSION, *_transaction(self._exported.name), *FORMATS):
                self._execute(statement)
            if self._statement_seconds is not None:
                self._execute(f"set local statement_timeout = {self._statement_seconds * 1000:.0f}")
        return self._connection

    def _execute(self, text: str) -> None:
        with adbc.AdbcStatement(self._connection) as statement:
            statement.set_sql_query(text)
            statement.execute_update()


_SESSION = (
    NO_TIMEOUTS,
    "set application_name = 'headwater pipeline'",
    "set client_encoding = 'UTF8'",
    "set jit = off",
    "set max_parallel_workers_per_gather = 0",
    f"set lock_timeout = {limits.SNAPSHOT_LOCK_SECONDS * 1000:.0f}",
)


def _transaction(name: str) -> Iterator[str]:
    yield "begin isolation level repeatable read, read only"
    yield "set transaction snapshot '{}'".format(name.replace("'", "''"))


def _with_shape(batch: pa.RecordBatch, shape: int) -> pa.RecordBatch:
    shapes = pa.repeat(pa.scalar(shape, pa.int64()), batch.num_rows)
    return pa.RecordBatch.from_arrays([*batch.columns, shapes], schema=IMAGES)


def _translated(error: Any, url: str) -> DatabaseError | TableLocked:
    state = getattr(error, "sqlstate", None)
    if state == _LOCK_NOT_AVAILABLE or "lock timeout" in str(error):
        return TableLocked(
            f"a table of {without_password(url)} is being altered: {error}",
            hint="It is read when the statement that alters it has ended.",
        )
    return DatabaseError(
        f"reading tables of {without_password(url)} failed: {error}",
        hint="Check that the server runs, that this machine reaches it, and that the role may read"
        " every row.",
    )


def frame(spark: SparkSession, exported: ExportedSnapshot, chunks: Sequence[Chunk]) -> DataFrame:
    """The rows of chunks as a DataFrame (`key`, `image`, `shape`), read when it is executed."""
    from pyspark.sql.pandas.types import from_arrow_schema

    tasks = max(1, min(len(chunks), limits.SNAPSHOT_READERS_MAX))

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with ChunkReader(exported) as reader:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    for chunk in chunks[number::tasks]:
                        yield from reader.rows(chunk)

    found: DataFrame = numbered(spark, tasks).mapInArrow(read, from_arrow_schema(IMAGES))
    return found


def numbered(spark: SparkSession, tasks: int) -> DataFrame:
    """A DataFrame with one row for each of this many tasks: the number of the task."""
    return spark.range(0, tasks, 1, tasks)
