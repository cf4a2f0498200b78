"""Every change in the lake, once; and the errors of the pipeline."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from headwater import limits
from headwater.errors import ConfigError, PipelineError, ResyncRequired
from headwater.pipeline.compaction import choice, tables
from headwater.pipeline.jobs.events_sink import EventsSink
from headwater.pipeline.jobs.ingest import Target, write_parts
from headwater.pipeline.jobs.pipeline import run
from headwater.pipeline.jobs.plan import EVENTS, PipelinePlan, StreamJob
from headwater.pipeline.lake import delta, maintenance
from headwater.pipeline.lake.events import last_offset
from headwater.pipeline.lake.parquet import adopt_staged, write_files
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.stream.checkpoints import Checkpoint, LakeLock
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.planning import _SPARK_PART_CHANGES, Planner
from headwater.pipeline.stream.progress import StreamProgress
from headwater.pipeline.stream.sink import StreamSink
from headwater.pipeline.views.weighted import parts_frame
from tests.support.lake.tables import execute, files_of, in_lake, logged, make_orders, run_once

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def lake(tmp_path: Path, spark: SparkSession) -> Lake:
    return Lake(str(tmp_path / "lake"), spark)


@pytest.fixture
def orders(url: str) -> str:
    make_orders(url)
    return url


def insert(first: int, last: int) -> str:
    return f"insert into orders select i, i / 7.0, 'n' || i from generate_series({first}, {last}) i"


# ------------------------------------------------------------------------ what is written


def test_events_are_the_log(spark: SparkSession, orders: str, lake: Lake) -> None:
    execute(
        orders,
        insert(1, 100),
        "begin; set local headwater.user_id = 'ann'; delete from orders where id < 9; commit",
        "update orders set id = id + 1000 where id % 5 = 0",
        "truncate orders",
    )
    (stream,) = run_once(spark, orders, lake)
    assert stream.changes == len(logged(orders))
    assert in_lake(lake) == logged(orders)
    execute(orders, insert(1, 10))
    run_once(spark, orders, lake)
    assert in_lake(lake) == logged(orders)
    assert lake.events().count() == len(logged(orders))


def test_large_batches_are_written_by_tasks(spark: SparkSession, orders: str, lake: Lake) -> None:
    execute(orders, insert(1, _SPARK_PART_CHANGES + 10))
    run_once(spark, orders, lake)
    assert in_lake(lake) == logged(orders)
    assert len(files_of(lake.events_path)) > 1
    assert not Path(lake.events_path, delta.STAGE).exists() or not os.listdir(
        Path(lake.events_path, delta.STAGE)
    )


def test_other_engines_read_the_same(spark: SparkSession, orders: str, lake: Lake) -> None:
    execute(orders, insert(1, 500), "update orders set note = null where id % 3 = 0")
    run_once(spark, orders, lake)
    seen = [row[:1] + row[5:9] for row in logged(orders)]
    polars = pl.read_delta(lake.events_path).sort("seq")
    assert polars.select("seq", "op", "key", "before", "after").rows() == seen
    found = lake.events().orderBy("seq").select("seq", "op", "key", "before", "after")
    assert [tuple(row) for row in found.collect()] == seen
    days = {(row["day"], row["committed_at"].date()) for row in polars.iter_rows(named=True)}
    assert all(day == date for day, date in days)


def test_readers_can_skip_files(spark: SparkSession, orders: str, lake: Lake) -> None:
    execute(orders, insert(1, 10))
    run_once(spark, orders, lake)
    actions = DeltaTable(lake.events_path).get_add_actions(flatten=True)
    (stats,) = pl.DataFrame(actions).to_dicts()
    seqs = [row[0] for row in logged(orders)]
    assert (stats["min.seq"], stats["max.seq"], stats["num_records"]) == (
        min(seqs),
        max(seqs),
        len(seqs),
    )
    assert stats["min.table_name"] == "orders"
    assert stats["null_count.before"] == len(seqs)
    assert stats["min.committed_at"] <= logged(orders)[-1][2] <= stats["max.committed_at"]


def test_commits_have_their_offset(spark: SparkSession, orders: str, lake: Lake) -> None:
    execute(orders, insert(1, 10))
    (stream,) = run_once(spark, orders, lake)
    last = last_offset(lake.events_path)
    assert last is not None
    assert str(last.position) == stream.position


def test_shapes_are_stored(spark: SparkSession, orders: str, lake: Lake) -> None:
    execute(orders, insert(1, 2), "alter table orders add column paid boolean")
    execute(orders, "insert into orders values (3, 1, 'x', true)")
    run_once(spark, orders, lake)
    execute(orders, "alter table orders drop column note", "delete from orders where id = 3")
    run_once(spark, orders, lake)
    rows = delta.select("select * from shapes", shapes=DeltaTable(lake.shapes_path))
    held = {row["id"]: row for row in rows}
    assert len(rows) == len(held)
    assert {row[-1] for row in logged(orders)} <= set(held)
    truth = execute(orders, "select id, relid::bigint, table_name, columns::text, key from"
                    " headwater.shapes")  # fmt: skip
    for id, relation, table, columns, key in truth:
        stored = held[id]
        found = stored["relation"], stored["table_name"], stored["columns"]
        assert found == (relation, table, columns)
        assert json.loads(stored["key"]) == key


def test_our_own_tables_are_left_out(
    spark: SparkSession, orders: str, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The progress of the pipeline can be followed like any table, and does not wake the
    pipeline."""
    monkeypatch.setattr(limits, "PIPELINE_REPORT_SECONDS", 0.1)
    execute(orders, "select headwater.enable_reactivity('headwater.pipeline')", insert(1, 3))
    running = Running(spark, PipelinePlan(orders, lake, seconds=0.05))
    try:
        until(lambda: state_of(orders, "events")[3::2] == (0, len(logged(orders))))
        until(lambda: _is_quiet(orders))
    finally:
        running.stop()
    assert {row[4] for row in in_lake(lake)} == {"orders"}


def _is_quiet(url: str) -> bool:
    """Whether no report comes for a long time."""
    latest = "select max(seq) from headwater.changes where table_name = 'pipeline'"
    before = execute(url, latest)
    threading.Event().wait(2)
    return before == execute(url, latest)


# ------------------------------------------------------------------------ once


@pytest.mark.parametrize("rows_max", [None, 7])
def test_a_lake_without_its_checkpoint(
    rows_max: int | None, spark: SparkSession, orders: str, lake: Lake
) -> None:
    """It continues after the last event of the lake, also if that is inside a read of the log."""
    execute(orders, insert(1, 30))
    stop_after = _Stops(2)
    job = _job(sink=stop_after.around(EventsSink))
    with pytest.raises(PipelineError, match="enough"):
        run_once(spark, orders, lake, rows_max=7, jobs=(job,))
    last = last_offset(lake.events_path)
    assert last is not None
    assert last.until is not None
    assert len(in_lake(lake)) == 14
    shutil.rmtree(lake.checkpoint("events"))
    execute(orders, insert(31, 40))
    run_once(spark, orders, lake, rows_max=rows_max)
    assert in_lake(lake) == logged(orders)


@pytest.mark.parametrize("restored", ["checkpoint", "events", "audit", "events and audit"])
def test_parts_of_a_lake_of_different_times(
    restored: str, spark: SparkSession, orders: str, lake: Lake, tmp_path: Path
) -> None:
    """A lake of which a part was restored continues from `events`."""
    execute(orders, insert(1, 5))
    run_once(spark, orders, lake)
    folders = {
        "checkpoint": (lake.checkpoint("events"),),
        "events": (lake.events_path,),
        "audit": (lake.audit_path,),
        "events and audit": (lake.events_path, lake.audit_path),
    }[restored]
    for folder in folders:
        shutil.copytree(folder, tmp_path / Path(folder).name)
    for first in (6, 11):
        execute(orders, insert(first, first + 4))
        run_once(spark, orders, lake)
    for folder in folders:
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / Path(folder).name, folder)
    execute(orders, insert(16, 20))
    run_once(spark, orders, lake)
    assert in_lake(lake) == logged(orders)
    assert counted(lake) == len(logged(orders))


def test_a_lake_whose_events_were_removed(spark: SparkSession, orders: str, lake: Lake) -> None:
    """They are written again."""
    execute(orders, insert(1, 5))
    run_once(spark, orders, lake)
    shutil.rmtree(lake.events_path)
    run_once(spark, orders, lake)
    assert in_lake(lake) == logged(orders)
    assert counted(lake) == len(logged(orders))


def test_a_second_writer_that_has_come_first(lake: Lake) -> None:
    """A lake under a URL has no lock: the batch of another stream must not be written twice."""
    rows = _some_rows()
    delta.create(lake.events_path, rows.schema)
    one, two = DeltaTable(lake.events_path), DeltaTable(lake.events_path)
    files = [write_files(lake.events_path, rows, []) for _ in "12"]
    for table, name, each in ((one, "one", files[0]), (two, "two", files[1])):
        raised = pytest.raises(PipelineError, match="other writers") if table is two else None
        with raised or nullcontext():
            delta.append_files(table, each, after=None, metadata={delta.OFFSET: name})
    assert DeltaTable(lake.events_path).to_pyarrow_dataset().count_rows() == rows.num_rows


@pytest.mark.parametrize("at", [0, 1])
def test_a_batch_that_starts_elsewhere_is_not_written(
    at: int, spark: SparkSession, orders: str, lake: Lake
) -> None:
    """Another pipeline has begun at an older offset in the same checkpoint: to write this batch
    would write changes twice. The next start continues from the table."""
    with closing(Planner(orders)) as planner:
        older = msgspec.json.encode(Offset(planner.now()).to_dict()).decode()
    execute(orders, insert(1, 5))
    run_once(spark, orders, lake)
    execute(orders, insert(6, 40))
    before: list[int] = []

    def other_pipeline() -> None:
        path = Path(lake.checkpoint("events"), "offsets/0" if at else "begin")
        *facts, _ = path.read_text().splitlines()
        path.write_text("\n".join([*facts, older]))
        before.append(DeltaTable(lake.events_path).version())

    between = _Between(at, other_pipeline)
    with pytest.raises(PipelineError, match=f"batch {at} of .* does not start where") as caught:
        run_once(spark, orders, lake, rows_max=7, jobs=(_job(sink=between.around(EventsSink)),))
    assert caught.value.retryable
    assert "one pipeline" in (caught.value.hint or "")
    assert DeltaTable(lake.events_path).version() == before[0]
    assert in_lake(lake) == logged(orders)[: 6 + 7 * at]  # the first is that it was enabled
    run_once(spark, orders, lake)
    assert in_lake(lake) == logged(orders)
    assert counted(lake) == len(logged(orders))


def test_a_table_that_another_pipeline_advances(
    spark: SparkSession, orders: str, lake: Lake
) -> None:
    """While this one runs, between two of its batches. Nothing is written twice."""
    execute(orders, insert(1, 5))
    run_once(spark, orders, lake)
    execute(orders, insert(6, 40))
    before: list[int] = []

    def other_pipeline() -> None:
        """It commits everything that there is."""
        table = DeltaTable(lake.events_path)
        here = last_offset(lake.events_path)
        assert here is not None
        with closing(Planner(orders)) as planner:
            until = Offset(here.until or planner.now())
            parts = parts_frame(spark, planner.parts(here, until))
        written = write_parts(parts, Target(lake.events_path, lake.audit_path))
        text = msgspec.json.encode(until.to_dict()).decode()
        delta.append_files(
            table, written.events, after=delta.offset_of(table), metadata={delta.OFFSET: text}
        )
        before.append(DeltaTable(lake.events_path).version())

    between = _Between(1, other_pipeline)
    with pytest.raises(PipelineError, match="other writers commit") as caught:
        run_once(spark, orders, lake, rows_max=7, jobs=(_job(sink=between.around(EventsSink)),))
    assert caught.value.retryable
    assert DeltaTable(lake.events_path).version() == before[0]
    assert in_lake(lake) == logged(orders)
    execute(orders, insert(41, 45))
    run_once(spark, orders, lake)
    assert in_lake(lake) == logged(orders)
    assert counted(lake) == len(logged(orders))


def counted(lake: Lake) -> int:
    """The changes in the roll-ups."""
    lines = DeltaTable(lake.audit_path).to_pyarrow_table(columns=["changes"])
    return sum(lines.column("changes").to_pylist())


class _Between:
    """A sink before one of whose batches something happens."""

    def __init__(self, batch: int, happens: Callable[[], None]) -> None:
        self.batch = batch
        self.happens = happens

    def around(self, sink: Callable[..., StreamSink]) -> Callable[..., StreamSink]:
        return lambda *arguments: _Interrupted(self, sink(*arguments))


class _Interrupted(StreamSink):
    def __init__(self, between: _Between, inner: StreamSink) -> None:
        self._between = between
        self._inner = inner

    def write(self, batch: DataFrame, batch_id: int) -> int:
        if batch_id == self._between.batch:
            self._between.happens()
        return self._inner.write(batch, batch_id)

    def close(self, seconds: float = 0) -> None:
        self._inner.close(seconds)


def _job(**fields: Any) -> StreamJob:
    given: dict[str, Any] = {
        "name": "events",
        "sink": EventsSink,
    }
    return StreamJob(**(given | {"begin": lambda lake: last_offset(lake.events_path)} | fields))


class _Stops:
    """A sink that fails after this many batches."""

    def __init__(self, batches: int, error: Exception | None = None) -> None:
        self.left = batches
        self.error = error or PipelineError("enough")

    def around(self, sink: Callable[..., StreamSink]) -> Callable[..., StreamSink]:
        return lambda *arguments: _Stopping(self, sink(*arguments))


class _Stopping(StreamSink):
    def __init__(self, stops: _Stops, inner: StreamSink) -> None:
        self._stops = stops
        self._inner = inner

    def write(self, batch: DataFrame, batch_id: int) -> int:
        if self._stops.left == 0:
            raise self._stops.error
        self._stops.left -= 1
        return self._inner.write(batch, batch_id)

    def close(self, seconds: float = 0) -> None:
        self._inner.close(seconds)


class Nowhere(StreamSink):
    def write(self, batch: DataFrame, batch_id: int) -> int:
        return 0


# ------------------------------------------------------------------------ supervised


class Running:
    """A pipeline in a thread."""

    def __init__(self, spark: SparkSession, plan: PipelinePlan) -> None:
        self._stop = threading.Event()
        self.ended: list[StreamProgress] = []
        self._thread = threading.Thread(
            target=lambda: self.ended.extend(run(spark, plan, self._stop))
        )
        self._thread.start()

    def stop(self) -> list[StreamProgress]:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.ended


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    waited = threading.Event()
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        waited.wait(0.05)
    raise AssertionError("it did not happen")


def state_of(url: str, name: str) -> tuple[Any, ...]:
    found = execute(url, "select state, restarts, error, behind_changes, position, changes"
                    f" from headwater.pipeline where name = '{name}'")  # fmt: skip
    return found[0] if found else (None,) * 6


def test_a_stream_that_fails_is_started_again(
    spark: SparkSession, orders: str, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other stream continues meanwhile, and both report their state."""
    monkeypatch.setattr(limits, "PIPELINE_RESTART_SECONDS", (0.1, 0.2))
    monkeypatch.setattr(limits, "PIPELINE_REPORT_SECONDS", 0.1)
    execute(orders, insert(1, 5))
    trouble = _Stops(0, OSError("the printer is on fire"))
    shaky = _job(name="shaky", sink=trouble.around(lambda *_: Nowhere()), begin=_none)
    running = Running(spark, PipelinePlan(orders, lake, jobs=(EVENTS, shaky), seconds=0.05))
    try:
        until(lambda: in_lake_or_none(lake) == logged(orders))
        until(lambda: (state_of(orders, "shaky")[1] or 0) >= 2)
        assert "printer" in state_of(orders, "shaky")[2]
        assert state_of(orders, "events")[:3] == ("running", 0, None)
        trouble.left = -1
        until(lambda: state_of(orders, "shaky")[0] == "running")
        execute(orders, insert(6, 9))
        until(lambda: state_of(orders, "shaky")[2] is None)
        until(lambda: state_of(orders, "events")[3::2] == (0, len(logged(orders))))
    finally:
        ended = running.stop()
    assert [each.state for each in ended] == ["stopped", "stopped"]
    assert state_of(orders, "events")[0] == "stopped"
    assert in_lake(lake) == logged(orders)


class Slow(Nowhere):
    """Takes long for a batch, and records whether it was closed during one."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.closed = (threading.Event() for _ in range(3))
        self.is_writing = self.was_torn = False

    def write(self, batch: DataFrame, batch_id: int) -> int:
        self.is_writing = True
        self.begun.set()
        self.may_end.wait(60)
        self.is_writing = False
        return 0

    def close(self, seconds: float = 0) -> None:
        self.was_torn = self.was_torn or self.is_writing
        self.closed.set()


def test_a_batch_that_takes_too_long_closes_its_sink_itself(
    spark: SparkSession, orders: str, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline stops without it. Closing the sink meanwhile would free what the batch uses."""
    monkeypatch.setattr(limits, "PIPELINE_STOP_SECONDS", 0.1)
    sink = Slow()
    slow = _job(name="slow", sink=lambda *_: sink, begin=_none)
    execute(orders, insert(1, 5))
    running = Running(spark, PipelinePlan(orders, lake, jobs=(slow,), seconds=0.05))
    assert sink.begun.wait(60)
    try:
        assert [each.state for each in running.stop()] == ["stopped"]
        assert not sink.closed.is_set()
    finally:
        sink.may_end.set()
    assert sink.closed.wait(60)
    assert not sink.was_torn


def _none(lake: Lake) -> Offset | None:
    return None


def in_lake_or_none(lake: Lake) -> list[tuple[Any, ...]] | None:
    return in_lake(lake) if delta.open_table(lake.events_path) else None


def test_a_stream_that_cannot_continue_raises_an_error(
    spark: SparkSession, orders: str, lake: Lake
) -> None:
    execute(orders, insert(1, 5))
    run_once(spark, orders, lake)
    execute(
        orders, "select setval('headwater.log_floor', (pg_current_xact_id()::text::bigint) + 10)"
    )
    execute(orders, insert(6, 7), insert(8, 9))
    with pytest.raises(ResyncRequired, match="trimmed") as caught:
        run(spark, PipelinePlan(orders, lake), threading.Event())
    assert f"headwater pipeline resnapshot --lake {lake.root}" in (caught.value.hint or "")
    assert state_of(orders, "events")[0] == "failed"


def test_two_pipelines_on_one_lake(spark: SparkSession, orders: str, lake: Lake) -> None:
    with (
        LakeLock(lake.root),
        pytest.raises(PipelineError, match=f"another pipeline .* process {os.getpid()}"),
    ):
        run_once(spark, orders, lake)
    run_once(spark, orders, lake)


def _some_rows() -> Any:
    import pyarrow as pa

    return pa.table({"seq": pa.array([1, 2, 3], pa.int64())})


@pytest.mark.parametrize("content", ["", "v1\n{}\nnonsense", 'v1\n{}\n{"snap": "7"}'])
def test_an_unreadable_checkpoint(content: str, tmp_path: Path) -> None:
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets" / "0").write_text(content)
    with pytest.raises(PipelineError, match=f"{tmp_path} cannot be read: offsets/0"):
        Checkpoint(str(tmp_path)).offset(0)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(spark: SparkSession, orders: str, tiny_disk: Path) -> None:
    lake = Lake(str(tiny_disk / "lake"), spark)
    execute(orders, insert(1, 5))
    run_once(spark, orders, lake)
    noise = "insert into orders select i, i, (select string_agg(md5(random()::text), '') from"
    execute(orders, f"{noise} generate_series(1, 30) where i > 0) from generate_series(100, 999) i")
    with pytest.raises(PipelineError, match="disk is full") as caught:
        run_once(spark, orders, lake)
    assert caught.value.retryable
    subprocess.run(["mount", "-o", "remount,size=64m", str(tiny_disk)], check=True)
    run_once(spark, orders, lake)
    assert in_lake(lake) == logged(orders)


# ------------------------------------------------------------------------ maintenance


def test_small_files_are_joined(
    spark: SparkSession, orders: str, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "FILES_MAX", 4)
    execute(orders, insert(1, 40))
    run_once(spark, orders, lake, rows_max=4)
    assert DeltaTable(lake.events_path).version() > 10
    assert len(files_of(lake.events_path)) < 8
    assert in_lake(lake) == logged(orders)
    monkeypatch.undo()
    execute(orders, insert(41, 60))
    run_once(spark, orders, lake, rows_max=4)
    compacted = {each.table: each.files_after for each in tables.compact(lake.root, lambda: spark)}
    assert (compacted["events"], compacted["shapes"], compacted["audit"]) == (1, 1, 1)
    assert in_lake(lake) == logged(orders)
    execute(orders, insert(61, 62))
    run_once(spark, orders, lake)
    assert in_lake(lake) == logged(orders)


def test_vacuum_leaves_young_files(spark: SparkSession, orders: str, lake: Lake) -> None:
    execute(orders, insert(1, 5))
    run_once(spark, orders, lake)
    (day,) = Path(lake.events_path).glob("day=*")
    orphan, young = day / "part-old.parquet", day / "part-young.parquet"
    for each in (orphan, young):
        each.write_bytes(b"never committed")
    os.utime(orphan, (0, 0))
    removed = {
        each.table: each.removed for each in maintenance.vacuum(lake.root, timedelta(hours=1))
    }
    assert {name for name, count in removed.items() if count} == {"events"}
    assert removed["events"] == 1
    assert young.exists()
    assert not orphan.exists()
    assert in_lake(lake) == logged(orders)
    with pytest.raises(ConfigError, match="an hour"):
        list(maintenance.vacuum(lake.root, timedelta(minutes=1)))


def test_staged_files_that_were_never_committed_are_removed(
    spark: SparkSession, orders: str, lake: Lake
) -> None:
    left = Path(lake.events_path, delta.STAGE, "dead")
    left.mkdir(parents=True)
    (left / "part.parquet").write_bytes(b"x")
    execute(orders, insert(1, 5))
    run_once(spark, orders, lake)
    assert not left.exists()
    assert in_lake(lake) == logged(orders)


def test_rows_that_the_driver_does_not_see_are_not_committed(
    spark: SparkSession, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where tasks of another machine stage their files in a folder of their own."""
    rows = spark.range(0, 10, numPartitions=2).withColumnRenamed("id", "seq")
    delta.create(lake.events_path, _some_rows().schema)
    with monkeypatch.context() as patched:
        patched.setattr(delta, "adopt_staged", lambda *given: list(adopt_staged(*given))[1:])
        with pytest.raises(PipelineError, match=r"10 rows .* found 5\. Nothing was committed"):
            delta.append_frame(lake.events_path, rows)
    assert DeltaTable(lake.events_path).version() == 0
    delta.append_frame(lake.events_path, rows)
    assert DeltaTable(lake.events_path).to_pyarrow_dataset().count_rows() == 10
