"""Rows of a megabyte, many of 100 KB, and thousands of 30 KB in one file, with little memory: each
reader takes a bounded part."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from deltalake import DeltaTable

from headwater.pipeline.lake.events import last_offset
from headwater.pipeline.reading.lake import Lake
from tests.support.lake.processes import headwater, running
from tests.support.lake.tables import execute

pytestmark = pytest.mark.timeout(500)

MEMORY = {"HEADWATER_LAKE_MEMORY": str(512 * 1024 * 1024)}

MADE = """
    create table large (id int primary key, body text);
    create table many (id int primary key, body text);
    select headwater.enable_reactivity('large'), headwater.enable_reactivity('many');
    insert into large select i, repeat(md5(i::text), 32768) from generate_series(1, 60) i;
    insert into large select i, repeat(md5(i::text), 3277) from generate_series(61, 400) i;
    insert into many select i, repeat(md5(i::text), 938) from generate_series(1, 4200) i
"""

BATCH_ROWS = 4096
"""The rows that Spark's reader of Parquet files takes at a time, unless it has another setting."""


def test_large_rows_with_little_memory(url: str, tmp_path: Path) -> None:
    execute(url, MADE)
    lake = Lake(str(tmp_path / "lake"))
    in_lake = ("--lake", lake.root)
    with running(url, lake.root, tmp_path / "log", **MEMORY) as pipeline:
        service = pipeline.service()
        pipeline.until(lambda: last_offset(lake.events_path) is not None)
        taken = headwater("pipeline", "snapshot", "large", "many", *in_lake, "--url", url)
        assert taken.returncode == 0, taken.stderr
        for path in (lake.events_path, lake.places.rows):
            assert most_rows(path) > BATCH_ROWS
        execute(url, "update large set body = body || 'x' where id <= 30")
        for table, written in (("large", dict(large())), ("many", dict(many()))):
            rows = headwater("asof", table, "2100-01-01", *in_lake, "--json")
            assert rows.returncode == 0, rows.stderr + pipeline.log.read_text()
            found = {row["id"]: row["body"] for row in map(json.loads, rows.stdout.splitlines())}
            assert found == written
            into = f"{table}_again"
            again = headwater("replay", table, "--into", into, *in_lake, "--url", url, **MEMORY)
            assert again.returncode == 0, again.stderr + pipeline.log.read_text()
            counted = f"select count(*) from {table} l join {into} a using (id, body)"
            assert execute(url, counted) == [(len(written),)]
        assert pipeline.service() == service
        assert execute(url, "select restarts from headwater.pipeline where name = 'events'") == [
            (0,)
        ]


def most_rows(path: str) -> int:
    """Those of the largest file of a Delta table."""
    files = DeltaTable(path).get_add_actions(flatten=True)
    return int(max(files["num_records"].to_pylist()))


def large() -> Iterator[tuple[int, str]]:
    for i in range(1, 401):
        text = body(i, 32768 if i <= 60 else 3277)
        yield i, text + ("x" if i <= 30 else "")


def many() -> Iterator[tuple[int, str]]:
    for i in range(1, 4201):
        yield i, body(i, 938)


def body(id: int, times: int) -> str:
    return hashlib.md5(str(id).encode()).hexdigest() * times
