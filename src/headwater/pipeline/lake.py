"""The lake: where the Delta tables of one database are, and what can be asked of them.

<root>/events/             every change, by day
<root>/snapshots/<table>/  the state of a table at intervals, with its position
<root>/shapes/             what tables looked like: columns and keys by shape id
<root>/audit/              roll-ups by day, user, table and operation
<root>/_checkpoints/<name>/  how far each stream has come
<root>/_lock               held by the pipeline that writes here
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from headwater.errors import ConfigError
from headwater.model import Position
from headwater.pipeline import delta
from headwater.pipeline.reading import EVENTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STORED = EVENTS.append(pa.field("day", pa.date32(), nullable=False))
"""An event as the lake holds it: `day` is that of `committed_at`, and the partition."""

SHAPES = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("relation", pa.int64(), nullable=False),
        pa.field("schema_name", pa.string(), nullable=False),
        pa.field("table_name", pa.string(), nullable=False),
        pa.field("columns", pa.string(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("first_seen", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
"""What a table looked like: `columns` and `key` are JSON, as `headwater.shapes` has them. `id` is
the `shape` of events."""


class Lake:
    """The lake under a root: a folder, or a URL that delta-rs and Spark both know."""

    def __init__(self, root: str, spark: SparkSession | None = None) -> None:
        self.root = root.rstrip("/")
        self._spark = spark

    @property
    def events_path(self) -> str:
        return f"{self.root}/events"

    @property
    def shapes_path(self) -> str:
        return f"{self.root}/shapes"

    def checkpoint(self, name: str) -> str:
        """Where the stream of that name keeps how far it has come."""
        return f"{self.root}/_checkpoints/{name}"

    def events(self) -> DataFrame:
        """Every change."""
        return self._table(self.events_path, STORED)

    def shapes(self) -> DataFrame:
        """What tables looked like when changes were written."""
        return self._table(self.shapes_path, SHAPES)

    def _table(self, path: str, schema: pa.Schema) -> DataFrame:
        from pyspark.sql.pandas.types import from_arrow_schema

        if self._spark is None:
            raise ConfigError("this lake has no Spark to read with", hint="Lake(root, spark)")
        if delta.open_table(path) is None:
            raise ConfigError(
                f"there is no Delta table at {path}",
                hint="headwater pipeline run fills the lake; is this its folder?",
            )
        return delta.read(self._spark, path, from_arrow_schema(schema))

    def as_of(self, table: str, when: datetime | Position) -> DataFrame:
        """The rows of a table at a moment, with the columns it had then."""
        raise NotImplementedError

    def history(self, table: str, key: object) -> DataFrame:
        """What became of a row: one line for each version, valid from and to."""
        raise NotImplementedError
