"""A MariaDB under load is mirrored while everything is killed: the runner 30 times, Headwater's
PostgreSQL twice, MariaDB once, all with SIGKILL or an immediate stop.

Every write increases its row's version. So the log is right exactly if the versions of each key
follow one another without a gap or a repetition, and the mirror if it equals the source.
`SEED=8123` repeats the decisions of a run.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pymysql
import pytest

from headwater.capture.mirror import registry
from headwater.capture.postgres import schema
from headwater.capture.source import SourceDefinition, TableSpec
from headwater.database import connect
from headwater.embedded import EmbeddedPostgres
from headwater.errors import HeadwaterError
from tests.support.databases import passable_folder
from tests.support.mariadb import MariaDB, running_mariadb

SEED = int(os.environ.get("SEED") or random.randrange(10_000))
KILLS = 30
WRITERS = 3
TABLE = (
    "create table shop.orders (id int primary key, version int not null, writer int not null,"
    " note varchar(200) not null)"
)


class Writer(threading.Thread):
    """Writes transactions of one to six changes to its own keys, until it is stopped. A server that
    is gone is waited for."""

    def __init__(self, server: MariaDB, number: int) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._number = number
        self._random = random.Random(SEED * 10 + number)
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            try:
                with self._server.connect("shop", autocommit=False) as connection:
                    while not self.stopped.wait(0.003):
                        self._transaction(connection)
            except (pymysql.err.Error, OSError):
                self.stopped.wait(0.05)

    def _transaction(self, connection: Any) -> None:
        with connection.cursor() as cursor:
            for _ in range(self._random.randrange(1, 7)):
                self._change(cursor, self._number * 1_000 + self._random.randrange(60))
        if self._random.random() < 0.1:
            connection.rollback()
        else:
            connection.commit()

    def _change(self, cursor: Any, id: int) -> None:
        note = "x" * self._random.randrange(200)
        cursor.execute("select version from orders where id = %s", (id,))
        found = cursor.fetchone()
        if found is None:
            cursor.execute(
                "insert into orders values (%s, %s, %s, %s)", (id, 1, self._number, note)
            )
        elif self._random.random() < 0.1:
            cursor.execute("delete from orders where id = %s", (id,))
        else:
            cursor.execute(
                "update orders set version = version + 1, note = %s where id = %s", (note, id)
            )


@contextmanager
def runner(url: str) -> Iterator[None]:
    """`headwater source run`, killed at the end of the block."""
    command = [sys.executable, "-m", "headwater", "source", "run"]
    with subprocess.Popen(
        command,
        env=os.environ | {"HEADWATER_URL": url},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield
        finally:
            process.kill()


@pytest.mark.timeout(300)
async def test_kills_under_load_lose_and_repeat_nothing() -> None:
    chance = random.Random(SEED)
    with (
        passable_folder() as folder,
        EmbeddedPostgres(folder / "data") as server,
        running_mariadb() as mariadb,
    ):
        mariadb.run("create database shop", TABLE)
        async with await connect(server.url, purpose="test", application_path=True) as connection:
            await schema.install(connection)
            definition = SourceDefinition(
                "shop", mariadb.url("shop"), "shop", tables=(TableSpec("orders"),)
            )
            await registry.declare(connection, definition, "command")
        writers = [Writer(mariadb, number) for number in range(1, WRITERS + 1)]
        for writer in writers:
            writer.start()
        try:
            await kill_everything(server, mariadb, chance)
        finally:
            for writer in writers:
                writer.stopped.set()
                writer.join()
        with runner(server.url):
            await until_same(server.url, mariadb)
        check_log(server.url)


async def kill_everything(
    server: EmbeddedPostgres, mariadb: MariaDB, chance: random.Random
) -> None:
    for kill in range(KILLS):
        with runner(server.url):
            # Some come while it starts, most while it applies changes.
            if kill == 0 or chance.random() < 0.8:
                await until_advanced(server.url)
            await asyncio.sleep(chance.uniform(0, 0.3))
            if kill in (KILLS // 3, KILLS * 2 // 3):
                server.stop_now()
                server.start()
            if kill == KILLS // 2:
                mariadb.kill()
                await asyncio.sleep(0.2)
                mariadb.start()


async def until_advanced(url: str) -> None:
    """Wait until the runner has applied a transaction after the first copy."""
    async with asyncio.timeout(60):
        before = await newest(url)
        while True:
            if await newest(url) != before:
                return
            await asyncio.sleep(0.02)


async def newest(url: str) -> tuple[Any, ...] | None:
    async with await connect(url, purpose="test") as connection:
        cursor = await connection.execute(
            "select max(xid)::text from headwater.source_transactions"
            " where exists (select from headwater.source_tables where state = 'live')"
        )
        return await cursor.fetchone()


async def until_same(url: str, mariadb: MariaDB) -> None:
    there = sorted(mariadb.run("select * from shop.orders"))
    async with asyncio.timeout(60):
        while True:
            try:
                here = await rows(url)
            except (psycopg.Error, HeadwaterError):
                here = []
            if here == there:
                return
            await asyncio.sleep(0.1)


async def rows(url: str) -> list[tuple[Any, ...]]:
    async with await connect(url, purpose="test") as connection:
        cursor = await connection.execute("select * from shop.orders order by id")
        return await cursor.fetchall()


def check_log(url: str) -> None:
    """The changes after the first copy: each begins where the last one of its key ended."""
    with psycopg.connect(url) as connection:
        found = connection.execute(
            "select op, key ->> 'id', (before ->> 'version')::int, (after ->> 'version')::int"
            " from headwater.changes where table_name = 'orders' and op <> 'reset' order by seq"
        ).fetchall()
    assert len(found) > 500, f"seed {SEED}: the writers wrote too little"
    version: dict[str, int | None] = {}
    for op, key, before, after in found:
        if key in version:
            assert version[key] == before, f"seed {SEED}: {op} of {key}"
        if op == "insert":
            assert (before, after) == (None, 1), f"seed {SEED}: {op} of {key}"
        if op == "update":
            assert after == before + 1, f"seed {SEED}: {op} of {key}"
        version[key] = after
