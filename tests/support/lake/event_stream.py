"""Appends rows, or random events of which it checks that other readers find each once."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
from deltalake import DeltaTable

from headwater.pipeline.lake import delta
from headwater.pipeline.lake.events import STORED_EVENTS
from headwater.pipeline.lake.parquet import write_files

NOW = datetime.now(UTC)


def append(path: str, rows: pa.Table, offset: str | None = None) -> None:
    """Append rows to a Delta table, in one commit with the offset that they reach."""
    table = DeltaTable(path)
    files = write_files(path, rows, table.metadata().partition_columns)
    delta.commit(table, files, None if offset is None else {delta.OFFSET: offset})


class Stream:
    """Appends random batches, as the events sink does."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = str(path)
        self._rng = random.Random(seed)
        self.rows: list[dict[str, Any]] = []
        self.batch = 0
        delta.create(self.path, STORED_EVENTS, ["day"])

    def append(self, relations: range = range(1, 9)) -> None:
        rows = [self._event(relations) for _ in range(self._rng.choice((0, 1, 3, 40)))]
        append(self.path, pa.Table.from_pylist(rows, STORED_EVENTS), f"offset {self.batch}")
        self.rows += rows
        self.batch += 1

    def _event(self, relations: range) -> dict[str, Any]:
        rng, at = self._rng, NOW - timedelta(days=self._rng.choice((0, 0, 1, 9)))
        image = rng.choice((None, '{"id":1}', f'{{"id":2,"note":"{"x" * rng.choice((5, 900))}"}}'))
        seq = len(self.rows) * 100 + rng.randrange(100)
        return {
            "seq": seq, "xid": seq // 7, "at": at, "committed_at": at, "position": "a-1:1",
            "schema_name": "public", "table_name": "t", "relation": rng.choice(relations),
            "shape": 1, "op": rng.choice(("insert", "update", "delete")), "key": '{"id":1}',
            "before": image, "after": image, "user_id": rng.choice((None, "ann")),
            "day": at.date(),
        }  # fmt: skip

    def check(self) -> None:
        """The table has every row once, the last batch and its offset, for each kind of reader."""
        names = ("seq", "relation", "after", "day")
        wanted = sorted((tuple(row[name] for name in names) for row in self.rows), key=repr)
        files = DeltaTable(self.path).file_uris()
        with duckdb.connect() as reader:
            found = reader.read_parquet(files, hive_partitioning=True) if files else None
            seen = [] if found is None else found.select(*names).fetchall()
        assert sorted(seen, key=repr) == wanted
        assert sorted(pl.read_delta(self.path).select(names).rows(), key=repr) == wanted
        table = DeltaTable(self.path)
        if self.batch:
            assert delta.offset_of(table) == f"offset {self.batch - 1}"
