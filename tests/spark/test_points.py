"""Single rows of the past: read without Spark, they are what Spark reads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.errors import HeadwaterError
from headwater.live.filters.text import parse_conditions
from headwater.pipeline.lake.moments import Moment
from headwater.pipeline.reading import choice, points
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.reading.points import PointReader
from headwater.pipeline.reading.requests import AsOfRequest
from tests.support.generators.row_histories import RowHistory
from tests.support.generators.sizes import first_seed, size
from tests.support.lake.truth import opened

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SEED = first_seed(41)


def in_full_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=repr)


def outcome(read: Callable[[], list[dict[str, Any]]]) -> object:
    """The rows, or the error."""
    try:
        return read()
    except HeadwaterError as error:
        return type(error), str(error), error.hint


def test_both_engines_give_one_answer(url: str, spark: SparkSession, tmp_path: Path) -> None:
    """Rows, whole tables, histories and refusals; with and without snapshots; with changes that are
    in the log only."""
    root = str(tmp_path / "lake")
    for seed in range(SEED, SEED + size("points_spark", 1, large=40)):
        shutil.rmtree(root, ignore_errors=True)
        with opened(url) as database, opened(url) as other:
            history = RowHistory(seed, database, other, url, root)
            history.play(12)
            compare(history, spark, url, root, truths=2)
            shutil.rmtree(f"{root}/snapshots", ignore_errors=True)
            compare(history, spark, url, root, truths=2)
            for table in history.tables:
                database.execute(f"drop table {table.sql.as_string(database)}".encode())


def compare(history: RowHistory, spark: SparkSession, url: str, root: str, *, truths: int) -> None:
    lake = Lake(root, spark).with_log(url)
    with points.opened(root, url) as reader:
        for truth in history.rng.sample(history.truths, truths):
            name, when, key = truth.table.name, truth.position, history.a_key(truth.table)
            for wanted in ([key], [*truth.rows][:1] or None, None):
                expected = outcome(partial(state_by_spark, lake, name, when, wanted))
                found = outcome(partial(state, reader, name, when, wanted))
                assert found == expected, (name, when, wanted)
            where = history.a_filter(truth.table).conditions
            request = AsOfRequest(name, None, str(when), where=where)
            chosen = choice.plan(reader, request)
            expected = outcome(partial(matching_by_spark, lake, name, when, where))
            # Rows that are known by their own changes alone are answered without Spark only.
            if chosen.engine == "datafusion" and isinstance(expected, list):
                rows = in_full_order(choice.run(reader, request, chosen).rows)
                assert rows == expected, (name, when, where)
        assert reader.history(name, key).rows == lake.history(name, key).toArrow().to_pylist()


def matching_by_spark(lake: Lake, name: str, when: Moment, where: tuple[str, ...]) -> list[Any]:
    return in_full_order(
        lake.as_of(name, when, where=parse_conditions(where)).toArrow().to_pylist()
    )


def state(reader: PointReader, name: str, when: Moment, keys: list[Any] | None) -> list[Any]:
    return in_full_order(reader.as_of(name, when, keys).rows)


def state_by_spark(lake: Lake, name: str, when: Moment, keys: list[Any] | None) -> list[Any]:
    (key,) = keys or [None]
    return in_full_order(lake.as_of(name, when, key=key).toArrow().to_pylist())
