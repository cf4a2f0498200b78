"""The lake: where the Delta tables of one database are, and what can be asked of them.

<root>/events/             every change, by day
<root>/snapshots/<table>/  the state of a table at intervals, with its position
<root>/shapes/             what tables looked like: columns and keys by shape id
<root>/audit/              roll-ups by day, user, table and operation
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from headwater.model import Position
from headwater.pipeline.reading import EVENTS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STORED = EVENTS.append(pa.field("day", pa.date32(), nullable=False))
"""An event as the lake holds it: `day` is that of `committed_at`, and the partition."""


class Lake:
    """The lake under a root: a folder, or a URL that delta-rs and Spark both know."""

    def __init__(self, root: str, spark: SparkSession | None = None) -> None:
        self.root = root.rstrip("/")
        self._spark = spark

    @property
    def events_path(self) -> str:
        return f"{self.root}/events"

    def events(self) -> DataFrame:
        """Every change."""
        raise NotImplementedError

    def as_of(self, table: str, when: datetime | Position) -> DataFrame:
        """The rows of a table at a moment, with the columns it had then."""
        raise NotImplementedError

    def history(self, table: str, key: object) -> DataFrame:
        """What became of a row: one line for each version, valid from and to."""
        raise NotImplementedError
