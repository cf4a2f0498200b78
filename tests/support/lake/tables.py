"""What tests of the lake share: a table that changes, a pipeline run to the end, and the truth."""

from __future__ import annotations

from threading import Event
from typing import Any

import duckdb
import psycopg
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headwater.pipeline.jobs.pipeline import run
from headwater.pipeline.jobs.plan import PipelinePlan
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.stream.progress import StreamProgress

LOG = """
    select seq, xid::text::bigint, at, schema_name, table_name, op, replace(replace(replace(replace(
             key::text, '{ "', '{"'), '" : ', '":'), ', "', ',"'), ' }', '}'), before::text,
           after::text, user_id, function_name, trace_id, shape
    from headwater.changes where schema_name <> 'headwater' order by seq
"""

COLUMNS = (
    'seq, xid, "at", schema_name, table_name, op, "key", "before", "after", user_id,'
    " function_name, trace_id, shape"
)


def execute(url: str, *statements: str) -> list[tuple[Any, ...]]:
    """Run statements, each in a transaction of its own; the rows of the last one."""
    with psycopg.connect(url, autocommit=True, options="-c timezone=UTC") as connection:
        for statement in statements:
            cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def make_orders(url: str) -> None:
    execute(
        url,
        "create table orders (id bigint primary key, amount numeric, note text)",
        "select headwater.enable_reactivity('orders')",
    )


def logged(url: str) -> list[tuple[Any, ...]]:
    """The log, as the events should be."""
    return execute(url, LOG)


def in_lake(lake: Lake) -> list[tuple[Any, ...]]:
    """The events, read by another program than Headwater."""
    with duckdb.connect() as connection:
        files = files_of(lake.events_path)
        if not files:
            return []
        connection.execute("set timezone = 'UTC'")
        found = connection.execute(
            f"select {COLUMNS} from read_parquet(?, hive_partitioning = true) order by seq", [files]
        )
        return found.fetchall()


def files_of(path: str) -> list[str]:
    return list(DeltaTable(path).file_uris())


def run_once(spark: SparkSession, url: str, lake: Lake, **fields: Any) -> list[StreamProgress]:
    """Run the pipeline until it has everything."""
    return run(spark, PipelinePlan(url, lake, once=True, **fields), Event())
