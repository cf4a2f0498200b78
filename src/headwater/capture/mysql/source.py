"""The source `mysql://` and `mariadb://`: the contract of a source over the parts of this folder.

The driver blocks, so every call runs in a thread. The copy, the catalog and the health have one
connection between them, guarded by a lock; the binary log has one of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import zlib
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from headwater.capture.mysql import checks
from headwater.capture.mysql.assembly import Assembler, Catalog
from headwater.capture.mysql.binlog import BinlogStream, Handover
from headwater.capture.mysql.connection import connect, interrupt, parse_url, query, translated
from headwater.capture.mysql.describe import (
    Charsets,
    Table,
    describe,
    find_tables,
    locate,
    read_charsets,
)
from headwater.capture.mysql.positions import Position, file_number
from headwater.capture.mysql.server import (
    Server,
    binary_logs,
    current_position,
    read_server,
    resumes_by_gtid,
)
from headwater.capture.mysql.snapshot import Snapshots
from headwater.capture.source import (
    Chunk,
    Health,
    Item,
    Problem,
    SourceDefinition,
    SourceKey,
    SourceTable,
)
from headwater.errors import ConfigError, SourceRefused, SourceUnavailable

if TYPE_CHECKING:
    from pymysql.connections import Connection

_OPTIONS = frozenset(("server_id", "tinyint1", "allow_cascades"))
_Result = TypeVar("_Result")


class MysqlSource:
    """Options: `server_id` (a number that no other replica of the server has), `tinyint1` (set to
    `"boolean"` for booleans), `allow_cascades`."""

    kind = "mysql"
    filters_rows = False

    def __init__(self, definition: SourceDefinition) -> None:
        self._definition = definition
        self._address = parse_url(definition.url)
        self._server_id = _server_id(definition)
        self._lock = threading.Lock()
        self._connection: Connection[Any] | None = None
        self._snapshots: Snapshots | None = None
        self._server: Server | None = None
        self._charsets: Charsets | None = None
        self._announced: Catalog | None = None
        self._looked: Catalog | None = None
        self._position: Position | None = None
        self._streams = set[BinlogStream]()
        self._closed = False

    # ------------------------------------------------------------------ the contract

    async def check(self) -> list[Problem]:
        try:
            return await self._run(self._check)
        except SourceRefused as error:
            return [Problem(str(error), error.hint or "")]

    async def tables(self) -> list[SourceTable]:
        catalog = await self._run(self._look)
        self._announced = catalog
        found = [table.source for table in catalog.tables.values()]
        return sorted(found, key=lambda table: table.name)

    async def start(self) -> str:
        return str(await self._run(self._now))

    async def estimate(self, table: SourceTable) -> int | None:
        """As the storage engine estimates it."""
        return await self._run(lambda connection: self._estimate(connection, table))

    async def snapshot(self, table: SourceTable, after: SourceKey | None, rows: int) -> Chunk:
        return await self._run(lambda connection: self._chunk(connection, table, after, rows))

    async def changes(self, after: str) -> AsyncGenerator[Item, None]:
        position = Position.parse(after)
        self._position = position
        handover = Handover(asyncio.get_running_loop())
        stream = BinlogStream(self._address, self._server_id, handover)
        self._streams.add(stream)
        thread = threading.Thread(
            target=stream.run,
            args=(lambda: self._prepare(position),),
            name="headwater-binlog",
            daemon=True,
        )
        thread.start()
        try:
            while True:
                for item in await handover.take():
                    yield item
        finally:
            handover.close()
            stream.close()
            await asyncio.shield(asyncio.to_thread(_finish, thread, stream))
            self._streams.discard(stream)

    async def acknowledge(self, upto: str) -> None:
        """The server deletes its logs after a time of its own."""
        self._position = Position.parse(upto)

    async def health(self) -> Health:
        return await self._run(self._health)

    def contains(self, position: str, mark: str) -> bool:
        return position == mark or Position.parse(position) >= Position.parse(mark)

    async def remove(self) -> None:
        """Nothing was made at the source."""

    async def close(self) -> None:
        self._closed = True
        for stream in list(self._streams):
            stream.close()
        if (connection := self._connection) is not None:
            interrupt(connection)  # A query that a cancelled call has left.
        await asyncio.to_thread(self._disconnect)

    # ------------------------------------------------------------------ in threads

    async def _run(self, work: Callable[[Connection[Any]], _Result]) -> _Result:
        return await asyncio.to_thread(self._with_connection, work)

    def _with_connection(self, work: Callable[[Connection[Any]], _Result]) -> _Result:
        with self._lock, translated(self._address):
            if self._closed:
                raise SourceUnavailable("the source is closed")
            done = False
            try:
                result = work(self._connected())
                done = True
                return result
            finally:
                if not done or (self._snapshots is not None and self._snapshots.broken):
                    self._drop()

    def _connected(self) -> Connection[Any]:
        if self._connection is None:
            self._connection = connect(self._address)
        return self._connection

    def _drop(self) -> None:
        connection, self._connection, self._snapshots = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    def _disconnect(self) -> None:
        with self._lock:
            self._drop()

    def _read_server(self, connection: Connection[Any]) -> Server:
        # Read again for each use: after a failover the same name is another server.
        self._server = read_server(connection)
        checks.refuse_old(self._server)
        return self._server

    def _check(self, connection: Connection[Any]) -> list[Problem]:
        server = read_server(connection)
        return checks.find_problems(
            connection, server, self._address, self._definition, self._server_id
        )

    def _now(self, connection: Connection[Any]) -> Position:
        return current_position(connection, self._read_server(connection))

    def _look(self, connection: Connection[Any]) -> Catalog:
        server = self._read_server(connection)
        if self._charsets is None:
            self._charsets = read_charsets(connection, server.dialect)
        present, absent = find_tables(
            connection,
            self._definition,
            self._address,
            fold=server.fold,
            mariadb=server.dialect == "mariadb",
        )
        tables = [describe(spec, found) for spec, found in present]
        fold = str.lower if server.fold else str
        keys = [(fold(table.schema), fold(table.name)) for table in tables]
        places = [locate(spec, self._address.database, set()) for spec in absent]
        catalog = Catalog(
            dict(zip(keys, tables, strict=True)),
            frozenset((fold(schema), fold(name)) for schema, name in places),
            self._charsets,
            server.fold,
        )
        self._looked = catalog
        return catalog

    def _prepare(self, position: Position) -> tuple[Position, bool, Assembler]:
        """In the stream's thread, on a connection that ends with it."""
        with connect(self._address) as connection:
            server = self._read_server(connection)
            by_gtid = resumes_by_gtid(connection, server, position)
            catalog = self._announced or self._look(connection)
        if by_gtid and server.identity != position.server:
            position = Position(server.dialect, server.identity, "", 0, position.gtids)
        named = server.dialect == "mariadb" or server.version >= (8, 0, 1)
        assembler = Assembler(
            position, catalog, self._look_again, by_gtid=by_gtid, named_columns=named
        )
        return position, by_gtid, assembler

    def _look_again(self) -> Catalog:
        with connect(self._address) as connection:
            return self._look(connection)

    def _chunk(
        self, connection: Connection[Any], source: SourceTable, after: SourceKey | None, rows: int
    ) -> Chunk:
        table = self._table(connection, source)
        if self._snapshots is None:
            self._snapshots = Snapshots(connection, self._read_server(connection))
        assert self._charsets is not None
        return self._snapshots.chunk(table, source, self._charsets, after, rows)

    def _estimate(self, connection: Connection[Any], source: SourceTable) -> int | None:
        table = self._table(connection, source)
        found = query(
            connection,
            "select table_rows from information_schema.tables"
            " where table_schema = %s and table_name = %s",
            (table.schema, table.name),
        )
        return None if not found or found[0][0] is None else int(found[0][0])

    def _table(self, connection: Connection[Any], source: SourceTable) -> Table:
        """The catalog may be ahead of what the copy asks for: columns that went are NULL in it. The
        key must be there."""
        for catalog in (self._looked, None):
            known = catalog or self._look(connection)
            for table in known.tables.values():
                if table.source.name == source.name and set(source.columns) <= set(
                    table.source.columns
                ):
                    return table
        for table in known.tables.values():
            if table.source.name == source.name and table.source.key == source.key:
                return table
        raise SourceUnavailable(
            f"{source.name} has changed at the source; the change has not been read yet"
        )

    def _health(self, connection: Connection[Any]) -> Health:
        logs, position = binary_logs(connection), self._position
        if position is None or not logs or not position.file:
            return Health()
        behind = sum(size for file, size in logs if file_number(file) > file_number(position.file))
        behind += sum(
            max(0, size - position.offset) for file, size in logs if file == position.file
        )
        if file_number(logs[0][0]) > file_number(position.file):
            return Health("lost", behind, f"The server deleted {position.file}: resnapshot.")
        if len(logs) > 1 and logs[0][0] == position.file:
            return Health(
                "lagging",
                behind,
                f"The position is in {position.file}, the oldest binary log, which the server"
                " deletes next. Start the source, or raise binlog_expire_logs_seconds.",
            )
        return Health("ok", behind)


def _finish(thread: threading.Thread, stream: BinlogStream) -> None:
    thread.join()
    stream.finish()


def _server_id(definition: SourceDefinition) -> int:
    """The option, or a number from the source's name: the same after a crash, so that the server
    ends the connection that was left behind."""
    if unknown := sorted(set(definition.options) - _OPTIONS):
        raise ConfigError(
            f"a MySQL source has no option {unknown[0]}",
            hint=f"Known are {', '.join(sorted(_OPTIONS))}.",
        )
    number = definition.options.get("server_id")
    if number is None:
        return 1_000_000_000 + zlib.crc32(definition.name.encode()) % 1_000_000_000
    if not isinstance(number, int) or not 0 < number < 2**32:
        raise ConfigError("server_id must be a number from 1 to 4294967295")
    return number
