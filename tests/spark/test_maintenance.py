"""Maintenance of the lake: the stream writes snapshots and roll-ups, reads open few files, and old
events are removed."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from typer.testing import CliRunner

from headwater import limits
from headwater.commands.cli import app
from headwater.errors import PipelineError, ResyncRequired
from headwater.model import Position
from headwater.pipeline.compaction import tables
from headwater.pipeline.jobs.plan import PipelinePlan
from headwater.pipeline.jobs.snapshot_schedule import BatchContent, CapturedShape, SnapshotSchedule
from headwater.pipeline.jobs.trim import Trimmed, thin, trim
from headwater.pipeline.lake import audit, delta, retention, snapshots
from headwater.pipeline.lake.events import STORED_EVENTS, last_offset
from headwater.pipeline.lake.parquet import write_batches
from headwater.pipeline.lake.retention import RetentionFloor
from headwater.pipeline.lake.snapshots import TableSnapshot
from tests.spark.test_events import Running, state_of, until
from tests.support.lake.event_stream import append
from tests.support.lake.tables import execute, files_of, run_once
from tests.support.lake.truth import Copy, Database, copy, fill, lake_at, opened, position, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater.pipeline.reading.lake import Lake

pytestmark = pytest.mark.timeout(900)

ITEMS = "create table items (id int primary key, region int, amount numeric(12,2), note text)"


def enable(database: Database, table: str) -> None:
    database.execute("select headwater.enable_reactivity(%s)", [table])


def trim_log(database: Database, lake: Lake) -> None:
    """Remove everything from the log that the lake has, as if its retention were over."""
    reached = lake.reached()
    assert reached is not None
    database.execute(
        "with gone as (delete from headwater.log where xid < %s::text::xid8 returning xid, seq, at)"
        " insert into headwater.trimmed select i.id, gone.* from gone, headwater.installation i",
        [reached.xmin],
    )
    database.execute("select setval('headwater.log_floor', %s)", [reached.xmin])


# ------------------------------------------------------------------------ which are due


def taken(shape: int = 1, *, upto: int = 10, rows: int = 0, log: str = "a") -> TableSnapshot:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    return TableSnapshot(7, upto, Position(log, upto, upto), at, shape, rows, "table")


@pytest.mark.parametrize(
    ("last", "contents", "read", "fold"),
    [
        (None, [BatchContent(7, 1, "insert", 1, 5, 5)], [7], []),
        (taken(), [BatchContent(7, 1, "insert", 99, 20, 30)], [], []),
        (taken(), [BatchContent(7, 1, "insert", 100, 20, 30)], [], [7]),
        (taken(), [BatchContent(7, 1, "insert", 100, 2, 3)], [], []),
        (taken(rows=1000), [BatchContent(7, 1, "insert", 100, 20, 30)], [], []),
        (taken(rows=1000), [BatchContent(7, 1, "delete", 500, 20, 30)], [], [7]),
        (taken(), [BatchContent(7, 1, "reset", 1, 20, 20)], [7], []),
        (taken(), [BatchContent(7, 1, "reset", 1, 9, 9)], [], []),
        (taken(), [BatchContent(7, 2, "update", 100, 20, 20)], [7], []),
        (taken(), [BatchContent(7, 2, "update", 100, 9, 9)], [], []),
    ],
)
def test_which_tables_are_due(
    last: TableSnapshot | None, contents: list[BatchContent], read: list[int], fold: list[int]
) -> None:
    schedule = SnapshotSchedule(100)
    if last is not None:
        schedule.add_snapshot(last)
        schedule.examine([CapturedShape(7, last.shape)], "a")
    for content in contents:
        schedule.add_changes(content)
    assert (schedule.to_read(), schedule.to_fold()) == (read, fold)
    schedule.add_snapshot(taken(upto=1000))
    assert (schedule.to_read(), schedule.to_fold()) == ([], [])


def test_another_database_or_shape_is_read_again() -> None:
    for last in (taken(log="b"), taken(shape=2)):
        schedule = SnapshotSchedule(100)
        schedule.add_snapshot(last)
        schedule.examine([CapturedShape(7, 1)], "a")
        assert schedule.to_read() == [7]


# ------------------------------------------------------------------------ while the stream runs

CHANGES: list[tuple[str, ...]] = [
    ("insert into items select i, i, i, 'b' from generate_series(10, 19) i",
     "update items set amount = 0.5 where id = 1"),
    ("alter table items add column extra int default 7",
     "update items set amount = amount + 1 where id = 2"),
    ("alter table items drop column region", "delete from items where id = 4"),
    ("alter table items rename column note to remark",
     "update items set remark = 'new' where id = 5"),
    ("alter table items alter column amount type int using (amount * 100)::int",
     "update items set amount = amount + 1 where id = 6"),
    ("update items set id = id + 1000 where id < 4",),
    ("alter table items drop constraint items_pkey, add primary key (id, extra)",
     "update items set extra = extra + 1 where id > 1000"),
    ("truncate items", "alter table items drop constraint items_pkey, add primary key (id)",
     "insert into items values (6, 6, 'after', 1), (10, 1, null, 2)"),
    ("update items set extra = extra + 1",) * 4,
    ("drop table items", "create table items (id text primary key, other date)",
     "insert into items values ('6', '2026-01-01')",
     "select headwater.enable_reactivity('items')",
     "insert into items values ('b', '2026-02-03')"),
    ("update items set other = '2027-01-01' where id = 'b'",),
]  # fmt: skip


def test_schema_changes_while_it_runs(url: str, spark: SparkSession, tmp_path: Path) -> None:
    """Only the pipeline takes snapshots, and the log is trimmed after it."""
    lake = lake_at(tmp_path, spark)
    copies: list[Copy] = []
    with opened(url) as database:
        database.execute(ITEMS)
        database.execute("insert into items select i, i, i, 'a' from generate_series(1, 9) i")
        enable(database, "items")
        for statements in CHANGES:
            for statement in statements:
                database.execute(statement.encode())
            copies.append(copy(database, "items"))
            run_once(spark, url, lake, snapshot_events=8)
            trim_log(database, lake)
        database.execute("insert into items values ('c', null)")
        run_once(spark, url, lake, snapshot_events=8)
        database.execute("drop schema headwater cascade")
    for number, each in enumerate(copies):
        assert rows_of(lake.as_of("items", each.position)) == each.rows, CHANGES[number]
        if number % 3 == 2:
            assert rows_of(lake.as_of("items", each.at)) == each.rows, CHANGES[number]
        elif number % 3 == 1:
            one = [row for row in each.rows if str(row["id"]) == "6"]
            assert rows_of(lake.as_of("items", each.position, key="6")) == one
    origins = [each.origin for each in snapshots.load(lake.places)]
    assert set(origins) == {"table", "events"}


def test_snapshots_fail_alone(
    url: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events continue, the problem is reported, and due snapshots are taken when it is over."""
    monkeypatch.setattr(limits, "PIPELINE_RESTART_SECONDS", (0.1, 0.2))
    monkeypatch.setattr(limits, "PIPELINE_REPORT_SECONDS", 0.1)
    lake = lake_at(tmp_path, spark)

    def fail(url: str, *_: object, **__: object) -> None:
        raise PipelineError("the camera is broken")

    monkeypatch.setattr(lake, "snapshots_of", fail)
    execute(url, ITEMS, "select headwater.enable_reactivity('items')")
    running = Running(spark, PipelinePlan(url, lake, seconds=0.05, snapshot_events=4))
    try:
        until(lambda: "camera" in (state_of(url, "snapshots")[2] or ""))
        execute(url, "insert into items values (1), (2)")
        until(lambda: state_of(url, "events")[5] == 3)
        monkeypatch.delattr(lake, "snapshots_of")
        until(lambda: state_of(url, "snapshots")[:1] == ("running",))
        assert state_of(url, "snapshots")[2] is None
        execute(url, "insert into items values (3), (4), (5), (6)")
        until(lambda: [each.rows for each in snapshots.load(lake.places)][-1:] == [6])
        assert snapshots.load(lake.places)[-1].origin == "events"
    finally:
        ended = running.stop()
    assert [each.name for each in ended] == ["events"]
    assert state_of(url, "snapshots")[0] == "stopped"


def test_a_run_once_reports_what_its_jobs_could_not_do(
    url: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lake_at(tmp_path, spark)

    def fail(url: str, *_: object, **__: object) -> None:
        raise PipelineError("the camera is broken")

    monkeypatch.setattr(lake, "snapshots_of", fail)
    execute(url, ITEMS, "select headwater.enable_reactivity('items')")
    with pytest.raises(PipelineError, match="camera"):
        run_once(spark, url, lake, snapshot_events=4)
    assert delta.offset_of(DeltaTable(lake.events_path)) is not None
    monkeypatch.delattr(lake, "snapshots_of")
    run_once(spark, url, lake, snapshot_events=4)
    assert len(snapshots.load(lake.places)) == 1


# ------------------------------------------------------------------------ roll-ups


def test_the_stream_updates_the_roll_ups(
    url: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = lake_at(tmp_path, spark)
    execute(url, ITEMS, "select headwater.enable_reactivity('items')")
    execute(url, "create schema sales; create table sales.lines (id int primary key)",
            "select headwater.enable_reactivity('sales.lines')")  # fmt: skip
    execute(url, "insert into items select i from generate_series(1, 10) i",
            "begin; set local headwater.user_id = 'ann'; insert into sales.lines values (1);"
            " commit",
            "delete from items where id > 8")  # fmt: skip
    counts = {"left": 1}
    add = audit.AuditTable.add

    def crash(self: audit.AuditTable, *arguments: Any, **named: Any) -> None:
        counts["left"] -= 1
        if counts["left"] == 0:
            raise PipelineError("between the two commits")
        add(self, *arguments, **named)

    def same() -> None:
        truth = audit.roll_up(lake.events()).collect()
        found = audit.summary(lake._rolled(None, None), audit.BY).select(*audit.AUDIT.names)
        assert sorted(map(repr, found.collect())) == sorted(map(repr, truth))

    monkeypatch.setattr(audit.AuditTable, "add", crash)
    for left in (1, 2):
        counts["left"] = left
        with pytest.raises(PipelineError, match="between the two"):
            run_once(spark, url, lake, rows_max=5, snapshot_events=0)
    monkeypatch.undo()
    run_once(spark, url, lake, rows_max=5, snapshot_events=0)
    same()
    before = DeltaTable(lake.audit_path)
    lines = before.to_pyarrow_table().num_rows
    list(tables.compact(lake.root, lambda: spark))
    after = DeltaTable(lake.audit_path)
    assert after.to_pyarrow_table().num_rows < lines
    assert len(after.file_uris()) == len(set(after.to_pyarrow_table().column("day").to_pylist()))
    same()
    # A batch that is in the lake stays known; and a lake without roll-ups is counted once.
    assert delta.offset_of(after) == delta.offset_of(before) is not None
    execute(url, "insert into items values (100)")
    run_once(spark, url, lake, snapshot_events=0)
    same()
    assert lake.audit(["user"]).filter("user = 'ann'").collect()[0]["changes"] == 1


def test_every_change_is_counted_once(
    url: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that only the log has, those that are in the lake and not in the roll-ups, and
    those of a batch that is committed while the counts are read."""
    lake = lake_at(tmp_path, spark)
    execute(url, ITEMS, "select headwater.enable_reactivity('items')")

    def add(count: int) -> None:
        execute(url, "insert into items select (select count(*) from items) + i"
                f" from generate_series(1, {count}) i")  # fmt: skip

    def inserted(found: Lake, **bounds: datetime) -> int:
        rows = found.audit(["operation"], **bounds).filter("operation = 'insert'").collect()
        return int(rows[0]["changes"]) if rows else 0

    add(3)  # with the reset: 4
    run_once(spark, url, lake, snapshot_events=0)
    add(4)
    assert (inserted(lake), inserted(lake.with_log(url))) == (3, 7)
    today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    assert inserted(lake.with_log(url), since=today - timedelta(days=1)) == 7
    assert inserted(lake.with_log(url), until=today - timedelta(days=1)) == 0
    command = ["audit", "--by", "operation", "--json", "--lake", lake.root, "--url", url]
    printed = CliRunner().invoke(app, command, catch_exceptions=False).stdout
    assert {row["operation"]: row["changes"] for row in map(json.loads, printed.splitlines())} == {
        "insert": 7, "reset": 1,
    }  # fmt: skip

    def uncounted(*_: object, **__: object) -> bool:
        raise PipelineError("between the two commits")

    with monkeypatch.context() as crash:
        crash.setattr(audit.AuditTable, "add", uncounted)
        with pytest.raises(PipelineError, match="between the two"):
            run_once(spark, url, lake, rows_max=2, snapshot_events=0)
    assert (in_lake_count(lake), inserted(lake)) == (6, 5)
    add(1)
    assert inserted(lake.with_log(url)) == 8
    opened = lake.with_log(url)
    run_once(spark, url, lake, rows_max=2, snapshot_events=0)
    assert (inserted(opened), inserted(lake), inserted(lake.with_log(url))) == (8, 8, 8)


def in_lake_count(lake: Lake) -> int:
    return int(DeltaTable(lake.events_path).to_pyarrow_table(columns=["seq"]).num_rows)


def test_the_offset_of_the_lake_is_always_known(tmp_path: Path) -> None:
    """After any number of commits without a batch, also if other writers commit in between."""
    path = str(tmp_path / "table")
    rows = pa.table({"seq": pa.array([1], pa.int64())})
    table = delta.create(path, rows.schema)
    assert delta.offset_of(table) is None
    for number in (1, 2):
        append(path, rows, f"o{number}")
    for _ in range(30):
        table = DeltaTable(path)
        table.vacuum(0, dry_run=False, enforce_retention_duration=False,
                     commit_properties=delta.carrying(table))  # fmt: skip
    assert delta.offset_of(DeltaTable(path)) == "o2"
    # Files are joined from an older version than the last batch: that batch counts.
    old = delta.carrying(DeltaTable(path))
    append(path, rows, "o3")
    table = DeltaTable(path)
    table.optimize.compact(commit_properties=old)
    assert delta.offset_of(DeltaTable(path)) == "o3"


# ------------------------------------------------------------------------ what is read


def test_older_files_are_not_opened(url: str, spark: SparkSession, tmp_path: Path) -> None:
    lake = lake_at(tmp_path, spark)

    def opened_for(when: Position | datetime, **given: Any) -> set[str]:
        files = lake.as_of("items", when, **given).inputFiles()
        return {Path(each).name for each in files if "/events/" in each}

    def newest(before: set[str]) -> set[str]:
        return {Path(each).name for each in files_of(lake.events_path)} - before

    with opened(url) as database, opened(url) as other:
        database.execute(ITEMS)
        enable(database, "items")
        lake.snapshot(url, "items")
        for start in (1, 11, 21):
            database.execute("insert into items select i, i from generate_series(%s::int, %s) i",
                             [start, start + 9])  # fmt: skip
            fill(lake, url)
        older = newest(set())
        first = position(database)
        fill(lake, url)
        # A transaction that is open meanwhile belongs to no snapshot, and is not forgotten.
        other.execute("begin")
        other.execute("insert into items values (99, 5)")
        database.execute("update items set region = 6 where id = 1")
        fill(lake, url)
        reached = lake.reached()
        assert reached is not None
        folded = lake.fold_snapshot("items", reached)
        assert (folded.origin, folded.rows) == ("events", 30)
        unchanged = newest(set())
        assert opened_for(reached) == set()
        other.execute("commit")
        database.execute("update items set region = 7 where id = 2")
        now = copy(database, "items")
        fill(lake, url)
        assert opened_for(now.position) == newest(unchanged)
        assert not opened_for(now.at) & older
        assert opened_for(now.position, key=2) == newest(unchanged)
        assert rows_of(lake.as_of("items", now.position)) == now.rows
        assert rows_of(lake.as_of("items", now.at)) == now.rows
        assert rows_of(lake.as_of("items", now.position, key=99))[0]["region"] == 5
        assert len(rows_of(lake.as_of("items", first))) == 30
    list(tables.compact(lake.root, lambda: spark))
    (file,) = files_of(lake.events_path)
    group = pq.read_metadata(file).row_group(0)
    blooms = {
        group.column(n).path_in_schema
        for n in range(group.num_columns)
        if group.column(n).bloom_filter_offset
    }
    assert blooms == {"key", "op"}
    assert [v["op"] for v in lake.history("items", 2).collect()] == ["insert", "update"]


# ------------------------------------------------------------------------ retention


def make_older(lake: Lake, age: timedelta) -> None:
    """Make all of this older by that time."""
    table = DeltaTable(lake.events_path)
    rows = table.to_pyarrow_table().to_pylist()
    for row in rows:
        row["committed_at"] -= age
        row["day"] = row["committed_at"].date()
    write_deltalake(
        table,
        pa.Table.from_pylist(rows, STORED_EVENTS),
        mode="overwrite",
        commit_properties=delta.carrying(table),
    )


def test_retention(url: str, spark: SparkSession, tmp_path: Path) -> None:
    lake = lake_at(tmp_path, spark)
    with opened(url) as database:
        database.execute(ITEMS)
        database.execute("create table idle (id int primary key)")
        enable(database, "items")
        enable(database, "idle")
        database.execute("insert into idle values (1)")
        database.execute("insert into items values (1), (2)")
        early = position(database)
        database.execute("insert into items values (3)")
        run_once(spark, url, lake, snapshot_events=0)
        make_older(lake, timedelta(days=10))
        # Only events that a snapshot contains are removed.
        assert trim(lake, timedelta(days=5)) == Trimmed(None, held=("idle", "items"))
        assert lake.events().count() == 6
        lake.snapshot(url, "items")
        lake.snapshot(url, "idle")
        database.execute("update items set region = 5 where id = 1")
        now = copy(database, "items")
        database.execute("delete from items where id = 2")
        run_once(spark, url, lake, snapshot_events=0)
        done = trim(lake, timedelta(days=5))
        today = datetime.now(UTC).date()
        assert (done.days, done.held) == (1, ())
        assert done.since == today - timedelta(days=5)
        assert lake.events().count() == 2
        for when in (early, datetime.now(UTC) - timedelta(days=9)):
            with pytest.raises(ResyncRequired, match=r"by its retention: the earliest moment") as e:
                lake.as_of("items", when)
            assert f"{done.since} 00:00" in str(e.value)
        assert rows_of(lake.as_of("items", now.position)) == now.rows
        assert rows_of(lake.as_of("idle", now.at)) == [{"id": 1}]
        assert rows_of(lake.as_of("items", now.at, key=2)) == [now.rows[1]]
        # The stream still has its position, and the audit its counts.
        last = last_offset(lake.events_path)
        assert last is not None
        assert last.position == lake.reached()
        assert lake.audit([]).collect()[0]["changes"] == 8
        assert trim(lake, timedelta(days=5)) == Trimmed(done.since)


def test_retention_removes_only_what_was_looked_at(
    url: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last snapshot is beyond what the lake has, and where a stream that is behind
    writes events of old days meanwhile."""
    lake = lake_at(tmp_path, spark)

    today, save = datetime.now(UTC).date(), retention.save

    def stored() -> list[dict[str, Any]]:
        rows = DeltaTable(lake.events_path).to_pyarrow_table().to_pylist()
        return sorted(rows, key=lambda row: int(row["seq"]))

    def write_older(root: str, floor: RetentionFloor) -> None:
        late = stored()[0] | {"seq": 1_000, "xid": 1_000_000}
        write_deltalake(
            lake.events_path, pa.Table.from_pylist([late], STORED_EVENTS), mode="append"
        )
        save(root, floor)

    with opened(url) as database:
        database.execute(ITEMS)
        enable(database, "items")
        database.execute("insert into items values (1)")
        fill(lake, url)
        make_older(lake, timedelta(days=10))
        database.execute("insert into items values (2)")
        # Perhaps the log has lost changes before it, and no gap says so yet.
        lake.snapshot(url, "items")
        assert trim(lake, timedelta(days=5)) == Trimmed(None, held=("items",))
        fill(lake, url)
    monkeypatch.setattr(retention, "save", write_older)
    assert trim(lake, timedelta(days=5)).days == 1
    assert [(row["day"] < today, row["seq"] == 1_000) for row in stored()] == [
        (False, False),
        (True, True),
    ]


def test_snapshots_are_thinned(tmp_path: Path) -> None:
    from headwater.pipeline.reading.lake import Lake

    lake, now = Lake(str(tmp_path)), datetime(2026, 6, 30, 12, tzinfo=UTC)
    for days, hours in ((20, 0), (20, 1), (20, 2), (1, 0), (1, 1)):
        at = now - timedelta(days=days) + timedelta(hours=hours)
        number = snapshots.number_of(at)
        origin = "table" if hours == 0 else "events"
        one = TableSnapshot(7, number, Position("a", number, number), at, 1, 0, origin)  # type: ignore[arg-type]
        rows = pa.record_batch([[7], [number], ["k"], ["{}"], [1]], schema=snapshots.ROWS)
        snapshots.create(lake.places)
        files = write_batches(
            lake.places.rows, snapshots.ROWS, [rows], snapshots.PARTITIONS, blooms=True
        )
        delta.add(DeltaTable(lake.places.rows), files)
        snapshots.add_to_list(lake.places, [one])
    assert thin(lake, now) == 1
    left = snapshots.load(lake.places)
    assert [each.taken_at.hour for each in left] == [12, 14, 12, 13]
    assert len(DeltaTable(lake.places.rows).file_uris()) == 4
    assert thin(lake, now) == 0
