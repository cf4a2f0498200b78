"""Delta tables through delta-rs: appended to exactly once, read by Spark's own Parquet reader.

Spark needs no jar for this. A batch is written as Parquet (`parquet`), by Arrow on the driver or by
Spark's tasks, and then committed together with the offset that it reaches. A batch follows the
offset of the version that its commit builds on. Delta refuses a commit on an older version, and the
offset is looked up again. So a batch that is repeated after a crash, or written by two processes at
once, is in the table once.

Before every commit the driver checks that each file exists with its size: tasks on other machines
may have written to a folder of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote
from uuid import uuid4

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, QueryBuilder, Schema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from headwater import limits
from headwater.errors import PipelineError
from headwater.pipeline.failpoints import failpoint
from headwater.pipeline.files import FileLocation
from headwater.pipeline.lake.parquet import (
    BLOOM_COLUMNS,
    LAKE_ROW_GROUP_BYTES,
    adopt_staged,
    rows_of,
    write_files,
)
from headwater.pipeline.permissions import make_folders

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation, SparkSession

STAGE = "_stage"
"""The folder in which Spark writes before a commit. Delta ignores names that begin with `_`."""


def create(path: str, schema: pa.Schema, partition_by: Sequence[str] = ()) -> DeltaTable:
    """The table at the path; created if it does not exist. Columns that one of an earlier release
    lacks are added; they are NULL in its rows."""
    place = FileLocation.of(path)
    if place.is_local:
        make_folders(Path(place.base))
    table = DeltaTable.create(path, schema, mode="ignore", partition_by=list(partition_by))
    present = {field.name for field in table.schema().fields}
    missing = [field for field in Schema.from_arrow(schema).fields if field.name not in present]
    if missing:
        table.alter.add_columns(missing, commit_properties=carrying(table))
    return table


def open_table(path: str, version: int | None = None) -> DeltaTable | None:
    """The table at the path, in its latest version or the one given; None if there is none."""
    try:
        return DeltaTable(path, version=version)
    except TableNotFoundError:
        return None


# ------------------------------------------------------------------------ appending


def append_frame(
    path: str,
    frame: DataFrame,
    *,
    metadata: dict[str, Any] | None = None,
    table: DeltaTable | None = None,
    blooms: bool = False,
) -> list[AddAction]:
    """Append rows, which Spark's tasks write. Returns the files. `table` is the opened table, if
    the caller has it: it is updated, and not opened again. `blooms` is for files that are not
    joined with others later."""
    table = table or DeltaTable(path)
    files = write_staged(path, frame, table.metadata().partition_columns, blooms=blooms)
    commit(table, files, metadata)
    return files


_SPARK_WRITER = {
    "compression": "zstd",
    # A reader has a page of each column in memory. A part is measured after it is compressed, so
    # this bounds rows that compress well less than `parquet` does.
    "parquet.block.size": str(LAKE_ROW_GROUP_BYTES),
    # After this many rows the writer looks whether these are full: a row may have a megabyte.
    "parquet.block.size.row.check.min": "10",
    "parquet.page.size.row.check.min": "10",
}
"""How Spark's own writer writes Parquet."""


def write_staged(
    path: str, frame: DataFrame, columns: Sequence[str], *, blooms: bool = False
) -> list[AddAction]:
    """Write rows with Spark's tasks as files of the table at the path, partitioned by these
    columns. They become visible by a commit."""
    place, stage = FileLocation.of(path), f"{STAGE}/{uuid4()}"
    counted, written = _counted(frame)
    writer = counted.write.partitionBy(*columns).options(**_SPARK_WRITER)
    if blooms:
        # Filters of the size that they need, instead of a megabyte each.
        writer = writer.option("parquet.bloom.filter.adaptive.enabled", "true")
    for name in (name for name in BLOOM_COLUMNS if blooms and name in frame.columns):
        writer = writer.option(f"parquet.bloom.filter.enabled#{name}", "true")
    writer.parquet(f"{path}/{stage}")
    files = list(adopt_staged(place, stage))
    place.remove(stage)
    _check_rows(place, files, written.get["rows"])
    return files


def add(table: DeltaTable, files: Sequence[AddAction]) -> None:
    """Add files that were written for the table, in one commit."""
    if files:
        commit(table, files)


def replace(
    table: DeltaTable,
    path: str,
    rows: pa.Table,
    days: Sequence[date],
    *,
    metadata: dict[str, Any] | None = None,
) -> None:
    """Replace everything that a table has of these days, in one commit on the version that `table`
    is at. CommitFailedError where another commit came first."""
    files = write_files(path, rows, table.metadata().partition_columns)
    check_written(table, files)
    table.create_write_transaction(
        list(files),
        "overwrite",
        table.schema(),
        table.metadata().partition_columns,
        partition_filters=[("day", "in", [day.isoformat() for day in days])],
        commit_properties=CommitProperties(custom_metadata=metadata, max_commit_retries=0),
    )


def note(table: DeltaTable, metadata: dict[str, Any]) -> None:
    """A commit with metadata and without files."""
    table.create_write_transaction(
        [],
        "append",
        table.schema(),
        table.metadata().partition_columns,
        commit_properties=CommitProperties(custom_metadata=metadata),
    )


def append_files(
    table: DeltaTable,
    files: Sequence[AddAction],
    *,
    after: str | None,
    metadata: dict[str, Any],
) -> None:
    """Add files to the table as one batch. `table` is at the offset `after`. PipelineError if
    another writer has taken it to another offset."""
    commit(table, files, metadata, lambda: offset_of(table) == after)


def remove_folder(path: str) -> None:
    """Remove every file of the tables below a folder."""
    parent, _, name = path.rpartition("/")
    FileLocation.of(parent).remove(name)


def _counted(frame: DataFrame) -> tuple[DataFrame, Observation]:
    """The frame, and how many `rows` of it Spark's tasks have written."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    observation = Observation()
    return frame.observe(observation, f.count(f.lit(1)).alias("rows")), observation


def _check_rows(place: FileLocation, files: Sequence[AddAction], rows: int) -> None:
    """Raise PipelineError unless the driver found all rows that the tasks wrote."""
    found = sum(map(rows_of, files))
    if found != rows:
        raise _not_shared(f"{rows} rows for the Delta table {place.base}, the driver found {found}")


def check_written(table: DeltaTable, files: Sequence[AddAction]) -> None:
    """Raise PipelineError unless the driver finds each file, with its size."""
    place = FileLocation.of(table.table_uri)
    found = place.system.get_file_info([place.below(file.path) for file in files])
    wrong = [
        (file, info) for file, info in zip(files, found, strict=True) if info.size != file.size
    ]
    if not wrong:
        return
    file, info = wrong[0]
    state = "does not exist" if info.size is None else f"has {info.size} bytes"
    raise _not_shared(
        f"{len(files)} files for the Delta table {place.base}, the driver found"
        f" {len(files) - len(wrong)}: {file.path} {state}, not {file.size}"
    )


def _not_shared(what: str) -> PipelineError:
    return PipelineError(
        f"Spark's tasks wrote {what}. Nothing was committed",
        hint="The lake must be in a folder or under a URL that the driver and all executors share.",
        retryable=True,
    )


def commit(
    table: DeltaTable,
    files: Sequence[AddAction],
    metadata: dict[str, Any] | None = None,
    follows: Callable[[], bool] = lambda: True,
) -> None:
    """Add files to the table in one commit. PipelineError where other commits come first, and they
    do not follow the version that is then the latest."""
    failpoint("written")
    check_written(table, files)
    properties = CommitProperties(
        custom_metadata=metadata,
        # No automatic retry: a commit in between may have been this batch, by another process.
        max_commit_retries=0,
    )
    for _ in range(limits.DELTA_COMMIT_ATTEMPTS_MAX):
        try:
            table.create_write_transaction(
                list(files),
                "append",
                table.schema(),
                table.metadata().partition_columns,
                commit_properties=properties,
            )
        except CommitFailedError as error:
            refused = error
        else:
            failpoint("committed")
            return
        table.update_incremental()
        if not follows():
            break
    raise PipelineError(
        f"the Delta table {table.table_uri} could not be written, because other writers commit to"
        f" it at the same time: {refused}",
        hint="Let only one pipeline write to the lake.",
        retryable=True,
    )


# ------------------------------------------------------------------------ reading


def read(
    spark: SparkSession,
    path: str,
    schema: Any,
    where: str | Sequence[tuple[str, str, Any]] = (),
    *,
    version: int | None = None,
    table: DeltaTable | None = None,
) -> DataFrame:
    """The rows of the table: of its latest version, of the version given, or of the version that
    `table` is at. `where` only skips files: by their partitions (tuples), or by their partitions
    and statistics (SQL). The rows of the other files are not filtered."""
    files = chosen_files(table or DeltaTable(path, version=version), where)
    if not files:
        # Not createDataFrame, for which Spark starts Python workers.
        columns = ((each.dataType.simpleString(), each.name) for each in schema)
        return spark.range(0).selectExpr(*(f"cast(null as {t}) as `{n}`" for t, n in columns))
    return read_files(spark, path, schema, files)


def read_files(spark: SparkSession, path: str, schema: Any, files: Sequence[str]) -> DataFrame:
    """The rows of some files of the table at the path."""
    return spark.read.schema(schema).option("basePath", path).parquet(*files)


def chosen_files(table: DeltaTable, where: str | Sequence[tuple[str, str, Any]] = ()) -> list[str]:
    """The files of a table that may contain matching rows."""
    predicate = where if isinstance(where, str) else list(where)
    files: list[str] = table.file_uris(file_pruning_predicate=predicate or None)
    return files


def file_sizes(table: DeltaTable) -> dict[str, int]:
    """The bytes of each file of a table, by its name without folders."""
    actions: Any = table.get_add_actions()
    paths, sizes = (actions[name].to_pylist() for name in ("path", "size_bytes"))
    return {path.rpartition("/")[2]: size for path, size in zip(paths, sizes, strict=True)}


def read_arrow(table: DeltaTable, schema: pa.Schema, where: str = "") -> pa.Table:
    """The rows of a table without partitions that fits in memory. `where` only skips files. Columns
    that an older file lacks are NULL."""
    # Imports pandas, which takes longer than reading most tables.
    import pyarrow.dataset as pads

    files = chosen_files(table, where)
    if not files:
        return schema.empty_table()
    places = [FileLocation.of(file) for file in files]
    paths = [place.base for place in places]
    found = pads.dataset(paths, schema, format="parquet", filesystem=places[0].system)
    return found.to_table()


def select(statement: str, **tables: DeltaTable) -> list[dict[str, Any]]:
    """The rows of an answer that fits in memory, by delta-rs' own engine (DataFusion): without
    Spark, and without pandas. The tables are named in the statement."""
    engine = QueryBuilder(_ENGINE)
    for name, table in tables.items():
        engine.register(name, table)
    try:
        found: Any = engine.execute(statement).read_all().to_struct_array()
    except (DeltaError, OSError) as error:
        names = ", ".join(table.table_uri for table in tables.values())
        raise PipelineError(
            f"the Delta table {names} could not be read: {error}",
            hint="Try again: its files may have been replaced at that moment.",
            retryable=True,
        ) from error
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def rows_of_table(
    table: DeltaTable, schema: pa.Schema, where: str = "true"
) -> list[dict[str, Any]]:
    """The rows of a table that match a condition, in the same way. Columns of the schema that a
    table of an earlier release lacks are NULL. The condition may name the table: `stored`."""
    present = {field.name for field in table.schema().fields}
    columns = (f'"{n}"' if n in present else f'null as "{n}"' for n in schema.names)
    return select(f"select {', '.join(columns)} from stored where {where}", stored=table)


def quoted(text: str) -> str:
    """A text in the SQL of DataFusion and of PostgreSQL.

    >>> quoted("it's")
    "'it''s'"
    """
    return "'" + text.replace("'", "''") + "'"


_ENGINE = {
    # Of a row group, first the columns of the condition, then the others of the rows found.
    "datafusion.execution.parquet.pushdown_filters": "true",
    "datafusion.execution.parquet.reorder_filters": "true",
}


# ------------------------------------------------------------------------ how far it goes

OFFSET = "offset"
"""The metadata of a commit that has the offset up to which the table has every change."""

_CARRIED, _CARRIED_FROM = "carried", "carried_from"


def offset_of(table: DeltaTable) -> str | None:
    """The offset up to which the version that `table` is at has every change: from its newest
    commit that has one. Commits that join or remove files repeat the offset they found (`carrying`)
    and its version: a later batch overrides it."""
    carried: str | None = None
    since = -1
    for version, entry in _commits(table):
        if version <= since:
            return carried
        if OFFSET in entry:
            return str(entry[OFFSET])
        if carried is None and _CARRIED in entry:
            carried, since = str(entry[_CARRIED]), int(entry[_CARRIED_FROM])
    return carried


def files_after(table: DeltaTable, offset: str) -> list[str] | None:
    """The files that were added by the commits with an offset after the one with this offset. None
    where that commit is not known."""
    place, files = FileLocation.of(table.table_uri), list[str]()
    for version, entry in _commits(table):
        if entry.get(OFFSET) == offset:
            return files
        if OFFSET in entry:
            files += (f"{table.table_uri.rstrip('/')}/{unquote(p)}" for p in _added(place, version))
    return None


def _added(place: FileLocation, version: int) -> Iterator[str]:
    """The paths of the files that a commit added."""
    for line in place.read(f"_delta_log/{version:020}.json").splitlines():
        action = msgspec.json.decode(line)
        if "add" in action:
            yield action["add"]["path"]


def _commits(table: DeltaTable) -> Iterator[tuple[int, dict[str, Any]]]:
    """The commits up to the version that `table` is at, the newest first. Not `table.history`: that
    begins with the newest commit of all, and calls it by the version that `table` is at."""
    log = FileLocation.of(table.table_uri)
    last = table.version()
    for version in range(last, max(-1, last - limits.DELTA_HISTORY_COMMITS), -1):
        try:
            content = log.read(f"_delta_log/{version:020}.json")
        except FileNotFoundError:  # cleaned away
            return
        for line in content.splitlines():
            action = msgspec.json.decode(line)
            if "commitInfo" in action:
                yield version, action["commitInfo"]


def carrying(table: DeltaTable) -> CommitProperties | None:
    """The offset of the table as metadata for a commit without a batch. So the newest commits have
    it, also when older ones are cleaned away."""
    version = table.version()
    offset = offset_of(table)
    if offset is None:
        return None
    return CommitProperties(custom_metadata={_CARRIED: offset, _CARRIED_FROM: str(version)})
