"""Reads rows of a view's tables in one snapshot of the database: all, or those with some values.

This is the whole state of a view over several tables. Nothing is stored in Spark, so nothing is
lost with an executor, and a restart continues. The tables' own indexes find the rows: a column that
tables are joined by should have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import msgspec
from psycopg import sql

from headwater import limits
from headwater.errors import HeadwaterError
from headwater.model import Column
from headwater.pipeline.lake.keys import key_expression
from headwater.pipeline.snapshots import reader
from headwater.pipeline.snapshots.chunks import Chunk
from headwater.pipeline.snapshots.database_snapshot import DatabaseSnapshot, SnapshotTable

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


class TooManyValuesError(HeadwaterError):
    """So many values changed that it is faster to build the view again."""


class Values(msgspec.Struct, frozen=True):
    """Values of a column as texts, and whether NULL is one of them."""

    texts: frozenset[str] = frozenset()
    has_null: bool = False

    @property
    def is_empty(self) -> bool:
        return not self.texts and not self.has_null

    def __contains__(self, text: str | None) -> bool:
        return self.has_null if text is None else text in self.texts

    def __or__(self, other: Values) -> Values:
        return Values(self.texts | other.texts, self.has_null or other.has_null)


ValuesOf = Mapping[tuple[str, str], Values]
"""Values by parameter and column."""


def collected(values: DataFrame) -> dict[tuple[str, str], Values]:
    """The values of columns (`weighted.VALUES`). TooManyValuesError for more than the limit."""
    found: pa.Table = values.limit(limits.VIEW_TOUCHED_VALUES_MAX + 1).toArrow()
    if found.num_rows > limits.VIEW_TOUCHED_VALUES_MAX:
        raise TooManyValuesError("too many values changed at once")
    texts: dict[tuple[str, str], set[str | None]] = {}
    columns = [found.column(name).to_pylist() for name in ("parameter", "column", "value")]
    for parameter, column, value in zip(*columns, strict=True):
        texts.setdefault((parameter, column), set()).add(value)
    return {
        place: Values(frozenset(v for v in each if v is not None), None in each)
        for place, each in texts.items()
    }


def rows_with(
    spark: SparkSession,
    now: DatabaseSnapshot,
    name: str,
    conditions: Iterable[Mapping[str, Values]],
) -> DataFrame:
    """The images of the rows of a table for which each condition holds: that one of its columns has
    one of the values. Where a column cannot be searched, more rows are returned."""
    table = now.tables[name]
    types = {column.name: column for column in table.table.columns}
    tests = [_any_of(types, condition) for condition in conditions]
    wanted = sql.SQL(" and ").join([test for test in tests if test is not None])
    if not any(test is not None for test in tests):
        return now.frame(spark, name)
    text = _statement(table, wanted).as_string()
    chunk = Chunk(
        relation=table.source.relation,
        shape=table.source.shape,
        member=table.source.relation,
        filenode=0,
        first=0,
        end=0,
        bytes=0,
        statement=text,
        is_whole=False,
    )
    return reader.frame(spark, now.exported, [chunk])


def _statement(table: SnapshotTable, wanted: sql.Composable) -> sql.Composed:
    source = table.source
    return sql.SQL(
        "select {key} as key, i.image::text as image from"
        " (select {image} as image from {label} o where {wanted} offset 0) i"
    ).format(
        key=key_expression("i.image", source.key),
        image=sql.SQL(source.image),
        label=sql.SQL(table.label),
        wanted=wanted,
    )


def _any_of(types: Mapping[str, Column], condition: Mapping[str, Values]) -> sql.Composable | None:
    tests = []
    for name, values in condition.items():
        cast = _CASTS.get(types[name].type)
        if cast is None:
            return None
        column = sql.SQL("o.{}").format(sql.Identifier(name))
        if values.texts:
            texts = sql.Literal(sorted(values.texts))
            tests.append(sql.SQL(f"{{}} = any({{}}::text[]::{cast}[])").format(column, texts))
        if values.has_null:
            tests.append(sql.SQL("{} is null").format(column))
    joined = sql.SQL(" or ").join(tests) if tests else sql.SQL("false")
    return sql.SQL("({})").format(joined)


_CASTS = {
    "smallint": "bigint",
    "integer": "bigint",
    "bigint": "bigint",
    "text": "text",
    "character varying": "text",
    "numeric": "numeric",
    "real": "real",
    "double precision": "double precision",
    "boolean": "boolean",
    "date": "date",
    "timestamp with time zone": "timestamptz",
    "timestamp without time zone": "timestamp",
}
"""The types of columns that rows are searched by, and what the values are compared as. Columns of
one of the types have the same texts as Spark's values. For others, all rows are read."""
