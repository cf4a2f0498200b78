"""The time of other programs for the same work, compared with `benchmarks/pipeline.py`.

They are not dependencies of ours: each runs in a process of its own, with the Python that
HEADWATER_PEERS names (`pip install 'dlt[postgres,deltalake,sql_database]'` in an environment of its
own), else with this one. A program that is not installed there is reported.

dlt reads the change log as a table, by `seq`, and writes Delta. It misses changes that commit late.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.measure import Result

DLT = """
import os, sys
import dlt
from dlt.sources.sql_database import sql_table

url, folder = sys.argv[1:]
source = sql_table(
    credentials=url, schema="headwater", table="changes", backend="pyarrow", chunk_size=50_000,
    incremental=dlt.sources.incremental("seq"), reflection_level="minimal",
    included_columns=["seq", "at", "table_name", "op", "before", "after", "user_id"],
)
pipeline = dlt.pipeline(
    "peer", pipelines_dir=folder + "/state",
    destination=dlt.destinations.filesystem("file://" + folder + "/lake"), dataset_name="events",
)
pipeline.run(source, table_name="changes", table_format="delta", write_disposition="append")
print(sum(pipeline.last_trace.last_normalize_info.row_counts.get(name, 0) for name in ["changes"]))
"""


def python() -> str:
    return os.environ.get("HEADWATER_PEERS", sys.executable)


def has(module: str) -> bool:
    check = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python(), "-c", check], check=False).returncode == 0


def dlt(url: str, folder: Path, changes: int) -> Result:
    """From the start of its process to its end, everything in one run."""
    name = f"{changes:,} changes → Delta by dlt, sql_database on the log"
    if not has("dlt"):
        return Result(name, "not installed", "beside ours")
    folder.mkdir()
    plain = url.replace("postgresql://", "postgresql+psycopg2://")
    settings = {"DLT_DATA_DIR": str(folder), "RUNTIME__DLTHUB_TELEMETRY": "false"}
    started = time.time()
    done = subprocess.run(
        [python(), "-c", DLT, plain, str(folder)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    seconds = time.time() - started
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return Result(name, "failed", "beside ours", None, reason[:120])
    rows = int(done.stdout.split()[-1])
    return Result(name, f"{rows / seconds:,.0f} changes/s", "beside ours", None, f"{rows:,} rows")
