"""From `headwater pipeline run` to the first commit, step by step:
`python -m benchmarks.start [--large] [cold|warm …]`.

`cold` has no archive of Spark's classes, as on the first run of a machine; `warm` has one. The
files of the packages are in the system's cache in both. The steps are those that the pipeline logs
itself, each in seconds since the process started.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import Result, execute, report, scratch_server
from benchmarks.pipeline import commits, database, pipeline
from benchmarks.processes import Usage

KINDS = ("cold", "warm")
WARM_SECONDS = 4.0
"""The target for the first commit of a warm start."""


class Start(NamedTuple):
    """One start: its steps in seconds, and when the first commit was there; processor seconds, in
    all and by program."""

    steps: Mapping[str, float]
    seconds: float
    cpu: float
    programs: Mapping[str, float]


def start(url: str, lake: Path, cache: Path, **settings: str) -> Start:
    began = time.time()
    with (
        pipeline(url, lake, "--json", cache=cache, **settings) as run,
        Usage(run.pid, 0.05) as usage,
    ):
        deadline = began + 120
        while not commits(lake):
            if run.poll() is not None or time.time() > deadline:
                raise RuntimeError(lake.with_name(f"{lake.name}.log").read_text())
            time.sleep(0.02)
        seconds = commits(lake)[0].at - began
        cpu, programs = usage.seconds(), usage.by_program()
        time.sleep(0.5)
    log = lake.with_name(f"{lake.name}.log").read_text()
    return Start(_steps(log), seconds, cpu, programs)


def _steps(log: str) -> dict[str, float]:
    for line in log.splitlines():
        if line.startswith("{") and "The pipeline started: " in line:
            message = json.loads(line)["message"]
            return {name: float(at) for name, at in re.findall(r"(\w+) ([\d.]+) s", message)}
    return {}


def warm_cache(folder: Path) -> Path:
    """A folder for caches with an archive of Spark's classes, which takes a minute to make. The
    files of the packages are in the system's cache afterwards."""
    folder.mkdir()
    subprocess.run(
        [sys.executable, "-m", "headwater", "pipeline", "warm"],
        env=os.environ | {"XDG_CACHE_HOME": str(folder)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return folder


def run(*, large: bool = False, tiny: bool = False, kinds: Sequence[str] = KINDS) -> list[Result]:
    rounds = 1 if tiny else 5 if large else 3
    with scratch_server() as server, tempfile.TemporaryDirectory(prefix="headwater-") as name:
        folder, url = Path(name), database(server.url, "start")
        execute(url, "insert into orders (region, status, amount) values (1, 'open', 1)")
        # First, also for the cold starts: they must not be the ones that read from the disk.
        warm = warm_cache(folder / "warm")
        found = list[Result]()
        for kind in kinds:
            starts = list[Start]()
            for number in range(rounds):
                cache = warm if kind == "warm" else folder / f"cache_{number}"
                cache.mkdir(exist_ok=True)
                starts.append(start(url, folder / f"{kind}_{number}", cache))
            found.append(result(kind, starts))
        return found


def result(kind: str, starts: Sequence[Start]) -> Result:
    """The median of the starts with its steps, and the times of all."""
    middle = sorted(starts, key=lambda each: each.seconds)[len(starts) // 2]
    steps = ", ".join(f"{name} {at:.2f}" for name, at in middle.steps.items())
    programs = ", ".join(f"{name} {cpu:.1f}" for name, cpu in middle.programs.items() if cpu > 0.1)
    times = ", ".join(f"{each.seconds:.1f}" for each in starts)
    is_warm = kind == "warm"
    return Result(
        f"start → first commit, {kind}",
        f"{middle.seconds:.2f} s",
        f"at most {WARM_SECONDS:g} s" if is_warm else "",
        middle.seconds <= WARM_SECONDS if is_warm else None,
        f"steps: {steps}; processor time {middle.cpu:.1f} s ({programs});"
        f" all starts: {times}; load {os.getloadavg()[0]:.1f}",
    )


if __name__ == "__main__":
    chosen = [each for each in sys.argv[1:] if each in KINDS] or KINDS
    report(
        "The start of the pipeline, in seconds",
        run(large="--large" in sys.argv, kinds=chosen),
    )
