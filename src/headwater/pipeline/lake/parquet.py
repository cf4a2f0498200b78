"""The Parquet files of Delta tables: how they are encoded, written, and described to Delta.

A file belongs to a table only after a commit (`delta`). Files that were never committed are
removed by vacuum. Rows are written as they arrive: what is in memory is bounded in bytes, whatever
the size of a row. Readers need memory for a part of a file at a time, so parts are bounded too.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from typing import Any, Literal
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import BloomFilterProperties, ColumnProperties, WriterProperties
from deltalake.transaction import AddAction

from headwater.pipeline.files import FileLocation

_DELTA_STATS_CHARS_MAX = 64
"""The lowest and highest text of a column are stored for readers of a Delta table if both are no
longer."""

_LAKE_ROW_GROUP_ROWS = 100_000
"""Rows in one part of a Parquet file of the lake. Readers pass over parts that have nothing for
them."""

LAKE_ROW_GROUP_BYTES = 32 * 2**20
"""Bytes of rows in one part of a Parquet file, before they are compressed. Only a single row may be
larger. A reader has one part in memory."""

_LAKE_FILE_BYTES = 128 * 2**20
"""After this many bytes a Parquet file is complete, and further rows go to another one."""

_LAKE_OPEN_FILES = 16
"""Parquet files that one writer has open, one for each partition. With more partitions, the file
that was longest without rows is completed."""


_UTC = pa.timestamp("us", tz="UTC")

BLOOM_COLUMNS = {"key": None, "op": 5}
"""Columns with a Bloom filter in files that are not joined with others later, and the number of
their different values where it is known: a request for one row then opens few files."""

ENCODINGS: dict[str, Literal["DELTA_BINARY_PACKED", "DELTA_BYTE_ARRAY"]] = {
    "seq": "DELTA_BINARY_PACKED",
    "at": "DELTA_BINARY_PACKED",
    "key": "DELTA_BYTE_ARRAY",
    "before": "DELTA_BYTE_ARRAY",
    "after": "DELTA_BYTE_ARRAY",
    "image": "DELTA_BYTE_ARRAY",
}
"""Columns whose values seldom repeat and resemble the value before: delta encodings store the
difference. The other columns have dictionaries."""


def write_batches(
    path: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    partition_by: Sequence[str] = (),
    *,
    blooms: bool = False,
) -> list[AddAction]:
    """Write rows as Parquet for the table at the path, and return the files. At least one file for
    each partition that has rows; none without rows, and none after an error. `blooms` is for files
    that are not joined with others later."""
    writer = _TableWriter(FileLocation.of(path), schema, partition_by, blooms)
    try:
        for batch in batches:
            writer.add(batch)
        return writer.finish()
    except BaseException:
        writer.abandon()
        raise


def write_files(path: str, rows: pa.Table, columns: Sequence[str]) -> list[AddAction]:
    """The same for rows that are in memory."""
    return write_batches(path, rows.schema, rows.to_batches(), columns)


def rows_of(file: AddAction) -> int:
    """The number of rows of a file that was written here."""
    return int(json.loads(file.stats)["numRecords"])


class _TableWriter:
    """Distributes rows to one file for each partition. Rows wait until there are enough for a part
    of a file; the waiting rows of all partitions together are bounded as well."""

    def __init__(
        self, place: FileLocation, schema: pa.Schema, columns: Sequence[str], blooms: bool
    ) -> None:
        self._place = place
        self._columns = list(columns)
        self._blooms = blooms
        self._schema = pa.schema([each for each in schema if each.name not in columns])
        self._files: OrderedDict[tuple[Any, ...], _PartitionFile] = OrderedDict()
        self._added: list[AddAction] = []

    def add(self, batch: pa.RecordBatch) -> None:
        for values, rows in _by_partition(batch, self._columns):
            for part in _bounded(rows):
                file = self._file(values)
                file.add(part)
                if file.is_complete:
                    self._close(values)
        waiting = self._files.values()
        while sum(file.waiting_bytes for file in waiting) > LAKE_ROW_GROUP_BYTES:
            max(waiting, key=lambda file: file.waiting_bytes).write_waiting()

    def finish(self) -> list[AddAction]:
        for values in list(self._files):
            self._close(values)
        return self._added

    def abandon(self) -> None:
        """Remove everything that was written: files that no table has would fill the disk."""
        for file in self._files.values():
            file.abandon()
        for done in self._added:
            _remove(self._place, done.path)

    def _file(self, values: tuple[Any, ...]) -> _PartitionFile:
        if values not in self._files:
            if len(self._files) >= _LAKE_OPEN_FILES:
                self._close(next(iter(self._files)))
            named = dict(zip(self._columns, values, strict=True))
            self._files[values] = _PartitionFile(self._place, self._schema, named, self._blooms)
        self._files.move_to_end(values)
        return self._files[values]

    def _close(self, values: tuple[Any, ...]) -> None:
        self._added.append(self._files[values].close())
        del self._files[values]


class _PartitionFile:
    """A Parquet file that is being written."""

    def __init__(
        self, place: FileLocation, schema: pa.Schema, values: Mapping[str, Any], blooms: bool
    ) -> None:
        self._place = place
        self._name = _file_name(values)
        self._values = values
        self._schema = schema
        self._waiting: list[pa.RecordBatch] = []
        self.waiting_bytes = 0
        self._waiting_rows = 0
        path = place.below(self._name)
        place.system.create_dir(path.rpartition("/")[0], recursive=True)
        self._stream = place.system.open_output_stream(path)
        encodings = _encodings(schema)
        self._writer = pq.ParquetWriter(
            self._stream,
            schema,
            compression="zstd",
            use_dictionary=[name for name in schema.names if name not in encodings],
            column_encoding=encodings,
            bloom_filter_options=_bloom_filters(schema) if blooms else None,
        )

    def add(self, rows: pa.RecordBatch) -> None:
        size = rows.nbytes
        if self.waiting_bytes + size > LAKE_ROW_GROUP_BYTES:
            self.write_waiting()
        self._waiting.append(rows)
        self.waiting_bytes += size
        self._waiting_rows += rows.num_rows
        if self._waiting_rows >= _LAKE_ROW_GROUP_ROWS:
            self.write_waiting()

    def write_waiting(self) -> None:
        """Write the waiting rows as one part of the file."""
        if self._waiting:
            rows = pa.Table.from_batches(self._waiting, self._schema)
            self._writer.write_table(rows, row_group_size=max(rows.num_rows, 1))
        self._waiting, self.waiting_bytes, self._waiting_rows = [], 0, 0

    @property
    def is_complete(self) -> bool:
        return bool(self._stream.tell() >= _LAKE_FILE_BYTES)

    def close(self) -> AddAction:
        self.write_waiting()
        self._writer.close()
        size = self._stream.tell()
        self._stream.close()
        return _added(self._name, size, self._values, self._writer.writer.metadata)

    def abandon(self) -> None:
        with suppress(OSError, pa.ArrowException):
            self._stream.close()
        # Else it would try again to write to the closed file when it is collected.
        self._writer.is_open = False
        _remove(self._place, self._name)


def _remove(place: FileLocation, name: str) -> None:
    with suppress(OSError, pa.ArrowException):
        place.system.delete_file(place.below(name))


def _bloom_filters(schema: pa.Schema) -> dict[str, dict[str, int]]:
    """The Bloom filters of a file. Of a column with many different values, one is large enough for
    a part in which all differ."""
    return {
        name: {"ndv": BLOOM_COLUMNS[name] or _LAKE_ROW_GROUP_ROWS}
        for name in schema.names
        if name in BLOOM_COLUMNS
    }


def _encodings(schema: pa.Schema) -> dict[str, str]:
    """The encodings of the columns that have one. A table of the user may call a column of another
    type by the same name."""
    return {
        field.name: ENCODINGS[field.name]
        for field in schema
        if field.name in ENCODINGS
        and (ENCODINGS[field.name] == "DELTA_BYTE_ARRAY") == pa.types.is_string(field.type)
        and (pa.types.is_string(field.type) or field.type in (pa.int64(), _UTC))
    }


def _by_partition(
    batch: pa.RecordBatch, columns: Sequence[str]
) -> Iterator[tuple[tuple[Any, ...], pa.RecordBatch]]:
    """The rows of each partition, without the columns of the partition, and their values."""
    if not batch.num_rows:
        return
    if not columns:
        yield (), batch
        return
    found = pa.table(batch).select(columns).group_by(list(columns)).aggregate([]).to_pylist()
    for values in found:
        rows = batch if len(found) == 1 else batch.filter(_is_in(batch, values))
        yield tuple(values[name] for name in columns), rows.drop_columns(list(columns))


def _is_in(batch: pa.RecordBatch, values: Mapping[str, Any]) -> Any:
    import pyarrow.compute as pc

    wanted = pa.repeat(pa.scalar(True), batch.num_rows)
    for name, value in values.items():
        column = batch.column(name)
        same = pc.is_null(column) if value is None else pc.equal(column, pa.scalar(value))
        wanted = pc.and_(wanted, same)
    return wanted


def _bounded(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The rows in pieces that fit into one part of a file. Halves, because one row may be as large
    as all others together."""
    fits = rows.nbytes <= LAKE_ROW_GROUP_BYTES and rows.num_rows <= _LAKE_ROW_GROUP_ROWS
    if fits or rows.num_rows == 1:
        yield rows
        return
    middle = rows.num_rows // 2
    yield from _bounded(rows.slice(0, middle))
    yield from _bounded(rows.slice(middle))


def _file_name(values: Mapping[str, Any]) -> str:
    folders = (f"{name}={_NO_VALUE if v is None else v}/" for name, v in values.items())
    return f"{''.join(folders)}part-{uuid4()}.parquet"


_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""The folder of rows whose partition column is NULL, as in Hive and Spark."""


def adopt_staged(place: FileLocation, stage: str) -> Iterator[AddAction]:
    """Move the files that Spark staged to their final place. They stay invisible until a commit."""
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
            size = place.system.get_file_info(place.below(name)).size
            yield _added(name, size, values, footer)


def _added(name: str, size: int, values: Mapping[str, Any], footer: pq.FileMetaData) -> AddAction:
    texts = {each: None if value is None else str(value) for each, value in values.items()}
    modified = int(datetime.now(UTC).timestamp() * 1000)
    return AddAction(name, size, texts, modified, True, json.dumps(_stats(footer)))


def _stats(footer: pq.FileMetaData) -> dict[str, Any]:
    """The statistics by which readers of a Delta table skip a file."""
    lowest, highest, nulls = {}, {}, {}
    for at, name in enumerate(footer.schema.names):
        if footer.schema.column(at).path != name:  # a value inside an array or a record
            continue
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
        if all(map(_has_bound, bounds)):
            lowest[name], highest[name] = map(_bound, bounds)
    return {
        "numRecords": footer.num_rows,
        "minValues": lowest,
        "maxValues": highest,
        "nullCount": nulls,
    }


def _has_bound(value: object) -> bool:
    match value:
        case str():
            return len(value) <= _DELTA_STATS_CHARS_MAX
        case int() | date():
            return True
    return False


def _bound(value: object) -> object:
    match value:
        case datetime(tzinfo=None):
            return value.isoformat()
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case date():
            return value.isoformat()
    return value


def writer_properties(names: Iterable[str]) -> WriterProperties:
    """How delta-rs writes files that are not joined with others later."""
    columns = {name: _properties(name) for name in names if name in {*BLOOM_COLUMNS, *ENCODINGS}}
    return WriterProperties(
        compression="ZSTD",
        max_row_group_size=_LAKE_ROW_GROUP_ROWS,
        column_properties=columns or None,
    )


def _properties(name: str) -> ColumnProperties:
    return ColumnProperties(
        dictionary_enabled=False if name in ENCODINGS else None,
        encoding=ENCODINGS.get(name),
        bloom_filter_properties=(
            BloomFilterProperties(True, ndv=BLOOM_COLUMNS[name]) if name in BLOOM_COLUMNS else None
        ),
    )
