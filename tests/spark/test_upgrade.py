"""A lake that the release before the restructuring filled is read and continued by this one.

`tests/support/upgrade` says how lake and database were made. Together they show: the checkpoints,
the commits and the file names of the lake are understood, also where the old pipeline was killed
between writing a batch and committing it; requests about the past give the answers that the old
release gave, or the rows that the database had; a streaming view continues without a rebuild.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from headwater import Lake, Position
from headwater.capture.postgres import schema
from headwater.commands.output import as_json, change_as_json
from headwater.database import connect
from headwater.errors import ResyncRequired
from headwater.pipeline.compaction import tables
from headwater.pipeline.jobs.plan import JOBS, views_job
from headwater.pipeline.reading.request_server import run_request
from headwater.pipeline.reading.requests import AuditRequest, LakeRequest, RowHistoryRequest
from headwater.pipeline.replay import replay
from tests.support.lake.tables import execute, in_lake, logged, run_once
from tests.support.lake.truth import in_order, rows_of
from tests.support.mirrors import applied_sql
from tests.support.upgrade import restore, shop


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Lake:
    return Lake(str(restore.extract_lake(tmp_path)), spark)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with restore.restored_database() as url:
        yield url


def documents(lake: Lake, request: LakeRequest) -> list[Any]:
    """The answer, as commands print it."""
    return [json.loads(as_json(row)) for row in run_request(lake, request).to_pylist()]


def moment(copy: dict[str, Any]) -> Position | datetime:
    """When the copy was made: as a time for one of the tables, as a position for the others."""
    if copy["table"] == "orders":
        return datetime.fromisoformat(copy["at"])
    return Position.parse(copy["position"])


def differing(lake: Lake, url: str, *names: str) -> list[str]:
    """The tables and moments of which the lake does not have the rows that the database had."""
    return [
        f"{copy['table']} {copy['name']}"
        for copy in restore.copies(*names)
        if rows_of(lake.as_of(copy["table"], moment(copy)))
        != in_order(restore.rows_of_copy(url, copy))
    ]


def test_requests_about_the_past_have_the_same_answers(lake: Lake, url: str) -> None:
    assert differing(lake, url, "first", "after the gap", "changed", "altered") == []
    for copy in restore.copies("lost"):
        with pytest.raises(ResyncRequired, match="lacks the changes between"):
            lake.as_of(copy["table"], moment(copy))
    answers = restore.facts()["answers"]
    versions = documents(lake, RowHistoryRequest("orders", ("2",)))
    assert versions == [{**each, **dict.fromkeys(ORIGIN)} for each in answers["history"]]
    by = AuditRequest(("user", "table", "operation"))
    assert documents(lake, by) == answers["audit"]


def test_the_log_adds_what_the_lake_lacks(lake: Lake, url: str, spark: SparkSession) -> None:
    assert differing(Lake(lake.root, spark, url=url), url, "left") == []


def test_a_replay_continues_from_its_cursor(lake: Lake, url: str, tmp_path: Path) -> None:
    since = Position.parse(restore.facts()["replay"]["since"])
    whole = Lake(lake.root, lake.spark, url=url)
    changes = [
        json.loads(change_as_json(change, transaction))
        for transaction in replay.emit(whole, "orders", since=since)
        for change in transaction.changes
    ]
    before = restore.facts()["answers"]["replay"]
    assert without_position(changes)[: len(before)] == without_position(before)
    cursor = tmp_path / "cursor"
    cursor.write_text(restore.facts()["replay"]["cursor"])
    rest = replay.emit(whole, "orders", since=since, cursor=cursor)
    seqs = [change.seq for transaction in rest for change in transaction.changes]
    assert seqs == [change["seq"] for change in changes[len(before) :]]


ORIGIN = ("source", "source_position", "source_committed_at")
"""Columns of events that the old release did not have."""


def without_position(changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A transaction's position depends on how far the lake was. The old release knew no origins."""
    return [
        {name: value for name, value in each.items() if name not in ("position", "origin")}
        for each in changes
    ]


def test_the_pipeline_continues_exactly_once(
    lake: Lake, url: str, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    before, leftover = in_lake(lake), unknown_files(lake)
    view = "select generation from headwater.views"
    generation = execute(url, view)

    run_once(spark, url, lake, jobs=(*JOBS, views_job(list(shop.hw.views.values()))))

    assert "of the pipeline: " not in caplog.text
    after = in_lake(lake)
    check_events(url, before, after)
    # The file that the old release wrote and did not commit stays until it is vacuumed.
    assert len(leftover) == 1
    assert unknown_files(lake) == leftover
    assert differing(lake, url, "left") == []
    counted = documents(lake, AuditRequest(("table",)))
    assert sum(each["changes"] for each in counted) == len(after)
    # The view continued where the old release left it, and was not built again.
    assert execute(url, view) == generation
    shown = execute(url, "select region, orders, revenue, largest from revenue order by 1")
    assert shown == execute(url, REVENUE)


def test_events_get_the_columns_of_this_release(lake: Lake, url: str, spark: SparkSession) -> None:
    """They are NULL in the events from before, also after files of both releases were joined."""
    before, position = len(in_lake(lake)), "0-1-4711"
    asyncio.run(upgrade(url))
    applied = applied_sql(position, "2026-11-18T09:30:00Z")
    execute(url, f"begin; update orders set amount = amount + 1 where id = 2; {applied}; commit")
    run_once(spark, url, lake)
    for _ in range(2):
        rows = DeltaTable(lake.events_path).to_pyarrow_table().sort_by("seq")
        assert {*ORIGIN} <= {*rows.column_names}
        assert rows.slice(0, before).column("source").null_count == before
        assert rows.column("source_position").drop_null().to_pylist() == [position]
        traced = lake.events().where("source = 'shop'").select("table_name", "source_position")
        assert [tuple(row) for row in traced.collect()] == [("orders", position)]
        counted = documents(lake, AuditRequest(("source",)))
        assert {each["source"]: each["changes"] for each in counted}["shop"] == 1
        list(tables.compact(lake.root, lambda: spark))


async def upgrade(url: str) -> None:
    async with await connect(url, purpose="test") as connection:
        await schema.install(connection)


def check_events(url: str, before: list[Any], after: list[Any]) -> None:
    """Each change of the log is one event, and no event from before has changed."""
    assert after[: len(before)] == before
    # The view itself writes changes, which may come too late for a run.
    first, last = before[-1][0], after[-1][0]
    assert after[len(before) :] == [row for row in logged(url) if first < row[0] <= last]
    assert last >= restore.facts()["log"][-1][0]


REVENUE = """
    select region, count(*), sum(amount), max(amount) from orders
    where status <> 'cancelled' group by region order by 1
"""


def unknown_files(lake: Lake) -> set[str]:
    """Files that were in no version of the Delta table `events`: others may have been joined."""
    logs = Path(lake.events_path).glob("_delta_log/*.json")
    actions = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    known = {Path(each["add"]["path"]).name for each in actions if "add" in each}
    return {path.name for path in Path(lake.events_path).glob("day=*/*.parquet")} - known
