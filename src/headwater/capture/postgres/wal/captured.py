"""The tables that a source captures: as the runner knows them, and as catalog and log have them.

What the runner knows is what `tables` returned or a `SchemaChange` said last. A difference to that,
in the log or in the catalog, becomes a `SchemaChange`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

import msgspec

from headwater.capture.postgres.wal.catalog.checks import table_problems
from headwater.capture.postgres.wal.catalog.describe import (
    CatalogTable,
    copies,
    find_tables,
    relation_table,
    rewritten,
    source_table,
)
from headwater.capture.postgres.wal.catalog.filtering import published_filter
from headwater.capture.postgres.wal.catalog.mirror_types import TypeCatalog
from headwater.capture.postgres.wal.catalog.publication import PublishedTable
from headwater.capture.postgres.wal.connecting import fetch
from headwater.capture.postgres.wal.pgoutput import Relation
from headwater.capture.postgres.wal.slots import flush, read_server
from headwater.capture.source import (
    Item,
    SchemaChange,
    SourceTable,
    TableDropped,
    TableSpec,
    TableVersions,
)
from headwater.database import Connection
from headwater.errors import SourceRefused

Found: TypeAlias = Sequence[tuple[TableSpec, CatalogTable | None]]
Session: TypeAlias = Callable[[], AbstractAsyncContextManager[Connection]]


_EXISTING = """
    select c.oid::bigint from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where c.oid = any (%s::bigint[]::oid[]) order by n.nspname, c.relname
"""


class CatalogView(msgspec.Struct, frozen=True):
    """The tables as the catalog had them when the log ended at `lsn`. `edition` counts the changes
    that had been found in the log by then, for each table."""

    lsn: int
    found: Found
    edition: dict[str, int]


class CapturedTables:
    def __init__(self, specs: Sequence[TableSpec], session: Session) -> None:
        self._specs = specs
        self._session = session
        self.types = TypeCatalog()
        self.version = 0
        self.tables: dict[str, SourceTable] = {}
        """By the names in the definition, as the runner knows them."""
        self.catalog: dict[str, CatalogTable] = {}
        self.truncated: set[str] = set()
        """Tables that the log truncated since the catalog was compared."""
        self._by_oid: dict[int, TableSpec] = {}
        self._compared: dict[str, CatalogTable] = {}
        """As the catalog had them when it was compared, at a position that the log has passed."""
        self._without_version: set[str] = set()
        """Tables whose versions were not returned since they were described."""
        self._edition: dict[str, int] = {}

    async def find(self, connection: Connection) -> Found:
        """What the catalog has now, with the types that it needs."""
        self.version = connection.info.server_version
        found = await find_tables(connection, self._specs)
        await self._load_types(connection, [table for _, table in found if table is not None])
        return found

    async def load(self, connection: Connection) -> None:
        """Describe every table that exists, or raise SourceRefused for one that cannot be
        mirrored."""
        found = await self.find(connection)
        there = [(spec, catalog) for spec, catalog in found if catalog is not None]
        for spec, catalog in there:
            for problem in table_problems(spec, catalog, self.types, self.version):
                if not problem.warning:
                    raise SourceRefused(problem.what, hint=problem.fix)
        self.catalog = {spec.name: catalog for spec, catalog in there}
        self._compared = dict(self.catalog)
        self._without_version = set(self.catalog)
        self._by_oid = {catalog.oid: spec for spec, catalog in there}
        self.tables = {
            spec.name: source_table(spec, catalog, self.types, self.version)
            for spec, catalog in there
        }

    async def _load_types(self, connection: Connection, tables: list[CatalogTable]) -> None:
        await self.types.load(connection, ((c.type, c.modifier) for t in tables for c in t.columns))

    async def published(self, connection: Connection) -> list[PublishedTable]:
        """The tables for the publication. One that was dropped since is left out; its end is
        returned with the changes."""
        rows = await fetch(connection, _EXISTING, list(self._by_oid))
        return [self._published(self._by_oid[oid]) for (oid,) in rows]

    def _published(self, spec: TableSpec) -> PublishedTable:
        catalog, table = self.catalog[spec.name], self.tables[spec.name]
        where = published_filter(spec, catalog, table, self.types)
        return PublishedTable(spec, catalog, where)

    def spec(self, name: str) -> TableSpec:
        return next(spec for spec in self._by_oid.values() if spec.name == name)

    # -------------------------------------------------------------------- the log

    async def relation(self, relation: Relation) -> tuple[SourceTable | None, SchemaChange | None]:
        """The table of a relation in the log, None if it is not captured; and the change, if it is
        not as the runner knows it."""
        spec = self._by_oid.get(relation.oid)
        if spec is None:
            return None, None
        async with self._session() as connection:
            catalog = await self._one(connection, spec, relation.oid)
            await self.types.load(connection, ((c.type_oid, c.modifier) for c in relation.columns))
        previous = self.tables[spec.name]
        table = relation_table(spec, relation, catalog, self.types, previous)
        if table == previous:
            return table, None
        described = msgspec.structs.replace(table, version="")
        change = SchemaChange(described, self._copies(previous, table, catalog))
        self.tables[spec.name] = table
        self._edition[spec.name] = self._edition.get(spec.name, 0) + 1
        if catalog is not None:
            self.catalog[spec.name] = catalog
        return table, change

    async def _one(self, connection: Connection, spec: TableSpec, oid: int) -> CatalogTable | None:
        ((_, catalog),) = await find_tables(connection, [spec])
        return catalog if catalog is not None and catalog.oid == oid else None

    def _copies(
        self, before: SourceTable, after: SourceTable, catalog: CatalogTable | None
    ) -> bool:
        known = self.catalog.get(before.name)
        same_files = known is not None and catalog is not None and _files(known) == _files(catalog)
        return copies(before, after, catalog, same_files)

    # -------------------------------------------------------------------- the catalog

    async def view(self) -> CatalogView | None:
        """The catalog now, if anything in it is not as it was. Its position is read last, so the
        log up to it has every change that the catalog shows."""
        edition = dict(self._edition)
        async with self._session() as connection:
            found = await self.find(connection)
            if not any(self._differs(spec, table) for spec, table in found):
                return None
            server = await read_server(connection)
            if server.flushed < server.inserted:
                await flush(connection)  # or an idle server would not send so much of its log
        return CatalogView(server.inserted, found, edition)

    def _differs(self, spec: TableSpec, catalog: CatalogTable | None) -> bool:
        if spec.name not in self.tables:
            return False
        if spec.name in self._without_version or catalog != self.catalog[spec.name]:
            return True
        assert catalog is not None
        return source_table(spec, catalog, self.types, self.version) != self.tables[spec.name]

    def compare(self, view: CatalogView) -> Iterator[Item]:
        """What the catalog shows that the log did not say. An item counts as known when it is
        returned; if the reader stops then, the next view finds the rest."""
        if versions := self._versions(view):
            yield TableVersions(versions)
            self._without_version -= versions.keys()
        for spec, catalog in view.found:
            if spec.name not in self.tables:
                continue
            if view.edition.get(spec.name, 0) != self._edition.get(spec.name, 0):
                continue  # the log has shown something newer
            known = self.catalog[spec.name]
            if catalog is None or catalog.oid != known.oid:
                del self.tables[spec.name], self.catalog[spec.name], self._by_oid[known.oid]
                self._without_version.discard(spec.name)
                yield TableDropped(spec.name)
            else:
                yield from self._compare(spec, known, catalog)
            self.truncated.discard(spec.name)

    def _versions(self, view: CatalogView) -> dict[str, str]:
        """Of tables whose versions the runner may not have: it stored them when it last ran."""
        return {
            spec.name: catalog.version
            for spec, catalog in view.found
            if catalog is not None
            and spec.name in self._without_version
            and catalog.oid == self.catalog[spec.name].oid
            and view.edition.get(spec.name, 0) == self._edition.get(spec.name, 0)
        }

    def _compare(
        self, spec: TableSpec, known: CatalogTable, catalog: CatalogTable
    ) -> Iterator[SchemaChange]:
        before = self.tables[spec.name]
        after = source_table(spec, catalog, self.types, self.version)
        moved = catalog.kind == "p" and self._rows_moved(spec.name, known, catalog)
        compared = self._compared[spec.name]
        again = (
            moved
            or self._copies(before, after, catalog)
            or rewritten(compared, catalog, _files(compared) == _files(catalog))
        )
        self.catalog[spec.name] = catalog
        if not catalog.key:
            return
        self._compared[spec.name] = catalog
        if after != before or moved:
            self.tables[spec.name] = after
            yield SchemaChange(after, again)

    def _rows_moved(self, name: str, known: CatalogTable, catalog: CatalogTable) -> bool:
        """Whether rows of a partitioned table came or went without changes in the log: a partition
        was detached, dropped, attached with its rows, or truncated by itself."""
        before, after = _files(known), _files(catalog)
        if before.keys() - after.keys():
            return True
        if any(leaf.attached for leaf in catalog.leaves if leaf.oid not in before):
            return True
        if name in self.truncated:
            return False
        return any(after[oid] != file for oid, file in before.items())


def _files(table: CatalogTable) -> dict[int, int]:
    return {leaf.oid: leaf.file for leaf in table.leaves}
