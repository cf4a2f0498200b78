"""Reads a change stream, and turns its events into the items of the contract.

A row's document comes with its event. For an update the server looks it up when it sends the event
(`updateLookup`), so it may already be newer than the change; later events lead to the same end. If
it no longer exists, the event is skipped: its delete, or the drop of its collection, follows in the
stream. Where all collections store images, the server sends the document as it was, and looks up
nothing.

A collection that is created begins empty, so `create` empties the mirror: that is how a collection
that was dropped and made again loses its old rows, whatever was restarted in between.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import bson
from bson.datetime_ms import DatetimeMS
from bson.timestamp import Timestamp
from msgspec.structs import replace
from pymongo.asynchronous.change_stream import AsyncChangeStream
from pymongo.read_concern import ReadConcern

from headwater.capture.mongodb import collections, pipeline
from headwater.capture.mongodb.columns import Layout
from headwater.capture.mongodb.connection import CODEC, Batch, Connection, Document
from headwater.capture.mongodb.positions import Position
from headwater.capture.mongodb.transactions import Assembler, Change, Event, size_of
from headwater.capture.source import (
    Item,
    Progress,
    SchemaChange,
    TableDropped,
    TableSpec,
    TransactionPart,
)

AWAIT_MS = 500
"""How long the server waits for an event before it sends an empty batch with its position."""
BATCH_EVENTS = 1_000
_BATCH_BYTES = 1_000_000
"""Texts of a batch above this may mean that the server cut it at 16 MB of BSON."""

_numbers = itertools.count(1)

_OPS: dict[str, Any] = {
    "insert": "insert", "update": "update", "replace": "update", "delete": "delete",
}  # fmt: skip


class Plan:
    """What a stream watches: the layouts of the collections, and which images they store."""

    def __init__(
        self, layouts: list[Layout], found: dict[str, collections.Collection], everything: bool
    ) -> None:
        self.layouts = layouts
        self.by_name = {layout.name: layout for layout in layouts}
        self.places = pipeline.places(layouts)
        self.everything = everything
        images = [layout.name in found and found[layout.name].images for layout in layouts]
        self.after_images = bool(images) and all(images) and not everything
        self.before_images = any(images)


class Stream:
    """One change stream. It ends when the server invalidates it; `position` is then where the next
    one begins."""

    def __init__(self, connection: Connection, plan: Plan, position: Position, scope: str | None):
        self.position = position
        self._connection = connection
        self._plan = plan
        self._scope = scope
        self._assembler = Assembler()
        self._comment = f"headwater changes {next(_numbers)}"
        self._fragments: Document = {}
        self._batch = self._given = self._batch_bytes = 0

    async def items(self) -> AsyncIterator[Item]:
        server = await self._connection.server()
        try:
            async with await self._open(self.position) as stream:
                while stream.alive:
                    event = await stream.try_next()
                    async for item in self._received(event, server.sharded):
                        yield item
                for item in self._ended(complete=True):
                    yield item
        finally:
            self._connection.replies.forget(self._comment)

    async def _open(self, position: Position | None) -> AsyncChangeStream[Document]:
        """From now on without a position."""
        server = await self._connection.server()
        database = self._connection.database.with_options(read_concern=ReadConcern("majority"))
        target = database if self._scope is None else database[self._scope]
        plan = self._plan
        start: dict[str, Any] = {}
        if position is not None and position.token is not None:
            start = {"start_after": position.resume_token()}
        elif position is not None:
            start = {"start_at_operation_time": Timestamp(*position.next_time())}
        return await target.watch(
            pipeline.stream_pipeline(
                plan.layouts, everything=plan.everything, splits=server.splits
            ),
            full_document="whenAvailable" if plan.after_images else "updateLookup",
            full_document_before_change="whenAvailable" if plan.before_images else None,
            max_await_time_ms=AWAIT_MS,
            batch_size=BATCH_EVENTS,
            show_expanded_events=True,
            comment=self._comment,
            **start,
        )

    async def present(self) -> Position:
        """Where a stream that is opened now begins."""
        try:
            async with await self._open(None) as stream:
                token = stream.resume_token
                if token is None:
                    await stream.try_next()
                    token = stream.resume_token
        finally:
            self._connection.replies.forget(self._comment)
        assert token is not None, "a change stream without a token"
        return Position.before(token)

    # -------------------------------------------------------------------- batches

    async def _received(self, event: Document | None, sharded: bool) -> AsyncIterator[Item]:
        batch = self._connection.replies.batch(self._comment)
        assert batch is not None
        if event is None:
            for item in self._idle(batch, sharded):
                yield item
            return
        self._count(batch)
        if (whole := self._whole(event)) is not None:
            async for item in self._event(whole):
                yield item
        if self._given == batch.size:
            for item in self._batch_over(batch, sharded):
                yield item

    def _count(self, batch: Batch) -> None:
        if batch.number != self._batch:
            self._batch, self._given, self._batch_bytes = batch.number, 0, 0
        self._given += 1

    def _batch_over(self, batch: Batch, sharded: bool) -> Iterator[Item]:
        """A replica set fills a batch unless its log has ended, so a transaction is whole then. A
        router may send less, and so may the first reply: events of the same time may follow."""
        proves_little = sharded or batch.first
        if proves_little and not self._assembler.in_transaction:
            yield from self._ended(complete=False)
        elif not proves_little and not self._cut(batch):
            yield from self._ended(complete=True)

    def _cut(self, batch: Batch) -> bool:
        """Whether the server may have ended the batch because it was full."""
        return batch.size >= BATCH_EVENTS or self._batch_bytes >= _BATCH_BYTES

    def _idle(self, batch: Batch, sharded: bool) -> Iterator[Item]:
        """An empty batch: the end of the log, unless it is the first reply."""
        if batch.first and self._assembler.in_transaction:
            return
        complete = not sharded and not batch.first
        yield from self._ended(complete=complete)
        position = self._after(batch, complete)
        if position != self.position:
            self.position = position
            yield Progress(str(position))

    def _after(self, batch: Batch, complete: bool) -> Position:
        """The position after an empty batch. Its token is that of the last event, or stands for a
        later time up to which there are no events."""
        if batch.token is None or batch.token["_data"] == self.position.token:
            return replace(self.position, complete=self.position.complete or complete)
        if complete:
            return Position.of_token(batch.token, complete=True)
        return Position.before(batch.token)

    def _ended(self, *, complete: bool) -> Iterator[Item]:
        for item in self._assembler.end(complete=complete):
            self._moved(item)
            yield item

    def _moved(self, item: Item) -> None:
        if isinstance(item, TransactionPart | Progress) and item.position is not None:
            self.position = Position.parse(item.position)

    def _whole(self, event: Document) -> Document | None:
        """The event, once its last fragment is here. A later fragment has fields that the earlier
        ones have not, and the token of the whole is that of the last."""
        split = event.pop("splitEvent", None)
        if split is None:
            return event
        self._fragments |= event
        if split["fragment"] < split["of"]:
            return None
        whole, self._fragments = self._fragments, {}
        return whole

    # -------------------------------------------------------------------- events

    async def _event(self, event: Document) -> AsyncIterator[Item]:
        for item in self._assembler.begin(_event_of(event)):
            self._moved(item)
            yield item
        kind = event["operationType"]
        handle = self._row_event if kind in pipeline.ROW_EVENTS else self._collection_event
        async for item in handle(event, kind):
            yield item

    async def _row_event(self, event: Document, kind: str) -> AsyncIterator[Item]:
        name = event["ns"]["coll"]
        layout = self._plan.by_name.get(name)
        if layout is None:
            layout = await self._appeared(name)
            if layout is not None:
                yield SchemaChange(layout.table)
        changes = [] if layout is None else await self._changes(event, kind, layout)
        self._batch_bytes += sum(map(size_of, changes))
        for item in self._assembler.add(changes):
            yield item

    async def _changes(self, event: Document, kind: str, layout: Layout) -> list[Change]:
        identifier = event["documentKey"]["_id"]
        places = self._plan.places.get(layout.name, pipeline.ANYWHERE)
        earlier = event.get(places.before)
        before = layout.row(earlier) if earlier else None
        if kind == "delete":
            return [Change(layout.name, "delete", None, before or layout.key_row(identifier))]
        document = event.get(places.after)
        if document is None and self._plan.after_images:
            document = await self._looked_up(layout, identifier)
        if document is None:
            return []
        return [Change(layout.name, _OPS[kind], layout.row(document), before)]

    async def _looked_up(self, layout: Layout, identifier: Any) -> Document | None:
        """The image is missing: stored for a time only, or not yet enabled at the change."""
        collection = self._connection.database.get_collection(
            layout.name, codec_options=CODEC, read_concern=ReadConcern("majority")
        )
        return await collection.find_one({"_id": identifier}, layout.projection())

    async def _collection_event(self, event: Document, kind: str) -> AsyncIterator[Item]:
        name, to = event.get("ns", {}).get("coll"), event.get("to", {}).get("coll")
        changes = list[Change]()
        if kind == "create" and (layout := await self._created(event, name)) is not None:
            yield SchemaChange(layout.table, copies=False)
            changes = [Change(layout.name, "truncate")]
        if kind in ("drop", "rename") and name in self._plan.by_name:
            yield TableDropped(name)
        if kind == "rename" and (layout := await self._known(to)) is not None:
            yield SchemaChange(layout.table)
            changes = [Change(layout.name, "truncate")]
        for item in self._assembler.add(changes):
            yield item

    async def _created(self, event: Document, name: str) -> Layout | None:
        if event.get("nsType", "collection") != "collection":
            return None
        return await self._known(name)

    async def _known(self, name: str) -> Layout | None:
        return self._plan.by_name.get(name) or await self._appeared(name)

    async def _appeared(self, name: str) -> Layout | None:
        """The layout of a collection that did not exist when the stream began, if all are captured
        and it is one that can be."""
        if not self._plan.everything or name.startswith("system."):
            return None
        found = await collections.existing(self._connection.database, [name])
        if name in found and found[name].kind != "collection":
            return None
        layout = self._plan.by_name[name] = Layout(TableSpec(name))
        self._plan.layouts.append(layout)
        return layout


def _event_of(event: Mapping[str, Any]) -> Event:
    time: Timestamp = event["clusterTime"]
    transaction = None
    if "txnNumber" in event:
        transaction = (bson.encode(event["lsid"]), int(event["txnNumber"]))
    return Event(event["_id"], (time.time, time.inc), transaction, _committed_at(event))


def _committed_at(event: Mapping[str, Any]) -> datetime:
    wall = event.get("wallTime")
    if isinstance(wall, DatetimeMS):
        return datetime.fromtimestamp(int(wall) / 1000, UTC)
    time: datetime = event["clusterTime"].as_datetime()
    return time
