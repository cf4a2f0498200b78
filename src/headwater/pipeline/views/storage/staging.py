"""Tables that Spark's tasks write results to, before one transaction adds them to a view.

A task writes with COPY, in batches of bounded size, and commits at its end. It may run twice: each
run marks its rows with a name of its own, and only the rows of the runs that Spark counts are used.
All columns are texts or whole numbers; the statement that reads them converts them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

# Not its `dbapi`: that imports pandas.
import adbc_driver_manager as adbc
import adbc_driver_postgresql
import msgspec
import pyarrow as pa
from psycopg import sql

from headwater.database import pinned_url, without_password
from headwater.errors import DatabaseError
from headwater.pipeline.failpoints import failpoint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RUN = "run"
"""The column that marks the rows of a run of a task."""

_RUNS = pa.schema([pa.field("run", pa.string()), pa.field("rows", pa.int64())])

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

    def drop(self) -> Iterator[sql.Composed]:
        for name in self.tables:
            yield sql.SQL("drop table if exists {}").format(sql.Identifier("headwater", name))


def written(results: DataFrame, url: str, rows: Rows) -> list[str]:
    """Write results with Spark's tasks; returns the runs whose rows count."""
    from pyspark.sql.pandas.types import from_arrow_schema

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield _write(url, batches, rows)

    made: DataFrame = results.mapInArrow(write, from_arrow_schema(_RUNS))
    runs: pa.Table = made.toArrow()
    return [
        run
        for run, count in zip(*(runs.column(n).to_pylist() for n in _RUNS.names), strict=True)
        if count
    ]


def _write(url: str, batches: Iterator[pa.RecordBatch], rows: Rows) -> pa.RecordBatch:
    run, count = uuid.uuid4().hex, 0
    try:
        with closing(_Writer(url)) as writer:
            for batch in batches:
                for table, each in rows(batch):
                    if each.num_rows:
                        writer.copy(table, _marked(run, each))
                        count += each.num_rows
            writer.commit()
    # OSError is how Arrow reports an error of the server.
    except (adbc.Error, OSError) as error:
        raise DatabaseError(
            f"writing a view to {without_password(url)} failed: {error}",
            hint="Check that the server runs, that it has space, and that this machine reaches it.",
        ) from error
    failpoint("staged")
    return pa.RecordBatch.from_pylist([{"run": run, "rows": count}], _RUNS)


def _marked(run: str, rows: pa.RecordBatch) -> pa.RecordBatch:
    marks = pa.repeat(pa.scalar(run), rows.num_rows)
    return pa.RecordBatch.from_arrays([marks, *rows.columns], [RUN, *rows.schema.names])


class _Writer:
    """A connection of a task, opened with the first rows."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._database: Any = None
        self._connection: Any = None

    def copy(self, table: str, rows: pa.RecordBatch) -> None:
        if self._connection is None:
            self._database = adbc_driver_postgresql.connect(pinned_url(self._url))
            self._connection = adbc.AdbcConnection(self._database)
            self._connection.set_autocommit(False)
        with adbc.AdbcStatement(self._connection) as statement:
            statement.set_options(
                **{
                    "adbc.ingest.target_table": table,
                    "adbc.ingest.target_db_schema": "headwater",
                    "adbc.ingest.mode": "adbc.ingest.mode.append",
                }
            )
            statement.bind_stream(pa.RecordBatchReader.from_batches(rows.schema, [rows]))
            statement.execute_update()

    def commit(self) -> None:
        if self._connection is not None:
            self._connection.commit()

    def close(self) -> None:
        for each in (self._connection, self._database):
            if each is not None:
                each.close()


def counted(runs: Sequence[str]) -> dict[str, list[str]]:
    """The parameter of statements that read the rows of runs."""
    return {"runs": list(runs)}


def rows_of(table: str) -> sql.Composed:
    """A relation with the rows of the runs that count, for statements."""
    return sql.SQL("(select * from {} where {} = any(%(runs)s::text[]))").format(
        sql.Identifier("headwater", table), sql.Identifier(RUN)
    )
