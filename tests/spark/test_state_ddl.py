"""The state of a table under DDL that the log does not have: as it was, or refused; never wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest

from headwater import limits, views
from headwater.errors import ResyncRequired
from headwater.pipeline.job_thread import JobThread
from headwater.pipeline.jobs.snapshot_job import SnapshotJob, since
from headwater.pipeline.lake import gaps, snapshots
from headwater.pipeline.views import maintenance
from headwater.pipeline.views.definitions import define
from tests.support.generators.sizes import first_seed, size
from tests.support.lake.truth import Copy, Database, copy, fill, lake_at, opened, rows_of
from tests.support.lake.views import equals, views_running

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from headwater.pipeline.reading.lake import Lake

pytestmark = pytest.mark.timeout(900)


class AlteredTable:
    """A table that is written and altered at random."""

    def __init__(self, chance: random.Random, database: Database) -> None:
        self.name = "t"
        self._chance = chance
        self._database = database
        database.execute("create table t (id int primary key, n int, v int, note text)")
        database.execute("insert into t select i, i, i, 'old' from generate_series(1, 40) i")
        database.execute("select headwater.enable_reactivity('t')")

    def execute(self, statement: str) -> None:
        try:
            self._database.execute(statement.encode())
        except psycopg.Error:
            self._database.execute("rollback")

    def write(self) -> None:
        first, value = self._chance.randrange(40), self._chance.randrange(1000)
        table = self.name
        self.execute(
            self._chance.choice(
                [
                    f"insert into {table} (id, n) select i, {value} from"
                    f" generate_series({first}, {first + 4}) i on conflict do nothing",
                    f"update {table} set n = {value} where id between {first} and {first + 9}",
                    f"update {table} set id = id + 100 where id = {first}",
                    f"delete from {table} where id between {first} and {first + 3}",
                ]
            )
        )

    def alter(self) -> None:
        chance, table, number = self._chance, self.name, self._chance.randint(2, 9)
        triggers = chance.choice(["all", "user"])
        unseen = f"update {table} set n = n + {number} where id % 3 = 1"
        statement = chance.choice(
            [
                f"alter table {table} add column if not exists c{number} int",
                f"alter table {table} add column if not exists d{number} int default {number}",
                f"alter table {table} drop column if exists c{number}",
                f"alter table {table} drop column if exists d{number}",
                f"alter table {table} rename column c{number} to e{number}",
                f"alter table {table} alter column v type int using v + {number}",
                f"alter table {table} alter column n type int using n * 2 % 1009",
                f"alter table {table} alter column v type bigint",
                f"alter table {table} alter column v type int",
                f"alter table {table} alter column v type bigint using v * {number}",
                f"alter table {table} alter column note type text using note || '{number}'",
                f"alter table {table} alter column note type varchar({number + 100})",
                f"truncate {table}",
                f"truncate {table}",
                f"alter table {table} disable trigger {triggers}; {unseen};"
                f" alter table {table} enable trigger {triggers}",
                f"begin; alter table {table} disable trigger user; {unseen};"
                f" alter table {table} enable trigger user; commit",
                f"begin; alter table {table} alter column v type int using v + {number};"
                f" update {table} set note = 'within' where id % 5 = 1; commit",
                f"set session_replication_role = replica; {unseen};"
                " set session_replication_role = origin",
                f"vacuum full {table}",
                f"begin; truncate {table}; rollback",
                f"alter table {table} rename to t{number}",
            ]
        )
        if statement.startswith("alter") and " rename to " in statement:
            self.name = f"t{number}"
        self.execute(statement)


def refusals(lake: Lake, copies: list[tuple[str, Copy]]) -> list[str]:
    """Compare each copy with the state at its position. Returns why some are not known."""
    refused = []
    for name, taken in copies:
        try:
            found = rows_of(lake.as_of(name, taken.position))
        except ResyncRequired as error:
            refused.append(str(error))
            continue
        # A column counts as added, dropped or renamed from the first change written under it.
        columns = {*(found or [{}])[0]} & {*(taken.rows or [{}])[0]}
        assert "id" in columns or not (found or taken.rows)
        assert among(found, columns) == among(taken.rows, columns), taken.position
    return refused


def among(rows: list[dict[str, Any]], columns: set[str]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in sorted(columns)} for row in rows]


@pytest.mark.parametrize("number", range(size("altered_tables", 1, large=8)))
def test_any_ddl(
    spark: SparkSession,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    """The pipeline looks at the table from time to time, as while it runs."""
    monkeypatch.setattr(limits, "SNAPSHOT_WATCH_SECONDS", 0.0)
    chance = random.Random(first_seed(9100) + number)
    lake = lake_at(tmp_path, spark)
    copies: list[tuple[str, Copy]] = []
    with opened(url) as database:
        table = AlteredTable(chance, database)
        job = JobThread("snapshots", SnapshotJob(lake, url, events_max=20).step)

        def work() -> None:
            before = snapshots.load(lake.places)
            fill(lake, url)
            for content in contents_since(lake, before):
                job.note(content)
            job.work()
            progress = job.progress()
            assert progress is not None
            assert progress.error is None

        work()
        for _ in range(size("altered_statements", 10, large=50)):
            for _ in range(chance.randrange(3)):
                table.write()
            if chance.random() < 0.5:
                copies.append((table.name, copy(database, table.name)))
            table.alter()
            for _ in range(chance.randrange(2)):
                table.write()
            if chance.random() < 0.5:
                copies.append((table.name, copy(database, table.name)))
            if chance.random() < 0.7:
                work()
        work()
    chosen = chance.sample(copies, min(len(copies), size("altered_samples", 8, large=100)))
    refused = refusals(lake, chosen)
    print(f"{len(refused)} of {len(chosen)} samples refused", *refused, sep="\n  ")
    assert len(refused) <= 0.6 * len(chosen)


def contents_since(lake: Lake, last: list[Any]) -> list[Any]:
    """What the stream reports about the changes that snapshots lack."""
    newest = {each.relation: each for each in last}
    found = list(since(lake, list(newest.values())))
    if not found:
        return []
    return [pa.Table.from_pylist([{n: getattr(c, n) for n in c.__struct_fields__} for c in found])]


def by_value(t: DataFrame) -> DataFrame:
    return t.groupBy("n").agg(views.count().alias("rows"))


BY_VALUE = "select n, count(*) as rows from t group by n"


def test_a_change_that_contradicts_the_snapshot(
    spark: SparkSession, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were written where no trigger fires: noticed when such a row changes next. The time
    in which its state is not known is refused, and later states are exact. A view of the table is
    built again, also where that is requested while it is being built."""
    lake = lake_at(tmp_path, spark)
    running = views_running(spark, url, lake, define(by_value, key="n"))
    with opened(url) as database:
        database.execute("create table t (id int primary key, n int)")
        database.execute("insert into t select i, i from generate_series(1, 5) i")
        database.execute("select headwater.enable_reactivity('t')")
        for name in ("insert", "update", "delete", "truncate"):
            database.execute(f"alter table t enable trigger headwater_{name}".encode())
        database.execute("update t set n = n + 1")  # the first one logs a reset, too
        fill(lake, url)
        job = JobThread("snapshots", SnapshotJob(lake, url, events_max=1).step)
        job.work()
        first = copy(database, "t")
        silent: list[Copy] = []

        def contradict() -> None:
            database.execute("set session_replication_role = replica")
            database.execute("update t set n = n + 100 where id = 3")
            database.execute("reset session_replication_role")
            silent.append(copy(database, "t"))
            database.execute("update t set n = n + 1")
            fill(lake, url)
            for contents in contents_since(lake, snapshots.load(lake.places)):
                job.note(contents)
            job.work()

        def building(place: str) -> None:
            if place == "building" and not silent:
                contradict()

        monkeypatch.setattr(maintenance, "failpoint", building)
        with running:
            assert equals(url, "by_value", BY_VALUE)
            contradict()
            assert equals(url, "by_value", BY_VALUE)
        last = copy(database, "t")
        fill(lake, url)
    begun = snapshots.load(lake.places)[0]
    gap, _ = gaps.load(lake.gaps_path, begun.relation)
    assert gap.reason == "rows changed without changes in the log"
    assert gap.is_before(begun.position)
    with pytest.raises(ResyncRequired, match="changed without changes in the log"):
        lake.as_of("t", silent[0].position)
    assert rows_of(lake.as_of("t", begun.position)) == first.rows
    assert rows_of(lake.as_of("t", last.position)) == last.rows
