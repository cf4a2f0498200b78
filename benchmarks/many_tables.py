"""A pipeline over a database with many tables: `python -m benchmarks.many_tables [--large]`.

`headwater pipeline run` in a process of its own: how long until the lake has a snapshot of every
table, and what the pipeline costs at rest afterwards, with streaming views over some of the tables.
At rest means that no row changes, every view is built, and every table has its typed tables. Also
what a look at the catalog costs, and what the lists of a lake with months of snapshots add to a
request.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import psycopg

from benchmarks.measure import Result, report, scratch_server
from benchmarks.pipeline import database, pipeline
from benchmarks.processes import Rest, Usage, at_rest
from benchmarks.views import CONNECTIONS, IDLE, one
from headwater.model import Position
from headwater.pipeline.lake import snapshots
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.reconcile.tables import captured
from headwater.pipeline.snapshots import catalog_marks
from headwater.pipeline.tables.layout import CURRENT, FOLDER

DAYS = 30
ROWS = 10
"""Rows of each table."""
SECONDS_MAX = 3_600.0
"""How long the pipeline may take until it is at rest."""

SNAPSHOTS, VIEWS, TYPED = "snapshots", "views", "typed tables"


class Size(NamedTuple):
    """How much is measured. `seconds` is how long the pipeline is watched at rest, `quiet` how long
    it had no work before that."""

    tables: int
    views: int
    listed: int
    quiet: float
    seconds: float
    settings: Mapping[str, str]


TINY = Size(3, 1, 3, 0.0, 1.0, {"lake_tables": "1 second"})
SMALL = Size(20, 2, 50, 10.0, 10.0, {"lake_tables": "5 seconds"})
# With the settings of a user, who gets the typed tables after a minute. A look for altered tables,
# each 10 s, is a part of the rest.
LARGE = Size(1_000, 30, 5_000, 75.0, 30.0, {})


def run(*, large: bool = False, tiny: bool = False) -> list[Result]:
    size = TINY if tiny else LARGE if large else SMALL
    with scratch_server() as server, tempfile.TemporaryDirectory(prefix="headwater-") as name:
        folder, url = Path(name), database(server.url, "many")
        create_tables(url, size.tables - 1)  # `orders` is one, too
        return [
            *_pipeline(url, folder, size),
            Result(
                f"a look at the catalog of {size.tables:,} tables",
                f"{_timed(lambda: catalog_marks.present(url)) * 1e3:.0f} ms",
            ),
            _lists(folder, size.listed),
        ]


def create_tables(url: str, count: int) -> None:
    """Captured tables of a few small rows each."""
    with psycopg.connect(url, autocommit=True) as connection:
        for number in range(count):
            name = f"t{number}"
            connection.execute(
                f"create table {name} (id int primary key, region text, amount numeric)".encode()
            )
            connection.execute(
                f"insert into {name} select i, 'r' || i % 5, i"
                f" from generate_series(1, {ROWS}) i".encode()
            )
            connection.execute("select headwater.enable_reactivity(%s)", [name])


# ------------------------------------------------------------------------ the pipeline


class Run(NamedTuple):
    """One run: when each stage was reached, in seconds from the start of the process; processor
    seconds until all were; what it used at rest."""

    reached: Mapping[str, float]
    cpu: float
    rest: Rest
    connections: int


def _pipeline(url: str, folder: Path, size: Size) -> Iterator[Result]:
    relations = {relation for relation, _ in captured(url)}
    assert len(relations) == size.tables
    (folder / "shop.py").write_text(IDLE.format(url=url, count=size.views))
    lake = Lake(str(folder / "lake"))
    done = _run(url, lake, relations, size)
    last = {each.relation: each.rows for each in snapshots.load(lake.places)}
    assert sum(last[relation] for relation in relations) == ROWS * (size.tables - 1)
    for number in range(size.views):
        assert one(url, f"select sum(n) from view_{number}") == ROWS
    yield from results(done, size.tables, size.views)


def _run(url: str, lake: Lake, relations: set[int], size: Size) -> Run:
    began, folder = time.monotonic(), Path(lake.root)
    # An archive of classes that is made after a minute would be measured as the rest.
    settings = {"lake_archive": "false", **size.settings}
    with (
        pipeline(url, folder, "--app", "shop:hw", **settings) as process,
        Usage(process.pid) as usage,
        psycopg.connect(url, autocommit=True) as database,
    ):

        def holds(query: str) -> bool:
            return database.execute(query.encode()).fetchone() == (True,)

        has_all = _Snapshots(lake, relations)
        stages: dict[str, Callable[[], bool]] = {
            SNAPSHOTS: has_all,
            VIEWS: lambda: holds(_LIVE.format(count=size.views)),
            TYPED: lambda: holds(_IDLE) and _typed_tables(folder) >= len(relations),
        }
        reached = _reached(process, folder, began, stages)
        cpu = usage.seconds()
        _await_quiet(process, folder, lambda: holds(_IDLE), size.quiet)
        rest = at_rest(process.pid, size.seconds)
        (connections,) = database.execute(CONNECTIONS.encode()).fetchone() or (0,)
    return Run(reached, cpu, rest, connections)


_LIVE = "select count(*) = {count} from headwater.views where state = 'live'"

# The job of the typed tables reports a position after each round over all of them.
_IDLE = """
    select count(*) filter (where name = 'tables' and position is not null) = 1
       and bool_and(state = 'running' and task is null and coalesce(behind_changes, 0) = 0)
    from headwater.pipeline
"""


def _typed_tables(lake: Path) -> int:
    return sum(1 for _ in lake.glob(f"{FOLDER}/*/*/{CURRENT}/_delta_log"))


class _Snapshots:
    """Whether the lake has a snapshot of each relation. Reads the list after a commit only: the
    machine is busy."""

    def __init__(self, lake: Lake, relations: set[int]) -> None:
        self._lake = lake
        self._relations = relations
        self._commits = 0

    def __call__(self) -> bool:
        log = Path(self._lake.places.list, "_delta_log")
        commits = len(os.listdir(log)) if log.is_dir() else 0
        if commits == self._commits:
            return False
        self._commits = commits
        return self._relations <= {each.relation for each in snapshots.load(self._lake.places)}


def _reached(
    process: subprocess.Popen[str],
    folder: Path,
    began: float,
    stages: Mapping[str, Callable[[], bool]],
) -> dict[str, float]:
    """When each of these was true for the first time."""
    reached: dict[str, float] = {}
    while len(reached) < len(stages):
        for name, is_reached in stages.items():
            if name not in reached and is_reached():
                reached[name] = time.monotonic() - began
        _check(process, folder, began, f"reached: {', '.join(reached) or 'nothing'}")
        time.sleep(0.1)
    return reached


def _await_quiet(
    process: subprocess.Popen[str], folder: Path, is_quiet: Callable[[], bool], seconds: float
) -> None:
    """Wait until the pipeline had no work for some seconds."""
    began = since = time.monotonic()
    while time.monotonic() - since < seconds:
        if not is_quiet():
            since = time.monotonic()
        _check(process, folder, began, "it has work all the time")
        time.sleep(0.5)


def _check(process: subprocess.Popen[str], folder: Path, began: float, state: str) -> None:
    if process.poll() is not None or time.monotonic() > began + SECONDS_MAX:
        log = folder.with_name(f"{folder.name}.log").read_text()
        raise RuntimeError(f"the pipeline is not at rest; {state}\n{log[-4000:]}")


def results(done: Run, tables: int, views: int) -> list[Result]:
    load, rest = f"load {os.getloadavg()[0]:.1f}", done.rest
    first, typed = done.reached[SNAPSHOTS], done.reached[TYPED]
    name = f"{tables:,} tables, {views} views at rest:"
    memory = ", ".join(f"{program} {size / 2**20:,.0f} MB" for program, size in rest.memory.items())
    cores = ", ".join(
        f"{program} {100 * share:.1f} %" for program, share in rest.cores.items() if share > 0.0005
    )
    return [
        Result(
            f"start of the process → first snapshot of {tables:,} tables",
            f"{first:.1f} s",
            detail=f"{first / tables * 1e3:.0f} ms a table;"
            f" {views} views live after {done.reached[VIEWS]:.1f} s; {load}",
        ),
        Result(
            "start of the process → typed tables of all",
            f"{typed:.1f} s",
            detail=f"{done.cpu:.0f} s of processor time until then",
        ),
        Result(f"{name} memory", rest.memory_text, detail=memory),
        Result(f"{name} processes", str(rest.processes)),
        Result(f"{name} connections", str(done.connections)),
        Result(f"{name} processor time", rest.cpu_text, detail=f"{cores}; {load}"),
    ]


# ------------------------------------------------------------------------ lists


def _lists(folder: Path, tables: int) -> Result:
    """The time to find the snapshots of one table among those of one, and of many."""
    found = []
    for name, count in (("few", 1), ("many", tables)):
        lake = Lake(str(folder / name))
        snapshots.create(lake.places)
        start = datetime(2026, 1, 1, tzinfo=UTC)
        for day in range(DAYS):
            at = start + timedelta(days=day)
            position = Position("a", day + 1, day + 1)
            number = snapshots.number_of(at)
            made = [
                TableSnapshot(relation, number, position, at, 1, 10, "events")
                for relation in range(count)
            ]
            snapshots.add_to_list(lake.places, made)
        assert len(snapshots.load(lake.places, 0)) == DAYS
        found.append(min(_timed(lambda: snapshots.load(lake.places, 0)) for _ in range(5)))  # noqa: B023
    few, many = found
    return Result(
        f"the snapshots of one table, in a list of {tables:,} tables × {DAYS} days",
        f"{many * 1e3:.0f} ms",
        detail=f"{few * 1e3:.0f} ms in a list of one table",
    )


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    report("Many tables", run(large="--large" in sys.argv))
