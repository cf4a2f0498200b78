"""The MongoDB source in the contract suite: against the stand-in, which each driver starts for
itself, or against the server of `HEADWATER_TEST_MONGODB_URL`.

A row is a document whose `_id` is the row's `id`, which it also has as a field, so that the mirror
has the same typed columns as those of the other sources, beside `_id` and `doc`.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from bson.binary import Binary
from bson.datetime_ms import DatetimeMS
from bson.decimal128 import Decimal128
from bson.int64 import Int64
from bson.objectid import ObjectId
from msgspec.structs import replace
from pymongo import AsyncMongoClient
from pymongo.asynchronous.client_session import AsyncClientSession

from headwater.capture.source import SourceDefinition, TableSpec
from tests.contract.sources.driver import SourceDriver, TypeCase, Writer
from tests.support.mongodb.process import REAL, StandIn, with_new_database

TYPES = {"id": "bigint", "name": "text", "amount": "numeric(12,2)", "note": "text"}
_ID = "c5f7b3ba-5c5e-4a8a-9d0a-111111111111"

CASES = [
    TypeCase("text", "Zoë", "text", "Zoë"),
    TypeCase("text", ObjectId("507f1f77bcf86cd799439011"), "text", "507f1f77bcf86cd799439011"),
    TypeCase("bigint", Int64(2**63 - 1), "bigint", "9223372036854775807"),
    TypeCase("integer", 7.0, "integer", "7"),
    TypeCase("numeric", Decimal128("1.10"), "numeric", "1.10"),
    TypeCase("numeric(12,2)", 0.125, "numeric(12,2)", "0.13"),
    TypeCase("double precision", 0.1, "double precision", "0.1"),
    TypeCase("boolean", True, "boolean", "t"),
    TypeCase("timestamp", DatetimeMS(1500), "timestamp without time zone", "1970-01-01 00:00:01.5"),
    TypeCase("date", DatetimeMS(-1), "date", "1969-12-31"),
    TypeCase("uuid", Binary.from_uuid(UUID(_ID)), "uuid", _ID),
    TypeCase("bytea", b"\x00\xff", "bytea", "\\x00ff"),
    TypeCase("jsonb", {"a": [1, None]}, "jsonb", '{"a": [1, null]}'),
    TypeCase("text[]", ["a", None], "text[]", "{a,NULL}"),
    TypeCase("integer", "not a number", "integer", None),
]

Client = AsyncMongoClient[dict[str, Any]]


def _bson(value: Any) -> Any:
    return Decimal128(value) if isinstance(value, Decimal) else value


def _document(row: dict[str, Any]) -> dict[str, Any]:
    return {"_id": row["id"]} | {name: _bson(value) for name, value in row.items()}


class MongoWriter:
    """One transaction of one session."""

    def __init__(self, client: Client, session: AsyncClientSession) -> None:
        self._database, self._session = client.get_default_database(), session

    async def insert(self, table: str, row: dict[str, Any]) -> None:
        await self._database[table].insert_one(_document(row), session=self._session)

    async def insert_many(self, table: str, rows: list[dict[str, Any]]) -> None:
        documents = [_document(row) for row in rows]
        await self._database[table].insert_many(documents, session=self._session)

    async def update(self, table: str, id: int, values: dict[str, Any]) -> None:
        changes = {"$set": {name: _bson(value) for name, value in values.items()}}
        await self._database[table].update_one({"_id": id}, changes, session=self._session)

    async def rekey(self, table: str, id: int, to: int) -> None:
        raise NotImplementedError("an _id never changes")

    async def delete(self, table: str, id: int) -> None:
        await self._database[table].delete_one({"_id": id}, session=self._session)

    async def truncate(self, table: str) -> None:
        raise NotImplementedError("MongoDB has no truncate")

    async def commit(self) -> None:
        await self._session.commit_transaction()
        await self._session.end_session()

    async def rollback(self) -> None:
        await self._session.abort_transaction()
        await self._session.end_session()


class MongoDriver:
    """Starts its server in a folder of the test, unless a real one is given."""

    kind = "mongodb"
    can: frozenset[str] = frozenset({"transactions", "interleave", "names"}) | (
        frozenset() if REAL else frozenset({"lose_position", "restart"})
    )

    def __init__(self, folder: Path) -> None:
        self._server = None if REAL else StandIn(folder)
        url = with_new_database(REAL or self.server.url)
        self.url = f"{url}{'&' if '?' in url else '?'}serverSelectionTimeoutMS=2000"
        self._client: Client = AsyncMongoClient(self.url)
        self._types: dict[str, dict[str, str]] = {}
        self.types = list(CASES)

    @classmethod
    @asynccontextmanager
    async def opened(cls, folder: Path) -> AsyncIterator[MongoDriver]:
        driver = cls(folder)
        try:
            yield driver
        finally:
            await driver.close()
            gc.collect()  # sockets that PyMongo left open: see the conftest of the suite

    @property
    def server(self) -> StandIn:
        assert self._server is not None, "a real server is not ours to break"
        return self._server

    def definition(self, *tables: str, **options: Any) -> SourceDefinition:
        specs = options.pop("tables", tuple(map(TableSpec, tables)))
        typed = tuple(self._typed(spec) for spec in specs)
        return SourceDefinition("shop", self.url, "shop", typed, **options)

    def _typed(self, spec: TableSpec) -> TableSpec:
        return spec if spec.types else replace(spec, types=self._types.get(spec.name, TYPES))

    async def create_table(self, name: str) -> None:
        await self._client.get_default_database().create_collection(name)
        self._types[name] = dict(TYPES)

    async def create_typed_table(self, name: str, cases: list[TypeCase]) -> None:
        await self._client.get_default_database().create_collection(name)
        declared = {f"c{number}": case.declared for number, case in enumerate(cases)}
        self._types[name] = {"id": "bigint"} | declared

    async def insert_typed(self, name: str, id: int, cases: list[TypeCase | None]) -> None:
        values = {f"c{n}": None if case is None else case.literal for n, case in enumerate(cases)}
        await self._client.get_default_database()[name].insert_one({"_id": id, "id": id} | values)

    async def writer(self) -> Writer:
        session = self._client.start_session()
        await session.start_transaction()
        return MongoWriter(self._client, session)

    async def rows(self, table: str) -> list[tuple[Any, ...]]:
        found = self._client.get_default_database()[table].find(sort=[("_id", 1)])
        columns = list(self._types[table])
        return [_row(document, columns) async for document in found]

    async def add_column(self, table: str, name: str, default: int) -> None:
        collection = self._client.get_default_database()[table]
        await collection.update_many({}, {"$set": {name: default}})
        self._types[table][name] = "integer"

    async def drop_table(self, name: str) -> None:
        await self._client.get_default_database().drop_collection(name)

    async def drop_column(self, table: str, name: str) -> None:
        await self._client.get_default_database()[table].update_many({}, {"$unset": {name: ""}})
        del self._types[table][name]

    async def create_keyless_table(self, name: str) -> None:
        raise NotImplementedError("every document has an _id")

    async def allow_filter(self, table: str, column: str) -> None:
        """A predicate needs nothing: the runner decides it."""

    async def leftovers(self) -> list[str]:
        """Capture makes nothing in a MongoDB."""
        return []

    async def lose_position(self) -> None:
        await self._client.admin.command("standInTruncateOplog")

    async def kill_server(self) -> None:
        await self._client.close()
        self.server.kill()

    async def start_server(self) -> None:
        self.server.start()
        self._client = AsyncMongoClient(self.url)

    async def close(self) -> None:
        if self._server is None:
            with suppress(Exception):
                await self._client.drop_database(self._client.get_default_database().name)
        await self._client.close()
        if self._server is not None:
            self._server.kill()


def _row(document: dict[str, Any], columns: list[str]) -> tuple[Any, ...]:
    """A document has its fields in any order, and may lack some."""
    values = [document.get(name) for name in columns]
    return tuple(value.to_decimal() if isinstance(value, Decimal128) else value for value in values)


def _checked(driver: MongoDriver) -> SourceDriver:
    """The type checker compares it with the protocol here."""
    return driver
