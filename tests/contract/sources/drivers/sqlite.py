"""SQLite files for the contract suite. There is no server: the file is the database, and SQLite has
one writer at a time."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

from headwater.capture.source import SourceDefinition, TableSpec
from headwater.capture.sqlite.queue import QueueNames
from tests.contract.sources.driver import COLUMNS, TypeCase

BUSY_SECONDS = 30.0

TYPES = [
    TypeCase("INTEGER", 9007199254740993, "bigint", "9007199254740993"),
    TypeCase("BIGINT", -(2**63), "bigint", "-9223372036854775808"),
    TypeCase("TINYINT", 3, "bigint", "3"),
    TypeCase("INTEGER", "no number", "bigint", None),
    TypeCase("TEXT", "Grüße \N{SNOWMAN} 'a' \\ \"", "text", "Grüße \N{SNOWMAN} 'a' \\ \""),
    TypeCase("VARCHAR(3)", "longer", "text", "longer"),
    TypeCase("TEXT", "a\x00b", "text", None),
    TypeCase("", 12, "text", "12"),
    TypeCase("REAL", 0.1, "double precision", "0.1"),
    TypeCase("DOUBLE", float("inf"), "double precision", "Infinity"),
    TypeCase("FLOAT", float("nan"), "double precision", None),
    TypeCase("NUMERIC", 12345678.5, "numeric", "12345678.5"),
    TypeCase("DECIMAL(12,2)", 12.5, "numeric(12,2)", "12.50"),
    TypeCase("DECIMAL(4,2)", 12345, "numeric(4,2)", None),
    TypeCase("BLOB", b"\x00\xff\\", "bytea", "\\x00ff5c"),
    TypeCase("BOOLEAN", 1, "boolean", "t"),
    TypeCase("BOOLEAN", 7, "boolean", None),
    TypeCase("DATE", "2026-11-18", "date", "2026-11-18"),
    TypeCase("DATE", "18.11.2026", "date", None),
    TypeCase(
        "DATETIME", "2026-11-18T12:30:00.25", "timestamp without time zone",
        "2026-11-18 12:30:00.25",
    ),
    TypeCase(
        "TIMESTAMP", "2026-11-18 12:30:00+02:00", "timestamp without time zone",
        "2026-11-18 10:30:00",
    ),
    TypeCase("TIME", "12:30:01", "time without time zone", "12:30:01"),
    TypeCase("JSON", '{"a": [1, null]}', "jsonb", '{"a": [1, null]}'),
    TypeCase("JSON", "{not json}", "jsonb", None),
    TypeCase(
        "UUID", "5F1C0A52-0000-4000-8000-000000000001", "uuid",
        "5f1c0a52-0000-4000-8000-000000000001",
    ),
]  # fmt: skip


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def value(given: Any) -> Any:
    return float(given) if isinstance(given, Decimal) else given


class SqliteWriter:
    """A transaction of one connection. It begins with its first write."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(
            path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )

    async def _execute(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        def execute() -> None:
            if not self._db.in_transaction:
                self._db.execute("begin immediate")
            self._db.executemany(sql, rows)

        await asyncio.to_thread(execute)

    async def insert(self, table: str, row: dict[str, Any]) -> None:
        await self.insert_many(table, [row])

    async def insert_many(self, table: str, rows: list[dict[str, Any]]) -> None:
        names = ", ".join(quoted(name) for name in rows[0])
        places = ", ".join("?" * len(rows[0]))
        values = [tuple(value(v) for v in row.values()) for row in rows]
        await self._execute(f"insert into {quoted(table)} ({names}) values ({places})", values)

    async def update(self, table: str, id: int, values: dict[str, Any]) -> None:
        sets = ", ".join(f"{quoted(name)} = ?" for name in values)
        row = (*[value(v) for v in values.values()], id)
        await self._execute(f"update {quoted(table)} set {sets} where id = ?", [row])

    async def rekey(self, table: str, id: int, to: int) -> None:
        await self._execute(f"update {quoted(table)} set id = ? where id = ?", [(to, id)])

    async def delete(self, table: str, id: int) -> None:
        await self._execute(f"delete from {quoted(table)} where id = ?", [(id,)])

    async def truncate(self, table: str) -> None:
        await self._execute(f"delete from {quoted(table)}", [()])

    async def commit(self) -> None:
        await self._end("commit")

    async def rollback(self) -> None:
        await self._end("rollback")

    async def _end(self, statement: str) -> None:
        if self._db.in_transaction:
            await asyncio.to_thread(self._db.execute, statement)

    def close(self) -> None:
        self._db.close()


class SqliteDriver:
    kind = "sqlite"
    can = frozenset(
        {"transactions", "rekey", "ddl", "lose_position", "names", "keyless", "missing"}
    )
    """Not `truncate`: `DELETE FROM` is a delete of each row. Not `interleave`: there is one writer
    at a time. Not `restart`: there is no server."""

    types = TYPES

    def __init__(self, folder: Path, journal_mode: str = "wal") -> None:
        self.path = folder / "shop.db"
        self._writers: list[SqliteWriter] = []
        self._run_now(lambda db: db.execute(f"pragma journal_mode = {journal_mode}"))

    @classmethod
    @asynccontextmanager
    async def opened(cls, folder: Path) -> AsyncIterator[SqliteDriver]:
        driver = cls(folder)
        try:
            yield driver
        finally:
            await driver.close()

    def definition(self, *tables: str, **options: Any) -> SourceDefinition:
        specs = tuple(TableSpec(name) for name in tables)
        fields = {"name": "shop", "into": "shop", "tables": specs} | options
        return SourceDefinition(url=f"sqlite:///{self.path}", **fields)

    async def create_table(self, name: str) -> None:
        await self._run(
            f"create table {quoted(name)} (id integer primary key, name text,"
            " amount decimal(12,2), note text)"
        )

    async def create_typed_table(self, name: str, cases: list[TypeCase]) -> None:
        columns = "".join(f", c{i} {case.declared}" for i, case in enumerate(cases))
        await self._run(f"create table {quoted(name)} (id integer primary key{columns})")

    async def insert_typed(self, name: str, id: int, cases: list[TypeCase | None]) -> None:
        values = [id, *[None if case is None else case.literal for case in cases]]
        places = ", ".join("?" * len(values))
        await self._run(f"insert into {quoted(name)} values ({places})", tuple(values))

    async def writer(self) -> SqliteWriter:
        self._writers.append(SqliteWriter(self.path))
        return self._writers[-1]

    async def rows(self, table: str) -> list[tuple[Any, ...]]:
        found = await self._run(f"select * from {quoted(table)} order by id")
        return [_judged(row) for row in found]

    async def add_column(self, table: str, name: str, default: int) -> None:
        await self._run(
            f"alter table {quoted(table)} add column {quoted(name)} integer default {int(default)}"
        )

    async def drop_table(self, name: str) -> None:
        await self._run(f"drop table {quoted(name)}")

    async def drop_column(self, table: str, name: str) -> None:
        await self._run(f"alter table {quoted(table)} drop column {quoted(name)}")

    async def create_keyless_table(self, name: str) -> None:
        await self._run(f"create table {quoted(name)} (a integer)")

    async def allow_filter(self, table: str, column: str) -> None:
        """A predicate needs nothing: the runner decides it."""

    async def leftovers(self) -> list[str]:
        found = await self._run(
            "select name from sqlite_master where substr(name, 1, 11) = '_headwater_' order by name"
        )
        return [name for (name,) in found]

    async def lose_position(self) -> None:
        await self._run(f"delete from {quoted(QueueNames.of('shop').queue)}")

    async def kill_server(self) -> None:
        raise NotImplementedError

    async def start_server(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()

    async def _run(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return await asyncio.to_thread(self._run_now, lambda db: db.execute(sql, values).fetchall())

    def _run_now(self, function: Callable[[sqlite3.Connection], Any]) -> Any:
        db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            return function(db)
        finally:
            db.close()


def _judged(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """With the amount as a decimal of two places, as in every database."""
    amount = row[2]
    rounded = None if amount is None else Decimal(str(amount)).quantize(Decimal("0.01"))
    assert COLUMNS[2] == "amount"
    return (*row[:2], rounded, *row[3:])
