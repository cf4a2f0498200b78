"""The files of a Delta table, and their exchange for others in one commit.

Commits of the stream may come in between. Files of another version than the one that was looked at
are never touched.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import date

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction

from headwater import limits
from headwater.errors import PipelineError
from headwater.pipeline.lake import delta


class StoredFile(msgspec.Struct, frozen=True):
    """A file of a Delta table. `day` is None in a table without days."""

    path: str
    size: int
    rows: int
    day: date | None


def stored_files(table: DeltaTable) -> list[StoredFile]:
    """The files of the version that `table` is at."""
    found = pa.table(table.get_add_actions(flatten=True))
    if "partition.day" not in found.column_names:
        found = found.append_column("partition.day", pa.nulls(found.num_rows, pa.date32()))
    columns = [found.column(name).to_pylist() for name in _FILE_COLUMNS]
    return [StoredFile(*values) for values in zip(*columns, strict=True)]


_FILE_COLUMNS = ("path", "size_bytes", "num_records", "partition.day")


def exchange(
    table: DeltaTable, gone: Sequence[StoredFile], added: Sequence[AddAction], what: str
) -> None:
    """Commit, on a version that has all the files that are to go. Delta itself would accept that a
    file is removed twice, and its rows be there twice: so each attempt looks again. PipelineError,
    in which `what` names the attempt, where a file is gone already."""
    is_change = not added  # else the rows stay the same
    now = time.time_ns() // 1_000_000
    removed = [RemoveAction(f.path, is_change, now, f.size, _partition(f)) for f in gone]
    kept = [_unchanged(file) for file in added]
    reason = ""
    for _ in range(limits.DELTA_COMMIT_ATTEMPTS_MAX):
        table.update_incremental()
        present = {file.path for file in stored_files(table)}
        if not present.issuperset(file.path for file in gone):
            reason = "another process removed some of them meanwhile"
            break
        try:
            table.create_write_transaction(
                [*removed, *kept],
                "append",
                table.schema(),
                table.metadata().partition_columns,
                commit_properties=_properties(table),
            )
        except CommitFailedError as error:
            reason = f"other commits came first: {error}"
        else:
            return
    raise PipelineError(
        f"files of the Delta table {table.table_uri} could not be {what}, because {reason}",
        hint="It is tried again.",
        retryable=True,
    )


def _properties(table: DeltaTable) -> CommitProperties:
    found = delta.carrying(table)
    metadata = None if found is None else found.custom_metadata
    return CommitProperties(custom_metadata=metadata, max_commit_retries=0)


def _unchanged(file: AddAction) -> AddAction:
    """The file, marked as one that has no new rows."""
    return AddAction(
        file.path, file.size, file.partition_values, file.modification_time, False, file.stats
    )


def _partition(file: StoredFile) -> dict[str, str | None]:
    return {} if file.day is None else {"day": file.day.isoformat()}
