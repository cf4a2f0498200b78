"""The contract suite over tables in Headwater's own database: captured by triggers, or from its WAL.
The table is its own mirror."""

from __future__ import annotations

from typing import Any

from psycopg import AsyncConnection

from headwater.capture.source import SourceDefinition
from tests.contract.sources.drivers.postgres_wal import PostgresWalDriver


class LocalDriver(PostgresWalDriver):
    """Only writes and reads: there is no source to define, no server of its own to kill."""

    can = frozenset({"transactions", "interleave", "rekey", "truncate", "ddl", "names"})

    def __init__(self, url: str, way: str) -> None:
        self.url = url
        self.kind = way
        self.types = [
            case
            for case in super().types_of_postgresql()
            if case.declared not in ("mood", "mood[]", "price", "pair", "regclass")
        ]
        self._writers: list[AsyncConnection[Any]] = []

    def definition(self, *tables: str, **options: Any) -> SourceDefinition:
        raise NotImplementedError

    async def close(self) -> None:
        for connection in self._writers:
            await connection.close()
