"""What the typed tables of a table look like: their folders, Headwater's own columns, and the
progress that each commit has in its metadata.

`<lake>/tables/<schema>/<table>/current` has the rows of the table, `…/history` every version of
each row. Headwater's own columns begin with `_`.
"""

from __future__ import annotations

import hashlib
import re
from datetime import datetime

import msgspec
import pyarrow as pa
from deltalake import DeltaTable

from headwater.model import Position, Table
from headwater.pipeline.lake import delta, maintenance

FOLDER = maintenance.TYPED
"""The folder of a lake that has the typed tables."""

CURRENT, HISTORY = "current", "history"

KEY, OPEN = "_key", "_is_current"

_UTC = pa.timestamp("us", tz="UTC")

_CURRENT_OWN = [pa.field(KEY, pa.string(), metadata={"comment": "the row's key, as in events"})]

_HISTORY_OWN = [
    *_CURRENT_OWN,
    pa.field("_op", pa.string(), metadata={"comment": "insert, update, snapshot, unknown"}),
    pa.field("_valid_from", _UTC, metadata={"comment": "time of the transaction that began it"}),
    pa.field("_valid_to", _UTC, metadata={"comment": "time at which it ended; NULL: still valid"}),
    pa.field("_seq", pa.int64(), metadata={"comment": "number of the change that began it"}),
    pa.field("_xid", pa.int64(), metadata={"comment": "transaction that began it"}),
    pa.field("_user_id", pa.string(), metadata={"comment": "who began it"}),
    pa.field("_function_name", pa.string()),
    pa.field("_trace_id", pa.string()),
    pa.field(
        "_end_op",
        pa.string(),
        metadata={"comment": "what ended it: update, delete, truncate, reset, altered, gap, …"},
    ),
    pa.field("_end_seq", pa.int64()),
    pa.field("_end_xid", pa.int64(), metadata={"comment": "transaction that ended it"}),
    pa.field("_end_user_id", pa.string(), metadata={"comment": "who ended it"}),
    pa.field("_end_function_name", pa.string()),
    pa.field("_end_trace_id", pa.string()),
    pa.field("_snapshot", pa.string(), metadata={"comment": "position that its era began at"}),
    pa.field(OPEN, pa.bool_(), metadata={"comment": "whether it is still valid"}),
]

OWN = {CURRENT: _CURRENT_OWN, HISTORY: _HISTORY_OWN}
"""Headwater's own columns of both tables, after those of the table."""

PARTITIONS: dict[str, list[str]] = {CURRENT: [], HISTORY: [OPEN]}
"""A merge reads and writes open versions only, so they have files of their own."""

END_COLUMNS = (
    "_valid_to", "_end_op", "_end_seq", "_end_xid", "_end_user_id", "_end_function_name",
    "_end_trace_id",
)  # fmt: skip


class Progress(msgspec.Struct, frozen=True):
    """The metadata of every commit: the table is exact at `position`."""

    position: Position
    at: datetime
    """A time after every transaction of the position that the table has."""
    relation: int
    shape: int
    snapshot: str
    """The position that the present era began at."""
    options: str
    """The fingerprint of the options."""
    fill: str = ""
    """The request by which it was last filled."""

    @property
    def begun(self) -> Position:
        """`snapshot` as a position."""
        return Position.parse(self.snapshot)

    def text(self) -> str:
        return msgspec.json.encode(
            msgspec.structs.asdict(self) | {"position": str(self.position)}
        ).decode()

    @classmethod
    def of(cls, table: DeltaTable) -> Progress | None:
        """That of the version the table is at; None before the first fill."""
        text = delta.offset_of(table)
        if text is None:
            return None
        fields = msgspec.json.decode(text)
        return msgspec.convert(
            fields | {"position": Position.parse(fields["position"])}, cls, strict=False
        )


def folder(table: Table) -> str:
    """The folder of a table's two Delta tables, relative to the lake.

    >>> folder(Table(1, "public", "orders", (), ("id",)))
    'tables/public/orders'
    """
    return f"{FOLDER}/{_file_name(table.schema)}/{_file_name(table.name)}"


def _file_name(name: str) -> str:
    """A name as a folder. One with other characters gets a hash, because two could become equal.

    >>> _file_name("Größe")
    'Gr__e-aedc3f80'
    """
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    if plain == name and not name.startswith("_"):
        return name
    return f"{plain.lstrip('_') or 'table'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
