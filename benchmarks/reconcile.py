"""What it costs to compare a table with the lake, and to repair it:
`python -m benchmarks.reconcile [--large]`.

A table of which a tenth was changed since its snapshot. First the hashes of its rows alone, as
PostgreSQL computes them and as Spark does over the state in the lake: both must be the same. Then a
whole `reconcile`. Then rows are changed behind the log's back; it must find exactly those, repair
the table, and leave another one as it is.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
import pyarrow as pa
from pyspark.sql import functions as f

from benchmarks.measure import Result, execute, report, scratch_server
from benchmarks.pipeline import database, run_once, session
from headwater.pipeline.lake import gaps, snapshots
from headwater.pipeline.lake.snapshots import TableSnapshot
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.reconcile import row_hashes
from headwater.pipeline.reconcile.drift import TableOutcome
from headwater.pipeline.reconcile.tables import reconcile
from headwater.pipeline.snapshots.chunks import chunks_of
from headwater.pipeline.snapshots.database_snapshot import DatabaseSnapshot, database_snapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SEED = 8


class Size(NamedTuple):
    """How much is compared, and how often hashes are computed. `hidden` is the number of rows that
    are changed without the log: not more than a report lists (`limits.RECONCILE_KEYS_MAX`)."""

    rows: int
    hidden: int
    rounds: int


TINY, SMALL, LARGE = Size(200, 10, 1), Size(20_000, 100, 3), Size(540_000, 1_000, 3)

TABLES = """
    create table items (
      id bigint primary key, region int not null, amount numeric(12, 2) not null, note text,
      updated_at timestamptz not null default now()
    );
    create table others (id int primary key);
    insert into others select generate_series(1, 10);
"""


def run(
    *, large: bool = False, tiny: bool = False, spark: SparkSession | None = None
) -> list[Result]:
    size = TINY if tiny else LARGE if large else SMALL
    with scratch_server() as server, tempfile.TemporaryDirectory(prefix="headwater-") as name:
        folder, url = Path(name), database(server.url, "reconcile")
        with session(spark, folder) as chosen:
            lake = Lake(str(folder / "lake"), chosen)
            prepare(chosen, url, lake, size.rows)
            return [*hashes(chosen, url, lake, size), *comparisons(url, lake, size)]


def prepare(spark: SparkSession, url: str, lake: Lake, rows: int) -> None:
    """A snapshot of rows that were there before capture, and later changes of a tenth of them."""
    execute(
        url,
        TABLES,
        "insert into items select i, i % 500, i * 1.25, 'note number ' || i"
        f" from generate_series(1, {rows}) i",
        "select headwater.enable_reactivity('items'), headwater.enable_reactivity('others')",
        "vacuum analyze items",
    )
    run_once(spark, url, lake)  # makes the snapshots, too
    execute(url, "update items set amount = amount + 1, updated_at = now() where id % 10 = 0")
    run_once(spark, url, lake)


# ------------------------------------------------------------------------ hashes


def hashes(spark: SparkSession, url: str, lake: Lake, size: Size) -> list[Result]:
    """The hashes of both sides at one position, each alone."""
    with database_snapshot(url, ("items",)) as now:
        chunks = chunks_of(now.tables["items"].source)
        buckets = row_hashes.bucket_count(sum(chunk.bytes for chunk in chunks))

        def in_database() -> pa.Table:
            frame = row_hashes.database_buckets(spark, now.exported, chunks, buckets)
            return _sums(frame)

        def on_spark() -> pa.Table:
            state = row_hashes.image_hashes(_state(url, lake, now))
            return _sums(row_hashes.lake_buckets(state, buckets))

        database_seconds, expected = _best(in_database, size.rounds)
        spark_seconds, found = _best(on_spark, size.rounds)
    assert found.equals(expected), "both sides have other hashes"
    rows = sum(found.column("rows").to_pylist())
    assert rows == size.rows, f"{rows} rows"
    detail = f"{buckets:,} buckets, best of {size.rounds}, load {os.getloadavg()[0]:.1f}"
    return [
        Result(f"hashes of {rows:,} rows, by PostgreSQL", _text(database_seconds), detail=detail),
        Result(f"hashes of {rows:,} rows, by Spark", _text(spark_seconds), detail=detail),
    ]


def _state(url: str, lake: Lake, now: DatabaseSnapshot) -> DataFrame:
    with_log = Lake(lake.root, lake.spark, url=url)
    rows: DataFrame = with_log.state_of(now.tables["items"].table.oid, now.position).rows
    return rows


def _sums(frame: DataFrame) -> pa.Table:
    """A line for each bucket, in their order."""
    sums = frame.groupBy("bucket").agg(
        f.sum("rows").alias("rows"), f.bit_xor("hashes").alias("hashes")
    )
    return sums.toArrow().sort_by("bucket").combine_chunks()


def _best(work: Callable[[], pa.Table], rounds: int) -> tuple[float, pa.Table]:
    return min((_timed(work) for _ in range(rounds)), key=lambda each: each[0])


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def _text(seconds: float) -> str:
    return f"{seconds:.2f} s"


# ------------------------------------------------------------------------ the whole of it


def comparisons(url: str, lake: Lake, size: Size) -> list[Result]:
    def compare(*, repairing: bool = False) -> TableOutcome:
        (found,) = reconcile(lake, url, ("items",), repairing=repairing)
        return found

    equal_seconds, equal = _timed(compare)
    assert (equal.outcome, equal.rows, equal.lake_rows) == ("equal", size.rows, size.rows), equal
    expected = hide_changes(url, size)
    events, before = lake.events().count(), snapshots.load(lake.places)
    drift_seconds, drift = _timed(compare)
    assert _named(drift) == expected, "reconcile has not found exactly the hidden changes"
    repair_seconds, repaired = _timed(lambda: compare(repairing=True))
    assert (_named(repaired), repaired.repaired) == (expected, True), repaired
    healed_seconds, healed = _timed(compare)
    assert (healed.outcome, healed.rows) == ("equal", healed.lake_rows), healed
    _check_untouched(url, lake, healed, events, before)
    counts = f"{drift.different} different, {drift.missing} missing, {drift.extra} extra"
    return [
        Result(f"reconcile, {size.rows:,} rows that are equal", _text(equal_seconds)),
        Result(
            f"reconcile, {size.hidden:,} hidden changes",
            _text(drift_seconds),
            "each, and nothing else",
            True,
            counts,
        ),
        Result(
            "reconcile --repair of them",
            _text(repair_seconds),
            "equal afterwards",
            True,
            f"compared again in {healed_seconds:.2f} s; no event and no other table has changed",
        ),
    ]


def _check_untouched(
    url: str, lake: Lake, healed: TableOutcome, events: int, before: list[TableSnapshot]
) -> None:
    """A repair makes a gap and a snapshot of that table; there is nothing else."""
    assert healed.relation is not None
    assert lake.events().count() == events
    (made,) = [each for each in snapshots.load(lake.places) if each not in before]
    assert made.relation == healed.relation
    assert len(gaps.load(lake.gaps_path, healed.relation)) == 1
    (other,) = reconcile(lake, url, ("others",))
    assert other.outcome == "equal", other
    assert gaps.load(lake.gaps_path, other.relation) == []


def hide_changes(url: str, size: Size) -> dict[int, str]:
    """Change random rows without the log: updates, deletes, inserts. Returns how each differs from
    the lake, by its key."""
    rng = random.Random(SEED)
    chosen = rng.sample(range(1, size.rows + 1), size.hidden)
    first, second = size.hidden * 6 // 10, size.hidden * 8 // 10
    updated, deleted = chosen[:first], chosen[first:second]
    inserted = [size.rows + each for each in chosen[second:]]
    with psycopg.connect(url) as connection:
        connection.execute("set local session_replication_role = replica")
        # The triggers of capture fire in a replica, too, where it owns the table. Here they do not,
        # as with a role that may not alter the table.
        _set_triggers(connection, "enable")
        connection.execute("update items set amount = amount + 1 where id = any(%s)", (updated,))
        connection.execute("delete from items where id = any(%s)", (deleted,))
        connection.execute(
            "insert into items select i, 1, 0.25, 'hidden' from unnest(%s::bigint[]) i", (inserted,)
        )
        _set_triggers(connection, "enable always")
    kinds = ((updated, "different"), (deleted, "extra"), (inserted, "missing"))
    return {key: kind for keys, kind in kinds for key in keys}


def _set_triggers(connection: psycopg.Connection, how: str) -> None:
    names = "select tgname from pg_trigger where tgrelid = 'items'::regclass and not tgisinternal"
    for (name,) in connection.execute(names).fetchall():
        connection.execute(f'alter table items {how} trigger "{name}"'.encode())
    connection.execute(
        "update headwater.captures set triggers_mark = headwater.triggers_mark(member)"
        " where member = 'items'::regclass"
    )


def _named(found: TableOutcome) -> dict[int, str]:
    named: dict[int, str] = {json.loads(each.key)["id"]: each.kind for each in found.keys}
    assert len(named) == len(found.keys) == found.differing, found
    return named


if __name__ == "__main__":
    report("Reconcile", run(large="--large" in sys.argv))
