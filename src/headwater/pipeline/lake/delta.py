"""Delta tables through delta-rs: appended to exactly once, read by Spark's own Parquet reader.

Spark needs no jar for this. A batch is written as Parquet (`parquet`), by Arrow on the driver or by
Spark's tasks, and then committed together with its number (`app_id`, `batch_id`). Whether the batch
is in the table is looked up in the version that the commit builds on. Delta refuses a commit on an
older version, and the lookup is repeated. So a batch that is repeated after a crash, or written by
two processes at once, is in the table once.

Before every commit the driver checks that each file exists with its size: tasks on other machines
may have written to a folder of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction

from headwater import limits
from headwater.errors import PipelineError
from headwater.pipeline.failpoints import failpoint
from headwater.pipeline.files import FileLocation
from headwater.pipeline.lake.parquet import BLOOM_COLUMNS, adopt_staged, rows_of, write_files
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


def append(
    path: str,
    rows: pa.Table,
    *,
    app_id: str,
    batch_id: int,
    metadata: dict[str, Any] | None = None,
    table: DeltaTable | None = None,
) -> bool:
    """Append a batch; False if the table has it already. `table` is the opened table, if the caller
    has it: it is updated, and not opened again."""
    table = table or DeltaTable(path)
    if holds(table, app_id, batch_id):
        return False
    files = write_files(path, rows, table.metadata().partition_columns)
    return _commit(table, files, app_id, batch_id, metadata)


def append_frame(
    path: str,
    frame: DataFrame,
    *,
    app_id: str | None = None,
    batch_id: int = 0,
    metadata: dict[str, Any] | None = None,
    table: DeltaTable | None = None,
    blooms: bool = False,
) -> list[AddAction] | None:
    """The same for a batch too large for the driver: Spark's tasks write it. Returns the files;
    None if the table has the batch already. Without an `app_id` this is not checked. `blooms` is
    for files that are not joined with others later."""
    table = table or DeltaTable(path)
    if app_id is not None and holds(table, app_id, batch_id):
        return None
    place, stage = FileLocation.of(path), f"{STAGE}/{uuid4()}"
    columns = table.metadata().partition_columns
    counted, written = _counted(frame)
    writer = counted.write.partitionBy(*columns).option("compression", "zstd")
    if blooms:
        # Filters of the size that they need, instead of a megabyte each.
        writer = writer.option("parquet.bloom.filter.adaptive.enabled", "true")
    for name in (name for name in BLOOM_COLUMNS if blooms and name in frame.columns):
        writer = writer.option(f"parquet.bloom.filter.enabled#{name}", "true")
    writer.parquet(f"{path}/{stage}")
    files = list(adopt_staged(place, stage))
    place.remove(stage)
    _check_rows(place, files, written.get["rows"])
    return files if _commit(table, files, app_id, batch_id, metadata) else None


def replace(
    table: DeltaTable,
    path: str,
    rows: pa.Table,
    days: Sequence[date],
    *,
    app: tuple[str, int] | None = None,
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
        commit_properties=CommitProperties(
            app_transactions=None if app is None else [Transaction(*app)],
            custom_metadata=metadata,
            max_commit_retries=0,
        ),
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


def holds(table: DeltaTable, app_id: str, batch_id: int) -> bool:
    """Whether the batch is in the table, in its latest version."""
    table.update_incremental()
    return knows(table, app_id, batch_id)


def knows(table: DeltaTable, app_id: str, batch_id: int) -> bool:
    """Whether the batch is in the version that `table` is at. That is enough before a commit: Delta
    refuses a commit on an older version."""
    done = table.transaction_version(app_id)
    return done is not None and done >= batch_id


def append_files(
    table: DeltaTable,
    files: Sequence[AddAction],
    *,
    app_id: str,
    batch_id: int,
    after: str | None,
    metadata: dict[str, Any],
) -> bool:
    """Add files to the table as one batch; False if the table has it already. `table` is at a
    version without the batch, and at the offset `after`. PipelineError if another writer has taken
    it to another offset."""
    return _commit(table, files, app_id, batch_id, metadata, lambda: offset_of(table) == after)


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


def _commit(
    table: DeltaTable,
    files: Sequence[AddAction],
    app_id: str | None,
    batch_id: int,
    metadata: dict[str, Any] | None,
    follows: Callable[[], bool] = lambda: True,
) -> bool:
    failpoint("written")
    check_written(table, files)
    properties = CommitProperties(
        app_transactions=None if app_id is None else [Transaction(app_id, batch_id)],
        custom_metadata=metadata,
        # No automatic retry: a commit in between may have been this batch.
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
            return True
        table.update_incremental()
        if app_id is not None and holds(table, app_id, batch_id):
            return False
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
    return spark.read.schema(schema).option("basePath", path).parquet(*files)


def chosen_files(table: DeltaTable, where: str | Sequence[tuple[str, str, Any]] = ()) -> list[str]:
    """The files of a table that may contain matching rows."""
    predicate = where if isinstance(where, str) else list(where)
    files: list[str] = table.file_uris(file_pruning_predicate=predicate or None)
    return files


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
