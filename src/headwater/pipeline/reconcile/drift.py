"""The Delta table `drift`: the outcome of each comparison of a table with the lake."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec
import pyarrow as pa
from deltalake import write_deltalake

from headwater.model import Position
from headwater.pipeline.lake import delta
from headwater.pipeline.lake.moments import instant
from headwater.pipeline.reconcile.comparison import DriftKey

_UTC = pa.timestamp("us", tz="UTC")

DRIFT = pa.schema(
    [
        pa.field("at", _UTC, nullable=False),
        pa.field("relation", pa.int64()),
        pa.field("table", pa.string(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("repaired", pa.bool_(), nullable=False),
        pa.field("position", pa.string()),
        pa.field("rows", pa.int64()),
        pa.field("lake_rows", pa.int64()),
        pa.field("missing", pa.int64(), nullable=False),
        pa.field("extra", pa.int64(), nullable=False),
        pa.field("different", pa.int64(), nullable=False),
        pa.field("keys", pa.string(), nullable=False),
        pa.field("error", pa.string()),
    ]
)
"""`keys` is a JSON list of `{"key": …, "kind": …}`, of a bounded number of rows that differ."""

_WITHOUT_KEYS = pa.schema([field for field in DRIFT if field.name != "keys"])
_FOUND = pa.schema([DRIFT.field(n) for n in ("at", "relation", "table", "outcome", "position")])

Outcome = Literal["equal", "drift", "unknown", "failed"]


class TableOutcome(msgspec.Struct, frozen=True):
    """A table compared at a position: `equal`, or with `drift`; `unknown` where the lake has no
    state of it, and `failed` where it could not be compared. `error` says why."""

    at: datetime
    relation: int | None
    table: str
    outcome: Outcome
    repaired: bool = False
    position: str | None = None
    rows: int | None = None
    lake_rows: int | None = None
    missing: int = 0
    extra: int = 0
    different: int = 0
    keys: tuple[DriftKey, ...] = ()
    error: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether somebody should look at it: it was not found to be equal, and not repaired."""
        return self.outcome != "equal" and not self.repaired

    @property
    def differing(self) -> int:
        return self.missing + self.extra + self.different


def save(path: str, outcomes: Sequence[TableOutcome]) -> None:
    """Add outcomes to the table at the path."""
    delta.create(path, DRIFT)
    rows = [msgspec.structs.asdict(each) | {"keys": _text(each.keys)} for each in outcomes]
    write_deltalake(path, pa.Table.from_pylist(rows, DRIFT), mode="append")


def _text(keys: Sequence[DriftKey]) -> str:
    return msgspec.json.encode(keys).decode()


def last(path: str) -> list[TableOutcome]:
    """The last outcome of each table, by their names, without the keys of rows."""
    table = delta.open_table(path)
    if table is None:
        return []
    rows = delta.read_arrow(table, _WITHOUT_KEYS).sort_by("at")
    places = rows.append_column("place", pa.array(range(len(rows)), pa.int64()))
    newest = places.group_by("table").aggregate([("place", "max")])
    found = rows.take(newest.column("place_max")).sort_by("table")
    return msgspec.convert(found.to_pylist(), list[TableOutcome])


def last_equal(path: str, relation: int, log: str) -> tuple[Position, datetime] | None:
    """The last position at which a table was equal, and its time."""
    table = delta.open_table(path)
    if table is None:
        return None
    rows = delta.read_arrow(table, _FOUND, f"relation = {relation}").sort_by("at").to_pylist()
    for row in reversed(rows):
        if row["relation"] == relation and row["outcome"] == "equal":
            position = Position.parse(row["position"])
            if position.log == log:
                return position, row["at"].astimezone(UTC)
    return None


def remove_old(path: str, keep: timedelta) -> None:
    """Remove rows older than `keep`. The last row of each table stays, and the last one that found
    it equal: a repair looks for it."""
    table = delta.open_table(path)
    if table is None:
        return
    rows = delta.read_arrow(table, _FOUND).sort_by("at").to_pylist()
    last = {row["table"]: row["at"] for row in rows}
    equal = {row["relation"]: row["at"] for row in rows if row["outcome"] == "equal"}
    spared, since = {*last.values(), *equal.values()}, datetime.now(UTC) - keep
    if not any(row["at"] < since and row["at"] not in spared for row in rows):
        return
    times = ", ".join(f"'{instant(at)}'" for at in sorted(spared))
    table.delete(f"at < '{instant(since)}' and at not in ({times})")
