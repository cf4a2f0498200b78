"""Carries rows from Spark's tasks to the transaction that writes them to a view.

A task returns a few rows to the driver, which sends them with the statements of the transaction.
Where the rows are more than `limits.VIEW_DRIVER_BYTES_MAX`, tasks write them to staging tables with
COPY, in batches of bounded size, and commit at their end. A task may run twice: each run marks its
rows with a name of its own, and only the rows of the runs that Spark counts are used. The
statements read a relation, and do not depend on where its rows are.

The staging tables of a view are there as long as the view is, and are empty between its batches.
All columns are texts or whole numbers; the statement that reads them converts them.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

# Not its `dbapi`: that imports pandas.
import adbc_driver_manager as adbc
import adbc_driver_postgresql
import msgspec
import pyarrow as pa
from psycopg import sql

from headwater.database import NO_TIMEOUTS, pinned_url, without_password
from headwater.errors import DatabaseError, PipelineError
from headwater.pipeline.failpoints import failpoint
from headwater.pipeline.views.storage.shown import Database

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RUN = "run"
"""The column that marks the rows of a run of a task."""

_COPY_BYTES = 1024 * 1024
"""About this many bytes of rows are copied at a time."""

_RETURNED_BYTES = "headwater.views.returned_bytes"
"""The property that tells the tasks of a job how many bytes of rows each may return."""

_RESULTS = pa.schema(
    [
        pa.field("table", pa.string()),
        pa.field("returned", pa.binary()),
        pa.field("run", pa.string()),
        pa.field("rows", pa.int64()),
    ]
)
"""What tasks return for a table: rows as an Arrow stream, or the run that wrote this many rows."""

Rows = Callable[[pa.RecordBatch], Iterator[tuple[str, pa.RecordBatch]]]
"""What a batch adds to which tables."""


class Staging(msgspec.Struct, frozen=True):
    """The tables that rows are written to, with their columns (`text` or `bigint`), by name."""

    tables: dict[str, tuple[tuple[str, str], ...]]

    def create(self) -> Iterator[sql.Composed]:
        for name, columns in self.tables.items():
            listed = [sql.SQL("{} text not null").format(sql.Identifier(RUN))]
            listed += (
                sql.SQL("{} {}").format(sql.Identifier(column), sql.SQL(kind))
                for column, kind in columns
            )
            yield sql.SQL("create unlogged table {} ({})").format(
                sql.Identifier("headwater", name), sql.SQL(", ").join(listed)
            )


class StagedRows:
    """The rows that tasks have made for the tables of a staging."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self.runs = set[str]()
        self._written = Counter[str]()
        self._returned: dict[str, list[pa.RecordBatch]] = {}

    def stage(self, results: DataFrame, url: str, rows: Rows, returned_max: int = 0) -> None:
        """Make rows from results, with Spark's tasks. All tasks together return at most this many
        bytes."""
        from pyspark.sql.pandas.types import from_arrow_schema

        def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            yield from _write(url, batches, rows)

        made: DataFrame = results.mapInArrow(write, from_arrow_schema(_RESULTS))
        # How many tasks there are is known only now, when what they execute is already planned.
        share = returned_max // max(1, made.rdd.getNumPartitions()) if returned_max else 0
        results.sparkSession.sparkContext.setLocalProperty(_RETURNED_BYTES, str(share))
        for table, returned, run, count in _tuples(made.toArrow()):
            if returned is not None:
                with pa.ipc.open_stream(returned) as stream:
                    self._returned.setdefault(table, []).extend(stream)
            else:
                self.runs.add(run)
                self._written[table] += count

    # -------------------------------------------------------------------- in a transaction

    def relation(self, table: str, *columns: str) -> sql.Composed:
        """A relation with the rows for a table, for statements with the parameters `given`."""
        kinds = dict(self.staging.tables[table])
        names = columns or tuple(kinds)
        parts: list[sql.Composable] = []
        if self._written[table]:
            parts.append(
                sql.SQL(
                    f"select {', '.join(names)} from {{}} where {RUN} = any(%(runs)s::text[])"
                ).format(sql.Identifier("headwater", table))
            )
        if table in self._returned or not parts:
            arrays = ", ".join(f"%({table}.{name})s::{kinds[name]}[]" for name in names)
            parts.append(sql.SQL(f"select * from unnest({arrays}) r ({', '.join(names)})"))
        return sql.SQL("({})").format(sql.SQL(" union all ").join(parts))

    @cached_property
    def given(self) -> dict[str, Any]:
        """The parameters of statements that read a relation."""
        given: dict[str, Any] = {"runs": sorted(self.runs)}
        for table, columns in self.staging.tables.items():
            for name, _ in columns:
                values = [each.column(name).to_pylist() for each in self._returned.get(table, ())]
                given[f"{table}.{name}"] = list(chain.from_iterable(values))
        return given

    def has(self, table: str) -> bool:
        """Whether there are rows for a table."""
        return bool(self._written[table]) or table in self._returned

    def check(self, database: Database) -> None:
        """PipelineError if rows that tasks wrote are gone: a crash of the server empties unlogged
        tables."""
        for table, count in self._written.items():
            query = sql.SQL("select count(*) from {} where {} = any(%s)").format(
                sql.Identifier("headwater", table), sql.Identifier(RUN)
            )
            row = database.execute(query, (sorted(self.runs),)).fetchone()
            if row != (count,):
                raise PipelineError(
                    f"not all of the {count} rows that were staged in headwater.{table} are there",
                    hint="A crash of the server removes such rows. They are computed again.",
                    retryable=True,
                )

    def clear(self, database: Database) -> None:
        """Remove them from the staging tables, with those of runs that do not count."""
        if self.runs:
            names = [sql.Identifier("headwater", name) for name in self.staging.tables]
            database.execute(sql.SQL("truncate {}").format(sql.SQL(", ").join(names)))


def _tuples(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.to_pylist() for column in table.columns), strict=True)


# ------------------------------------------------------------------------ in a task


def _write(url: str, batches: Iterator[pa.RecordBatch], rows: Rows) -> Iterator[pa.RecordBatch]:
    """Returns the rows, if they are few; otherwise writes them."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    returned_max = int(context.getLocalProperty(_RETURNED_BYTES) or 0)
    held = _Held()
    try:
        with closing(_Writer(url)) as writer:
            for batch in batches:
                for table, each in rows(batch):
                    held.add(table, each)
                if held.size > max(returned_max, _COPY_BYTES):
                    writer.copy(held)
            if writer.is_open or held.size > returned_max:
                writer.copy(held)
            writer.commit()
    # OSError is how Arrow reports an error of the server.
    except (adbc.Error, OSError) as error:
        raise DatabaseError(
            f"writing a view to {without_password(url)} failed: {error}",
            hint="Check that the server runs, that it has space, and that this machine reaches it.",
        ) from error
    if writer.is_open:
        failpoint(f"staged.{context.attemptNumber()}")
    found: list[dict[str, object]] = [
        {"table": table, "returned": stream} for table, stream in held.streams()
    ]
    found += ({"table": t, "run": writer.run, "rows": n} for t, n in writer.written.items())
    yield pa.RecordBatch.from_pylist(found, _RESULTS)


class _Held:
    """Rows that a task holds, by table."""

    def __init__(self) -> None:
        self.size = 0
        self.tables: dict[str, list[pa.RecordBatch]] = {}

    def add(self, table: str, rows: pa.RecordBatch) -> None:
        if rows.num_rows:
            self.tables.setdefault(table, []).append(rows)
            self.size += rows.nbytes

    def taken(self) -> Iterator[tuple[str, pa.Table]]:
        """All rows; there are none after that."""
        tables, self.tables, self.size = self.tables, {}, 0
        for table, batches in tables.items():
            yield table, pa.Table.from_batches(batches).combine_chunks()

    def streams(self) -> Iterator[tuple[str, bytes]]:
        for table, rows in self.taken():
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, rows.schema) as stream:
                stream.write_table(rows)
            yield table, sink.getvalue().to_pybytes()


class _Writer:
    """A run of a task that writes. Its connection is opened with the first rows."""

    def __init__(self, url: str) -> None:
        self.run = uuid.uuid4().hex
        self.written = Counter[str]()
        self._url = url
        self._database: Any = None
        self._connection: Any = None

    @property
    def is_open(self) -> bool:
        return bool(self.written)

    def copy(self, held: _Held) -> None:
        """Write what a task holds."""
        for table, rows in held.taken():
            self._copy(table, rows.append_column(RUN, [[self.run] * rows.num_rows]))
            self.written[table] += rows.num_rows

    def _copy(self, table: str, rows: pa.Table) -> None:
        if self._connection is None:
            self._database = adbc_driver_postgresql.connect(pinned_url(self._url))
            self._connection = adbc.AdbcConnection(self._database)
            with adbc.AdbcStatement(self._connection) as statement:
                # The transaction is idle while Spark computes further rows.
                statement.set_sql_query(NO_TIMEOUTS)
                statement.execute_update()
            self._connection.set_autocommit(False)
        with adbc.AdbcStatement(self._connection) as statement:
            statement.set_options(
                **{
                    "adbc.ingest.target_table": table,
                    "adbc.ingest.target_db_schema": "headwater",
                    "adbc.ingest.mode": "adbc.ingest.mode.append",
                }
            )
            statement.bind_stream(rows.to_reader())
            statement.execute_update()

    def commit(self) -> None:
        if self._connection is not None:
            self._connection.commit()

    def close(self) -> None:
        for each in (self._connection, self._database):
            if each is not None:
                each.close()
