"""`format("headwater")` as a user's program sees it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from pyspark.errors import PySparkException

from headwater.errors import ConfigError
from headwater.pipeline.stream.source import HeadwaterSource, Options
from tests.integration.pipeline.test_planning import trim

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Taken:
    """A sink that remembers, by batch, the numbers it was given."""

    def __init__(self) -> None:
        self.batches: dict[int, list[int]] = {}

    def __call__(self, frame: DataFrame, batch: int) -> None:
        rows = [row.seq for row in frame.select("seq").collect()]
        assert self.batches.setdefault(batch, rows) == rows

    @property
    def seqs(self) -> list[int]:
        return sorted(seq for rows in self.batches.values() for seq in rows)


def stream(spark: SparkSession, url: str, checkpoint: Path, taken: Taken, **options: Any) -> Any:
    frame = spark.readStream.format("headwater").option("url", url).options(**options).load()
    return frame.writeStream.foreachBatch(taken).option("checkpointLocation", str(checkpoint))


def seqs(connection: psycopg.Connection) -> list[int]:
    return [seq for (seq,) in connection.execute("select seq from headwater.log order by seq")]


def test_a_stream_reads_in_batches_and_continues_from_its_checkpoint(
    spark: SparkSession, url: str, orders: psycopg.Connection, tmp_path: Path
) -> None:
    taken = Taken()
    for first in (1, 11):
        orders.execute(
            "insert into orders select n, 0 from generate_series(%s::int, %s::int) n",
            (first, first + 9),
        )
        writer = stream(spark, url, tmp_path, taken, maxRows=4)
        writer.trigger(availableNow=True).start().awaitTermination()
        assert taken.seqs == seqs(orders)
    assert [len(rows) for rows in taken.batches.values()] == [4, 4, 2] * 2


def test_a_stream_follows(
    spark: SparkSession, url: str, orders: psycopg.Connection, tmp_path: Path
) -> None:
    orders.execute("insert into orders values (1, 1)")
    taken = Taken()
    query = stream(spark, url, tmp_path, taken, since="now").start()
    try:
        query.processAllAvailable()
        orders.execute("insert into orders values (2, 1)")
        query.processAllAvailable()
        orders.execute("update orders set amount = 2")
        query.processAllAvailable()
    finally:
        query.stop()
    assert taken.seqs == seqs(orders)[1:]
    # The first batch of a new stream is there even if it is empty; no other is.
    assert [len(rows) for rows in taken.batches.values()] == [0, 1, 2]


def test_a_batch_between_positions_and_times(
    spark: SparkSession, url: str, orders: psycopg.Connection
) -> None:
    def load(**options: Any) -> list[Any]:
        reader = spark.read.format("headwater").option("url", url).options(**options)
        return reader.load().orderBy("seq").collect()

    orders.execute("insert into orders values (1, 1)")
    (one,) = load()
    orders.execute("insert into orders values (2, 1)")
    orders.execute("insert into orders values (3, 1)")
    rows = load(since=one.position)
    assert [row.key for row in rows] == ['{"id":2}', '{"id":3}']
    assert [row.key for row in load(until=one.position)] == ['{"id":1}']
    assert load(since=rows[0].position, until=one.position) == []
    times = [row.committed_at.isoformat() + "Z" for row in load()]
    assert [row.key for row in load(since=times[1], until=times[2])] == ['{"id":2}']


def test_a_stream_that_was_left_behind_fails_with_a_hint(
    spark: SparkSession, url: str, orders: psycopg.Connection, tmp_path: Path
) -> None:
    orders.execute("insert into orders values (1, 1)")
    writer = stream(spark, url, tmp_path, Taken())
    writer.trigger(availableNow=True).start().awaitTermination()
    orders.execute("insert into orders values (2, 1)")
    trim(orders)
    query = stream(spark, url, tmp_path, Taken()).trigger(availableNow=True).start()
    with pytest.raises(PySparkException, match=r"trimmed past position.*since=beginning"):
        query.awaitTermination()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colour": "red"}, r"no option colour.*It has url, tables"),
        ({"until": "tomorrow"}, r"'tomorrow' is not a position.*Write a position or a time"),
        ({"tables": "nothing"}, r"nothing was never captured.*headwater enable nothing"),
        ({"maxRows": "5"}, r"read at once.*readStream"),
    ],
)
def test_a_wrong_option_reaches_the_user(
    spark: SparkSession, url: str, orders: psycopg.Connection, options: Any, message: str
) -> None:
    orders.execute("insert into orders values (1, 1)")
    with pytest.raises(PySparkException, match=rf"(?s){message}"):
        spark.read.format("headwater").option("url", url).options(**options).load().collect()


def test_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWATER_URL", raising=False)
    with pytest.raises(ConfigError, match="needs a database"):
        Options.of({})
    monkeypatch.setenv("HEADWATER_URL", "postgresql:///shop")
    options = Options.of({"tables": "orders, sales.lines,", "maxRows": "5"}, streaming=True)
    assert options == Options("postgresql:///shop", ("orders", "sales.lines"), rows_max=5)
    for wrong in ("0", "-1", "many"):
        with pytest.raises(ConfigError, match="is not a number of rows"):
            Options.of({"maxRows": wrong}, streaming=True)
    with pytest.raises(ConfigError, match="a stream has no end"):
        Options.of({"until": "now"}, streaming=True)


def test_its_name() -> None:
    assert HeadwaterSource.name() == "headwater"
