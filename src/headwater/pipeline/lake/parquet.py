"""The Parquet files of Delta tables: how they are encoded, written, and described to Delta.

A file belongs to a table only after a commit (`delta`). Files that were never committed are
removed by vacuum.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime
from typing import Any, Literal
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
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


def write_files(path: str, rows: pa.Table, columns: Sequence[str]) -> list[AddAction]:
    """Write rows as Parquet for the table at the path, a file for each partition."""
    return list(_write(FileLocation.of(path), rows, columns))


def rows_of(file: AddAction) -> int:
    """The number of rows of a file that was written here."""
    return int(json.loads(file.stats)["numRecords"])


def _write(place: FileLocation, rows: pa.Table, columns: Sequence[str]) -> Iterator[AddAction]:
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
            yield _added(place, name, values, footer)


def _added(
    place: FileLocation, name: str, values: dict[str, str | None], footer: pq.FileMetaData
) -> AddAction:
    info = place.system.get_file_info(place.below(name))
    modified = int(datetime.now(UTC).timestamp() * 1000)
    return AddAction(name, info.size, values, modified, True, json.dumps(_stats(footer)))


def _stats(footer: pq.FileMetaData) -> dict[str, Any]:
    """The statistics by which readers of a Delta table skip a file."""
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
