"""The contract suite over PostgreSQL's log: a database of its own for each test."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psycopg
from psycopg import AsyncConnection, sql

from headwater.capture.source import SourceDefinition, TableSpec
from tests.contract.sources.driver import COLUMNS, TypeCase
from tests.support.cluster import Cluster
from tests.support.databases import database_url

SETTINGS = {
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "logical_decoding_work_mem": "64kB",
}
"""Of a cluster for this driver. With so little memory, large transactions are streamed."""

_numbers = itertools.count(1)


class PostgresWriter:
    """One transaction at a time, on a connection that it gives back at the end of each."""

    def __init__(self, driver: PostgresWalDriver) -> None:
        self._driver = driver
        self._connection: AsyncConnection[Any] | None = None

    async def connection(self) -> AsyncConnection[Any]:
        if self._connection is None:
            self._connection = await self._driver.take_connection()
        return self._connection

    async def execute(self, statement: str, values: list[Any] | None = None) -> None:
        await (await self.connection()).execute(statement.encode(), values)

    async def insert(self, table: str, row: dict[str, Any]) -> None:
        await self.insert_many(table, [row])

    async def insert_many(self, table: str, rows: list[dict[str, Any]]) -> None:
        names = list(rows[0])
        columns, places = ", ".join(map(_escaped, names)), ", ".join(["%s"] * len(names))
        statement = f"insert into {_escaped(table)} ({columns}) values ({places})"
        async with (await self.connection()).cursor() as cursor:
            await cursor.executemany(
                statement.encode(), [[row[name] for name in names] for row in rows]
            )

    async def update(self, table: str, id: int, values: dict[str, Any]) -> None:
        assignments = ", ".join(f"{_escaped(name)} = %s" for name in values)
        statement = f"update {_escaped(table)} set {assignments} where id = %s"
        await self.execute(statement, [*values.values(), id])

    async def rekey(self, table: str, id: int, to: int) -> None:
        await self.update(table, id, {"id": to})

    async def delete(self, table: str, id: int) -> None:
        await self.execute(f"delete from {_escaped(table)} where id = %s", [id])

    async def truncate(self, table: str) -> None:
        await self.execute(f"truncate {_quoted(table)}")

    async def commit(self) -> None:
        await (await self.connection()).commit()
        self._give_back()

    async def rollback(self) -> None:
        await (await self.connection()).rollback()
        self._give_back()

    def _give_back(self) -> None:
        assert self._connection is not None
        self._driver.idle.append(self._connection)
        self._connection = None


class PostgresWalDriver:
    """Made by `opened`, which also drops the slot and the database."""

    kind = "postgresql"
    can = frozenset(
        {
            "transactions", "interleave", "rekey", "truncate", "ddl", "lose_position", "restart",
            "names", "keyless", "missing",
        }
    )  # fmt: skip

    types: list[TypeCase]

    def __init__(self, cluster: Cluster, database: str) -> None:
        self.types = list(POSTGRES_TYPES)
        self._cluster = cluster
        self._database = database
        self._connections: list[AsyncConnection[Any]] = []
        self.idle: list[AsyncConnection[Any]] = []
        self.url = database_url(cluster.url, database)
        self.slot = f"headwater_{database}"

    @classmethod
    @asynccontextmanager
    async def opened(cls, cluster: Cluster) -> AsyncIterator[PostgresWalDriver]:
        driver = cls(cluster, f"wal_{next(_numbers)}")
        await driver._run_elsewhere(f"create database {driver._database}")
        await driver.execute(
            "create type mood as enum ('happy', 'sad')",
            "create domain price as numeric(8,2)",
            "create type pair as (a int, b text)",
        )
        try:
            yield driver
        finally:
            await driver.close()

    def definition(self, *tables: str, **options: Any) -> SourceDefinition:
        # Slots belong to the server, not to the database.
        own = {"slot": self.slot, **options.pop("options", {})}
        options.setdefault("tables", tuple(map(TableSpec, tables)))
        return SourceDefinition("shop", self.url, "shop", options=own, **options)

    async def create_table(self, name: str) -> None:
        await self.execute(
            f"create table {_quoted(name)} (id bigint primary key, name text not null,"
            " amount numeric(12,2), note text)",
            f"alter table {_quoted(name)} alter note set storage external",
        )

    async def create_typed_table(self, name: str, cases: list[TypeCase]) -> None:
        columns = "".join(f", c{i} {case.declared}" for i, case in enumerate(cases))
        await self.execute(f"create table {_quoted(name)} (id bigint primary key{columns})")

    async def insert_typed(self, name: str, id: int, cases: list[TypeCase | None]) -> None:
        values = "".join(f", {'null' if case is None else case.literal}" for case in cases)
        await self.execute(f"insert into {_quoted(name)} values ({id}{values})")

    async def writer(self) -> PostgresWriter:
        return PostgresWriter(self)

    async def take_connection(self) -> AsyncConnection[Any]:
        """One that no writer uses."""
        if self.idle:
            return self.idle.pop()
        connection = await AsyncConnection.connect(self.url)
        self._connections.append(connection)
        return connection

    async def rows(self, table: str) -> list[tuple[Any, ...]]:
        async with await AsyncConnection.connect(self.url, autocommit=True) as connection:
            names = ", ".join(COLUMNS)
            cursor = await connection.execute(
                f"select {names}, t.* from {_quoted(table)} t order by id".encode()
            )
            found = [column.name for column in cursor.description or ()]
            places = [*range(4), *(i for i, n in enumerate(found) if i > 3 and n not in COLUMNS)]
            return [tuple(row[i] for i in places) for row in await cursor.fetchall()]

    async def add_column(self, table: str, name: str, default: int) -> None:
        await self.execute(
            f"alter table {_quoted(table)} add column {_quoted(name)} integer default {default}"
        )

    async def drop_table(self, name: str) -> None:
        await self.execute(f"drop table {_quoted(name)}")

    async def drop_column(self, table: str, name: str) -> None:
        await self.execute(f"alter table {_quoted(table)} drop column {_quoted(name)}")

    async def create_keyless_table(self, name: str) -> None:
        await self.execute(f"create table {_quoted(name)} (a integer)")

    async def allow_filter(self, table: str, column: str) -> None:
        """A column of a row filter must be in the replica identity."""
        await self.execute(f"alter table {_quoted(table)} replica identity full")

    async def leftovers(self) -> list[str]:
        async with await AsyncConnection.connect(self.url, autocommit=True) as connection:
            cursor = await connection.execute(
                "select slot_name::text from pg_replication_slots"
                " where database = current_database()"
                " union all select pubname::text from pg_publication"
            )
            return [name for (name,) in await cursor.fetchall()]

    async def lose_position(self) -> None:
        await self._run_elsewhere(
            "select pg_terminate_backend(active_pid) from pg_replication_slots"
            f" where slot_name = '{self.slot}' and active"
        )
        until = time.monotonic() + 10
        while True:
            try:
                await self._run_elsewhere(
                    "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
                    f" where slot_name = '{self.slot}'"
                )
                return
            except psycopg.errors.ObjectInUse:
                assert time.monotonic() < until
                await asyncio.sleep(0.02)

    async def kill_server(self) -> None:
        self.idle.clear()
        await asyncio.to_thread(self._cluster.kill)

    async def start_server(self) -> None:
        """The processes of the killed server may need a moment to notice."""
        until = time.monotonic() + 30
        while True:
            try:
                await asyncio.to_thread(self._cluster.start)
                return
            except subprocess.CalledProcessError:
                assert time.monotonic() < until
                await asyncio.sleep(0.1)

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()
        await self.lose_position()
        await self._run_elsewhere(f"drop database if exists {self._database} with (force)")

    async def execute(self, *statements: str) -> None:
        """Each in its own transaction."""
        async with await AsyncConnection.connect(self.url, autocommit=True) as connection:
            for statement in statements:
                await connection.execute(statement.encode())

    async def _run_elsewhere(self, statement: str) -> None:
        async with await AsyncConnection.connect(self._cluster.url, autocommit=True) as connection:
            await connection.execute(statement.encode())


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string()


def _escaped(name: str) -> str:
    """For a statement with placeholders."""
    return _quoted(name).replace("%", "%%")


POSTGRES_TYPES = [
    TypeCase("smallint", "-32768", "smallint", "-32768"),
    TypeCase("integer", "2147483647", "integer", "2147483647"),
    TypeCase("bigint", "-9223372036854775808", "bigint", "-9223372036854775808"),
    TypeCase("numeric(12,2)", "12.50", "numeric(12,2)", "12.50"),
    TypeCase("numeric", "'NaN'", "numeric", "NaN"),
    TypeCase("real", "0.1", "real", "0.1"),
    TypeCase("double precision", "'-Infinity'", "double precision", "-Infinity"),
    TypeCase("boolean", "true", "boolean", "t"),
    TypeCase("text", "E'Zoë\\t\\n\\\\ 中 😀'", "text", "Zoë\t\n\\ 中 😀"),
    TypeCase("text", "''", "text", ""),
    TypeCase("varchar(20)", "'a'", "character varying(20)", "a"),
    TypeCase("char(4)", "'ab'", "character(4)", "ab  "),
    TypeCase("bytea", "'\\x00ff'", "bytea", "\\x00ff"),
    TypeCase("date", "'2026-01-31'", "date", "2026-01-31"),
    TypeCase("timestamptz", "'2026-01-31 12:00:00.123456+02'",
             "timestamp with time zone", "2026-01-31 10:00:00.123456+00"),
    TypeCase("timestamp(3)", "'2026-01-31 12:00:00.123'",
             "timestamp(3) without time zone", "2026-01-31 12:00:00.123"),
    TypeCase("time", "'12:30:00'", "time without time zone", "12:30:00"),
    TypeCase("timetz", "'12:30:00+02'", "time with time zone", "12:30:00+02"),
    TypeCase("interval", "'1 year 2 days 03:04:05'", "interval", "1 year 2 days 03:04:05"),
    TypeCase("uuid", "'11111111-2222-3333-4444-555555555555'", "uuid",
             "11111111-2222-3333-4444-555555555555"),
    TypeCase("json", "'{\"a\": [1, null]}'", "json", '{"a": [1, null]}'),
    TypeCase("jsonb", "'{\"a\": [1, null]}'", "jsonb", '{"a": [1, null]}'),
    TypeCase("inet", "'10.0.0.0/8'", "inet", "10.0.0.0/8"),
    TypeCase("int4range", "'[1,5)'", "int4range", "[1,5)"),
    TypeCase("point", "'(1,2)'", "point", "(1,2)"),
    TypeCase("bit(3)", "B'101'", "bit(3)", "101"),
    TypeCase("tsvector", "'a b'", "tsvector", "'a' 'b'"),
    TypeCase("money", "'1234.50'", "money", "$1,234.50"),
    TypeCase("text[]", "array['a,b', null, '\"']", "text[]", '{"a,b",NULL,"\\""}'),
    TypeCase("integer[]", "array[[1,2],[3,4]]", "integer[]", "{{1,2},{3,4}}"),
    TypeCase("mood", "'happy'", "text", "happy"),
    TypeCase("mood[]", "array['happy','sad']::mood[]", "text[]", "{happy,sad}"),
    TypeCase("price", "9.99", "numeric(8,2)", "9.99"),
    TypeCase("pair", "row(1, 'x y')", "text", '(1,"x y")'),
    TypeCase("regclass", "'pg_class'", "text", "pg_class"),
]  # fmt: skip
