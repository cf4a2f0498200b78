"""What the contract suite needs of a source database: to write to it, to read it as the judge, and
to break it. There is one driver for each way of capture, in `drivers/`.

All drivers have the same table, `TABLE`: an integer key, a text, a decimal with two places, and a
nullable text that may be large.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from headwater.capture.source import SourceDefinition

COLUMNS = ("id", "name", "amount", "note")
"""Of the table that every driver creates: bigint key, text, numeric(12,2), text or NULL."""


class TypeCase(NamedTuple):
    """A column type of the source: its declaration there, a literal to insert, and the mirror's
    type and value as PostgreSQL prints them."""

    declared: str
    literal: Any
    mirror_type: str
    mirror_value: str | None


class Writer(Protocol):
    """One transaction of one connection. A source without transactions commits each write."""

    async def insert(self, table: str, row: dict[str, Any]) -> None: ...
    async def insert_many(self, table: str, rows: list[dict[str, Any]]) -> None: ...
    async def update(self, table: str, id: int, values: dict[str, Any]) -> None: ...
    async def rekey(self, table: str, id: int, to: int) -> None: ...
    async def delete(self, table: str, id: int) -> None: ...
    async def truncate(self, table: str) -> None: ...
    async def commit(self) -> None: ...
    async def rollback(self) -> None: ...


class SourceDriver(Protocol):
    """One database of its own for each test, on a server that tests share."""

    kind: str

    can: frozenset[str]
    """What this way of capture or its database has: `transactions` (several writes in one, and
    rollback), `interleave` (two open writers at once), `rekey`, `truncate`, `ddl`, `lose_position`,
    `restart` (the server can be killed and started again), `names` (quoted and unicode names),
    `keyless` (tables without a key), `missing` (a table must exist before it is captured)."""

    types: list[TypeCase]

    def definition(self, *tables: str, **options: Any) -> SourceDefinition:
        """The source `shop` into the schema `shop`; options are fields of `SourceDefinition`."""
        ...

    async def create_table(self, name: str) -> None: ...
    async def create_typed_table(self, name: str, cases: list[TypeCase]) -> None:
        """With the key `id` and columns `c0`, `c1`, … of the cases' types; no rows."""
        ...

    async def insert_typed(self, name: str, id: int, cases: list[TypeCase | None]) -> None:
        """One row; None for NULL."""
        ...

    async def writer(self) -> Writer: ...
    async def rows(self, table: str) -> list[tuple[Any, ...]]:
        """All rows in the order of `id`: (int, str, Decimal, str | None), and further columns."""
        ...

    async def add_column(self, table: str, name: str, default: int) -> None:
        """An integer column whose present rows get the default."""
        ...

    async def drop_table(self, name: str) -> None: ...
    async def drop_column(self, table: str, name: str) -> None: ...
    async def create_keyless_table(self, name: str) -> None: ...
    async def allow_filter(self, table: str, column: str) -> None:
        """What a predicate over the column needs at the source, as the docs page of it says."""
        ...

    async def leftovers(self) -> list[str]:
        """What capture has made at the source and is still there: slots, triggers, tables."""
        ...

    async def lose_position(self) -> None:
        """Make the source forget changes that were not read yet (purge, drop the slot, …)."""
        ...

    async def kill_server(self) -> None:
        """With SIGKILL; `start_server` starts it again over the same files."""
        ...

    async def start_server(self) -> None: ...
    async def close(self) -> None: ...
