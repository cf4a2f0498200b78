"""Typed tables: equal to PostgreSQL, now and at any recorded position, after random histories.

PostgreSQL judges: what it had is recorded, and compared with what DuckDB and Polars read from the
files of the lake.
"""

from __future__ import annotations

import hmac
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from headwater import limits
from headwater.commands.lake.typed_tables import typed_tables
from headwater.errors import ConfigError
from headwater.model import Column, Table
from headwater.pipeline.job_thread import JobThread
from headwater.pipeline.jobs.resnapshot import resnapshot
from headwater.pipeline.jobs.snapshot_job import SnapshotJob
from headwater.pipeline.lake import audit, delta, gaps, shapes, snapshots
from headwater.pipeline.lake.events import STORED_EVENTS
from headwater.pipeline.lake.gaps import LakeGap
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.reconcile.tables import reconcile
from headwater.pipeline.tables import job, requests, writes
from headwater.pipeline.tables.catalog import Catalog
from headwater.pipeline.tables.choice import Choice
from headwater.pipeline.tables.columns import columns_of, schema_of
from headwater.pipeline.tables.job import TablesJob
from headwater.pipeline.tables.layout import Progress
from headwater.pipeline.tables.options import TableOptions
from headwater.pipeline.tables.typed_table import TypedTable
from headwater.pipeline.tables.writes import TypedDelta
from headwater.settings.tables import TableEntry
from tests.integration.test_docs import blocks
from tests.support.generators import typed as generator
from tests.support.generators.sizes import first_seed, size
from tests.support.lake import typed
from tests.support.lake.processes import headwater
from tests.support.lake.tables import execute, make_orders, run_once
from tests.support.lake.truth import Database, fill, lake_at, opened
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


pytestmark = pytest.mark.timeout(3600)

HISTORIES = size("typed_tables", 1, large=60)
TURNS = size("typed_turns", 12, large=30)

LAKE_TABLES = ROOT / "docs/howto/lake-tables.md"

POINTS = [f"{when}_{what}" for what in ("history", "current") for when in
          ("merging", "rewriting", "committed")]  # fmt: skip


class KilledError(BaseException):
    """Stands for the end of the process."""


class Story:
    """One history, played."""

    def __init__(self, url: str, lake: Lake, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.things = generator.Things(self.rng)
        self.url, self.lake, self.monkeypatch = url, lake, monkeypatch
        self.known: list[typed.Truth] = []
        self.quiet: list[bool] = []
        self.other: Database | None = None
        self.steps: list[str] = []
        self.relation = 0
        self.fill, self.options = "", TableOptions()

    def play(self, database: Database, turns: int) -> None:
        for statement in (*generator.SCHEMA, self.things.create()):
            database.execute(statement.encode())
        for _ in range(4):
            self.write(database)
        database.execute("select headwater.enable_reactivity('things')")
        self.snapshot()
        for _ in range(turns):
            self.turn(database)
        self.commit_other()
        self.run(database, self.things.rename())
        self.write(database)
        self.snapshot()
        self.fill_again()
        self.merge()
        self.write(database)
        self.merge()
        self.record(database)

    def turn(self, database: Database) -> None:
        self.write(database)
        match self.rng.randint(0, 12):
            case 0 | 1:
                self.commit_other()
                before = dict(self.things.columns)
                if not self.run(database, self.things.alter()):
                    self.things.columns = before
                self.write(database)
            case 2:
                self.commit_other()
                self.run(database, "truncate things")
                self.write(database)
            case 3:
                self.commit_other()
                self.run(database, "select headwater.disable_reactivity('things')")
                self.write(database)
                self.run(database, "select headwater.enable_reactivity('things')")
            case 4:
                self.snapshot()
            case 5:
                self.commit_other()
                self.lose(database)
            case 6 | 7:
                self.merge()
            case 8 | 9:
                self.merge(kill=True)
            case 10:
                self.fill_again()
                self.merge(kill=self.rng.random() < 0.5)
            case _:
                self.begin_other()
                self.merge()
        if self.rng.random() < 0.7:
            self.record(database)

    def record(self, database: Database) -> None:
        self.known.append(typed.truth(database, "things"))
        # The time of a transaction that commits later may be an earlier one.
        self.quiet.append(self.other is None)

    def begin_other(self) -> None:
        """Begin a transaction that stays open over merges. Its rows are its own."""
        if self.other is None:
            self.steps.append("-- another transaction begins")
            self.other = psycopg.connect(self.url)
            self.write_other()

    def write_other(self) -> None:
        assert self.other is not None
        number = self.rng.randint(100, 104)
        self.other.execute(
            "insert into things (id, part) values (%s, 'other')"
            " on conflict (id) do update set part = things.part || '+'",
            [number],
        )
        self.other.execute("delete from things where id = %s", [number - 50])

    def commit_other(self) -> None:
        if self.other is not None:
            self.write_other()
            self.steps.append("-- it commits")
            self.other.commit()
            self.other.close()
            self.other = None

    def lose(self, database: Database) -> None:
        """Continue at the present position, as after the log was trimmed: with a gap."""
        self.merge()
        self.write(database)
        self.steps.append("-- a gap")
        assert all(isinstance(each, LakeGap) or not each.error for each in resnapshot(
            self.lake, self.url))  # fmt: skip

    def fill_again(self) -> None:
        """At the next merge, because of a request or of other options."""
        self.steps.append("-- to be filled again")
        self.fill = str(len(self.steps))
        if self.rng.random() < 0.5:
            self.options = TableOptions(as_text=(self.rng.choice(list(self.things.columns)),))

    def write(self, database: Database) -> None:
        for _ in range(self.rng.randint(1, 3)):
            self.run(database, self.things.write())

    def run(self, database: Database, statement: str) -> bool:
        """Whether the statement succeeded: a type may refuse the values of another."""
        try:
            with database.transaction():
                database.execute(statement.encode())
        except psycopg.Error as error:
            self.steps.append(f"-- {type(error).__name__}: {statement}")
            return False
        self.steps.append(statement)
        return True

    def snapshot(self) -> None:
        self.relation = self.lake.snapshot(self.url, "things").relation
        self.steps.append("-- snapshot")

    def merge(self, *, kill: bool = False) -> None:
        self.steps.append(f"-- merge{', killed' if kill else ''}")
        fill(self.lake, self.url)
        # Few changes are merged by the driver, more are written by Spark.
        self.monkeypatch.setattr(limits, "TABLES_MERGE_CHANGES_MAX", self.rng.choice([3, 10_000]))
        reached = self.lake.reached()
        assert reached is not None
        if kill:
            self.monkeypatch.setattr(writes, "failpoint", self._killer())
            with suppress(KilledError):
                self.table().advance(reached)
            self.monkeypatch.undo()
        self.table().advance(reached)
        again = self.table()
        before = [each.table and each.table.version() for each in again.targets]
        again.advance(reached)
        assert before == [each.table and each.table.version() for each in self.table().targets]

    def _killer(self) -> object:
        point, passes = self.rng.choice(POINTS), iter(range(self.rng.randint(0, 1), -1, -1))

        def failpoint(name: str) -> None:
            if name == point and next(passes, 0) == 0:
                raise KilledError

        return failpoint

    def table(self) -> TypedTable:
        return TypedTable(self.lake, self.relation, self.options, fill=self.fill)

    @property
    def text(self) -> str:
        return f"SEED={self.seed}\n" + ";\n".join(self.steps)


def engines() -> Iterator[Literal["duckdb", "polars"]]:
    while True:
        yield "duckdb"
        yield "polars"


@pytest.mark.parametrize("number", range(HISTORIES))
def test_a_random_history(
    number: int, url: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lake_at(tmp_path, spark)
    story = Story(url, lake, first_seed(20261118) + number, monkeypatch)
    with opened(url) as database:
        try:
            story.play(database, TURNS)
        except Exception as error:
            error.add_note(story.text)
            raise
    engine = engines()
    last = story.known[-1]
    root = f"{lake.root}/tables/public/things"
    for _ in range(2):
        typed.expect(typed.read(f"{root}/current", next(engine)), last.rows, story.text)
    answered = 0
    history = {name: typed.read(f"{root}/history", name) for name in ("duckdb", "polars")}
    for each, is_quiet in zip(story.known, story.quiet, strict=True):
        rows = typed.state_at(history[next(engine)], each.position)
        if rows is not None:
            answered += 1
            typed.expect(rows, each.rows, f"{story.text}\nat {each.position}")
        rows = typed.state_at_time(history[next(engine)], each.at)
        if rows is not None and is_quiet:
            # A table that was empty when it was read has no row with that position.
            answered += 1
            typed.expect(rows, each.rows, f"{story.text}\nat {each.at}")
    assert answered, story.text


def by_delta_rs(path: str) -> list[typed.Row]:
    table = DeltaTable(path)
    fields = table.schema().fields
    names = {each.name: each.metadata.get("headwater.column", f"!{each.name}") for each in fields}
    return [
        {names[name]: value for name, value in row.items()}
        for row in table.to_pyarrow_dataset().to_table().to_pylist()
    ]


def test_added_and_dropped_columns_leave_closed_versions_in_their_files(
    url: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They only change Delta's schema. Files with and without a column are read, merged, joined and
    converted together. A column of another type is written again."""
    lake = lake_at(tmp_path, spark)
    root = f"{lake.root}/tables/public/items"
    known: list[typed.Truth] = []

    def closed() -> set[str]:
        return {f for f in DeltaTable(f"{root}/history").file_uris() if "_is_current=false" in f}

    def after(*statements: str, snapshot: bool = True) -> set[str]:
        """The files of closed versions when the statements are merged."""
        execute(url, *statements)
        if snapshot:
            lake.snapshot(url, "items")
        fill(lake, url)
        reached = lake.reached()
        assert reached is not None
        relation = shapes.load(lake.shapes_path, "items")[-1].table.oid
        done = TypedTable(lake, relation, TableOptions()).advance(reached)
        assert done.waits is None
        with opened(url) as database:
            known.append(typed.truth(database, "items"))
        return closed()

    def check() -> None:
        readers: dict[str, Callable[[str], list[typed.Row]]] = {
            "delta-rs": by_delta_rs,
            "duckdb": partial(typed.read, engine="duckdb"),
            "polars": partial(typed.read, engine="polars"),
        }
        for engine, read in readers.items():
            typed.expect(read(f"{root}/current"), known[-1].rows, engine)
            history = read(f"{root}/history")
            for number, each in enumerate(known):
                rows = typed.state_at(history, each.position)
                assert rows is not None
                typed.expect(rows, each.rows, f"{engine}, state {number}")

    after(
        "create table items (id int primary key, note text, amount int)",
        "insert into items select i, 'n' || i, i from generate_series(1, 5) i",
        "select headwater.enable_reactivity('items')",
    )
    first = after("update items set note = 'x' where id < 3", "delete from items where id = 3")
    assert first
    second = after(
        "alter table items add price numeric(10,2) default 1.5",
        "alter table items add at timestamp default '2026-11-01 12:00'",
        "update items set price = 7, at = null where id = 1",
    )
    assert first < second
    columns = {path: set(pq.read_schema(path).names) for path in second}
    assert {"price" in columns[path] for path in first} == {False}
    assert {"price" in columns[path] for path in second - first} == {True}
    third = after("update items set amount = 9 where id = 2", "delete from items where id = 1",
                  snapshot=False)  # fmt: skip
    assert second < third
    feed = pa.table(DeltaTable(f"{root}/history").load_cdf(starting_version=0).read_all())
    changes = zip(feed["_change_type"].to_pylist(), feed["_is_current"].to_pylist(), strict=True)
    assert ("delete", False) not in set(changes), "closed versions are not in the feed again"
    fourth = after(
        "alter table items drop note", "alter table items add note_2 text",
        "insert into items values (6, 6, 1, null, 'm')",
    )  # fmt: skip
    assert third < fourth
    check()
    monkeypatch.setattr(writes, "_COMPACT_COMMITS", 1)
    fifth = after("update items set amount = 0 where id = 6", snapshot=False)
    assert len(fifth) < len(fourth), "the files were joined"
    check()
    monkeypatch.undo()
    sixth = after("alter table items alter amount type bigint")
    assert sixth.isdisjoint(fifth)
    check()
    # The query of the documentation.
    (query,) = (b.text for b in blocks(LAKE_TABLES) if "_valid_from <=" in b.text)

    def at_time(at: datetime) -> list[typed.Row]:
        text = query.replace("2026-11-15 10:00Z", at.isoformat())
        return typed.read(f"{root}/history", "duckdb", text)

    answered = 0
    for each in known:
        rows = at_time(each.at)
        if "unknown" not in [row["!_op"] for row in rows]:
            typed.expect(rows, each.rows, f"at {each.at}")
            answered += 1
    assert answered > 1
    (before,) = at_time(known[0].at - timedelta(days=1))
    assert before["!_op"] == "unknown"


def test_stored_columns_are_found_by_their_names_in_postgresql(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Not by those in Delta, which another column may have now."""
    path = str(tmp_path / "current")
    declared = [Column(name, "integer", "integer") for name in ("id", "A", "a")]
    shape = Table(1, "public", "items", tuple(declared), ("id",))
    before, after = (
        columns_of(shape, TableOptions()),
        columns_of(
            msgspec.structs.replace(shape, columns=(*declared[:1], declared[2], declared[1])),
            TableOptions(),
            text={"a"},
        ),
    )
    assert [[each.name for each in columns] for columns in (before, after)] == [
        ["id", "A", "a_2"],
        ["id", "a", "A_2"],
    ]
    stored = pa.table([[1], [10], [20], ["k"]], schema=schema_of("current", before))
    write_deltalake(path, stored)
    rows = TypedDelta(path, "current").rows(spark, after, whole=True)
    assert rows.columns == ["id", "a", "A_2", "_key"]
    assert [tuple(row) for row in rows.collect()] == [(1, "20", 10, "k")]


# ------------------------------------------------------------------------ the job

CUSTOMERS = """
    create table customers (id int primary key, name text, email text, card text, notes text)"""

HIDDEN = ("ann@example.com", "card-4711", "card-4712", "a note")


def contents(root: str) -> str:
    """Everything in the files below a folder, of old versions too."""
    found = []
    for path in sorted(Path(root).rglob("*")):
        if path.suffix == ".parquet":
            found.append(str(pq.read_table(path, partitioning=None).to_pydict()))
        elif path.is_file():
            found.append(path.read_text(errors="replace"))
    return "\n".join(found)


def test_the_pipeline_keeps_typed_tables(
    url: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden columns never reach the files; pause, resume, backfill and other options."""
    lake = lake_at(tmp_path, spark)
    entry = TableEntry(exclude=("notes",), mask=("card",), hash=("email",))
    choice = Choice(entries={"customers": entry}, secret="s" * 32, exclude=("other",))
    root = f"{lake.root}/tables/public/customers"

    def rows() -> list[dict[str, object]]:
        return sorted(typed.read(f"{root}/current", "polars"), key=lambda row: str(row["id"]))

    def run(chosen: Choice = choice) -> list[dict[str, object]]:
        """What the pipeline does beside the streams."""
        fill(lake, url)
        thread = JobThread("tables", TablesJob(lake, chosen, once=True).step)
        thread.work()
        progress = thread.progress()
        assert progress is not None
        assert progress.error is None
        return rows()

    def state() -> str:
        return next(each.state for each in typed_tables(lake.root, choice))

    execute(
        url,
        CUSTOMERS,
        "create table other (id int primary key)",
        "insert into customers values (1, 'Ann', 'ann@example.com', 'card-4711', 'a note'),"
        " (2, 'Bob', null, null, null)",
        "select headwater.enable_reactivity('customers')",
        "select headwater.enable_reactivity('other')",
    )
    email = hmac.new(b"s" * 32, b"ann@example.com", "sha256").hexdigest()
    ann = {"id": 1, "name": "Ann", "email": email, "card": "***", "!_key": '{"id":1}'}
    bob = {"id": 2, "name": "Bob", "email": None, "card": None, "!_key": '{"id":2}'}
    run_once(spark, url, lake, tables=choice)
    assert execute(url, "select state, error from headwater.pipeline where name = 'tables'") == [
        ("stopped", None)
    ]
    assert rows() == [ann, bob]
    customers = shapes.load(lake.shapes_path, "customers")[-1].table
    execute(
        url,
        "update customers set card = 'card-4712' where id = 1",
        "update customers set name = 'Bert' where id = 2",
    )
    bert = {**bob, "name": "Bert"}
    assert run() == [ann, bert]
    assert [text for text in HIDDEN if text in contents(root)] == []
    assert not Path(f"{lake.root}/tables/public/other").exists()
    changes = pa.table(DeltaTable(f"{root}/current").load_cdf(starting_version=1).read_all())
    assert sorted(changes["_change_type"].to_pylist()) == [
        "update_postimage", "update_postimage", "update_preimage", "update_preimage",
    ]  # fmt: skip
    requests.pause(lake.root, customers, paused=True)
    execute(url, "delete from customers where id = 2")
    assert run() == [ann, bert]
    assert state() == "paused"
    requests.pause(lake.root, customers, paused=False)
    assert run() == [ann]
    versions = len(typed.read(f"{root}/history", "duckdb"))
    requests.backfill(lake.root, customers)
    assert state() == "due"
    assert run() == [ann]
    assert len(typed.read(f"{root}/history", "duckdb")) == versions
    assert state() == "ready"
    execute(
        url,
        "alter table customers rename card to number",
        "alter table customers rename to clients",
        "update clients set number = 'card-4712'",
    )
    lake.snapshot(url, "clients")
    old, root = root, f"{lake.root}/tables/public/clients"
    renamed = {"number" if name == "card" else name: value for name, value in ann.items()}
    assert run() == [renamed]
    assert [text for text in HIDDEN if text in contents(old) + contents(root)] == []
    execute(url, "alter table clients rename to customers", "update customers set name = 'Ann'")
    lake.snapshot(url, "customers")
    root = old
    assert run() == [renamed]
    entry = TableEntry(include=("name",), hash=("id",), mask=("name",))
    hidden = Choice(include=("cust*",), entries={"customers": entry}, secret="t" * 32)
    (row,) = run(hidden)
    assert row.keys() == {"id", "name", "!_key"}
    assert (row["name"], len(str(row["id"])), len(str(row["!_key"]))) == ("***", 64, 64)
    hidden_texts = (*HIDDEN, email, "Ann", "Bert", '{"id":1}')
    assert [text for text in hidden_texts if text in contents(root)] == []
    monkeypatch.setattr(job, "_RENEWED_AFTER", timedelta(0))
    execute(url, "insert into other values (1)")
    assert run(hidden) == [row], "a table without changes"
    assert not Path(f"{lake.root}/tables/public/other").exists()
    progress = [Progress.of(DeltaTable(f"{root}/{which}")) for which in ("current", "history")]
    assert [each and each.position for each in progress] == [lake.reached()] * 2
    thread = JobThread("tables", TablesJob(lake, hidden, once=True).step)
    thread.work()
    execute(url, "alter table customers rename to private", "update private set name = 'Bo'")
    lake.snapshot(url, "private")
    fill(lake, url)
    requests.backfill(lake.root, customers)
    thread.work()
    assert thread.failure is None
    assert not Path(f"{lake.root}/tables/public/private").exists(), "renamed into an excluded one"
    with pytest.raises(ConfigError, match="Delta is not on its class path"):
        Catalog("default").register(spark, root, customers)


def test_a_killed_pipeline_brings_both_tables_to_one_position(url: str, tmp_path: Path) -> None:
    make_orders(url)
    execute(url, "insert into orders select i, i, 'a' from generate_series(1, 9) i")
    lake = Lake(str(tmp_path / "lake"))
    settings = {"HEADWATER_URL": url, "HEADWATER_LAKE_TABLES": "0 seconds"}
    run = ("pipeline", "run", "--once", "--lake", lake.root, "--master", "local[2,4]")
    killed = headwater(*run, **settings, HEADWATER_FAILPOINT="committed_history:1")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    root = f"{lake.root}/tables/public/orders"
    assert len(typed.read(f"{root}/history", "polars")) == 10  # nine rows, and the time before
    assert not Path(f"{root}/current").exists()
    execute(url, "update orders set note = 'b' where id < 3", "delete from orders where id = 3")
    done = headwater(*run, **settings)
    assert done.returncode == 0, done.stderr
    with opened(url) as database:
        known = typed.truth(database, "orders")
    assert len(known.rows) == 8
    for which in ("current", "history"):
        rows = typed.read(f"{root}/{which}", "duckdb")
        typed.expect([row for row in rows if row.get("!_is_current", True)], known.rows, which)
    assert len(rows) == 12


# ------------------------------------------------------------------------ what no event says


class QuietTables:
    """Tables that hardly change, but for what the log lacks. `seen` is altered so that the catalog
    shows it; of `silent` only a comparison, or a change that contradicts the lake, does."""

    NAMES = ("seen", "silent")

    def __init__(
        self, url: str, lake: Lake, database: Database, seed: int, patch: pytest.MonkeyPatch
    ) -> None:
        self.rng, self.steps = random.Random(seed), [f"SEED={seed}"]
        self.url, self.lake, self.database = url, lake, database
        self.known: dict[str, list[typed.Truth]] = {name: [] for name in self.NAMES}
        self.snapshots = JobThread("snapshots", SnapshotJob(lake, url, events_max=1).step)
        self.start()
        patch.setattr(limits, "SNAPSHOT_WATCH_SECONDS", 0.0)
        patch.setattr(job, "_RENEWED_AFTER", timedelta(0))
        patch.setattr(gaps, "add", partial(self.add_gap, gaps.add))
        patch.setattr(snapshots, "add_to_list", partial(self.add_gap, snapshots.add_to_list))
        for name in self.NAMES:
            self.run(
                f"create table {name} (id int primary key, n int, note text)",
                f"insert into {name} select i, i, 'a' from generate_series(1, 4) i",
                f"select headwater.enable_reactivity('{name}')",
            )
        for when in ("insert", "update", "delete", "truncate"):
            self.run(f"alter table silent enable trigger headwater_{when}")

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.steps.append(statement)
            self.database.execute(statement.encode())

    def start(self) -> None:
        self.tables = JobThread("tables", TablesJob(self.lake, Choice(), once=True).step)

    def turn(self) -> None:
        match self.rng.randint(0, 5):
            case 0:
                name = self.rng.choice(self.NAMES)
                self.run(f"update {name} set n = n + 1")
            case 1:
                self.run(
                    "set session_replication_role = replica",
                    "update silent set n = n * 2 + 1",
                    "reset session_replication_role",
                )
            case _:
                self.alter(self.rng.randrange(10_000))
        self.record()

    def alter(self, number: int) -> None:
        hidden = f"update seen set n = n + {number}"
        self.run(
            self.rng.choice(
                [
                    f"alter table seen disable trigger user; {hidden};"
                    " alter table seen enable trigger user",
                    f"alter table seen alter n type int using n + {number}",
                    f"alter table seen add c{number} int default {number}",
                    f"alter table seen add d{number} int",
                ]
            )
        )

    def record(self) -> None:
        for name in self.NAMES:
            self.known[name].append(typed.truth(self.database, name))

    # ---------------------------------------------------------------- the pipeline

    def look(self, *, repair: bool = False) -> None:
        """What runs beside the tables: the stream, the watch of the catalog, a comparison."""
        self.steps.append(f"-- look{', and repair' if repair else ''}")
        self.fill()
        self.snapshots.work()
        assert self.snapshots.failure is None
        if repair:
            assert {each.error for each in reconcile(self.lake, self.url, repairing=True)} == {None}
            self.fill()

    def fill(self) -> None:
        events = delta.create(self.lake.events_path, STORED_EVENTS, ["day"])
        before = events.file_uris()
        fill(self.lake, self.url)
        new = [each for each in DeltaTable(self.lake.events_path).file_uris() if each not in before]
        for file in new:
            contents = audit.contents_of(audit.counted(pq.read_table(file, partitioning=None)))
            self.snapshots.note(contents)
            self.tables.note(contents)

    def merge(self, *, restart: bool = False) -> None:
        self.steps.append(f"-- merge{', restarted' if restart else ''}")
        if restart:
            self.start()
        self.tables.work()
        assert self.tables.failure is None

    def add_gap(self, add: Callable[..., None], *given: Any) -> None:
        """The tables come to the present while a gap or a snapshot is written."""
        if self.rng.random() < 0.4:
            self.fill()
            self.merge(restart=True)
        self.steps.append(f"-- {add.__module__}")
        add(*given)
        if self.rng.random() < 0.2:
            self.merge()

    def expect_current(self) -> None:
        self.look(repair=True)
        self.merge()
        self.record()
        for name in self.NAMES:
            rows = typed.read(f"{self.lake.root}/tables/public/{name}/current", "polars")
            typed.expect(rows, self.known[name][-1].rows, ";\n".join(self.steps))

    def expect_history(self) -> int:
        """Returns how many recorded states the histories know."""
        text, answered = ";\n".join(self.steps), 0
        for name in self.NAMES:
            history = typed.read(f"{self.lake.root}/tables/public/{name}/history", "duckdb")
            for each in self.known[name]:
                for found in (
                    typed.state_at(history, each.position),
                    typed.state_at_time(history, each.at),
                ):
                    if found is not None:
                        answered += 1
                        typed.expect(found, each.rows, f"{text}\n{name} at {each}")
        return answered


@pytest.mark.parametrize("number", range(size("quiet_tables", 1, large=40)))
def test_what_no_event_says(
    number: int, url: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gap, or another shape, is in the typed tables a round later, however late it is found."""
    lake = lake_at(tmp_path, spark)
    with opened(url) as database:
        seed = first_seed(1) + number
        story = QuietTables(url, lake, database, seed, monkeypatch)
        story.look()
        story.merge()
        for _ in range(size("quiet_turns", 3, large=10)):
            for _ in range(story.rng.randint(1, 2)):
                story.turn()
                if story.rng.random() < 0.5:
                    story.look()
                if story.rng.random() < 0.5:
                    story.merge(restart=story.rng.random() < 0.3)
            story.expect_current()
        assert story.expect_history()
