"""Debezium's embedded engine (`pydbzengine`) and our pipeline on the same changes, side by side:
`python -m benchmarks.debezium [--large | CHANGES]`.

Both begin when all changes are written, each in a process of its own, and write them to Delta. Our
pipeline starts twice: cold, without an archive of Spark's classes, as on the first run of a
machine, and warm, with one. The engine has no such archive, so all its starts are the same. The
files of all programs are in the system's cache before.

The engine streams from a replication slot over TCP, which it requires. It is no dependency of ours:
HEADWATER_PEERS names the Python that has it (`pip install pydbzengine deltalake pyarrow` in an
environment of its own), else it is this one; without it, our figures stand alone.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import psycopg

from benchmarks import peers
from benchmarks.measure import Result, execute, report, scratch_server
from benchmarks.pipeline import commits, database, pipeline, write_large
from benchmarks.processes import Usage
from benchmarks.start import warm_cache

CHANGES, LARGE = 100_000, 1_000_000

ENGINE = """
import json, os, sys, time
from pathlib import Path

host, port, name, folder, expected, began = sys.argv[1:]
began = float(began)
import pyarrow as pa
from deltalake import write_deltalake
from pydbzengine import BasePythonChangeHandler, DebeziumJsonEngine

class Handler(BasePythonChangeHandler):
    first, rows = None, 0

    def handleJsonBatch(self, records):
        rows = [(str(r.destination()), str(r.key()), str(r.value())) for r in records]
        table = pa.table({n: [r[i] for r in rows] for i, n in enumerate(("t", "key", "value"))})
        write_deltalake(folder + "/lake", table, mode="append")
        self.first = self.first or time.time() - began
        self.rows += len(rows)
        if self.rows >= int(expected):
            done = {"first": self.first, "seconds": time.time() - began, "rows": self.rows}
            Path(folder, "done.part").write_text(json.dumps(done))
            os.rename(folder + "/done.part", folder + "/done")

DebeziumJsonEngine(properties={
    "name": "peer", "topic.prefix": "peer",
    "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
    "database.hostname": host, "database.port": port, "database.user": "postgres",
    "database.password": "none", "database.dbname": name, "plugin.name": "pgoutput",
    "slot.name": "peer", "publication.name": "peer", "publication.autocreate.mode": "disabled",
    "table.include.list": "public.orders", "snapshot.mode": "no_data",
    "offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
    "offset.storage.file.filename": folder + "/offsets", "offset.flush.interval.ms": "1000",
    "schema.history.internal": "io.debezium.storage.file.history.FileSchemaHistory",
    "schema.history.internal.file.filename": folder + "/schemas",
    "key.converter.schemas.enable": "false", "value.converter.schemas.enable": "false",
    "max.batch.size": "20000", "max.queue.size": "80000", "poll.interval.ms": "50",
}, handler=Handler()).run()
"""


READ_FILES = """
from importlib.util import find_spec
from pathlib import Path

import jpype

folders = [Path(find_spec(name).origin).parent for name in ("pydbzengine", "deltalake", "pyarrow")]
for folder in [*folders, Path(jpype.getDefaultJVMPath()).parents[1]]:
    for path in folder.rglob("*"):
        if path.is_file():
            path.read_bytes()
"""


class Run(NamedTuple):
    """Seconds from the start of the process to the first batch and to the last; changes; processor
    seconds."""

    first: float
    seconds: float
    rows: int
    cpu: float

    @property
    def rate(self) -> float:
        return self.rows / self.seconds

    @property
    def cpu_per_million(self) -> float:
        return self.cpu / self.rows * 1e6


def ours(url: str, lake: Path, cache: Path, changes: int) -> Run:
    cache.mkdir(exist_ok=True)
    began = time.time()
    with (
        pipeline(url, lake, cache=cache, lake_interval="0 seconds") as run,
        Usage(run.pid) as usage,
    ):
        while sum(commit.rows for commit in commits(lake)) < changes:
            if run.poll() is not None or time.time() - began > 600:
                raise RuntimeError(lake.with_name(f"{lake.name}.log").read_text())
            time.sleep(0.05)
        cpu = usage.seconds()
    made = commits(lake)
    rows = sum(commit.rows for commit in made)
    assert rows == changes, f"{rows} of {changes} changes are in the lake"
    return Run(made[0].at - began, made[-1].at - began, rows, cpu)


def debezium(address: str, name: str, folder: Path, changes: int) -> Run:
    folder.mkdir()
    done = folder / "done"
    began = time.time()
    arguments = [address, "5432", name, str(folder), str(changes), str(began)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [peers.python(), "-c", ENGINE, *arguments], stdout=log, stderr=log, cwd=folder
        )
        try:
            with Usage(process.pid) as usage:
                while not done.exists():
                    if process.poll() is not None or time.time() - began > 600:
                        raise RuntimeError((folder / "log").read_text()[-2000:])
                    time.sleep(0.05)
                cpu = usage.seconds()
        finally:
            process.kill()
            process.wait()
    found = msgspec.json.decode(done.read_bytes())
    # The engine promises each change at least once. One run wrote three more.
    assert found["rows"] >= changes, f"{found['rows']} of {changes} changes were written"
    return Run(found["first"], found["seconds"], found["rows"], cpu)


def _address() -> str:
    """A loopback address that no other server of this machine listens on, most probably."""
    return f"127.{os.getpid() % 250 + 1}.{random.randrange(1, 250)}.{random.randrange(1, 250)}"


def _open_tcp(url: str) -> None:
    """Let users of this machine connect over TCP: the server is a scratch one."""
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute("show hba_file").fetchone()
        assert row is not None
        path = Path(row[0])
        path.write_text(
            "host all all 127.0.0.0/8 trust\nhost replication all 127.0.0.0/8 trust\n"
            + path.read_text()
        )
        connection.execute("select pg_reload_conf()")


def run(*, large: bool = False, changes: int | None = None) -> list[Result]:
    changes = changes or (LARGE if large else CHANGES)
    address = _address()
    with (
        scratch_server(listen_addresses=address) as server,
        tempfile.TemporaryDirectory(prefix="headwater-") as name,
    ):
        folder, url = Path(name), database(server.url, "beside")
        _open_tcp(url)
        has_peer = peers.has("pydbzengine")
        if has_peer:
            execute(
                url,
                "create publication peer for table orders",
                "select pg_create_logical_replication_slot('peer', 'pgoutput')",
            )
        write_large(url, changes)
        execute(url, "vacuum analyze headwater.log", "checkpoint")
        caches = {"cold": folder / "empty", "warm": warm_cache(folder / "warm")}
        own = {
            kind: ours(url, folder / f"lake_{kind}", cache, changes + 1)
            for kind, cache in caches.items()
        }
        peer = None
        if has_peer:
            subprocess.run([peers.python(), "-c", READ_FILES], check=True)
            peer = debezium(address, "beside", folder / "debezium", changes)
    return results(own, peer)


def results(own: Mapping[str, Run], peer: Run | None) -> list[Result]:
    """Our runs by the kind of their start, and the engine's."""
    return [line for kind, run in own.items() for line in _compared(kind, run, peer)]


def _compared(kind: str, own: Run, peer: Run | None) -> Iterator[Result]:
    load = f"load {os.getloadavg()[0]:.1f}"
    missing = "pydbzengine is not installed: pip install pydbzengine deltalake pyarrow"

    def line(name: str, ours: float, theirs: float | None, unit: str) -> Result:
        value = f"{ours:,.1f} {unit}"
        if theirs is None:
            return Result(f"{name}, {kind}", value, "", None, missing)
        detail = f"Debezium {theirs:,.1f} {unit}, cold or warm; ratio {ours / theirs:.2f}; {load}"
        return Result(f"{name}, {kind}", value, "beside Debezium", None, detail)

    yield line("start → first batch in Delta", own.first, peer and peer.first, "s")
    yield line(f"{own.rows:,} changes → Delta", own.rate, peer and peer.rate, "changes/s")
    yield line(
        "processor time of a million changes",
        own.cpu_per_million,
        peer and peer.cpu_per_million,
        "s",
    )


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[1:] if each.isdigit()]
    report(
        "Beside Debezium",
        run(large="--large" in sys.argv, changes=numbers[0] if numbers else None),
    )
