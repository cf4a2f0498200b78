"""Delta tables through delta-rs: appended to exactly once, read by Spark's own Parquet reader.

Spark needs no jar for this. A batch is written as Parquet, by Arrow on the driver or by Spark's
tasks, and then committed together with its number (`app_id`, `batch_id`). Whether it is in already
is looked up in the very version that the commit builds on: a commit that another came before is
refused, and looked at anew. So one that is replayed after a crash, or written by two processes at
once, is in the table once. Parquet that was never committed belongs to nobody; vacuum removes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import (
    BloomFilterProperties,
    ColumnProperties,
    CommitProperties,
    DeltaTable,
    Transaction,
    WriterProperties,
)
from deltalake.exceptions import CommitFailedError, TableNotFoundError
from deltalake.transaction import AddAction

from headwater import limits
from headwater.errors import PipelineError
from headwater.pipeline.crashes import crash_point
from headwater.pipeline.files import Place
from headwater.pipeline.ownership import make_folders

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STAGE = "_stage"
"""Where Spark writes before a commit. Delta passes over names that begin so."""

BLOOMED = {"key": None, "op": 5}
"""Columns with a Bloom filter in files that are written to last, and how many different values they
have where that is known: who asks for one row opens few files."""


def create(path: str, schema: pa.Schema, partition_by: Sequence[str] = ()) -> DeltaTable:
    """The table at the path, made if there is none."""
    place = Place.of(path)
    if place.is_local:
        make_folders(Path(place.base))
    return DeltaTable.create(path, schema, mode="ignore", partition_by=list(partition_by))


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
    """Append a batch; False if it was in already. With `table` that one is brought up to date and
    used, instead of opening it anew."""
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
    None if the batch was in already. One without an `app_id` is not looked for. `blooms` is for
    files that are not joined with others later."""
    table = table or DeltaTable(path)
    if app_id is not None and holds(table, app_id, batch_id):
        return None
    place, stage = Place.of(path), f"{STAGE}/{uuid4()}"
    columns = table.metadata().partition_columns
    writer = frame.write.partitionBy(*columns).option("compression", "zstd")
    if blooms:
        # As large as it must be, and not a megabyte each.
        writer = writer.option("parquet.bloom.filter.adaptive.enabled", "true")
    for name in (name for name in BLOOMED if blooms and name in frame.columns):
        writer = writer.option(f"parquet.bloom.filter.enabled#{name}", "true")
    writer.parquet(f"{path}/{stage}")
    files = list(_adopt(place, stage))
    place.remove(stage)
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
    """Put rows in the place of everything that a table has of these days, in one commit on the
    version that `table` is at. CommitFailedError where another came before."""
    files = _write(Place.of(path), rows, table.metadata().partition_columns)
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
    """A commit that adds nothing and says something."""
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
    """Whether the batch is in the version that `table` is at. Enough before a commit: one that
    another came before is refused."""
    done = table.transaction_version(app_id)
    return done is not None and done >= batch_id


def append_files(
    table: DeltaTable,
    files: Sequence[AddAction],
    *,
    app_id: str,
    batch_id: int,
    metadata: dict[str, Any] | None = None,
) -> bool:
    """Make files part of the table as one batch; False if it was in already. `table` is at a
    version that does not hold the batch."""
    return _commit(table, files, app_id, batch_id, metadata)


def _commit(
    table: DeltaTable,
    files: Sequence[AddAction],
    app_id: str | None,
    batch_id: int,
    metadata: dict[str, Any] | None,
) -> bool:
    crash_point("written")
    properties = CommitProperties(
        app_transactions=None if app_id is None else [Transaction(app_id, batch_id)],
        custom_metadata=metadata,
        # Whoever comes in between must be looked at: it may have been this batch.
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
            crash_point("committed")
            return True
        table.update_incremental()
        if app_id is not None and holds(table, app_id, batch_id):
            return False
    raise PipelineError(
        f"others keep writing to the Delta table at {table.table_uri}: {refused}",
        hint="Two pipelines may be writing to one lake; let one of them do it.",
        retryable=True,
    )


# ------------------------------------------------------------------------ Parquet


ENCODINGS: dict[str, Literal["DELTA_BINARY_PACKED", "DELTA_BYTE_ARRAY"]] = {
    "seq": "DELTA_BINARY_PACKED",
    "at": "DELTA_BINARY_PACKED",
    "key": "DELTA_BYTE_ARRAY",
    "before": "DELTA_BYTE_ARRAY",
    "after": "DELTA_BYTE_ARRAY",
    "image": "DELTA_BYTE_ARRAY",
}
"""Columns whose values hardly ever repeat and resemble the one before: what differs is kept. The
others have dictionaries."""


def write_files(path: str, rows: pa.Table, columns: Sequence[str]) -> list[AddAction]:
    """Write rows as Parquet for the table at the path, a file for each partition."""
    return list(_write(Place.of(path), rows, columns))


def rows_of(file: AddAction) -> int:
    """How many rows a file has that was written here."""
    return int(json.loads(file.stats)["numRecords"])


def _write(place: Place, rows: pa.Table, columns: Sequence[str]) -> Iterator[AddAction]:
    found = _partitions(rows, columns)
    for values in found:
        part = rows
        for name, value in values.items() if len(found) > 1 else ():
            part = part.filter(pc.field(name) == pa.scalar(value, rows.schema.field(name).type))
        name = _file_name(values)
        place.system.create_dir(place.below(name).rpartition("/")[0], recursive=True)
        footers: list[pq.FileMetaData] = []
        part = part.drop_columns(list(columns))
        pq.write_table(
            part,
            place.below(name),
            filesystem=place.system,
            compression="zstd",
            use_dictionary=[name for name in part.column_names if name not in ENCODINGS],
            column_encoding={n: ENCODINGS[n] for n in part.column_names if n in ENCODINGS},
            metadata_collector=footers,
        )
        yield _added(place, name, _texts(values), footers[0])


def _partitions(rows: pa.Table, columns: Sequence[str]) -> list[dict[str, Any]]:
    if not columns:
        return [{}] if rows.num_rows else []
    found: list[dict[str, Any]] = rows.group_by(list(columns)).aggregate([]).to_pylist()
    return found


def _file_name(values: dict[str, Any]) -> str:
    folders = (f"{name}={value}/" for name, value in values.items())
    return f"{''.join(folders)}part-{uuid4()}.parquet"


def _texts(values: dict[str, Any]) -> dict[str, str | None]:
    return {name: str(value) for name, value in values.items()}


def _adopt(place: Place, stage: str) -> Iterator[AddAction]:
    """Move what Spark wrote to where it is to stay. Until it is committed nobody sees it there."""
    for info in list(place.files(stage)):
        folders = info.path.removeprefix(place.below(stage)).strip("/").split("/")[:-1]
        if not info.path.endswith(".parquet") or info.base_name.startswith((".", "_")):
            continue
        values = dict(folder.split("=", 1) for folder in folders)
        name = _file_name(values)
        place.system.create_dir(place.below(name).rpartition("/")[0], recursive=True)
        place.system.move(info.path, place.below(name))
        footer = pq.read_metadata(place.below(name), filesystem=place.system)
        if footer.num_rows:
            yield _added(place, name, values, footer)


def _added(
    place: Place, name: str, values: dict[str, str | None], footer: pq.FileMetaData
) -> AddAction:
    info = place.system.get_file_info(place.below(name))
    modified = int(datetime.now(UTC).timestamp() * 1000)
    return AddAction(name, info.size, values, modified, True, json.dumps(_stats(footer)))


def _stats(footer: pq.FileMetaData) -> dict[str, Any]:
    """What Delta tells readers about a file, so that they can pass over it."""
    lowest, highest, nulls = {}, {}, {}
    for at, name in enumerate(footer.schema.names):
        found = [
            footer.row_group(group).column(at).statistics for group in range(footer.num_row_groups)
        ]
        if any(each is None or not each.has_null_count for each in found):
            continue
        nulls[name] = sum(each.null_count for each in found)
        filled = [each for each in found if each.has_min_max]
        if not filled or len(filled) < len(found):
            continue
        bounds = min(each.min for each in filled), max(each.max for each in filled)
        if all(map(_is_told, bounds)):
            lowest[name], highest[name] = map(_told, bounds)
    return {
        "numRecords": footer.num_rows,
        "minValues": lowest,
        "maxValues": highest,
        "nullCount": nulls,
    }


def _is_told(value: object) -> bool:
    match value:
        case str():
            return len(value) <= limits.DELTA_STATS_CHARS_MAX
        case int() | date():
            return True
    return False


def _told(value: object) -> object:
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case date():
            return value.isoformat()
    return value


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
    """The rows of the table, as of its latest version, the one given, or that of `table`. `where`
    leaves out files: by their partitions (tuples), or by what Delta knows of their columns, too
    (SQL). Of the files that are left, it filters nothing."""
    files = chosen_files(table or DeltaTable(path, version=version), where)
    if not files:
        # Not createDataFrame, for which Spark starts Python workers.
        columns = ((each.dataType.simpleString(), each.name) for each in schema)
        return spark.range(0).selectExpr(*(f"cast(null as {t}) as `{n}`" for t, n in columns))
    return spark.read.schema(schema).option("basePath", path).parquet(*files)


def chosen_files(table: DeltaTable, where: str | Sequence[tuple[str, str, Any]] = ()) -> list[str]:
    """The files of a table that may have such rows."""
    predicate = where if isinstance(where, str) else list(where)
    files: list[str] = table.file_uris(file_pruning_predicate=predicate or None)
    return files


# ------------------------------------------------------------------------ how far it goes

OFFSET = "offset"
"""Where a commit says how far the table goes with it."""

_CARRIED, _CARRIED_FROM = "carried", "carried_from"


def offset_of(table: DeltaTable) -> str | None:
    """How far the table goes, as its newest commit that says. What joins or removes files says
    again what it found (`carrying`), and of which version: a batch that came since counts more."""
    carried: str | None = None
    since = -1
    for count in (limits.DELTA_HISTORY_COMMITS // 500, limits.DELTA_HISTORY_COMMITS):
        for entry in table.history(count):
            if entry["version"] <= since:
                return carried
            if OFFSET in entry:
                return str(entry[OFFSET])
            if carried is None and _CARRIED in entry:
                carried, since = str(entry[_CARRIED]), int(entry[_CARRIED_FROM])
    return carried


def carrying(table: DeltaTable) -> CommitProperties | None:
    """For a commit that brings no batch: how far the table goes. However many of them follow each
    other, and whatever of the past is cleaned away, the newest one says it."""
    version = table.version()
    offset = offset_of(table)
    if offset is None:
        return None
    return CommitProperties(custom_metadata={_CARRIED: offset, _CARRIED_FROM: str(version)})


def writer_properties(names: Iterable[str]) -> WriterProperties:
    """How delta-rs writes files that stay."""
    columns = {name: _properties(name) for name in names if name in {*BLOOMED, *ENCODINGS}}
    return WriterProperties(
        compression="ZSTD",
        max_row_group_size=limits.LAKE_ROW_GROUP_ROWS,
        column_properties=columns or None,
    )


def _properties(name: str) -> ColumnProperties:
    return ColumnProperties(
        dictionary_enabled=False if name in ENCODINGS else None,
        encoding=ENCODINGS.get(name),
        bloom_filter_properties=(
            BloomFilterProperties(True, ndv=BLOOMED[name]) if name in BLOOMED else None
        ),
    )
