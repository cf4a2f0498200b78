"""The past of single rows without Spark: `python -m benchmarks.past [--large]`.

A lake of ten tables with many events is written directly, by the functions that the pipeline uses,
and joined as the pipeline joins files. Then a row's state and history are asked for by commands
(their start included), and over a gateway. Each answer is compared with what was written.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.measure import Result, execute, percentile, report, scratch_server
from headwater.capture.postgres import schema
from headwater.database import connect
from headwater.pipeline.compaction import tables as compaction
from headwater.pipeline.lake import delta, shapes
from headwater.pipeline.lake.events import STORED_EVENTS
from headwater.pipeline.lake.parquet import write_files
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.planning import Planner
from headwater.testing.gateway_process import Served, serving

TABLES = 10
DAYS = 30
LAST_XID = 700
START = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(days=DAYS)


class Size(msgspec.Struct, frozen=True):
    events: tuple[int, ...]
    samples: int
    commits: int
    """In which the events are written."""


TINY = Size((2_000,), samples=1, commits=3)
SMALL = Size((10_000, 200_000), samples=5, commits=40)
LARGE = Size((10_000, 1_000_000, 5_000_000), samples=9, commits=200)


def run(*, large: bool = False, tiny: bool = False) -> list[Result]:
    size = TINY if tiny else LARGE if large else SMALL
    results = []
    for events in size.events:
        with scratch_server() as server, tempfile.TemporaryDirectory() as folder:
            lake = Lake(server.url, f"{folder}/lake", events, size.commits)
            results += measure(lake, Path(folder), size.samples)
    return results


class Lake:
    """A lake whose tables are enabled in a database without rows."""

    def __init__(self, url: str, root: str, events: int, commits: int) -> None:
        self.url, self.root, self.events = url, root, events
        asyncio.run(_install(url))
        for n in range(TABLES):
            columns = "id bigint primary key, amount numeric(12, 2), note text"
            execute(url, f"create table t{n} ({columns})")
            execute(url, f"select headwater.enable_reactivity('t{n}')")
        self.tables = [(each.table.id, each.table.oid) for each in self._shapes()]
        self.rng = np.random.default_rng(1)
        self.ids = self.rng.integers(1, max(events // 200, 10), events)
        self.which = self.rng.integers(0, TABLES, events)
        self._write(commits)
        compaction_files = list(compaction.compact(root, _no_spark))
        self.files = next(c.files_after for c in compaction_files if c.table == "events")

    def _shapes(self) -> list[shapes.Shape]:
        path = f"{self.root}/shapes"
        shapes.record(path, self.url)
        found = shapes.load(path)
        return sorted(found, key=lambda each: each.table.name)[:TABLES]

    def _write(self, commits: int) -> None:
        path = f"{self.root}/events"
        table = delta.create(path, STORED_EVENTS, ["day"])
        with closing(Planner(self.url)) as planner:
            end = planner.now()
        offset = msgspec.json.encode(Offset(end).to_dict()).decode()
        bounds = np.linspace(0, self.events, commits + 1).astype(int)
        for first, last in pairwise(bounds):
            rows = self._rows(first, last, f"{end.log}-{LAST_XID}:{LAST_XID}:")
            delta.commit(table, write_files(path, rows, ["day"]), {delta.OFFSET: offset})

    def _rows(self, first: int, last: int, position: str) -> pa.Table:
        seq = np.arange(first, last, dtype=np.int64)
        at = pa.array(self.micros(seq), pa.timestamp("us", tz="UTC"))
        ids, which = pa.array(self.ids[first:last]), self.which[first:last]
        key = pc.binary_join_element_wise('{"id":', ids.cast(pa.string()), "}", "")
        noise = pa.array(self.rng.integers(0, 10**12, last - first)).cast(pa.string())
        columns = {
            "seq": pa.array(seq + 1),
            "xid": pa.array(seq * (LAST_XID - 10) // self.events + 3),
            "at": at,
            "committed_at": at,
            "position": pa.repeat(position, len(seq)),
            "schema_name": pa.repeat("public", len(seq)),
            "table_name": pc.binary_join_element_wise("t", pa.array(which).cast(pa.string()), ""),
            "relation": pa.array(np.array([oid for _, oid in self.tables])[which]),
            "shape": pa.array(np.array([shape for shape, _ in self.tables])[which]),
            "op": pa.repeat("update", len(seq)),
            "key": key,
            "before": _image(ids, noise, seq),
            "after": _image(ids, noise, seq + 1),
            "user_id": pa.repeat("ann", len(seq)),
            "day": at.cast(pa.date32()),
        }
        absent = pa.nulls(len(seq))
        arrays = [columns.get(field.name, absent).cast(field.type) for field in STORED_EVENTS]
        return pa.Table.from_arrays(arrays, schema=STORED_EVENTS)

    def micros(self, seq: Any) -> Any:
        return int(START.timestamp() * 1e6) + seq * (DAYS * 86_400_000_000 // self.events)

    def changes(self, key: int) -> Any:
        """The numbers of the changes of a row of `t3`."""
        return np.nonzero((self.ids == key) & (self.which == 3))[0]


async def _install(url: str) -> None:
    connection = await connect(url, purpose="benchmark")
    await schema.install(connection)
    await connection.close()


def _image(ids: Any, noise: Any, seq: Any) -> Any:
    amount = pa.array(seq).cast(pa.string())
    parts = ('{"id":', ids.cast(pa.string()), ',"amount":', amount, '.50,"note":"note ', noise)
    return pc.binary_join_element_wise(*parts, '"}', "")


def _no_spark() -> Any:
    raise AssertionError("small files are joined without Spark")


# ------------------------------------------------------------------------ measuring


class Took(msgspec.Struct, frozen=True):
    """Milliseconds on the clock, and of processor time of the command or the gateway. The latter
    says what the first is on a quiet machine."""

    wall: float
    cpu: float


class Watch:
    """Begins to measure when it is made."""

    def __init__(self, cpu: Callable[[], float]) -> None:
        self._cpu = cpu
        self._begun = time.perf_counter(), cpu()

    def took(self) -> Took:
        wall, cpu = time.perf_counter() - self._begun[0], self._cpu() - self._begun[1]
        return Took(wall * 1000, cpu * 1000)


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(lake: Lake, folder: Path, samples: int) -> list[Result]:
    keys = [int(key) for key in lake.rng.choice(lake.ids[lake.which == 3], samples)]
    detail = f"{lake.events:,} events in {lake.files} files, load {os.getloadavg()[0]:.0f}"
    results = []

    def add(name: str, times: list[Took], target: float) -> None:
        middle = percentile([took.wall for took in times], 0.5)
        cpu = percentile([took.cpu for took in times], 0.5)
        value = f"{middle:.0f} ms p50, {cpu:.0f} ms of processor time"
        results.append(Result(name, value, f"< {target:.0f} ms", middle < target, detail))

    add("headwater asof --key", [command_as_of(lake, key, "--key", str(key)) for key in keys], 500)
    where = [command_as_of(lake, key, "--where", f"id = {key}") for key in keys]
    add("headwater asof --where, the key", where, 500)
    add("headwater history", [command_history(lake, key) for key in keys], 500)
    with (
        serving(lake.url, folder, lake_location=lake.root) as served,
        httpx.Client(base_url=served.url, trust_env=False, timeout=60) as client,
    ):
        gateway_history(lake, client, served, keys[0])  # imports what it needs
        add("gateway: /v1/asof", [gateway_as_of(lake, client, served, key) for key in keys], 500)
        add(
            "gateway: /v1/history",
            [gateway_history(lake, client, served, key) for key in keys],
            500,
        )
    return results


def command(lake: Lake, *arguments: str) -> tuple[Took, list[Any]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_")}
    watch = Watch(_of_children)
    done = subprocess.run(
        [sys.executable, "-m", "headwater", *arguments, "--lake", lake.root, "--json"],
        capture_output=True,
        text=True,
        check=True,
        env=environment | {"HEADWATER_URL": lake.url},
    )
    took = watch.took()
    return took, [json.loads(line) for line in done.stdout.splitlines()]


def command_as_of(lake: Lake, key: int, *options: str) -> Took:
    change = lake.changes(key)[-1]
    at = START.fromtimestamp(int(lake.micros(change)) / 1e6, UTC) + timedelta(milliseconds=1)
    took, rows = command(lake, "asof", "t3", at.isoformat(), *options)
    assert [row["amount"] for row in rows] == [float(change + 1) + 0.5], rows
    return took


def command_history(lake: Lake, key: int) -> Took:
    took, rows = command(lake, "history", "t3", str(key))
    assert [row["seq"] for row in rows] == [0, *(lake.changes(key) + 1)]
    return took


def gateway_as_of(lake: Lake, client: httpx.Client, served: Served, key: int) -> Took:
    change = lake.changes(key)[-1]
    at = START.fromtimestamp(int(lake.micros(change)) / 1e6, UTC) + timedelta(milliseconds=1)
    watch = Watch(served.cpu)
    answer = client.get("/v1/asof/t3", params={"key": key, "at": at.isoformat()})
    took = watch.took()
    assert answer.json()["row"]["amount"] == f"{change + 1}.50", answer.text
    return took


def gateway_history(lake: Lake, client: httpx.Client, served: Served, key: int) -> Took:
    watch = Watch(served.cpu)
    answer = client.get("/v1/history/t3", params={"key": key})
    took = watch.took()
    found = [version["seq"] for version in answer.json()["versions"]]
    assert found[:50] == [*(lake.changes(key) + 1)[::-1], 0][:50]
    return took


if __name__ == "__main__":
    report("The past of a row, without Spark", run(large="--large" in sys.argv))
