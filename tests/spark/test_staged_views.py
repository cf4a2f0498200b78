"""Rows of a view that are too many for the driver are written by Spark's tasks, and are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from psycopg import sql
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from headwater import limits, views
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.views.definitions import define
from headwater.pipeline.views.storage.shown import Database
from headwater.pipeline.views.storage.staging import StagedRows
from tests.support.lake.tables import execute
from tests.support.lake.views import equals, views_running

pytestmark = pytest.mark.timeout(300)

RETURNED = 60_000
"""Bytes of rows that the driver may hold."""

NOTES = (
    "create table notes (id int primary key, topic text, body text)",
    "create index on notes (topic)",
    "select headwater.enable_reactivity('notes')",
)
INSERT = (
    "insert into notes select i, {topic}, repeat(md5(i::text), 100) from generate_series({span}) i"
)


def places(notes: DataFrame) -> DataFrame:
    by_id = Window.partitionBy("topic").orderBy("id")
    return notes.withColumn("place", f.row_number().over(by_id))


PLACES = """
    select topic, row_number() over (partition by topic order by id)::int as place, id, body
    from notes
"""


def topics(notes: DataFrame) -> DataFrame:
    return notes.groupBy("topic").agg(
        views.count().alias("notes"),
        views.sum("id").alias("total"),
        views.max("body").alias("last"),
        views.count_distinct("body").alias("bodies"),
    )


TOPICS = """
    select topic, count(*) as notes, sum(id) as total, max(body) as last,
           count(distinct body) as bodies
    from notes group by topic
"""

HISTORY = (
    INSERT.format(topic="'a'", span="-1, -1"),
    INSERT.format(topic="'b'", span="2001, 2003"),
    "update notes set body = body || 'more' where topic = 'b'",
    "delete from notes where topic = 'a' and id % 2 = 0",
    "update notes set topic = 'c' where topic = 'a' and id > 50",
    "update notes set topic = 'd' where topic = 'c' or id = -1",
    "delete from notes where topic = 'd'",
    INSERT.format(topic="'t' || i % 40", span="3001, 3200"),
)


class Watched:
    """What the views of a test write: the bytes that the driver had, and the runs of tasks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.returned: list[int] = []
        self.runs: list[int] = []
        self.loses_next = False
        check = StagedRows.check

        def checked(rows: StagedRows, database: Database) -> None:
            self._note(rows, database)
            check(rows, database)

        monkeypatch.setattr(StagedRows, "check", checked)

    def _note(self, rows: StagedRows, database: Database) -> None:
        batches = [batch for each in rows._returned.values() for batch in each]
        self.returned.append(sum(batch.nbytes for batch in batches))
        self.runs.append(len(rows.runs))
        if self.loses_next and rows.runs:
            self.loses_next = False
            table = next(iter(rows.staging.tables))
            database.execute(sql.SQL("truncate headwater.{}").format(sql.Identifier(table)))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(limits, "VIEW_DRIVER_BYTES_MAX", RETURNED)
    return Watched(monkeypatch)


def staged(url: str) -> list[tuple[Any, ...]]:
    """The staging tables that have rows."""
    names = execute(url, "select relname from pg_class where relname ~ '^view_.*_stage'")
    return [each for each in names if execute(url, f"select 1 from headwater.{each[0]} limit 1")]


@pytest.mark.parametrize(("function", "truth"), [(places, PLACES), (topics, TOPICS)])
def test_rows_that_are_too_many_for_the_driver(
    function: Any, truth: str, spark: SparkSession, url: str, tmp_path: Path, watched: Watched
) -> None:
    execute(url, *NOTES, INSERT.format(topic="'a'", span="1, 300"))
    key = ["topic", "place"] if function is places else ["topic"]
    view = define(function, key=key, name="shown")
    with views_running(spark, url, Lake(str(tmp_path / "lake"), spark), view):
        assert equals(url, "shown", truth)
        (build,) = watched.runs
        assert build
        for statement in HISTORY:
            execute(url, statement)
            assert equals(url, "shown", truth), statement
        # It was computed by the changes, and never built again.
        assert execute(url, "select generation from headwater.views") == [(1,)]
        assert staged(url) == []
        # As after a crash of the server: the transaction is not made with a part of the rows.
        watched.loses_next = True
        execute(url, INSERT.format(topic="'e'", span="4001, 4300"))
        assert equals(url, "shown", truth)
    assert not watched.loses_next
    assert max(watched.returned) <= RETURNED
    assert {bool(runs) for runs in watched.runs[1:]} == {True, False}
    assert execute(url, "select generation from headwater.views") == [(1,)]
    assert staged(url) == []
