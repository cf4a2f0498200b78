"""The pipeline is killed many times while six writers overlap, and is stopped at the end: nothing
is lost or doubled.

A few kills by default; `HEADWATER_KILLS=30` for more, `SEED=8123` to repeat the writers'
decisions. Some kills have a fixed place: between the Parquet of a batch and its commit, between its
commit and Spark's record of it, between the events and their roll-up, in a task, and around the
transactions that update and replace a view.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable

from headwater import limits
from headwater.pipeline.lake import delta
from headwater.pipeline.reading.lake import Lake
from tests.support.lake.tables import execute, in_lake, logged, make_orders

SEED = int(os.environ.get("SEED") or random.randrange(10_000))
KILLS = int(os.environ.get("HEADWATER_KILLS") or 2)
WRITERS = 6
AIMED = ("written", "applied", "committed", "applying", "unapplied", "uncounted", "swapping", "")
"""What each kill is aimed at, in turn and from one of them on that SEED says; nothing for a random
moment."""


class Writers:
    """Sessions that write in transactions of random length, and sometimes roll back."""

    def __init__(self, url: str, chance: random.Random) -> None:
        self._url = url
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._write, args=(random.Random(chance.random()),))
            for _ in range(WRITERS)
        ]
        for thread in self._threads:
            thread.start()

    def _write(self, chance: random.Random) -> None:
        with psycopg.connect(self._url) as connection:
            while not self._stop.is_set():
                try:
                    self._transaction(connection, chance)
                except (psycopg.errors.DeadlockDetected, psycopg.errors.UniqueViolation):
                    connection.rollback()

    def _transaction(self, connection: psycopg.Connection, chance: random.Random) -> None:
        for _ in range(chance.randint(1, 5)):
            connection.execute(_statement(chance).encode())
            self._stop.wait(chance.random() * 0.05)
        if chance.random() < 0.15:
            connection.rollback()
        else:
            connection.commit()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)


def _statement(chance: random.Random) -> str:
    key = chance.randint(1, 80)
    return chance.choices(
        [
            f"insert into orders values ({key}, {chance.random():.6f}) on conflict (id) do update"
            " set amount = orders.amount + 1",
            f"update orders set amount = amount + 1 where id % 9 = {key % 9}",
            f"update orders set id = id + 100 where id = {key}",
            f"delete from orders where id in ({key}, {key} + 100)",
            "truncate orders",
        ],
        # A truncate makes the pipeline build its views again: with one in each batch, it would do
        # nothing else.
        [30, 10, 8, 20, 0.05],
    )[0]


@contextmanager
def open_writer(url: str) -> Iterator[None]:
    """One transaction that stays open for the whole run, and commits at its end. In a table of its
    own: a truncate would wait for it, and all writers for the truncate."""
    execute(
        url,
        "create table pears (id bigint primary key)",
        "select headwater.enable_reactivity('pears')",
    )
    with psycopg.connect(url) as connection:
        connection.execute("insert into pears values (1)")
        yield


SHOP = """
from headwater import Headwater, limits, views

hw = Headwater({url!r})
limits.VIEW_DRIVER_BYTES_MAX = {returned}


@hw.view(key="bucket")
def totals(orders):
    return orders.withColumn("bucket", orders["id"] % 7).groupBy("bucket").agg(
        views.count().alias("n"),
        views.sum("amount").alias("total"),
        views.avg("amount").alias("average"),
        views.max("amount").alias("largest"),
        views.count_distinct("amount").alias("different"),
    )


@hw.view(key="id")
def matched(orders, pears):
    return orders.select("id", "amount").join(pears.withColumn("pear", pears["id"]), "id", "left")
"""

MATCHED = """
    select o.id, amount, p.id as pear from orders o left join pears p on p.id = o.id order by 1
"""

TOTALS = """
    select id % 7, count(*), sum(amount), avg(amount), max(amount), count(distinct amount)
    from orders group by 1 order by 1
"""


DUE = "update headwater.views set state = 'due' where state = 'live'"


class Pipeline:
    """`headwater pipeline run` as a process; with a view."""

    def __init__(self, url: str, lake: Lake, log: Path, *, returned: int | None = None) -> None:
        if returned is None:
            returned = limits.VIEW_DRIVER_BYTES_MAX
        (log.parent / "shop.py").write_text(SHOP.format(url=url, returned=returned))
        self._command = [
            sys.executable, "-m", "headwater", "pipeline", "run", "--app", "shop:hw",
            "--lake", lake.root, "--master", "local[2,4]",
        ]  # fmt: skip
        self._lake = lake
        self._log = log

    def start(self, *options: str, crash_at: str = "") -> subprocess.Popen[bytes]:
        environment = dict(os.environ) | {"HEADWATER_LAKE_INTERVAL": "0.2 seconds"}
        if crash_at:
            environment["HEADWATER_FAILPOINT"] = crash_at
        with self._log.open("ab") as output:
            return subprocess.Popen(
                [*self._command, *options],
                env=environment,
                stdout=output,
                stderr=output,
                cwd=self._log.parent,
            )

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        process = self.start("--json")
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def version(self) -> int:
        table = delta.open_table(self._lake.events_path)
        return -1 if table is None else int(table.version())

    def kill_at_random(self, chance: random.Random) -> None:
        """Kill it some time after it has begun to write. Each of its tasks dies at its second or
        third part, between the file of events and that of counts; Spark starts it again."""
        before, process = self.version(), self.start(crash_at=f"part:{chance.randint(2, 3)}")
        self.wait_until(process, lambda: self.version() > before)
        wait(chance.random() * 2)
        process.kill()
        process.wait()

    def wait_until(self, process: subprocess.Popen[bytes], condition: Any) -> None:
        for _ in range(600):
            if condition():
                return
            assert process.poll() is None, self._log.read_text()
            wait(0.2)
        raise AssertionError(self._log.read_text())


def end_of(
    process: subprocess.Popen[bytes], log: Path, meanwhile: Callable[[], object] = lambda: None
) -> int:
    """Its exit code. A process that does not end is killed."""
    deadline = time.monotonic() + 300
    try:
        while time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(1)
            meanwhile()
        raise AssertionError(f"it did not end: {log.read_text()}")
    finally:
        process.kill()
        process.wait()


def wait(seconds: float) -> None:
    threading.Event().wait(seconds)


@pytest.mark.timeout(600 + 60 * KILLS)
def test_nothing_is_lost_or_doubled(url: str, tmp_path: Path) -> None:
    print(f"SEED={SEED} HEADWATER_KILLS={KILLS}")
    chance = random.Random(SEED)
    make_orders(url)
    lake = Lake(str(tmp_path / "lake"))
    pipeline = Pipeline(url, lake, tmp_path / "log")
    writers = Writers(url, chance)
    try:
        with open_writer(url):
            for number in range(KILLS):
                if aim := AIMED[(SEED + number) % len(AIMED)]:
                    process = pipeline.start(crash_at=f"{aim}:{chance.randint(1, 3)}")
                    # Views that are live are otherwise built again after a truncate only.
                    rebuild = partial(execute, url, DUE) if aim == "swapping" else lambda: None
                    ended = end_of(process, tmp_path / "log", rebuild)
                    assert ended == -signal.SIGKILL, (tmp_path / "log").read_text()
                else:
                    pipeline.kill_at_random(chance)
    finally:
        writers.stop()
    truth = own(logged(url))
    with pipeline.running() as process:
        pipeline.wait_until(process, lambda: len(own(in_lake(lake))) >= len(truth))
        pipeline.wait_until(process, lambda: view_totals(url) == execute(url, TOTALS))
        pipeline.wait_until(process, lambda: view_matched(url) == execute(url, MATCHED))
        assert pipeline.start("--once").wait(120) == 1
        assert f"process {process.pid}" in (tmp_path / "log").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, (tmp_path / "log").read_text()

    found = own(in_lake(lake))
    seqs = [row[0] for row in found]
    assert len(seqs) == len(set(seqs))
    assert found == truth
    assert len(truth) > 100
    assert [row[5] for row in found if row[4] == "pears"] == ["reset", "insert"]
    assert_order_by_key(lake)
    rolled = DeltaTable(lake.audit_path).to_pyarrow_table()
    assert sum(rolled.column("changes").to_pylist()) == len(in_lake(lake))
    assert view_totals(url) == execute(url, TOTALS)
    assert view_matched(url) == execute(url, MATCHED)
    assert execute(url, "select distinct state from headwater.pipeline") == [("stopped",)]


def view_totals(url: str) -> list[tuple[Any, ...]] | None:
    """The rows of the view; None while there is none."""
    if execute(url, "select to_regclass('totals') is null") == [(True,)]:
        return None
    return execute(
        url, "select bucket, n, total, average, largest, different from totals order by bucket"
    )


def view_matched(url: str) -> list[tuple[Any, ...]] | None:
    """The rows of the view that is computed key by key."""
    if execute(url, "select to_regclass('matched') is null") == [(True,)]:
        return None
    return execute(url, "select id, amount, pear from matched order by id")


def own(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Without the rows of views: those of the last batch may come after the end of the lake."""
    return [row for row in rows if row[4] not in ("totals", "matched")]


def assert_order_by_key(lake: Lake) -> None:
    """Commits come in the order of the log for each row."""
    table = DeltaTable(lake.events_path)
    last: dict[str, int] = defaultdict(int)
    for version in range(1, table.version() + 1):
        rows = _added_in(lake, version)
        lowest: dict[str, int] = {}
        for seq, key in rows:
            lowest[key] = min(seq, lowest.get(key, seq))
        assert all(last[key] < seq for key, seq in lowest.items())
        for seq, key in rows:
            last[key] = max(last[key], seq)


def _added_in(lake: Lake, version: int) -> list[tuple[int, str]]:
    now = DeltaTable(lake.events_path, version=version).to_pyarrow_dataset()
    before = DeltaTable(lake.events_path, version=version - 1)
    old = set(before.file_uris())
    new = [
        uri for uri in DeltaTable(lake.events_path, version=version).file_uris() if uri not in old
    ]
    if not new:
        return []
    import pyarrow.dataset as ds

    table = ds.dataset(new, schema=now.schema, format="parquet").to_table(
        ["seq", "table_name", "key"]
    )
    return [
        (row["seq"], row["table_name"] + row["key"])
        for row in table.to_pylist()
        if row["key"] is not None
    ]


def make_pears_and_orders(url: str) -> None:
    make_orders(url)
    execute(
        url,
        "create table pears (id bigint primary key)",
        "select headwater.enable_reactivity('pears')",
        "insert into orders select i, i from generate_series(1, 500) i",
    )


def inner_tables(url: str) -> set[str]:
    """The staging tables of views, and those of generations that are no more."""
    query = """
        select c.relname from pg_class c
        where c.relname ~ '^view_.*_' and c.relkind = 'r' and not exists (
          select from headwater.views v
          where c.relname ~ ('^view_' || v.number || '_' || v.generation || '_(groups|a)'))
    """
    return {name for (name,) in execute(url, query)}


def staged(url: str) -> set[str]:
    """The staging tables that have rows."""
    return {
        name
        for name in inner_tables(url)
        if execute(url, f"select exists(select from headwater.{name})") == [(True,)]
    }


def assert_nothing_is_left(url: str) -> None:
    assert staged(url) == set()
    views = execute(url, "select name, number, generation from headwater.views")
    prefixes = {name: f"view_{number}_{generation}_stage" for name, number, generation in views}
    # The aggregates of totals store the values of two columns.
    own = {f"{prefixes['totals']}{at}" for at in ("", 3, 4)}
    assert inner_tables(url) == own | {prefixes["matched"]}


@pytest.mark.timeout(600)
def test_a_build_that_is_killed(url: str, tmp_path: Path) -> None:
    """The next start builds the view, and nothing is left of the build before."""
    make_pears_and_orders(url)
    pipeline = Pipeline(url, Lake(str(tmp_path / "lake")), tmp_path / "log")
    place = random.Random(SEED).choice(("building:1", "swapping:1"))
    assert end_of(pipeline.start("--once", crash_at=place), tmp_path / "log") == -signal.SIGKILL
    assert view_totals(url) is None or view_matched(url) is None
    execute(url, "update orders set amount = amount + 1 where id % 3 = 0")
    assert end_of(pipeline.start("--once"), tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert view_totals(url) == execute(url, TOTALS)
    assert view_matched(url) == execute(url, MATCHED)
    assert_nothing_is_left(url)


@pytest.mark.timeout(600)
def test_rows_that_tasks_write_themselves(url: str, tmp_path: Path) -> None:
    """Tasks die after they have written their rows, and run again. The pipeline dies before the
    transaction that reads the rows, and starts again."""
    make_pears_and_orders(url)
    log = tmp_path / "log"
    pipeline = Pipeline(url, Lake(str(tmp_path / "lake")), log, returned=0)
    for update, place, code in (
        ("update orders set amount = amount + 1 where id % 3 = 0", "staged.0:1", 0),
        ("update orders set id = id + 1000 where id % 3 = 1", "unapplied:1", -signal.SIGKILL),
        ("delete from orders where id % 3 = 2", "staged.0:1", 0),
    ):
        execute(url, update)
        assert end_of(pipeline.start("--once", crash_at=place), log) == code, log.read_text()
        if code:
            assert staged(url)
        else:
            assert "Lost task" in (tmp_path / "lake" / "_spark.log").read_text()
            assert view_totals(url) == execute(url, TOTALS)
            assert view_matched(url) == execute(url, MATCHED)
            assert_nothing_is_left(url)
    assert execute(url, "select distinct generation from headwater.views") == [(1,)]
