"""From `headwater pipeline run` to the first commit, step by step: `python -m benchmarks.start`.

`cold` has no class archive, as on the first run of a machine; `warm` has one. The files of the
packages are in the system's cache in both. The steps are those that the pipeline logs itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import execute, scratch_server
from benchmarks.pipeline import commits, database, pipeline
from benchmarks.processes import Usage

ROUNDS = 3


class Start(NamedTuple):
    """One start: its steps in seconds, and when the first commit was there."""

    steps: dict[str, float]
    seconds: float
    cpu: float


def start(url: str, lake: Path, cache: Path, **settings: str) -> Start:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    began = time.time()
    with pipeline(url, lake, "--json", **settings) as run, Usage(run.pid, 0.05) as usage:
        deadline = began + 120
        while not commits(lake):
            if run.poll() is not None or time.time() > deadline:
                raise RuntimeError(lake.with_name(f"{lake.name}.log").read_text())
            time.sleep(0.02)
        seconds = commits(lake)[0].at - began
        cpu, by = usage.seconds(), usage.by_program()
        print(by)
        time.sleep(0.5)
    return Start(_steps(lake.with_name(f"{lake.name}.log").read_text()), seconds, cpu)


def _steps(log: str) -> dict[str, float]:
    for line in log.splitlines():
        if line.startswith("{") and "The pipeline started: " in line:
            message = json.loads(line)["message"]
            return {name: float(at) for name, at in re.findall(r"(\w+) ([\d.]+) s", message)}
    return {}


def main() -> None:
    kinds = sys.argv[1:] or ["cold", "warm"]
    with scratch_server() as server, tempfile.TemporaryDirectory(prefix="headwater-") as name:
        folder = Path(name)
        url = database(server.url, "start")
        execute(url, "insert into orders (region, status, amount) values (1, 'open', 1)")
        for kind in kinds:
            cache = folder / kind
            cache.mkdir()
            if kind == "warm":
                environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
                command = [sys.executable, "-m", "headwater", "pipeline", "warm"]
                subprocess.run(command, env=environment, check=True)
            for number in range(ROUNDS):
                print(
                    kind,
                    start(url, folder / f"{kind}_{number}", cache),
                    os.getloadavg()[0],
                    flush=True,
                )


if __name__ == "__main__":
    main()
