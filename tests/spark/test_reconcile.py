"""Tables are compared with the lake at one position: hidden changes are found, each, and nothing
else is. The database judges."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psycopg
import pytest
from deltalake import DeltaTable
from typer.testing import CliRunner

from headwater import limits
from headwater.commands.cli import app
from headwater.errors import ConfigError, ResyncRequired
from headwater.metrics import PipelineMetrics
from headwater.model import Table
from headwater.pipeline.job_thread import JobThread
from headwater.pipeline.lake import delta, gaps, snapshots
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reconcile import drift
from headwater.pipeline.reconcile.drift import TableOutcome
from headwater.pipeline.reconcile.job import ReconcileJob
from headwater.pipeline.reconcile.tables import reconcile
from tests.support.generators.sizes import first_seed, size
from tests.support.lake.tables import execute, in_lake
from tests.support.lake.truth import Database, copy, fill, lake_at, opened, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater.pipeline.reading.lake import Lake

ROUNDS = size("reconciles", 1, large=60)
ROWS = size("reconcile_rows", 5_000, large=1_000_000)

MICROSECOND = timedelta(microseconds=1)

TYPES = {
    "int": "(random() * 1e6)::int - 500000",
    "numeric": "(random() * 1e9)::numeric(20, 7)",
    "float8": "case when random() < 0.1 then 'NaN' when random() < 0.1 then '-Infinity'"
    " else random() * 1e30 end",
    "real": "(random() * 1e10)::real",
    "text": "chr(32 + (random() * 9000)::int) || '\"\\' || repeat('é', (random() * 30)::int)",
    "bytea": "decode(md5(random()::text), 'hex')",
    "timestamptz": "now() + random() * interval '900 days'",
    "timestamp": "'2026-01-01'::timestamp + random() * interval '900 days'",
    "interval": "random() * interval '900 days'",
    "jsonb": "jsonb_build_object('b', random(), 'a', array[1, null])",
    "json": '\'{"b" : 1,  "a":[ 1.10 ]}\'::json',
    "uuid": "gen_random_uuid()",
    "boolean": "random() < 0.5",
    "text[]": "array['a', null, md5(random()::text)]",
    "int4range": "int4range(1, 2 + (random() * 9)::int)",
    "money": "(random() * 1000)::numeric::money",
    "char(9)": "left(md5(random()::text), 5)",
    "inet": "'10.0.0.1'::inet",
}


class HiddenChanges:
    """A table of random types, and changes that the log has not, of which the keys are known."""

    def __init__(self, database: Database, rng: random.Random, name: str) -> None:
        self._database = database
        self._rng = rng
        self.name = name
        kinds = rng.sample(sorted(TYPES), 5)
        self._columns = {f"c{number}": kind for number, kind in enumerate(kinds)}
        columns = ", ".join(f"{name} {kind}" for name, kind in self._columns.items())
        key = rng.choice(("id", "id, part"))
        database.execute(
            f"create table {name} (id int, part text default 'é\"', {columns}, primary key ({key}))"
            .encode()
        )  # fmt: skip
        self.insert(1, rng.choice((0, 7, 300)))

    def insert(self, first: int, last: int) -> None:
        values = ", ".join(TYPES[kind] for kind in self._columns.values())
        self._database.execute(
            f"insert into {self.name} select i, 'é\"', {values}"
            f" from generate_series({first}, {last}) i".encode()
        )

    def write(self) -> None:
        """Ordinary changes, which the log has."""
        rng = self._rng
        first = self._one("select coalesce(max(id), 0) + 1 from {}")
        self.insert(first, first + rng.randrange(20))
        self._database.execute(f"update {self.name} set c0 = c0 where random() < 0.3".encode())
        self._database.execute(f"delete from {self.name} where random() < 0.1".encode())

    def hide(self) -> dict[str, str]:
        """Changes behind the log's back. Returns how each key differs."""
        rng, found = self._rng, dict[int, str]()
        rows = [row for (row,) in self._rows("select id from {}")]
        rng.shuffle(rows)
        with hidden(self._database, self.name):
            for number in rows[: rng.randrange(1, 9)]:
                match rng.choice(("update", "delete", "move")):
                    case "update":
                        column = rng.choice(sorted(self._columns))
                        value = (
                            f"case when {column} is null then {TYPES[self._columns[column]]} end"
                        )
                        self._change(f"update {self.name} set {column} = {value}", number)
                        found[number] = "different"
                    case "delete":
                        self._change(f"delete from {self.name}", number)
                        found[number] = "extra"
                    case "move":
                        self._change(f"update {self.name} set id = id + 100000", number)
                        found |= {number: "extra", number + 100_000: "missing"}
            self.insert(200_000, 200_000 + rng.randrange(3))
            found |= {
                row: "missing" for (row,) in self._rows("select id from {} where id >= 200000")
            }
        return {str(number): kind for number, kind in found.items()}

    def _change(self, statement: str, number: int) -> None:
        self._database.execute(f"{statement} where id = {number}".encode())

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        return self._database.execute(query.format(self.name).encode()).fetchall()

    def _one(self, query: str) -> Any:
        return self._rows(query)[0][0]


@contextmanager
def hidden(database: Database, table: str) -> Iterator[None]:
    """Inside the block, the log does not have what is changed: as with `session_replication_role =
    replica` where the role that captures the table does not own it, and so cannot have its triggers
    fire always."""
    with database.transaction():
        database.execute("set local session_replication_role = replica")
        _set_triggers(database, table, "enable")
        yield
        _set_triggers(database, table, "enable always")


def _set_triggers(database: Database, table: str, how: str) -> None:
    names = "select tgname from pg_trigger where tgrelid = %s::regclass and not tgisinternal"
    for (name,) in database.execute(names.encode(), [table]).fetchall():
        database.execute(f'alter table {table} {how} trigger "{name}"'.encode())
    database.execute(
        "update headwater.captures set triggers_mark = headwater.triggers_mark(member)"
        " where member = %s::regclass",
        [table],
    )


def by_number(found: TableOutcome) -> dict[str, str]:
    return {str(json.loads(each.key)["id"]): each.kind for each in found.keys}


def only(lake: Lake, url: str, *names: str, **options: Any) -> TableOutcome:
    (found,) = reconcile(lake, url, names, **options)
    return found


@contextmanager
def writing(url: str, tables: list[HiddenChanges]) -> Iterator[None]:
    """Ordinary writers at work: transactions that overlap, some of which are long."""
    done = threading.Event()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        try:
            with psycopg.connect(url) as database:
                while not done.is_set():
                    table = rng.choice(tables).name
                    where = f"where id % 7 = {seed}"
                    database.execute(f"update {table} set c1 = null {where}".encode())
                    if rng.random() < 0.5:
                        database.execute(f"delete from {table} {where} and id % 2 = 0".encode())
                    database.commit() if rng.random() < 0.8 else database.rollback()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.mark.parametrize("seed", range(first_seed(1), first_seed(1) + ROUNDS))
def test_hidden_changes_are_found_each(
    url: str, spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    """In tables of random types, with writers at work. Repair heals them; nothing else is
    touched."""
    lake, rng = lake_at(tmp_path, spark), random.Random(seed)
    with opened(url) as database:
        tables = [HiddenChanges(database, rng, f"t{number}") for number in range(2)]
        for table in tables:
            database.execute("select headwater.enable_reactivity(%s)", [table.name])
        fill(lake, url)
        for table in tables:
            lake.snapshot(url, table.name)
            table.write()
        fill(lake, url)
        tables[0].write()  # the log has it, the lake not yet
        with writing(url, tables):
            for found in reconcile(lake, url):
                assert (found.outcome, found.keys, found.error) == ("equal", (), None)
        expected = tables[0].hide()
        events, earlier = in_lake(lake), snapshots.load(lake.places)
        found = only(lake, url, "t0")
        assert (found.outcome, by_number(found)) == ("drift", expected)
        assert only(lake, url, "t1").outcome == "equal"
        assert only(lake, url, "t0", repairing=True).repaired
        healed = only(lake, url, "t0")
        assert (healed.outcome, healed.rows) == ("equal", healed.lake_rows)
        now = copy(database, "t1")
        assert len(rows_of(lake.with_log(url).as_of("t1", now.position))) == len(now.rows)
    assert in_lake(lake) == events
    assert [each for each in snapshots.load(lake.places) if each not in earlier] == (
        snapshots.load(lake.places, found.relation)[-1:]
    )
    (gap,) = gaps.load(lake.gaps_path, found.relation)
    assert gap.relation == found.relation
    last = {each.table: each.outcome for each in drift.last(lake.drift_path)}
    assert last == {"t0": "equal", "t1": "equal"}


# ------------------------------------------------------------------------ a large table


def test_each_of_many_hidden_changes(
    url: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 random rows, in a table that is read in several chunks."""
    monkeypatch.setattr(limits, "SNAPSHOT_CHUNK_BYTES", 128 * 1024)
    lake = lake_at(tmp_path, spark)
    with opened(url) as database:
        database.execute("create table items (id int primary key, amount int, note text)")
        database.execute(
            "insert into items select i, mod(i, 7), md5(i::text)"
            " from generate_series(1, %s::int) i",
            [ROWS],
        )
        database.execute("create table others as select * from items limit 10")
        database.execute("alter table others add primary key (id)")
        for table in ("items", "others"):
            database.execute("select headwater.enable_reactivity(%s)", [table])
        fill(lake, url)
        for table in ("items", "others"):
            lake.snapshot(url, table)
        with hidden(database, "items"):
            changed = database.execute(
                "update items set amount = amount + 1 where id in"
                " (select id from items order by random() limit 1000) returning id"
            ).fetchall()
        (found, other) = reconcile(lake, url, repairing=True)
        assert (other.outcome, other.repaired) == ("equal", False)
        assert (found.outcome, found.different, found.repaired) == ("drift", 1000, True)
        assert by_number(found) == {str(number): "different" for (number,) in changed}
        now = copy(database, "items")
        assert only(lake, url, "items").outcome == "equal"
        assert rows_of(lake.with_log(url).as_of("items", now.position)) == now.rows


def test_the_command(url: str, spark: SparkSession, tmp_path: Path) -> None:
    lake = lake_at(tmp_path, spark)
    execute(
        url,
        "create table items (id int primary key)",
        "insert into items values (1), (2)",
        "select headwater.enable_reactivity('items')",
    )
    fill(lake, url)
    lake.snapshot(url, "items")

    def ask(*options: str) -> tuple[int, list[dict[str, Any]]]:
        command = ["pipeline", "reconcile", "--json", "--lake", lake.root, "--url", url, *options]
        answer = CliRunner().invoke(app, command, catch_exceptions=False)
        return answer.exit_code, [json.loads(line) for line in answer.stdout.splitlines()]

    def reported() -> str | None:
        ((error,),) = execute(url, "select error from headwater.pipeline where name = 'reconcile'")
        return str(error) if error else None

    status, (equal,) = ask()
    assert (status, equal["outcome"], equal["rows"]) == (0, "equal", 2)
    assert reported() is None
    with opened(url) as database, hidden(database, "items"):
        database.execute("delete from items where id = 2")
    status, (found,) = ask("items")
    assert (status, found["outcome"], found["keys"]) == (
        1, "drift", [{"key": '{"id":2}', "kind": "extra"}],
    )  # fmt: skip
    assert reported() == "items: 1 row only in the lake"
    for name, table in (("mine", found["relation"]), ("other", 1)):
        shape = msgspec.json.encode({"rows": Table(1, "public", "t", (), (), table)}).decode()
        execute(
            url,
            "insert into headwater.views (name, state, tables)"
            f" values ('{name}', 'live', '{shape}')",
        )
    status, (repaired,) = ask("--repair")
    assert execute(url, "select name, state from headwater.views order by 1") == [
        ("mine", "due"),
        ("other", "live"),
    ]
    assert (status, repaired["repaired"]) == (0, True)
    assert reported() is None
    # The time between is unknown, and what was before is not.
    with pytest.raises(ResyncRequired, match="reconcile found rows"):
        lake.as_of("items", gaps.load(lake.gaps_path, found["relation"])[0].until_at - MICROSECOND)
    with pytest.raises(ConfigError, match="no lake"):
        list(reconcile(lake_at(tmp_path / "other", spark), url))


def test_problems_of_one_table(url: str, spark: SparkSession, tmp_path: Path) -> None:
    """The other tables are compared all the same."""
    lake = lake_at(tmp_path, spark)
    with opened(url) as database, opened(url) as other:
        for name in ("good", "new", "altered", "locked"):
            database.execute(f"create table {name} (id int primary key)".encode())
            database.execute("select headwater.enable_reactivity(%s)", [name])
        fill(lake, url)
        for name in ("good", "altered", "locked"):
            lake.snapshot(url, name)
        database.execute("alter table altered add column extra int default 7")
        other.execute("begin")
        other.execute("lock table locked in access exclusive mode")
        names = ("good", "gone", "new", "altered", "locked")
        found = {each.table: each for each in reconcile(lake, url, names)}
        other.execute("rollback")
    assert {name: each.outcome for name, each in found.items()} == {
        "good": "equal", "gone": "failed", "new": "unknown", "altered": "unknown",
        "locked": "failed",
    }  # fmt: skip
    assert "gone" in (found["gone"].error or "")
    assert "no snapshot" in (found["new"].error or "")
    assert "altered" in (found["altered"].error or "")
    assert "being altered" in (found["locked"].error or "")
    new, altered = reconcile(lake, url, ("new", "altered"), repairing=True)
    assert new.repaired
    assert altered.repaired
    assert {each.outcome for each in reconcile(lake, url)} == {"equal"}
    assert gaps.load(lake.gaps_path, new.relation) == []


def test_rows_that_the_role_may_not_see(url: str, spark: SparkSession, tmp_path: Path) -> None:
    """A comparison with some of the rows would find drift where there is none."""
    lake = lake_at(tmp_path, spark)
    with opened(url) as database:
        database.execute("create table items (id int primary key)")
        database.execute("insert into items values (1), (2)")
        database.execute("select headwater.enable_reactivity('items')")
        fill(lake, url)
        lake.snapshot(url, "items")
        database.execute("alter table items enable row level security")
        database.execute("create policy one on items using (id = 1)")
        role = f"reader_{random.Random(url).randrange(10**9)}"
        database.execute(f"create role {role} login".encode())
        try:
            for right in ("select on items", "usage on schema headwater",
                          "select on all tables in schema headwater",
                "select on all sequences in schema headwater",
                          "execute on all functions in schema headwater"):  # fmt: skip
                database.execute(f"grant {right} to {role}".encode())
            found = only(lake, psycopg.conninfo.make_conninfo(url, user=role), "items")
        finally:
            database.execute(f"drop owned by {role}; drop role {role}".encode())
    assert found.outcome == "failed"
    assert "row-level security" in (found.error or "")


def test_the_schedule(
    url: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each table once in a period. Drift is the error of the job until the table is repaired."""
    monkeypatch.setattr(limits, "RECONCILE_CHECK_SECONDS", 0)
    lake = lake_at(tmp_path, spark)
    with opened(url) as database:
        database.execute("create table items (id int primary key)")
        database.execute("create table new (id int primary key)")
        for name in ("items", "new"):
            database.execute("select headwater.enable_reactivity(%s)", [name])
        fill(lake, url)
        lake.snapshot(url, "items")
        with hidden(database, "items"):
            database.execute("insert into items values (5)")
    metrics = PipelineMetrics()

    def measured(name: str) -> float | None:
        labels = {"table": "items"}
        return metrics.registry.get_sample_value(f"headwater_pipeline_{name}", labels)

    run = JobThread("reconcile", ReconcileJob(lake, url, timedelta(days=1), metrics).step)
    run.work()
    reported = run.progress()
    assert reported is not None
    assert (reported.state, reported.error) == ("running", "items: 1 row missing in the lake")
    assert measured("drift_rows") == 1
    reads, last = list[str](), drift.last

    def counted(path: str) -> list[TableOutcome]:
        reads.append(path)
        return last(path)

    monkeypatch.setattr(drift, "last", counted)
    for _ in range(3):
        run.work()  # not again today
    assert len(reads) == 1
    assert len(delta.read_arrow(DeltaTable(lake.drift_path), drift.DRIFT)) == 1
    only(lake, url, "items", repairing=True)
    run.work()
    reported = run.progress()
    assert reported is not None
    assert reported.error is None
    assert measured("drift_rows") == 0
    # After a day it is due again.
    late = ReconcileJob(lake, url, timedelta(microseconds=1), metrics)
    JobThread("reconcile", late.step).work()
    assert [each.outcome for each in drift.last(lake.drift_path)] == ["equal"]
    # A comparison that fails early is one of that table too: it is reported, and not due again.
    monkeypatch.setattr(limits, "SNAPSHOT_LOCK_SECONDS", 0.05)
    with opened(url) as database, database.transaction():
        database.execute("lock table items")
        JobThread("reconcile", late.step).work()
        run.work()
    (failed,) = drift.last(lake.drift_path)
    assert (failed.table, failed.outcome) == ("items", "failed")
    reported = run.progress()
    assert reported is not None
    assert reported.error == f"items: {failed.error}"
    assert len(delta.read_arrow(DeltaTable(lake.drift_path), drift.DRIFT)) == 4


def test_a_snapshot_that_was_computed_during_a_repair(
    url: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the rows from before the repair, and must not be used."""
    lake = lake_at(tmp_path, spark)
    with opened(url) as database:
        database.execute("create table items (id int primary key)")
        database.execute("select headwater.enable_reactivity('items')")
        fill(lake, url)
        lake.snapshot(url, "items")
        with hidden(database, "items"):
            database.execute("insert into items values (5)")
        database.execute("insert into items values (6)")
        fill(lake, url)
        reached = lake.reached()
        assert reached is not None
        write = snapshots.write_frame

        def repaired_meanwhile(*given: Any) -> TableSnapshot:
            with monkeypatch.context() as first:
                first.setattr(snapshots, "write_frame", write)
                assert only(lake, url, "items", repairing=True).repaired
            return write(*given)

        monkeypatch.setattr(snapshots, "write_frame", repaired_meanwhile)
        with pytest.raises(ResyncRequired, match="reconcile"):
            lake.fold_snapshot("items", reached)
        monkeypatch.undo()
        assert only(lake, url, "items").outcome == "equal"
        database.execute("insert into items values (7)")
        now = copy(database, "items")
        fill(lake, url)
        assert rows_of(lake.as_of("items", now.position)) == now.rows
