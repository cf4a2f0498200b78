"""Chunks as on a MySQL without GTIDs: a read lock is the fence. No MySQL can be installed here, so
MariaDB is taken for one."""

from __future__ import annotations

import asyncio

import pytest

from headwater.capture.mysql.connection import connect, parse_url
from headwater.capture.mysql.describe import Charsets, describe, find_tables
from headwater.capture.mysql.positions import Position
from headwater.capture.mysql.server import Server
from headwater.capture.mysql.snapshot import Snapshots
from tests.contract.sources.drivers.mysql import MysqlDriver


@pytest.fixture
def server() -> Server:
    return Server("mysql", (5, 7, 0), "uuid", fold=False, gtids=False)


async def test_chunk_waits_for_writers(driver: MysqlDriver, server: Server) -> None:
    """A transaction that has written to the table is either committed before the mark, or after."""
    await driver.execute("create table t (id int primary key)", "insert into t values (1), (2)")
    address = parse_url(f"mysql://root@127.0.0.1:{driver.server.port}/{driver.database}")
    writer = await driver.writer()
    await writer.insert("t", {"id": 3})

    def read() -> tuple[int, Position, Position]:
        with connect(address) as connection:
            definition = driver.definition("t")
            ((spec, found),), _ = find_tables(
                connection, definition, address, fold=False, mariadb=True
            )
            table = describe(spec, found)
            snapshots = Snapshots(connection, server)
            chunk = snapshots.chunk(table, table.source, Charsets({}, {}), None, 10)
            assert not snapshots.broken
            return len(chunk.rows), Position.parse(chunk.low), Position.parse(chunk.high)

    reading = asyncio.create_task(asyncio.to_thread(read))
    waiting = "select 1 from information_schema.processlist where state like 'Waiting for%lock%'"
    async with asyncio.timeout(30):
        while not await driver.execute(waiting):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await writer.commit()
    rows, low, high = await reading
    assert rows == 3
    assert low.gtids == ""
    assert high >= low
