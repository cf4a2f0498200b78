"""Rows become Parquet files in bounded memory, whatever their size, their order and their number of
partitions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headwater.pipeline.lake import delta, parquet
from headwater.pipeline.lake.parquet import rows_of, write_batches
from tests.support.generators.sizes import first_seed, size

SCHEMA = pa.schema(
    [
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("image", pa.string()),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("local", pa.timestamp("us")),
        pa.field("day", pa.date32()),
    ]
)


def batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def rows(generator: random.Random, first: int, count: int) -> list[dict[str, Any]]:
    moment = datetime(2026, 11, 15, 22, tzinfo=UTC)
    made = []
    for seq in range(first, first + count):
        at = moment + timedelta(hours=generator.choice([0, 0, 0, 1, 30]))
        made.append(
            {
                "seq": seq,
                "key": generator.choice([None, "k" * generator.randrange(100)]),
                "image": generator.randbytes(generator.choice([1, 40, 900, 9_000])).hex(),
                "tags": generator.choice([None, [], ["a", None, "b"]]),
                "at": at,
                "local": at.replace(tzinfo=None),
                "day": generator.choice([at.date(), at.date(), None]),
            }
        )
    return made


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "LAKE_ROW_GROUP_BYTES", 20_000)
    monkeypatch.setattr(parquet, "_LAKE_ROW_GROUP_ROWS", 50)
    monkeypatch.setattr(parquet, "_LAKE_FILE_BYTES", 50_000)
    monkeypatch.setattr(parquet, "_LAKE_OPEN_FILES", 2)


@pytest.mark.usefixtures("small")
def test_the_rows_come_back(tmp_path: Path) -> None:
    """Batches of random sizes, in random partitions: read by other engines they are the same rows,
    and no part of a file is larger than its bound."""
    for seed in range(first_seed(0), first_seed(0) + size("parquet_files", 12, large=300)):
        generator = random.Random(seed)
        path = str(tmp_path / str(seed))
        given: list[dict[str, Any]] = []
        batches = []
        for _ in range(generator.randrange(6)):
            given += (made := rows(generator, len(given), generator.choice([0, 1, 30, 200])))
            batches.append(batch(made))
        columns = generator.choice([[], ["day"]])
        table = delta.create(path, SCHEMA, columns)
        files = write_batches(path, SCHEMA, iter(batches), columns)
        assert sum(map(rows_of, files)) == len(given), seed
        delta.append_files(table, files, after=None, metadata={delta.OFFSET: "o"})
        found = pl.read_delta(path).sort("seq").to_arrow().select(SCHEMA.names).cast(SCHEMA)
        assert found.to_pylist() == given, seed
        for file in files:
            _check_bounds(Path(path, file.path))


def _check_bounds(file: Path) -> None:
    with pq.ParquetFile(file) as opened:
        for group in range(opened.num_row_groups):
            part = opened.read_row_group(group)
            assert part.num_rows <= 50
            assert part.num_rows == 1 or part.nbytes <= 21_000


def test_the_statistics_of_typed_columns(tmp_path: Path) -> None:
    """A time without a zone has none in the statistics; what is inside an array has no entry."""
    moment = datetime(2026, 11, 15, 10, 30, 0, 5)
    row = {
        "seq": 7, "key": None, "image": "x" * 100, "tags": ["a"],
        "at": moment.replace(tzinfo=UTC), "local": moment, "day": date(2026, 11, 15),
    }  # fmt: skip
    (file,) = write_batches(str(tmp_path), SCHEMA, [batch([row])])
    stats = json.loads(file.stats)
    assert stats["minValues"] == {
        "seq": 7,
        "at": "2026-11-15T10:30:00.000005Z",
        "local": "2026-11-15T10:30:00.000005",
        "day": "2026-11-15",
    }
    assert set(stats["nullCount"]) == set(SCHEMA.names) - {"tags"}


@pytest.mark.usefixtures("small")
def test_after_an_error_there_are_no_files(tmp_path: Path) -> None:
    """Some were complete, others open."""

    def failing() -> Iterator[pa.RecordBatch]:
        generator = random.Random(3)
        yield batch(rows(generator, 0, 300))
        assert list(tmp_path.rglob("*.parquet"))
        raise OSError("the server is gone")

    with pytest.raises(OSError, match="gone"):
        write_batches(str(tmp_path), SCHEMA, failing(), ["day"])
    assert not list(tmp_path.rglob("*.parquet"))


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """600 rows of a megabyte: a fraction of them is in memory."""
    schema = pa.schema([pa.field("seq", pa.int64()), pa.field("after", pa.string())])
    before, most = pa.total_allocated_bytes(), 0

    def large() -> Iterator[pa.RecordBatch]:
        nonlocal most
        for seq in range(600):
            most = max(most, pa.total_allocated_bytes() - before)
            text = chr(97 + seq % 26) * 2**20
            yield pa.RecordBatch.from_pylist([{"seq": seq, "after": text}], schema=schema)

    files = write_batches(str(tmp_path), schema, large())
    assert sum(map(rows_of, files)) == 600
    assert most < 4 * parquet.LAKE_ROW_GROUP_BYTES


@pytest.mark.parametrize("kind", [pa.int32(), pa.binary(), pa.list_(pa.int64())])
def test_a_column_of_another_type_may_have_the_name_of_ours(
    kind: pa.DataType, tmp_path: Path
) -> None:
    """Encodings are chosen by name, for the columns of the lake's own tables."""
    schema = pa.schema([pa.field("key", kind), pa.field("seq", pa.float64())])
    (file,) = write_batches(
        str(tmp_path), schema, [pa.RecordBatch.from_pylist([{"seq": 1.5}], schema=schema)]
    )
    assert pq.read_table(tmp_path / file.path).to_pylist() == [{"key": None, "seq": 1.5}]
