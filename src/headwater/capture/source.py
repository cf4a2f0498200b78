"""The contract of a source: a database elsewhere whose changes Headwater mirrors.

A source knows nothing of PostgreSQL's log or of the mirror. It describes its tables with the
PostgreSQL types of the mirror's columns, and gives every value as the text that PostgreSQL reads
for that type. Its positions are text that only the source itself understands. The runner in
`headwater.capture.running` calls it: first `check`, once `start`, then `snapshot` for each table
while it reads `changes`.

A source raises `SourceUnavailable` when trying again may help, `SourceRefused` when somebody must
change something first, and `PositionLost` when the changes after a position no longer exist (all
in `headwater.errors`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from enum import Enum
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec


class Missing(Enum):
    """The value of a column that a change does not carry: it is as it was before."""

    UNCHANGED = "unchanged"


UNCHANGED: Final = Missing.UNCHANGED

Cell: TypeAlias = str | Missing | None
"""A value as the text that PostgreSQL reads for the column's type; None is NULL."""

SourceRow: TypeAlias = tuple[Cell, ...]
"""One row, in the order of `SourceTable.columns`."""

SourceKey: TypeAlias = tuple[str, ...]
"""The key's values, in the order of `SourceTable.key`. Two keys of a table are the same exactly
when their texts are."""


class SourceColumn(msgspec.Struct, frozen=True):
    """A column of a mirror: `type` is PostgreSQL's, as in `create table` (`numeric(12,2)`)."""

    name: str
    type: str
    nullable: bool = True


class SourceTable(msgspec.Struct, frozen=True):
    """A table as the source has it now, without the columns that its definition leaves out. `name`
    is the name in the definition; `target` is the name of its mirror, without the schema. `version`
    changes whenever rows may have changed without changes (a column that was dropped and added
    again); it is empty where a source has none, and in a `SchemaChange` that leaves it as it is."""

    name: str
    target: str
    columns: tuple[SourceColumn, ...]
    key: tuple[str, ...]
    version: str = ""

    def key_places(self) -> tuple[int, ...]:
        """Where the values of the key are in a row."""
        names = [column.name for column in self.columns]
        return tuple(names.index(name) for name in self.key)


RowOp: TypeAlias = Literal["insert", "update", "delete", "truncate"]


class RowChanges(msgspec.Struct, frozen=True):
    """Consecutive changes of one table with the same operation, in their order.

    `after` has the rows of inserts and updates. `before` has the rows of deletes; of updates where
    the source knows it, one for each, or None. A row in `before` has at least its key; values that
    the source does not know are `UNCHANGED`. Without `before`, an update did not change the key. A
    change of a key is one update, never a delete and an insert. Both are empty for `truncate`.
    """

    table: str
    op: RowOp
    after: Sequence[SourceRow] = ()
    before: Sequence[SourceRow | None] = ()


class TransactionPart(msgspec.Struct, frozen=True):
    """Changes of one committed transaction, at most `SOURCE_PART_CHANGES` rows or
    `SOURCE_PART_BYTES` (one larger row is a part of its own). The last part has the position after
    the transaction and its commit time; `position` is None while parts follow. Parts of two
    transactions never mix."""

    changes: Sequence[RowChanges]
    position: str | None = None
    committed_at: datetime | None = None


class Progress(msgspec.Struct, frozen=True):
    """No change of a captured table was committed between the last item and this position. Never
    between parts of a transaction. Sent often enough that an idle source's position advances: at
    least once a second while the source's log grows, and as soon as the end of it is reached."""

    position: str


class SchemaChange(msgspec.Struct, frozen=True):
    """From here on, rows of the table have these columns. `copies` says that rows may have changed
    without changes (a new column with a default): the runner copies the table again. Sent before
    the first change with the new columns, also between parts of a transaction."""

    table: SourceTable
    copies: bool = True


class TableDropped(msgspec.Struct, frozen=True):
    """The table no longer exists at the source; its mirror keeps the rows."""

    table: str


class TableVersions(msgspec.Struct, frozen=True):
    """The versions of tables, by their names. All changes after this item are of these versions,
    and a chunk that is read from here on has them. The runner copies a table again whose mirror
    has another version. Sent between transactions, once after `changes` begins: the tables may have
    been altered while no runner read them."""

    versions: dict[str, str]


Item: TypeAlias = TransactionPart | Progress | SchemaChange | TableDropped | TableVersions


class Chunk(msgspec.Struct, frozen=True):
    """Rows of a table in the order of its key, as they were at one moment between two positions.

    Every transaction up to `low` is contained in the rows, and none after `high`. `last` is the key
    of the last row, from which the next chunk continues; None after the last chunk.
    """

    rows: Sequence[SourceRow]
    last: SourceKey | None
    low: str
    high: str


class Problem(msgspec.Struct, frozen=True):
    """Why a source cannot be captured: the thing and the reason, and what to do about it. A
    `warning` does not prevent it. `missing` is the name of the table, as the definition has it, if
    the problem is that it does not exist: one that was mirrored before does not stop the others."""

    what: str
    fix: str
    warning: bool = False
    missing: str | None = None


class Health(msgspec.Struct, frozen=True):
    """How the source itself is. `state` is a word of the source (`ok`, `lagging`, `unreserved`, …);
    `lag_bytes` is what the source keeps for us, None where that means nothing; `warning` says what
    will go wrong and what to do."""

    state: str = "ok"
    lag_bytes: int | None = None
    warning: str | None = None


class TableSpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a definition says about a table. `name` is as the source writes it (`orders`,
    `sales.orders`); `target` is the mirror's name where it differs. `columns` are those to mirror,
    `exclude` those to leave out: never both. `where` is a filter (JSON form) that rows must match.
    `types` overrides or, for documents, declares columns: a path and its PostgreSQL type."""

    name: str
    target: str | None = None
    columns: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    where: Any = None
    types: dict[str, str] = {}


class SourceDefinition(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A source as it was declared in Python, in `headwater.toml` or on the command line. `tables`
    is empty for all tables. `into` is the schema of the mirrors. `options` are the source's own."""

    name: str
    url: str
    into: str
    tables: tuple[TableSpec, ...] = ()
    feed_only: bool = False
    options: dict[str, Any] = {}


class Source(Protocol):
    """One source database. Made from a `SourceDefinition`; opens connections when it needs them.

    One runner uses it at a time, but `snapshot` and `health` are called while `changes` is being
    read. `close` ends everything; a source is not used again after it.
    """

    kind: str
    """`postgresql`, `mysql`, `mongodb` or `sqlite`."""

    filters_rows: bool
    """Whether the source applies `TableSpec.where` itself, to chunks and to changes. Otherwise the
    runner does."""

    async def check(self) -> list[Problem]:
        """Everything that is wrong now: rights, settings, versions, tables. Changes nothing. Raises
        SourceUnavailable if the source does not answer."""
        ...

    async def tables(self) -> list[SourceTable]:
        """The tables of the definition as they are now, in the order of their names, without those
        that do not exist. A table that cannot be mirrored raises `SourceRefused` with its name, the
        reason and what to do."""
        ...

    async def start(self) -> str:
        """The present position, from which `changes` can begin. Makes what capture needs at the
        source (a slot, triggers). Called again after a crash or for a resnapshot: it uses what
        exists where that still works."""
        ...

    async def snapshot(self, table: SourceTable, after: SourceKey | None, rows: int) -> Chunk:
        """At most this many rows, and `SOURCE_CHUNK_BYTES`, whose keys follow `after`."""
        ...

    def changes(self, after: str) -> AsyncGenerator[Item, None]:
        """What was committed after the position, in commit order, for ever. Closing the iterator
        ends it without leaving a connection or a thread. It holds a bounded number of changes in
        memory, whatever the size of a transaction."""
        ...

    async def acknowledge(self, upto: str) -> None:
        """Everything up to the position is durable here; the source may forget it."""
        ...

    async def health(self) -> Health: ...

    def contains(self, position: str, mark: str) -> bool:
        """Whether everything up to `mark` is also up to `position`."""
        ...

    async def remove(self) -> None:
        """Remove what `start` made at the source. Succeeds where nothing is left to remove."""
        ...

    async def close(self) -> None: ...
