"""MongoDB as a source: copies collections with snapshot reads and follows them with a change
stream.

A chunk is read at one cluster time, which the server chooses and reports, so the chunk contains
exactly what was committed up to then. The change stream watches the whole database and the server
filters it; with the option `scope = "collection"` it watches the one collection of the definition,
which needs a right on that collection only. Nothing is made at the source, and nothing needs to be
acknowledged: the server's log (the oplog) has a size or a duration of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator
from typing import Any

from pymongo.asynchronous.cursor import AsyncCursor
from pymongo.errors import OperationFailure
from pymongo.read_concern import ReadConcern

from headwater import limits
from headwater.capture.mongodb import checks, collections, pipeline
from headwater.capture.mongodb.columns import Layout
from headwater.capture.mongodb.connection import CODEC, Connection, Document
from headwater.capture.mongodb.failures import translated
from headwater.capture.mongodb.positions import Position, following
from headwater.capture.mongodb.stream import Plan, Stream
from headwater.capture.mongodb.texts.keys import key_text, key_value
from headwater.capture.source import (
    Chunk,
    Health,
    Item,
    Problem,
    SourceDefinition,
    SourceKey,
    SourceRow,
    SourceTable,
)
from headwater.errors import ConfigError, HeadwaterError, SourceRefused, SourceUnavailable

_numbers = itertools.count(1)

_BATCH_DOCUMENTS = 2_000
_WINDOW_LOW = 0.25
"""The part of the oplog that must still lie before our position, or `health` warns."""


class MongoSource:
    """The collections of one MongoDB database."""

    kind = "mongodb"
    filters_rows = False

    def __init__(self, definition: SourceDefinition) -> None:
        self.definition = definition
        self._scope = _scope(definition)
        self._connection = Connection(definition.url)
        self._layouts: dict[str, Layout] = {}
        self._position: Position | None = None

    async def check(self) -> list[Problem]:
        try:
            with translated(self.definition.url, "connecting to MongoDB"):
                return await self._problems()
        except SourceUnavailable:
            raise
        except HeadwaterError as error:
            return [Problem(str(error), error.hint or "")]

    async def _problems(self) -> list[Problem]:
        if problems := checks.server_problems(await self._connection.server()):
            return problems
        found = await self._existing()
        problems = checks.collection_problems(self.definition, found)
        if any(not problem.warning for problem in problems):
            return problems
        names = [layout.name for layout in collections.layouts(self.definition, found)]
        problems += await checks.read_problems(self._connection, names)
        try:
            await self.start()
        except SourceUnavailable:
            raise
        except HeadwaterError as error:
            problems.append(Problem(str(error), error.hint or ""))
        return problems

    async def tables(self) -> list[SourceTable]:
        with translated(self.definition.url, "listing the collections"):
            return [layout.table for layout in (await self._plan()).layouts]

    async def start(self) -> str:
        with translated(self.definition.url, "opening a change stream"):
            await self._require_server()
            stream = Stream(self._connection, await self._plan(), Position((0, 0)), self._scope)
            return str(await stream.present())

    async def estimate(self, table: SourceTable) -> int | None:
        """As the server counts documents; None for a server that does not say it."""
        with translated(self.definition.url, f"counting the collection {table.name}"):
            layout = self._layouts.get(table.name) or (await self._plan()).by_name[table.name]
            collection = self._connection.database.get_collection(layout.name)
            try:
                return await collection.estimated_document_count()
            except OperationFailure:
                return None

    async def snapshot(self, table: SourceTable, after: SourceKey | None, rows: int) -> Chunk:
        with translated(self.definition.url, f"copying the collection {table.name}"):
            layout = self._layouts.get(table.name) or (await self._plan()).by_name[table.name]
            comment = f"headwater copy {next(_numbers)}"
            try:
                found, more = await self._read(
                    self._find(layout, after, rows, comment), layout, after, rows
                )
                return await self._chunk(layout, found, more, comment)
            finally:
                self._connection.replies.forget(comment)

    def _find(
        self, layout: Layout, after: SourceKey | None, rows: int, comment: str
    ) -> AsyncCursor[Document]:
        """`min` continues at the key in the order of all BSON types, unlike `$gt`, which compares
        values of one type only. It includes the key itself."""
        collection = self._connection.database.get_collection(
            layout.name, codec_options=CODEC, read_concern=ReadConcern("snapshot")
        )
        cursor = collection.find(
            pipeline.pushed(layout) or {},
            layout.projection(),
            sort=[("_id", 1)],
            hint=[("_id", 1)],
            limit=rows + 2,
            batch_size=min(rows + 2, _BATCH_DOCUMENTS),
            comment=comment,
        )
        return cursor if after is None else cursor.min([("_id", key_value(after[0]))])

    async def _read(
        self, cursor: AsyncCursor[Document], layout: Layout, after: SourceKey | None, rows: int
    ) -> tuple[list[SourceRow], bool]:
        """The rows that fit in a chunk, and whether others follow."""
        found, size = list[SourceRow](), 0
        async with cursor:
            async for document in cursor:
                if after is not None and key_text(document["_id"]) == after[0]:
                    continue
                row = layout.row(document)
                size += sum(len(cell) for cell in row if isinstance(cell, str))
                if found and (len(found) == rows or size > limits.SOURCE_CHUNK_BYTES):
                    return found, True
                found.append(row)
        return found, False

    async def _chunk(
        self, layout: Layout, found: list[SourceRow], more: bool, comment: str
    ) -> Chunk:
        """In a sharded cluster, the stream only proves that it has given all events of a time when
        it has reached a later one."""
        batch = self._connection.replies.batch(comment)
        if batch is None or batch.read_at is None:
            raise SourceRefused(
                "the server does not report the time of a snapshot read",
                hint="Only MongoDB 6.0 and later are supported.",
            )
        time = batch.read_at.time, batch.read_at.inc
        sharded = (await self._connection.server()).sharded
        low, high = Position(time), Position(following(time) if sharded else time)
        return Chunk(found, layout.key(found[-1]) if more else None, str(low), str(high))

    async def changes(self, after: str) -> AsyncGenerator[Item, None]:
        position = Position.parse(after)
        with translated(self.definition.url, "reading the change stream"):
            await self._require_server()
            plan = await self._plan()
            while True:
                stream = Stream(self._connection, plan, position, self._scope)
                async for item in stream.items():
                    self._position = stream.position
                    yield item
                position = stream.position

    async def acknowledge(self, upto: str) -> None:
        """Nothing: the oplog does not wait for readers."""

    async def health(self) -> Health:
        with translated(self.definition.url, "asking for the state of the server"):
            await self._connection.client.admin.command("ping")
            try:
                window = await self._oplog_window()
            except OperationFailure:
                # Not a member of a replica set but a router, or the right is missing.
                return Health()
        if window is None or self._position is None:
            return Health()
        return window_health(window, self._position)

    async def _oplog_window(self) -> tuple[int, int] | None:
        """The seconds of the oldest and of the newest entry."""
        oplog = self._connection.client.local["oplog.rs"]
        oldest = await oplog.find_one({}, {"ts": 1}, sort=[("$natural", 1)])
        newest = await oplog.find_one({}, {"ts": 1}, sort=[("$natural", -1)])
        return (oldest["ts"].time, newest["ts"].time) if oldest and newest else None

    def contains(self, position: str, mark: str) -> bool:
        return Position.parse(position).contains(Position.parse(mark))

    async def remove(self) -> None:
        """Nothing: `start` made nothing."""

    async def close(self) -> None:
        await self._connection.close()

    async def _existing(self) -> dict[str, collections.Collection]:
        names = [spec.name for spec in self.definition.tables] or None
        return await collections.existing(self._connection.database, names)

    async def _plan(self) -> Plan:
        found = await self._existing()
        layouts = collections.layouts(self.definition, found)
        for layout in layouts:
            self._layouts.setdefault(layout.name, layout)
        layouts = [self._layouts[layout.name] for layout in layouts]
        return Plan(layouts, found, everything=not self.definition.tables)

    async def _require_server(self) -> None:
        for problem in checks.server_problems(await self._connection.server()):
            raise SourceRefused(problem.what, hint=problem.fix)


def window_health(window: tuple[int, int], position: Position) -> Health:
    oldest, newest = window
    left, whole = position.time[0] - oldest, newest - oldest
    if whole > 0 and left < _WINDOW_LOW * whole:
        return Health(
            "lagging",
            warning=f"the oplog reaches back {whole} seconds, of which {max(left, 0)} are left"
            " before the position is lost; give the server a larger oplog (replSetResizeOplog)",
        )
    return Health()


def _scope(definition: SourceDefinition) -> str | None:
    options: dict[str, Any] = dict(definition.options)
    scope = options.pop("scope", "database")
    if options:
        raise ConfigError(
            f"source {definition.name}: MongoDB has no option {next(iter(options))!r:.100}",
            hint='Its option is "scope": "database" (the default) or "collection".',
        )
    if scope not in ("database", "collection"):
        raise ConfigError(
            f"source {definition.name}: scope cannot be {scope!r:.100}",
            hint='It is "database" or "collection".',
        )
    if scope == "database":
        return None
    if len(definition.tables) != 1:
        raise ConfigError(
            f'source {definition.name}: scope = "collection" needs exactly one table',
            hint="Name one collection, or watch the database.",
        )
    return definition.tables[0].name
