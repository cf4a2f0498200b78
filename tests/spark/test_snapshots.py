"""Snapshots of tables, read and written by Spark's tasks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from deltalake import DeltaTable

from headwater import limits
from headwater.errors import CaptureError
from headwater.log.complete import StillBehind
from headwater.pipeline.job_thread import JobThread
from headwater.pipeline.jobs.snapshot_job import SnapshotJob
from headwater.pipeline.lake import delta, snapshots
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.snapshots import table_reads
from headwater.pipeline.snapshots.database_snapshot import NotCapturedError, database_snapshot
from headwater.pipeline.snapshots.table_reads import FailedTable, ReadProgress
from tests.support.generators.sizes import first_seed, size
from tests.support.lake.truth import Copy, Database, copy, fill, lake_at, opened, rows_of
from tests.support.wal_capture import still_behind
from tests.unit.pipeline.lake.test_snapshots import rows_in, write_rows
from tests.unit.pipeline.lake.test_snapshots import taken as unfinished

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater.pipeline.reading.lake import Lake

pytestmark = pytest.mark.timeout(300)


def enable(database: Database, name: str) -> None:
    database.execute("select headwater.enable_reactivity(%s)", [name])


def test_tasks_read_a_table_in_one_snapshot(
    spark: SparkSession, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tasks, each with its own connection, see the same rows."""
    with opened(url) as database:
        database.execute("create table items (id int primary key, note text)")
        database.execute("insert into items select n, 'old' from generate_series(1, 2000) n")
        enable(database, "items")
        monkeypatch.setattr(limits, "SNAPSHOT_CHUNK_BYTES", 8192)
        with database_snapshot(url, ["items"]) as now:
            found = now.frame(spark, "items")
            assert found.rdd.getNumPartitions() == limits.SNAPSHOT_READERS_MAX
            database.execute("update items set note = 'new'")
            rows = [tuple(row) for row in found.collect()]
            shape = now.tables["items"].table.id
    assert sorted(rows) == sorted(
        (f'{{"id":{n}}}', f'{{"id":{n},"note":"old"}}', shape) for n in range(1, 2001)
    )


def test_many_tables_in_one_snapshot(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """One snapshot of the database, one commit of rows and one of the list. A table that is not
    there any more does not matter."""
    lake = lake_at(tmp_path, spark)
    with opened(url) as database:
        for number in range(12):
            database.execute(f"create table t{number} (id int primary key)".encode())
            database.execute(f"insert into t{number} select generate_series(1, {number})".encode())
            enable(database, f"t{number}")
        job = SnapshotJob(lake, url, events_max=100)
        thread = JobThread("snapshots", job.step)
        thread.work()
        progress = thread.progress()
        assert progress is not None
        assert (progress.error, progress.task, progress.changes) == (None, None, 66)
        taken = snapshots.load(lake.places)
        assert sorted(each.rows for each in taken) == list(range(12))
        assert len({each.position for each in taken}) == 1
        assert DeltaTable(lake.places.rows).version() == 1
        assert DeltaTable(lake.places.list).version() == 1
        # Rows that a killed run has left, and a day later.
        left = write_rows(lake.places, unfinished(7, 1), timedelta(days=2))
        delta.add(DeltaTable(lake.places.rows), left)
        job._trim_at = 0.0
        thread.work()
        assert rows_in(lake.places) == sorted(
            (each.relation, each.snapshot) for each in taken for _ in range(each.rows)
        )
        database.execute("drop table t1; select headwater.disable_reactivity('t2')")
        outcomes = list(lake.snapshots_of(url, [each.relation for each in taken]))
    failed = [each.error for each in outcomes if isinstance(each, FailedTable)]
    assert [type(each) for each in failed] == [NotCapturedError] * 2
    assert len([each for each in outcomes if isinstance(each, TableSnapshot)]) == 10


def test_a_table_that_is_being_altered_does_not_hold_up_the_others(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it locked while capture from the WAL is far behind."""
    monkeypatch.setattr(limits, "SNAPSHOT_LOCK_SECONDS", 0.05)
    lake = lake_at(tmp_path, spark)
    with opened(url) as database, opened(url) as other:
        for name in ("a", "b"):
            database.execute(f"create table {name} (id int primary key)".encode())
            enable(database, name)
        with other.transaction():
            other.execute("alter table a add column note text")
            with still_behind(monkeypatch), pytest.raises(StillBehind):
                list(lake.snapshots_of(url, ["a", "b"]))
            outcomes = list(lake.snapshots_of(url, ["a", "b"]))
    (failed,) = [each for each in outcomes if isinstance(each, FailedTable)]
    assert failed.table == "a"
    assert "being altered" in str(failed.error)
    assert [each.rows for each in outcomes if isinstance(each, TableSnapshot)] == [0]


class KilledError(BaseException):
    """The process ends here."""


KINDS = (
    ["create table t (id int primary key, n int, note text)"],
    [
        "create table t (id int primary key, n int, note text) partition by range (id)",
        "create table t_1 partition of t for values from (minvalue) to (400)",
        "create table t_2 partition of t for values from (400) to (maxvalue)",
    ],
    [
        "create table t (id int primary key, n int, note text)",
        "create table t_1 (own int, primary key (id)) inherits (t)",
    ],
)


class History:
    """Random writes to a table of one of these kinds."""

    def __init__(self, chance: random.Random, database: Database) -> None:
        self._chance = chance
        self._database = database
        kind = chance.choice(KINDS)
        self._rewritten = "t_1" if len(kind) > 1 else "t"
        for statement in kind:
            database.execute(statement.encode())
        database.execute(
            "insert into t select i, i, repeat('x', i % 300) from generate_series(1, 900) i"
        )
        enable(database, "t")

    def write(self) -> None:
        chance = self._chance
        first, note = chance.randrange(900), "y" * chance.randrange(400)
        statement = chance.choice(
            [
                f"insert into t select i, i, '{note}' from generate_series({first}, {first + 60}) i"
                " where not exists (select from t where id = i)",
                f"update t set note = '{note}' where id between {first} and {first + 80}",
                # Rows move to other blocks, and the log has nothing.
                f"update t set note = note where id between {first} and {first + 200}",
                f"update t set note = note where id % 7 = {first % 7}",
                f"update t set id = id + 2000 where id between {first} and {first + 5}",
                f"delete from t where id between {first} and {first + 100}",
                f"vacuum {'full ' if chance.random() < 0.2 else ''}{self._rewritten}",
                "truncate t" if chance.random() < 0.1 else "vacuum t",
                "alter table t alter n type int using n + 1"
                if chance.random() < 0.2
                else "analyze t",
                "alter table t add column if not exists extra int"
                if chance.random() < 0.2
                else "select 1",
            ]
        )
        # What needs the table for itself waits for a snapshot that is being read.
        self._database.execute("set lock_timeout = '20ms'")
        with suppress(psycopg.errors.LockNotAvailable):
            self._database.execute(statement.encode())
        self._database.execute("reset lock_timeout")


def read_until_killed(
    lake: Lake, url: str, history: History, database: Database, writes: int
) -> Iterator[tuple[Copy, Any]]:
    """Read the table; the copy is that of the snapshot's position."""
    taken = None
    for outcome in lake.snapshots_of(url, ["t"]):
        match outcome:
            case ReadProgress():
                # The first is reported when the snapshot of the database was opened.
                taken = copy(database, "t") if taken is None else taken
                for _ in range(writes):
                    history.write()
            case FailedTable():
                assert isinstance(outcome.error, CaptureError)
                yield taken, None  # type: ignore[misc]
            case TableSnapshot():
                assert taken is not None
                yield taken, outcome


@pytest.mark.parametrize("number", range(size("snapshot_kills", 3, large=60)))
def test_snapshots_that_are_killed(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Writes before, between and during runs that are killed at any place: in the end the snapshot
    has exactly the rows of its position."""
    chance = random.Random(first_seed(7300) + number)
    lake = lake_at(tmp_path, spark)
    monkeypatch.setattr(limits, "SNAPSHOT_READERS_MAX", 2)
    monkeypatch.setattr(limits, "SNAPSHOT_CHUNK_BYTES", chance.choice([8192, 20_000, 40_000]))
    left = [0]

    def failpoint(name: str) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KilledError

    monkeypatch.setattr(table_reads, "failpoint", failpoint)
    with opened(url) as database:
        history = History(chance, database)
        fill(lake, url)
        for turn in range(4):
            left[0] = chance.randrange(1, 7) if turn < 3 else -1
            for _ in range(chance.randrange(3)):
                history.write()
            if chance.random() < 0.5:
                fill(lake, url)
            try:
                found = list(read_until_killed(lake, url, history, database, chance.randrange(2)))
            except KilledError:
                continue
            for taken, made in found:
                assert made is not None
                assert rows_of(lake.as_of("t", made.position)) == taken.rows
        assert found
