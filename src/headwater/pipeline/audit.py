"""Who changed what: roll-ups of the events by day, user, table, operation and function.

The roll-up of a batch is added to what the lake has, in one commit that carries the number of the
batch: one that comes again is found to be in already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction

from headwater.errors import InvalidQuery
from headwater.pipeline import delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_UTC = pa.timestamp("us", tz="UTC")

AUDIT = pa.schema(
    [
        pa.field("day", pa.date32(), nullable=False),
        pa.field("user", pa.string()),
        pa.field("table", pa.string(), nullable=False),
        pa.field("operation", pa.string(), nullable=False),
        pa.field("function", pa.string()),
        pa.field("changes", pa.int64(), nullable=False),
        pa.field("first_at", _UTC, nullable=False),
        pa.field("last_at", _UTC, nullable=False),
    ]
)
"""`user` and `function` are NULL for changes whose writer did not say."""

BY = ("day", "user", "table", "operation", "function")
"""What changes can be counted by."""


def roll_up(events: DataFrame) -> DataFrame:
    """The events counted by everything that they can be counted by."""
    from pyspark.sql import functions as f

    label = f.when(f.col("schema_name") == "public", f.col("table_name")).otherwise(
        f.concat_ws(".", "schema_name", "table_name")
    )
    return (
        events.groupBy(
            f.to_date("committed_at").alias("day"),
            f.col("user_id").alias("user"),
            label.alias("table"),
            f.col("op").alias("operation"),
            f.col("function_name").alias("function"),
        )
        .agg(
            f.count("*").alias("changes"),
            f.min("committed_at").alias("first_at"),
            f.max("committed_at").alias("last_at"),
        )
        .select(*AUDIT.names)
    )


def summary(rolled: DataFrame, by: Sequence[str]) -> DataFrame:
    """A roll-up by fewer things. InvalidQuery for one that is none."""
    from pyspark.sql import functions as f

    for name in by:
        if name not in BY:
            raise InvalidQuery(f"changes are not counted by {name!r}", hint=f"By: {', '.join(BY)}.")
    grouped = rolled.groupBy(*by).agg(
        f.sum("changes").alias("changes"),
        f.min("first_at").alias("first_at"),
        f.max("last_at").alias("last_at"),
    )
    return grouped.orderBy(*by) if by else grouped


def add(path: str, rolled: pa.Table, *, app_id: str, batch_id: int) -> bool:
    """Add the roll-up of a batch to the lake's; False if it was in already."""
    delta.create(path, AUDIT, ["day"])
    table = DeltaTable(path)
    done = table.transaction_version(app_id)
    if done is not None and done >= batch_id:
        return False
    same = " and ".join(f'(kept."{name}" is not distinct from new."{name}")' for name in BY)
    (
        table.merge(
            rolled.cast(AUDIT),
            same,
            source_alias="new",
            target_alias="kept",
            commit_properties=CommitProperties(app_transactions=[Transaction(app_id, batch_id)]),
        )
        .when_matched_update(
            {
                "changes": "kept.changes + new.changes",
                "first_at": "least(kept.first_at, new.first_at)",
                "last_at": "greatest(kept.last_at, new.last_at)",
            }
        )
        .when_not_matched_insert({name: f'new."{name}"' for name in AUDIT.names})
        .execute()
    )
    return True
