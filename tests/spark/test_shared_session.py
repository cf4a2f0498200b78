"""A running pipeline: commands use its Spark, its progress can be followed, it stops in order."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from pyspark.sql import SparkSession

from headwater.client.connection import connect
from headwater.commands.hub_transport import hub_transport
from headwater.commands.output import as_json
from headwater.hub.hub import Hub
from headwater.pipeline.lake.events import last_offset
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.reading.request_server import run_request
from headwater.pipeline.reading.requests import AsOfRequest
from headwater.pipeline.spark import shared_session
from headwater.pipeline.spark.shared_session import PipelineService
from tests.support.lake.processes import free_port, headwater, running
from tests.support.lake.tables import execute, in_lake, logged, make_orders, run_once

pytestmark = pytest.mark.timeout(300)

ROWS = "insert into orders select i, i / 4.0, 'n' || i from generate_series({}, {}) i"

FAR = datetime(2100, 1, 1, tzinfo=UTC)

CONNECTED = """
import sys
from headwater.pipeline.reading.lake import Lake
from datetime import datetime, UTC

lake = Lake.connect(sys.argv[1])
print(type(lake.spark).__module__)
now = datetime.now(UTC)
print(lake.as_of("orders", now).count())
print(lake.as_of("orders", now, key=7).collect()[0].note)
print(lake.history("orders", 7).count())
print(lake.audit(["operation"]).collect()[0].changes)
"""

WRONG_TOKEN = """
import sys
from pyspark.sql import SparkSession

print(SparkSession.builder.remote(f"{sys.argv[1]}/;token=wrong").getOrCreate().range(3).count())
"""


@pytest.fixture
def orders(url: str) -> str:
    make_orders(url)
    return url


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def test_a_running_pipeline(request: pytest.FixtureRequest, orders: str, tmp_path: Path) -> None:
    """One pipeline, as each of its users sees it."""
    lake = Lake(str(tmp_path / "lake"))
    execute(orders, ROWS.format(1, 20))
    assert (
        headwater("pipeline", "snapshot", "orders", "--lake", lake.root, "--url", orders).returncode
        == 0
    )
    asked = ("asof", "orders", FAR.isoformat(), "--lake", lake.root, "--json")
    port, in_folder = free_port(), ("--lake", lake.root)
    with running(orders, lake.root, tmp_path / "log", "--metrics-port", str(port)) as pipeline:
        service = pipeline.service()
        assert modes(lake.root, shared_session.FILE) == [0o700, 0o600]
        assert modes(Path(service.socket).parent, service.socket) == [0o700, 0o600]
        execute(orders, ROWS.format(21, 40), "delete from orders where id > 30")
        pipeline.until(lambda: last_offset(lake.events_path) and in_lake(lake) == logged(orders))
        second = headwater("pipeline", "run", "--once", "--lake", lake.root, "--url", orders)
        assert second.returncode == 1
        assert f"process {service.pid}" in " ".join(second.stderr.split())

        with_pipeline = headwater(*asked)
        assert with_pipeline.returncode == 0, with_pipeline.stderr
        assert len(with_pipeline.stdout.splitlines()) == 30
        refused = headwater("asof", "pears", "2100-01-01", "--lake", lake.root)
        assert (refused.returncode, "has no table pears" in refused.stderr) == (2, True)
        assert "n7" in headwater("history", "orders", "7", "--lake", lake.root).stdout
        assert "delete" in headwater("audit", "--lake", lake.root).stdout

        connected = python(CONNECTED, lake.root)
        assert connected.stdout.splitlines() == [
            "pyspark.sql.connect.session", "30", "n7", "1", "10",
        ], connected.stderr  # fmt: skip
        assert service.connect is not None
        wrong = python(WRONG_TOKEN, service.connect)
        assert wrong.returncode != 0
        assert "UNAUTHENTICATED" in wrong.stderr

        asyncio.run(asyncio.wait_for(_progress_is_live(orders), 60))
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
        assert 'headwater_pipeline_up{stream="events"} 1.0' in metrics
        status = headwater("status", "--url", orders).stdout
        (line,) = (each for each in status.splitlines() if each.split()[:1] == ["events"])
        assert line.split()[:3] == ["events", "running", "nothing"]

        named = json.loads(headwater("status", "--url", orders, *in_folder, "--json").stdout)
        assert named["spark_log"] == f"{lake.root}/_spark.log"
        assert_closed(lake, pipeline.process.pid)
        assert pipeline.stop() == 0, pipeline.log.read_text()
        # Warnings of Spark while it starts do not go to the terminal.
        assert "WARN" in Path(named["spark_log"]).read_text()
        assert "WARN " not in pipeline.log.read_text()
    assert not os.path.exists(f"{lake.root}/{shared_session.FILE}")
    assert not os.path.exists(service.socket)
    assert shared_session.find(lake.root) is None

    # Without it: the rows are the same, nothing is written twice, and the files that a killed
    # pipeline has left are ignored.
    before = files(lake)
    spark: SparkSession = request.getfixturevalue("spark")  # not before: one Spark at a time
    run_once(spark, orders, Lake(lake.root, spark))
    assert (files(lake), in_lake(lake)) == (before, logged(orders))
    stale = PipelineService(1, service.socket, service.connect, service.token)
    Path(lake.root, shared_session.FILE).write_text(json.dumps(_fields(stale)))
    assert shared_session.find(lake.root) is None
    alone = run_request(Lake(lake.root, spark), AsOfRequest("orders", FAR)).to_pylist()
    expected = [as_json(row) for row in alone if row["id"] < 100]
    assert sorted(expected) == sorted(with_pipeline.stdout.splitlines())


def modes(*paths: str | Path) -> list[int]:
    """The modes of a folder and of what is in it, or of any paths."""
    first, *rest = map(Path, paths)
    return [stat.S_IMODE((first / each).lstat().st_mode) for each in (Path(), *rest)]


def assert_closed(lake: Lake, pipeline: int) -> None:
    """The usual umask lets others read what a program makes. Here the folder of the lake is closed
    to them, and so is what the pipeline put in it, wherever it may be moved; so is every file
    elsewhere that the pipeline and those it started have open."""
    assert modes(lake.root) == [0o700]
    made = [
        each
        for name in ("_checkpoints", "_lock", "_service", "_spark.log", "events", "audit")
        for each in (Path(lake.root, name), *Path(lake.root, name).rglob("*"))
    ]
    open_ones = {str(each): oct(mode) for each in made if (mode := modes(each)[0]) & 0o077}
    assert open_ones == {}
    assert [each for each in written_by(pipeline) if reachable(each)] == []


def written_by(pid: int) -> set[Path]:
    """The regular files that a process and its descendants have open for writing."""
    found = set[Path]()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found |= written_by(int(child))
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            flags = int(Path(f"/proc/{pid}/fdinfo/{each.name}").read_text().split()[3], 8)
            path = each.resolve()
            if flags & os.O_ACCMODE and path.is_file():
                found.add(path)
    return found


def reachable(path: Path) -> bool:
    """Whether others can read a file: no folder above it is closed to them."""
    return bool(path.stat().st_mode & 0o004) and all(
        each.stat().st_mode & 0o001 for each in path.parents
    )


def files(lake: Lake) -> list[str]:
    return sorted(str(each) for each in Path(lake.events_path).rglob("*.parquet"))


def _fields(service: PipelineService) -> dict[str, Any]:
    return {name: getattr(service, name) for name in service.__struct_fields__}


async def _progress_is_live(url: str) -> None:
    """The pipeline has captured its own progress: it can be followed like any table."""
    async with Hub(url) as hub, connect("local", transport=hub_transport(hub)) as connection:
        live = connection.live("headwater.pipeline")
        written: int | None = None
        async with aclosing(live.deltas()) as batches:
            async for _ in batches:
                (events,) = (row for row in live.rows if row["name"] == "events")
                if written is None:
                    written = events["changes"]
                    await asyncio.to_thread(execute, url, ROWS.format(101, 105))
                elif events["changes"] == written + 5:
                    return
