"""The driver of the contract suite for MariaDB: a database of its own for each test, on one server.

Writers are connections of PyMySQL in threads, each with autocommit off.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from decimal import Decimal
from typing import Any

import pymysql

from headwater.capture.mysql.connection import quoted
from headwater.capture.source import SourceDefinition, TableSpec
from tests.contract.sources.driver import TypeCase
from tests.support.mariadb import MariaDB, fresh_mariadb_database

TYPES = [
    TypeCase("tinyint", "-128", "smallint", "-128"),
    TypeCase("tinyint unsigned", "255", "smallint", "255"),
    TypeCase("bool", "true", "smallint", "1"),
    TypeCase("smallint", "-32768", "smallint", "-32768"),
    TypeCase("smallint unsigned", "65535", "integer", "65535"),
    TypeCase("mediumint", "-8388608", "integer", "-8388608"),
    TypeCase("mediumint unsigned", "16777215", "integer", "16777215"),
    TypeCase("int", "-2147483648", "integer", "-2147483648"),
    TypeCase("int(8) unsigned zerofill", "42", "bigint", "42"),
    TypeCase("bigint", "-9223372036854775808", "bigint", "-9223372036854775808"),
    TypeCase("bigint unsigned", "18446744073709551615", "numeric(20,0)", "18446744073709551615"),
    TypeCase("decimal(12,2)", "-1234567890.12", "numeric(12,2)", "-1234567890.12"),
    TypeCase("decimal(65,30)", "0.000000000000000000000000000001", "numeric(65,30)",
             "0.000000000000000000000000000001"),
    TypeCase("decimal(9)", "-999999999", "numeric(9,0)", "-999999999"),
    TypeCase("float", "0.1", "real", "0.1"),
    TypeCase("double", "0.1", "double precision", "0.1"),
    TypeCase("double", "-1.7976931348623157e308", "double precision", "-1.7976931348623157e+308"),
    TypeCase("bit(1)", "1", "boolean", "t"),
    TypeCase("bit(12)", "b'101000000001'", "bit(12)", "101000000001"),
    TypeCase("bit(64)", "1", "bit(64)", "0" * 63 + "1"),
    TypeCase("date", "'2024-02-29'", "date", "2024-02-29"),
    TypeCase("date", "'0000-00-00'", "date", None),
    TypeCase("date", "'2024-00-15'", "date", None),
    TypeCase("datetime", "'1000-01-01 00:00:00'", "timestamp without time zone",
             "1000-01-01 00:00:00"),
    TypeCase("datetime(6)", "'9999-12-31 23:59:59.999999'", "timestamp without time zone",
             "9999-12-31 23:59:59.999999"),
    TypeCase("datetime(3)", "'0000-00-00 00:00:00'", "timestamp without time zone", None),
    TypeCase("timestamp null", "'2024-07-01 10:20:30'", "timestamp with time zone",
             "2024-07-01 10:20:30+00"),
    TypeCase("timestamp(1) null", "'2038-01-19 03:14:07.5'", "timestamp with time zone",
             "2038-01-19 03:14:07.5+00"),
    TypeCase("timestamp null", "'0000-00-00 00:00:00'", "timestamp with time zone", None),
    TypeCase("time", "'-838:59:59'", "interval", "-838:59:59"),
    TypeCase("time(4)", "'-00:00:00.0001'", "interval", "-00:00:00.0001"),
    TypeCase("year", "2024", "smallint", "2024"),
    TypeCase("year", "0", "smallint", "0"),
    TypeCase("char(5)", "'ab  '", "text", "ab"),
    TypeCase("varchar(300)", "'Zoë 🦊 '", "text", "Zoë 🦊 "),
    TypeCase("varchar(20) character set latin1", "'café €'", "text", "café €"),
    TypeCase("char(5) character set ucs2", "'日本'", "text", "日本"),
    TypeCase("text character set sjis", "'日本'", "text", "日本"),
    TypeCase("varchar(20) collate utf8mb4_bin", "'A\\0b'", "text", "A\u2400b"),
    TypeCase("tinytext", "'x'", "text", "x"),
    TypeCase("mediumtext", "repeat('ab', 40000)", "text", "ab" * 40000),
    TypeCase("longtext", "''", "text", ""),
    TypeCase("binary(4)", "x'0100'", "bytea", "\\x01000000"),
    TypeCase("varbinary(300)", "x'00ff00'", "bytea", "\\x00ff00"),
    TypeCase("tinyblob", "''", "bytea", "\\x"),
    TypeCase("longblob", "repeat(x'ab', 70000)", "bytea", "\\x" + "ab" * 70000),
    TypeCase("enum('a','it''s','é')", "'é'", "text", "é"),
    TypeCase("enum('a','é') character set latin1", "'é'", "text", "é"),
    TypeCase("enum('a','b')", "'unknown'", "text", ""),
    TypeCase("set('x','y','z')", "'z,x'", "text", "x,z"),
    TypeCase("set('x','y')", "''", "text", ""),
    TypeCase("json", "'{\"a\": [1, \"ü\\\\u0000\"]}'", "jsonb", '{"a": [1, "ü\u2400"]}'),
    TypeCase("uuid", "'c0137b05-e349-11f1-b29e-02fc00000000'", "uuid",
             "c0137b05-e349-11f1-b29e-02fc00000000"),
    TypeCase("inet4", "'10.0.0.0'", "inet", "10.0.0.0"),
    TypeCase("inet6", "'2001:db8::'", "inet", "2001:db8::"),
    TypeCase("point", "point(1, 2)", "bytea",
             "\\x000000000101000000000000000000f03f0000000000000040"),
]  # fmt: skip


class MysqlWriter:
    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def _run(self, statement: str, values: Any = None, *, many: bool = False) -> None:
        def run() -> None:
            with self._connection.cursor() as cursor:
                if many:
                    cursor.executemany(statement, values)
                else:
                    cursor.execute(statement, values)

        await asyncio.to_thread(run)

    async def insert(self, table: str, row: dict[str, Any]) -> None:
        await self.insert_many(table, [row])

    async def insert_many(self, table: str, rows: list[dict[str, Any]]) -> None:
        columns = list(rows[0])
        names, places = ", ".join(map(quoted, columns)), ", ".join(["%s"] * len(columns))
        values = [tuple(row[column] for column in columns) for row in rows]
        statement = f"insert into {quoted(table)} ({names}) values ({places})"
        await self._run(statement, values, many=True)

    async def update(self, table: str, id: int, values: dict[str, Any]) -> None:
        settings = ", ".join(f"{quoted(column)} = %s" for column in values)
        statement = f"update {quoted(table)} set {settings} where id = %s"
        await self._run(statement, (*values.values(), id))

    async def rekey(self, table: str, id: int, to: int) -> None:
        await self._run(f"update {quoted(table)} set id = %s where id = %s", (to, id))

    async def delete(self, table: str, id: int) -> None:
        await self._run(f"delete from {quoted(table)} where id = %s", (id,))

    async def truncate(self, table: str) -> None:
        await self._run(f"truncate table {quoted(table)}")

    async def commit(self) -> None:
        await asyncio.to_thread(self._connection.commit)

    async def rollback(self) -> None:
        await asyncio.to_thread(self._connection.rollback)


class MysqlDriver:
    """Made by `opened`, which drops the database at the end."""

    kind = "mysql"
    can = frozenset(
        {
            "transactions", "interleave", "rekey", "truncate", "ddl", "lose_position", "restart",
            "names", "keyless", "missing",
        }
    )  # fmt: skip

    def __init__(self, server: MariaDB, database: str) -> None:
        self.types = list(TYPES)
        self.server = server
        self.database = database
        self._writers = list[Any]()

    @classmethod
    @asynccontextmanager
    async def opened(cls, server: MariaDB) -> AsyncIterator[MysqlDriver]:
        with fresh_mariadb_database(server) as database:
            driver = cls(server, database)
            try:
                yield driver
            finally:
                await driver.close()

    async def create_keyless_table(self, name: str) -> None:
        await asyncio.to_thread(
            self.server.run, f"create table {quoted(name)} (a int)", database=self.database
        )

    async def allow_filter(self, table: str, column: str) -> None:
        """A predicate needs nothing: the runner decides it."""

    async def leftovers(self) -> list[str]:
        """Capture makes nothing in a MySQL database."""
        return []

    def definition(self, *tables: str, **options: Any) -> SourceDefinition:
        fields: dict[str, Any] = {
            "name": "shop",
            "url": self.server.url(self.database),
            "into": "shop",
            "tables": tuple(TableSpec(table) for table in tables),
        }
        return SourceDefinition(**(fields | options))

    async def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        return await asyncio.to_thread(self.server.run, *statements, database=self.database)

    async def create_table(self, name: str) -> None:
        await self.execute(
            f"create table {quoted(name)} (id bigint primary key, name text not null,"
            " amount decimal(12,2) not null, note longtext)"
        )

    async def create_typed_table(self, name: str, cases: list[TypeCase]) -> None:
        columns = "".join(f", c{i} {case.declared}" for i, case in enumerate(cases))
        await self.execute(f"create table {quoted(name)} (id bigint primary key{columns})")

    async def insert_typed(self, name: str, id: int, cases: list[TypeCase | None]) -> None:
        values = "".join(f", {'null' if case is None else case.literal}" for case in cases)
        await self.execute(
            "set sql_mode = '', time_zone = '+00:00'",
            f"insert into {quoted(name)} values ({id}{values})",
        )

    async def writer(self) -> MysqlWriter:
        connection = await asyncio.to_thread(self.server.connect, self.database, autocommit=False)
        self._writers.append(connection)
        return MysqlWriter(connection)

    async def rows(self, table: str) -> list[tuple[Any, ...]]:
        found = await self.execute(f"select * from {quoted(table)} order by id")
        return [(int(row[0]), row[1], Decimal(row[2]), *row[3:]) for row in found]

    async def add_column(self, table: str, name: str, default: int) -> None:
        await self.execute(
            f"alter table {quoted(table)} add column {quoted(name)} int not null default {default}"
        )

    async def drop_table(self, name: str) -> None:
        await self.execute(f"drop table {quoted(name)}")

    async def drop_column(self, table: str, name: str) -> None:
        await self.execute(f"alter table {quoted(table)} drop column {quoted(name)}")

    async def lose_position(self) -> None:
        """A change is written first, so that there is one to forget."""
        await self.execute(
            "create table if not exists forgotten (id int primary key)",
            "replace into forgotten values (1)",
            "flush binary logs",
        )
        last = (await self.execute("show binary logs"))[-1][0]
        async with asyncio.timeout(30):
            while (await self.execute("show binary logs"))[0][0] != last:
                await self.execute(f"purge binary logs to '{last}'")
                await asyncio.sleep(0.05)

    async def kill_server(self) -> None:
        await asyncio.to_thread(self.server.kill)

    async def start_server(self) -> None:
        await asyncio.to_thread(self.server.start)

    async def close(self) -> None:
        for connection in self._writers:
            with suppress(pymysql.err.Error):
                connection.close()
        self._writers.clear()
