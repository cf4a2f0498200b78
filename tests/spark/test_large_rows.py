"""Rows of a megabyte and many of 100 KB, with little memory: each reader takes a bounded part."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from headwater.pipeline.lake.events import last_offset
from headwater.pipeline.reading.lake import Lake
from tests.support.lake.processes import headwater, running
from tests.support.lake.tables import execute

pytestmark = pytest.mark.timeout(500)

MEMORY = {"HEADWATER_LAKE_MEMORY": str(512 * 1024 * 1024)}

MADE = """
    create table large (id int primary key, body text);
    select headwater.enable_reactivity('large');
    insert into large select i, repeat(md5(i::text), 32768) from generate_series(1, 60) i;
    insert into large select i, repeat(md5(i::text), 3277) from generate_series(61, 400) i
"""


def test_large_rows_with_little_memory(url: str, tmp_path: Path) -> None:
    execute(url, MADE)
    lake = Lake(str(tmp_path / "lake"))
    in_lake = ("--lake", lake.root)
    with running(url, lake.root, tmp_path / "log", **MEMORY) as pipeline:
        service = pipeline.service()
        pipeline.until(lambda: last_offset(lake.events_path) is not None)
        taken = headwater("pipeline", "snapshot", "large", *in_lake, "--url", url)
        assert taken.returncode == 0, taken.stderr
        execute(url, "update large set body = body || 'x' where id <= 30")
        rows = headwater("asof", "large", "2100-01-01", *in_lake, "--json")
        assert rows.returncode == 0, rows.stderr + pipeline.log.read_text()
        found = {row["id"]: row["body"] for row in map(json.loads, rows.stdout.splitlines())}
        assert found == expected()
        again = headwater("replay", "large", "--into", "again", *in_lake, "--url", url, **MEMORY)
        assert again.returncode == 0, again.stderr + pipeline.log.read_text()
        counted = "select count(*) from large l join again a using (id) where l.body = a.body"
        assert execute(url, counted) == [(400,)]
        assert pipeline.service() == service
        assert execute(url, "select restarts from headwater.pipeline where name = 'events'") == [
            (0,)
        ]


def expected() -> dict[int, str]:
    made = {}
    for i in range(1, 401):
        text = hashlib.md5(str(i).encode()).hexdigest() * (32768 if i <= 60 else 3277)
        made[i] = text + ("x" if i <= 30 else "")
    return made
