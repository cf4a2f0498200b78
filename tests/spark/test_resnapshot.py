"""A gap in the log and a full disk: the pipeline reports them with a hint that works."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headwater.errors import ResyncRequired, Unavailable
from headwater.pipeline.lake import gaps
from headwater.pipeline.reading.lake import Lake
from tests.support.lake.processes import headwater
from tests.support.lake.tables import execute, in_lake, logged, make_orders, run_once
from tests.support.lake.truth import Copy, copy, opened, rows_of

pytestmark = pytest.mark.timeout(300)

TRIMMED = "select setval('headwater.log_floor', pg_current_xact_id()::text::bigint + 1)"
RESTORED = "update headwater.installation set id = default"


def taken(url: str) -> Copy:
    with opened(url) as database:
        return copy(database, "orders")


def insert(first: int, last: int) -> str:
    return f"insert into orders select i, i, 'n' || i from generate_series({first}, {last}) i"


@pytest.mark.parametrize(
    ("loss", "says"),
    [(TRIMMED, "trimmed past position"), (RESTORED, "another log than this database's")],
    ids=["trimmed", "restored"],
)
def test_a_gap(loss: str, says: str, spark: SparkSession, url: str, tmp_path: Path) -> None:
    """The stream never skips. Resnapshot continues from now. As-of is exact before and after the
    gap, and refuses moments in between."""
    make_orders(url)
    lake = Lake(str(tmp_path / "lake"), spark)
    execute(url, insert(1, 10))
    lake.snapshot(url, "orders")
    execute(url, "update orders set note = 'x' where id < 4")
    before = taken(url)
    run_once(spark, url, lake)
    known = in_lake(lake)
    execute(url, "delete from orders where id = 1")
    missed = taken(url)
    execute(url, "delete from orders where id = 2", loss, "delete from orders where id = 3")

    with pytest.raises(ResyncRequired, match=says) as caught:
        run_once(spark, url, lake)
    assert f"headwater pipeline resnapshot --lake {lake.root}" in (caught.value.hint or "")
    assert in_lake(lake) == known

    done = headwater("pipeline", "resnapshot", "--lake", lake.root, "--url", url)
    assert done.returncode == 0, done.stderr
    assert "The lake has no changes between" in done.stdout
    assert "orders: 7 rows" in done.stdout
    quiet = taken(url)
    execute(url, insert(11, 12), "update orders set note = 'y' where id = 11")
    after = taken(url)
    run_once(spark, url, lake)

    assert len(in_lake(lake)) == len(known) + 3
    (gap,) = gaps.load(lake.gaps_path)
    # A lake has the time of its last event, but not of its last position.
    assert rows_of(lake.as_of("orders", gap.since_at)) == before.rows
    for each in (quiet, after):
        assert rows_of(lake.as_of("orders", each.at)) == each.rows
    for each in (before, after):
        assert rows_of(lake.as_of("orders", each.position)) == each.rows
    with pytest.raises(ResyncRequired, match="lacks the changes between"):
        lake.transactions("orders", before.position)
    assert len(list(lake.transactions("orders", quiet.position))) == 2
    for moment in (missed.at, missed.position):
        with pytest.raises((ResyncRequired, Unavailable), match="lacks the changes between"):
            lake.as_of("orders", moment)


def test_an_unreadable_checkpoint_is_replaced(
    spark: SparkSession, url: str, tmp_path: Path
) -> None:
    make_orders(url)
    lake = Lake(str(tmp_path / "lake"), spark)
    execute(url, insert(1, 5))
    run_once(spark, url, lake)
    Path(lake.checkpoint("events"), "metadata").write_text("{")
    execute(url, insert(6, 9))
    run_once(spark, url, lake)
    assert in_lake(lake) == logged(url)


def test_a_full_disk_is_reported(spark: SparkSession, url: str, tmp_path: Path) -> None:
    """Files of the process may not grow beyond a bound, as on a disk that is full: no rights are
    needed for that."""
    make_orders(url)
    lake = Lake(str(tmp_path / "lake"), spark)
    execute(url, insert(1, 5))
    run_once(spark, url, lake)
    noise = "(select string_agg(md5(random()::text), '') from generate_series(1, 30) where i > 0)"
    execute(url, f"insert into orders select i, i, {noise} from generate_series(100, 999) i")
    bound = 256 * 1024
    done = subprocess.run(
        [sys.executable, "-m", "headwater", "pipeline", "run", "--once", "--lake", lake.root,
         "--master", "local[2,4]", "--url", url],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (bound, bound)),
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "the disk is full" in done.stderr
    assert "No change is lost" in done.stderr
    run_once(spark, url, lake)
    assert in_lake(lake) == logged(url)
