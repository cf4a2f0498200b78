"""What a task does that reads chunks of a table and writes them, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import psycopg
import pyarrow as pa

from headwater.pipeline.snapshots.chunks import Chunk, chunks_of
from headwater.pipeline.snapshots.database_snapshot import database_snapshot
from headwater.pipeline.snapshots.reader import ExportedSnapshot
from headwater.pipeline.snapshots.writer import task
from tests.support.generators.sizes import size

MEMORY = 160_000_000
"""A task takes less, whatever the size of a chunk: a batch that was read, and what waits to be
written."""


class Work(msgspec.Struct, frozen=True):
    exported: ExportedSnapshot
    chunks: list[Chunk]
    path: str


def most_bytes() -> int:
    """The most memory that this process has had."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def work(encoded: bytes) -> None:
    given = msgspec.json.decode(encoded, type=Work)
    number = pa.RecordBatch.from_pydict({"id": [0]})
    write = task(given.exported, given.chunks, 1, given.path, 1)
    before = most_bytes()
    errors = [row["error"] for batch in write(iter([number])) for row in batch.to_pylist()]
    assert errors == [""] * len(given.chunks)
    print(most_bytes() - before)


def test_large_rows_need_bounded_memory(url: str, tmp_path: Path) -> None:
    """Rows of a megabyte, in one chunk. They pass neither through the driver nor through Java."""
    count = size("snapshot_megabytes", 200, large=1200)
    with psycopg.connect(url, autocommit=True) as database:
        database.execute("create table files (id int primary key, content text)")
        database.execute("alter table files alter content set storage external")
        database.execute(
            "insert into files select n, repeat(md5(n::text), 31250)"
            f" from generate_series(1, {count}) n".encode()
        )
        database.execute("select headwater.enable_reactivity('files')")
    with database_snapshot(url, ["files"]) as now:
        chunks = chunks_of(now.tables["files"].source, count * 2_000_000)
        assert len(chunks) == 1
        given = msgspec.json.encode(Work(now.exported, chunks, str(tmp_path)))
        program = "import sys; from tests.integration.pipeline import test_snapshot_writer as t;"
        done = subprocess.run(
            [sys.executable, "-c", f"{program} t.work(sys.stdin.buffer.read())"],
            input=given,
            capture_output=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr.decode()
    assert int(done.stdout) < MEMORY
