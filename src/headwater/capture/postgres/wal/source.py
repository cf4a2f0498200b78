"""A PostgreSQL database elsewhere as a source, read by logical replication.

At the source it has a publication and a slot, both named `headwater_` and the source's name. It has
up to three sessions: one streams the log, one reads chunks of tables, one reads the catalog and the
state of the slot. A position contains the server's identity, so that another server, or one that
lost changes in a failover, is noticed.

Options: `slot` and `publication` give other names; a publication that is named is the
administrator's, and is neither made nor dropped. `lag_warning_bytes` says from which size on a slot
is `lagging`, and `spool_folder` where large transactions wait for their commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import msgspec

from headwater.capture.postgres.wal.captured import CapturedTables
from headwater.capture.postgres.wal.catalog import checks
from headwater.capture.postgres.wal.catalog.filtering import pushed_filter
from headwater.capture.postgres.wal.catalog.publication import (
    check_publication,
    drop_publication,
    ensure_publication,
)
from headwater.capture.postgres.wal.connecting import fetch_value, open_session, source_errors
from headwater.capture.postgres.wal.positions import Position, parse_position
from headwater.capture.postgres.wal.replication import ReplicationStream, open_stream
from headwater.capture.postgres.wal.slots import (
    LAG_WARNING_BYTES,
    check_position,
    check_usable,
    create_slot,
    drop_slot,
    flush,
    judge,
    read_server,
    read_slot,
    slot_name,
)
from headwater.capture.postgres.wal.snapshot import Visibility, chunk_statement, read_chunk
from headwater.capture.postgres.wal.spool import Spool
from headwater.capture.postgres.wal.tail import Tail
from headwater.capture.source import (
    Chunk,
    Health,
    Item,
    Problem,
    SourceDefinition,
    SourceKey,
    SourceTable,
)
from headwater.database import Connection
from headwater.errors import ConfigError, SourceError, SourceRefused

CATALOG_SECONDS = 5.0
"""How often the catalog is compared with what the log said."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    slot: str | None = None
    publication: str | None = None
    lag_warning_bytes: int = LAG_WARNING_BYTES
    spool_folder: str | None = None


class PostgresSource:
    """The contract is in `headwater.capture.source`."""

    kind = "postgresql"
    filters_rows = False
    """Some filters are applied at the source, to save traffic. The runner applies all."""

    def __init__(self, definition: SourceDefinition) -> None:
        self._url = definition.url
        self._options = _read_options(definition)
        self._slot = self._options.slot or slot_name(definition.name)
        self._publication = self._options.publication or slot_name(definition.name)
        self._tables = CapturedTables(definition.tables, self._catalog_session)
        self._visibility = Visibility()
        self._position: Position | None = None
        self._tail: Tail | None = None
        self._stream: ReplicationStream | None = None
        self._sessions: dict[str, Connection] = {}
        self._locks = {name: asyncio.Lock() for name in ("catalog", "snapshot")}

    # -------------------------------------------------------------------- before

    async def check(self) -> list[Problem]:
        try:
            async with self._catalog_session() as connection:
                return await self._problems(connection)
        except SourceRefused as error:
            return [Problem(str(error), error.hint or "Correct the URL of the source.")]

    async def _problems(self, connection: Connection) -> list[Problem]:
        found = await checks.server_problems(connection, self._slot)
        if connection.info.server_version < checks.OLDEST:
            return found
        tables = await self._tables.find(connection)
        for spec, table in tables:
            version = connection.info.server_version
            found += checks.table_problems(spec, table, self._tables.types, version)
        if not tables:
            found.append(Problem("the database has no tables to capture", "Check the URL."))
        there = [(spec, table) for spec, table in tables if table is not None]
        managed = self._options.publication is None
        found += await checks.publication_problems(connection, self._publication, managed, there)
        found += await checks.slot_in_use(connection, self._slot)
        return found

    async def tables(self) -> list[SourceTable]:
        async with self._catalog_session() as connection:
            await self._tables.load(connection)
        return [self._tables.tables[name] for name in sorted(self._tables.tables)]

    async def start(self) -> str:
        async with self._catalog_session() as connection:
            for problem in await checks.server_problems(connection, self._slot):
                raise SourceRefused(problem.what, hint=problem.fix)
            await self._publish(connection)
            position = await self._make_slot(connection)
            await self._doubt(connection)
        self._position = position
        return str(position)

    async def _publish(self, connection: Connection) -> None:
        if not self._tables.tables:
            await self._tables.load(connection)
        if self._options.publication is None:
            tables = await self._tables.published(connection)
            await ensure_publication(connection, self._publication, tables, self._tables.version)

    async def _check_publication(self, connection: Connection, position: Position) -> None:
        if not self._tables.tables:
            await self._tables.load(connection)
        managed = self._options.publication is None
        tables = await self._tables.published(connection)
        await check_publication(connection, self._publication, tables, position.lsn, managed)

    async def _make_slot(self, connection: Connection) -> Position:
        """A slot that still works is used again, from the present on."""
        slot = await read_slot(connection, self._slot)
        if slot is not None:
            check_usable(slot, self._slot, connection.info.dbname)
            if slot.is_lost:
                await drop_slot(connection, self._slot)
                slot = None
        if slot is None:
            lsn = await create_slot(connection, self._slot, connection.info.server_version)
            return (await read_server(connection)).position.at(lsn)
        server = await read_server(connection)
        if server.flushed < server.inserted:
            await flush(connection)
        return server.position

    async def _doubt(self, connection: Connection) -> None:
        self._visibility.doubt(await fetch_value(connection, "select pg_current_snapshot()::text"))

    # -------------------------------------------------------------------- reading

    async def estimate(self, table: SourceTable) -> int | None:
        """As the planner estimates it, also for a table that was never analysed."""
        async with self._session("snapshot") as connection:
            if table.name not in self._tables.catalog:
                await self._tables.load(connection)
            catalog = self._tables.catalog[table.name]
            from_ = f"{'only ' if catalog.kind == 'r' else ''}{catalog.quoted}"
            plan = await fetch_value(connection, f"explain (format json) select from {from_}")
        return int(plan[0]["Plan"]["Plan Rows"])

    async def snapshot(self, table: SourceTable, after: SourceKey | None, rows: int) -> Chunk:
        low = self._tail.position if self._tail is not None else self._position
        async with self._session("snapshot") as connection:
            if low is None:
                low = (await read_server(connection)).position
                await flush(connection)
                await self._doubt(connection)
            if table.name not in self._tables.catalog:
                await self._tables.load(connection)
            catalog = self._tables.catalog[table.name]
            types = self._tables.types
            by_text = [
                c.name for c in catalog.columns
                if c.name in table.key and not types.is_built_in(c.type)
            ]  # fmt: skip
            where = pushed_filter(self._tables.spec(table.name), catalog, table, types)
            from_ = f"{'only ' if catalog.kind == 'r' else ''}{catalog.quoted}"
            statement = chunk_statement(from_, table, after, where, by_text)
            return await read_chunk(connection, statement, table, rows, low, self._visibility)

    async def changes(self, after: str) -> AsyncGenerator[Item, None]:
        position = parse_position(after)
        async with self._catalog_session() as connection:
            server = await read_server(connection)
            await check_position(connection, self._url, self._slot, position, server)
            await self._check_publication(connection, position)
            await self._publish(connection)
            await self._doubt(connection)
        view = await self._tables.view()
        self._position = Position(server.system, server.timeline, position.lsn)
        spool = Spool(self._options.spool_folder)
        stream = await open_stream(self._url, self._slot, [self._publication], position.lsn)
        self._stream = stream
        tail = Tail(stream, spool, self._tables, self._visibility, self._position)
        self._tail = tail
        tail.view = view
        watching = asyncio.create_task(self._watch(tail))
        try:
            async for item in tail.items():
                yield item
        finally:
            self._position, self._tail, self._stream = tail.position, None, None
            watching.cancel()
            await stream.close()
            spool.close()

    async def _watch(self, tail: Tail) -> None:
        """Look at the catalog now and then."""
        while True:
            await asyncio.sleep(CATALOG_SECONDS)
            if tail.view is None:
                # The reader of the log meets the same error, and reports it.
                with suppress(SourceError, ConfigError):
                    tail.view = await self._tables.view()

    # -------------------------------------------------------------------- while running

    async def acknowledge(self, upto: str) -> None:
        if self._stream is not None:
            self._stream.confirm(parse_position(upto).lsn)

    async def health(self) -> Health:
        async with self._catalog_session() as connection:
            slot = await read_slot(connection, self._slot)
            server = await read_server(connection)
            keep_bytes = await fetch_value(
                connection, "select pg_size_bytes(current_setting('max_slot_wal_keep_size'))"
            )
        return judge(slot, server, self._slot, self._options.lag_warning_bytes, keep_bytes)

    def contains(self, position: str, mark: str) -> bool:
        one, other = parse_position(position), parse_position(mark)
        return one.system == other.system and one.lsn >= other.lsn

    async def remove(self) -> None:
        if self._stream is not None:
            await self._stream.close()
        async with self._catalog_session() as connection:
            await drop_slot(connection, self._slot)
            if self._options.publication is None:
                await drop_publication(connection, self._publication)

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.close()
        while self._sessions:
            _, connection = self._sessions.popitem()
            await connection.close()

    # -------------------------------------------------------------------- sessions

    def _catalog_session(self) -> AbstractAsyncContextManager[Connection]:
        return self._session("catalog")

    @asynccontextmanager
    async def _session(self, name: str) -> AsyncIterator[Connection]:
        """A session that is opened when it is first used, and again after an error."""
        async with self._locks[name]:
            connection = self._sessions.get(name)
            if connection is None or connection.closed:
                connection = await open_session(self._url, purpose=f"source {name}")
                self._sessions[name] = connection
            try:
                with source_errors(self._url):
                    yield connection
            except BaseException:
                self._sessions.pop(name, None)
                await connection.close()
                raise


def _read_options(definition: SourceDefinition) -> Options:
    try:
        return msgspec.convert(definition.options, Options)
    except msgspec.ValidationError as error:
        names = ", ".join(Options.__struct_fields__)
        raise ConfigError(
            f"options of the source {definition.name}: {error}", hint=f"It has: {names}."
        ) from error
