"""The contract suite over tables in Headwater's own database, captured by triggers or from its WAL.
The table is its own mirror."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from psycopg import AsyncConnection

from headwater.capture.source import SourceDefinition
from tests.contract.sources.drivers.postgres_wal import POSTGRES_TYPES, PostgresWalDriver


class LocalDriver(PostgresWalDriver):
    """Only writes and reads: there is no source to define, no server of its own to kill."""

    can = frozenset({"transactions", "interleave", "rekey", "truncate", "ddl", "names"})

    def __init__(self, url: str, way: str) -> None:
        self.url = url
        self.kind = way
        own = ("mood", "mood[]", "price", "pair", "regclass")
        self.types = [case for case in POSTGRES_TYPES if case.declared not in own]
        self._connections: list[AsyncConnection[Any]] = []
        self.idle: list[AsyncConnection[Any]] = []

    @classmethod
    @asynccontextmanager
    async def opened(cls, url: str, way: str) -> AsyncIterator[LocalDriver]:  # type: ignore[override]
        driver = cls(url, way)
        try:
            yield driver
        finally:
            await driver.close()

    def definition(self, *tables: str, **options: Any) -> SourceDefinition:
        raise NotImplementedError

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()
