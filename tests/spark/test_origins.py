"""Mirrored changes have their source, its position and its commit time in streams and in the lake.

A lake of an earlier release, which lacks these columns, is in `test_upgrade`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

from headwater.admin.history import _version
from headwater.commands.cli import app
from headwater.commands.lake.rows import versions_view
from headwater.model import Origin
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.reading.request_server import run_request
from headwater.pipeline.reading.requests import AuditRequest, RowHistoryRequest
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.planning import Planner
from tests.support.lake.tables import execute, make_orders, run_once
from tests.support.mirrors import applied_sql, mirror_sql

pytestmark = pytest.mark.timeout(300)

AT = datetime(2026, 11, 18, 9, 30, 0, 123456, UTC)
NAMES = ("source", "source_position", "source_committed_at")


@pytest.fixture
def lake(tmp_path: Path, spark: SparkSession) -> Lake:
    return Lake(str(tmp_path / "lake"), spark)


@pytest.fixture
def shop(url: str) -> str:
    """`orders` is a mirror, `notes` is not."""
    make_orders(url)
    execute(
        url,
        mirror_sql("orders"),
        "create table notes (id int primary key)",
        "select headwater.enable_reactivity('notes')",
    )
    return url


def write(url: str) -> None:
    execute(
        url,
        "insert into notes values (1)",
        f"begin; insert into orders values (1, 1, 'a'); {applied_sql('1.100', AT.isoformat())};"
        " commit",
        f"begin; update orders set amount = 2; {applied_sql('1.200')}; commit",
        "insert into notes values (2)",
    )


FIRST, SECOND = ("shop", "1.100", AT), ("shop", "1.200", None)
EXPECTED = [("notes", None, None, None), ("orders", *FIRST), ("orders", *SECOND),
            ("notes", None, None, None)]  # fmt: skip


def traced(events: DataFrame) -> list[tuple[Any, ...]]:
    """Table and origin of each change, in order."""
    found = events.where("op <> 'reset'").orderBy("seq").select("table_name", *NAMES).toArrow()
    return [tuple(row.values()) for row in found.to_pylist()]


def test_a_read_of_the_log(spark: SparkSession, shop: str) -> None:
    write(shop)
    log = spark.read.format("headwater").option("url", shop)
    assert traced(log.load()) == EXPECTED
    assert traced(log.option("tables", "orders").load()) == EXPECTED[1:3]


def test_the_log_is_joined_only_where_there_are_sources(shop: str) -> None:
    planner = Planner(shop)
    try:
        begin = Offset(planner.beginning())
        assert [each.origins for each in planner.parts(begin, Offset(planner.now()))] == [False]
        write(shop)
        assert [each.origins for each in planner.parts(begin, Offset(planner.now()))] == [True]
    finally:
        planner.close()


def test_the_lake(spark: SparkSession, shop: str, lake: Lake) -> None:
    write(shop)
    run_once(spark, shop, lake)
    assert traced(lake.events()) == EXPECTED
    execute(shop, f"begin; delete from orders; {applied_sql('1.300')}; commit")
    whole = Lake(lake.root, spark, url=shop)
    assert traced(whole.events()) == [*EXPECTED, ("orders", "shop", "1.300", None)]
    changes = [change for each in whole.transactions("orders") for change in each.changes]
    assert [change.origin for change in changes if change.op != "reset"] == [
        Origin(*FIRST), Origin(*SECOND), Origin("shop", "1.300"),
    ]  # fmt: skip


def test_the_history_of_a_row(spark: SparkSession, shop: str, lake: Lake) -> None:
    write(shop)
    run_once(spark, shop, lake)
    versions = run_request(lake, RowHistoryRequest("orders", ("1",))).to_pylist()
    assert [tuple(each[name] for name in NAMES) for each in versions] == [FIRST, SECOND]
    shown = versions_view(versions).plain
    assert "insert  from shop at 1.100" in shown
    assert [_version(each).origin for each in versions] == [Origin(*FIRST), Origin(*SECOND)]
    plain = run_request(lake, RowHistoryRequest("notes", ("1",), plain=True)).to_pylist()
    assert "from" not in versions_view(plain).plain


def test_changes_counted_by_source(spark: SparkSession, shop: str, lake: Lake) -> None:
    write(shop)
    run_once(spark, shop, lake)
    counted = run_request(lake, AuditRequest(("source", "table", "operation"))).to_pylist()
    found = {
        (each["source"], each["table"], each["operation"]): each["changes"] for each in counted
    }
    assert found[None, "notes", "insert"] == 2
    assert found["shop", "orders", "insert"] == found["shop", "orders", "update"] == 1
    assert ("shop", "notes", "insert") not in found


def test_the_command_counts_by_source() -> None:
    assert "source" in CliRunner().invoke(app, ["audit", "--help"]).output
