"""Debezium's embedded engine (`pydbzengine`) and our pipeline on the same changes, side by side:
`python -m benchmarks.debezium [CHANGES]`.

Both begin when all changes are written, each in a process of its own, and write them to Delta. The
engine streams from a replication slot over TCP, which it requires. It is no dependency of ours:
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
from pathlib import Path
from typing import NamedTuple

import msgspec
import psycopg

from benchmarks import peers
from benchmarks.measure import Result, execute, report, scratch_server
from benchmarks.pipeline import commits, database, pipeline, write_large
from benchmarks.processes import Usage

CHANGES = 100_000

ENGINE = """
import json, os, sys, time
from pathlib import Path

began = time.time()
host, port, name, folder, expected = sys.argv[1:]
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


def ours(url: str, lake: Path, changes: int) -> Run:
    began = time.time()
    with pipeline(url, lake, lake_interval="0 seconds") as run, Usage(run.pid) as usage:
        while sum(commit.rows for commit in commits(lake)) < changes:
            if run.poll() is not None or time.time() - began > 600:
                raise RuntimeError(lake.with_name(f"{lake.name}.log").read_text())
            time.sleep(0.05)
        cpu = usage.seconds()
    made = commits(lake)
    rows = sum(commit.rows for commit in made)
    return Run(made[0].at - began, made[-1].at - began, rows, cpu)


def debezium(address: str, name: str, folder: Path, changes: int) -> Run:
    folder.mkdir()
    done = folder / "done"
    arguments = [address, "5432", name, str(folder), str(changes)]
    began = time.time()
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


def run(changes: int = CHANGES) -> list[Result]:
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
        own = ours(url, folder / "ours", changes + 1)
        peer = debezium(address, "beside", folder / "debezium", changes) if has_peer else None
    return list(results(own, peer))


def results(own: Run, peer: Run | None) -> list[Result]:
    load = f"load {os.getloadavg()[0]:.1f}"
    missing = "pydbzengine is not installed: pip install pydbzengine deltalake pyarrow"

    def compared(name: str, ours: float, theirs: float | None, unit: str) -> Result:
        value = f"{ours:,.1f} {unit}"
        if theirs is None:
            return Result(name, value, "", None, missing)
        detail = f"Debezium {theirs:,.1f} {unit}; ratio {ours / theirs:.2f}; {load}"
        return Result(name, value, "beside Debezium", None, detail)

    return [
        compared("start → first batch in Delta", own.first, peer and peer.first, "s"),
        compared(f"{own.rows:,} changes → Delta", own.rate, peer and peer.rate, "changes/s"),
        compared(
            "processor time of a million changes",
            own.cpu_per_million,
            peer and peer.cpu_per_million,
            "s",
        ),
    ]


if __name__ == "__main__":
    report("Beside Debezium", run(int(sys.argv[1]) if len(sys.argv) > 1 else CHANGES))
