"""Commits to typed tables: each is one Delta commit with the progress it reaches, on the version
that the caller has seen.

A few changes are merged by delta-rs on the driver, which also writes Delta's change data feed.
Above `TABLES_MERGE_CHANGES_MAX`, and where all rows change (a truncate, a new era), Spark's tasks
write the table's open versions again. A commit that another one has come before is refused, so the
same changes are never applied twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Schema, TableFeatures, WriterProperties
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, create_table_with_add_actions

from headwater.pipeline.failpoints import failpoint
from headwater.pipeline.files import FileLocation
from headwater.pipeline.lake import delta
from headwater.pipeline.permissions import make_folders
from headwater.pipeline.tables.columns import TypedColumn, differing, schema_of, stored_columns
from headwater.pipeline.tables.layout import (
    CURRENT,
    END_COLUMNS,
    HISTORY,
    KEY,
    OPEN,
    OWN,
    PARTITIONS,
    Progress,
)
from headwater.pipeline.tables.steps import KIND
from headwater.pipeline.tables.values import converted, scale_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_CONFIGURATION = {"delta.enableChangeDataFeed": "true"}

WRITER = WriterProperties(compression="ZSTD")
"""How delta-rs writes files of typed tables."""

_COMPACT_COMMITS = 100
"""The small files of a typed table are joined after this many commits."""

log = logging.getLogger(__name__)


class TypedDelta:
    """One of the two Delta tables of a table, in the version that was last read or written."""

    def __init__(self, path: str, which: str) -> None:
        self.path = path
        self.which = which
        self.table = delta.open_table(path)
        self.progress = None if self.table is None else Progress.of(self.table)

    @property
    def schema(self) -> pa.Schema | None:
        return None if self.table is None else pa.schema(self.table.schema().to_arrow())

    def has(self, columns: Sequence[TypedColumn]) -> bool:
        """Whether the stored table has these columns with these types."""
        wanted, stored = schema_of(self.which, columns), self.schema
        if stored is None:
            return False
        kinds = {field.name: field.type for field in stored}
        return {field.name: field.type for field in wanted} == kinds

    def retypes(self, columns: Sequence[TypedColumn]) -> bool:
        """Whether a stored column gets another type, so that all rows must be written again. For a
        column that is added they need not be: Delta says that it is NULL in files that lack it."""
        return self.schema is not None and bool(differing(columns, self.schema))

    # -------------------------------------------------------------------- merging

    def merge(self, steps: pa.Table, columns: Sequence[TypedColumn], progress: Progress) -> None:
        """Apply steps that fit in memory."""
        assert self.table is not None
        failpoint(f"merging_{self.which}")
        if self.which == HISTORY:
            self._merge_history(steps, columns, progress)
        else:
            self._merge_current(steps, columns, progress)
        self._committed(progress)

    def _merge_history(
        self, steps: pa.Table, columns: Sequence[TypedColumn], progress: Progress
    ) -> None:
        assert self.table is not None
        names = schema_of(HISTORY, columns).names
        merger = self.table.merge(
            steps.select([*names, KIND]),
            f"t.`{KEY}` = s.`{KEY}` and t.`{OPEN}` = true and s.`{KIND}` = 'end'",
            source_alias="s",
            target_alias="t",
            writer_properties=WRITER,
            commit_properties=_properties(progress),
        )
        ended = {f"`{name}`": f"s.`{name}`" for name in END_COLUMNS}
        merger.when_matched_update(ended | {f"`{OPEN}`": "false"}).when_not_matched_insert(
            {f"`{name}`": f"s.`{name}`" for name in names}, predicate=f"s.`{KIND}` = 'version'"
        ).execute()

    def _merge_current(
        self, steps: pa.Table, columns: Sequence[TypedColumn], progress: Progress
    ) -> None:
        assert self.table is not None
        names = schema_of(CURRENT, columns).names
        is_version = pc.equal(steps[KIND], "version")
        present = steps.filter(pc.and_(is_version, steps[OPEN])).select(names)
        touched = steps.filter(pc.invert(is_version)).select(names)
        gone = touched.filter(pc.invert(pc.is_in(touched[KEY], present[KEY].combine_chunks())))
        marks = [
            pa.repeat(value, rows.num_rows) for value, rows in ((False, present), (True, gone))
        ]
        source = pa.concat_tables(
            rows.append_column("_gone", mark)
            for rows, mark in zip((present, gone), marks, strict=True)
        )
        values = {f"`{name}`": f"s.`{name}`" for name in names}
        self.table.merge(
            source,
            f"t.`{KEY}` = s.`{KEY}`",
            source_alias="s",
            target_alias="t",
            writer_properties=WRITER,
            commit_properties=_properties(progress),
        ).when_matched_delete("s.`_gone`").when_matched_update(values).when_not_matched_insert(
            values, predicate="not s.`_gone`"
        ).execute()

    # -------------------------------------------------------------------- rewriting

    def rewrite(
        self,
        frame: DataFrame,
        columns: Sequence[TypedColumn],
        progress: Progress,
        *,
        whole: bool,
    ) -> None:
        """Replace all rows, or of `history` the open versions, by those of the frame."""
        from pyspark.sql.pandas.types import from_arrow_schema

        schema = schema_of(self.which, columns)
        rows = frame.select(*(f"`{name}`" for name in schema.names))
        simple = from_arrow_schema(schema.remove_metadata())
        # A union of frames may find another type that fits both.
        assert _kinds(rows.schema) == _kinds(simple), "the rows have other types"
        place = FileLocation.of(self.path)
        if place.is_local:
            make_folders(Path(place.base))
        files = delta.write_staged(self.path, rows, PARTITIONS[self.which])
        failpoint(f"rewriting_{self.which}")
        if self.table is None:
            self._create(files, schema, progress)
        else:
            self._replace(files, schema, progress, whole or self.which == CURRENT)
        self._committed(progress)

    def _create(self, files: list[AddAction], schema: pa.Schema, progress: Progress) -> None:
        create_table_with_add_actions(
            self.path,
            Schema.from_arrow(schema),
            files,
            mode="error",
            partition_by=PARTITIONS[self.which],
            configuration=_CONFIGURATION,
            commit_properties=_properties(progress),
        )
        self.table = DeltaTable(self.path)

    def _replace(
        self, files: list[AddAction], schema: pa.Schema, progress: Progress, whole: bool
    ) -> None:
        assert self.table is not None
        self._allow_local_times(schema)
        delta.check_written(self.table, files)
        self.table.create_write_transaction(
            list(files),
            "overwrite",
            Schema.from_arrow(schema),
            PARTITIONS[self.which],
            partition_filters=None if whole else [(OPEN, "=", "true")],
            commit_properties=_properties(progress),
        )

    def _allow_local_times(self, schema: pa.Schema) -> None:
        """The feature that Delta needs for the first timestamp without a time zone."""
        assert self.table is not None
        features = self.table.protocol().reader_features or ()
        if any(kind == pa.timestamp("us") for kind in schema.types) and not features:
            self.table.alter.add_feature(
                [TableFeatures.TimestampWithoutTimezone, TableFeatures.ChangeDataFeed],
                allow_protocol_versions_increase=True,
                commit_properties=delta.carrying(self.table),
            )
            self.table.update_incremental()

    def _committed(self, progress: Progress) -> None:
        assert self.table is not None
        self.table.update_incremental()
        self.progress = progress
        failpoint(f"committed_{self.which}")

    # -------------------------------------------------------------------- reading

    def rows(
        self, spark: SparkSession, columns: Sequence[TypedColumn], *, whole: bool
    ) -> DataFrame:
        """The stored rows with the columns of `columns`, their names and types: all, or of
        `history` the open versions."""
        from pyspark.sql import functions as f
        from pyspark.sql.pandas.types import from_arrow_schema

        assert self.table is not None
        assert self.schema is not None
        stored, wanted = self.schema, schema_of(self.which, columns)
        where = [] if whole or self.which == CURRENT else [(OPEN, "=", "true")]
        plain = from_arrow_schema(stored.remove_metadata())
        found = delta.read(spark, self.path, plain, where, table=self.table)
        known = stored_columns(stored)
        present = {known[c.source].name: c for c in columns if c.source in known}
        types = differing(columns, stored)
        if types:
            target = pa.schema([(n, types.get(n, stored.field(n).type)) for n in stored.names])
            scales = {n: scale_of(c, stored.field(n).type) for n, c in present.items()}

            def convert(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
                for batch in batches:
                    arrays = [
                        converted(values, field.type, scales.get(field.name, 0))
                        for values, field in zip(batch.columns, target, strict=True)
                    ]
                    yield pa.RecordBatch.from_arrays(arrays, schema=target)

            found = found.mapInArrow(convert, from_arrow_schema(target))
        # `current` may have other names than the history until it is written again.
        names = {column.name: name for name, column in present.items()}
        names |= {field.name: field.name for field in OWN[self.which]}
        return found.select(
            *(
                (
                    f.col(f"`{names[each.name]}`")
                    if each.name in names
                    else f.lit(None).cast(each.dataType)
                ).alias(each.name)
                for each in from_arrow_schema(wanted.remove_metadata())
            )
        )

    def compact_when_due(self) -> None:
        """Join small files after every TABLES_COMPACT_COMMITS commits."""
        assert self.table is not None
        if self.table.version() % _COMPACT_COMMITS == _COMPACT_COMMITS - 1:
            try:
                self.table.optimize.compact(
                    writer_properties=WRITER, commit_properties=delta.carrying(self.table)
                )
            except DeltaError as error:
                # Another process did it at the same time. No row is lost.
                log.warning("Could not compact %s: %s", self.path, error)
            self.table.update_incremental()


def _properties(progress: Progress) -> CommitProperties:
    return CommitProperties(custom_metadata={delta.OFFSET: progress.text()}, max_commit_retries=0)


def _kinds(schema: StructType) -> list[str]:
    return [field.dataType.simpleString() for field in schema]
