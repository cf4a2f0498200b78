"""Chunks of a copy, against real servers."""

from __future__ import annotations

import asyncio
from functools import partial

import psycopg
import pytest

from headwater import limits
from headwater.capture.postgres.wal import snapshot
from headwater.capture.postgres.wal.source import PostgresSource
from headwater.capture.source import SourceKey, SourceRow, TransactionPart
from headwater.errors import SourceUnavailable
from tests.contract.sources.drivers.postgres_wal import SETTINGS, PostgresWalDriver
from tests.support.cluster import releases, running
from tests.support.wal_replica import eventually


async def read_all(source: PostgresSource, name: str, rows: int) -> list[SourceRow]:
    """All chunks, one after the other."""
    (table,) = [table for table in await source.tables() if table.name == name]
    found: list[SourceRow] = []
    last: SourceKey | None = None
    while True:
        chunk = await source.snapshot(table, last, rows)
        assert len(chunk.rows) <= rows
        found += chunk.rows
        if chunk.last is None:
            return found
        last = chunk.last


@pytest.mark.parametrize(
    ("columns", "values"),
    [
        ("a bigint, b text", "i % 7, 'b' || i"),
        ("a text collate \"C\", b numeric", "'ä' || i, i / 4.0"),
        ("a mood, b int", "(array['happy', 'sad'])[i % 2 + 1]::mood, i"),
        ("a int[], b bytea", "array[i, i % 3], decode(to_hex(i + 4096), 'hex')"),
        ("a price, b boolean, c int", "i % 5, i % 2 = 0, i"),
        ("a pair, b text", "row(i, 'x')::pair, E'tab\\tand\\\\slash'"),
    ],
)  # fmt: skip
async def test_every_row_comes_once_in_chunks(
    driver: PostgresWalDriver, columns: str, values: str
) -> None:
    names = [column.split()[0] for column in columns.split(", ")]
    await driver.execute(
        f"create table t ({columns}, primary key ({', '.join(names)}))",
        f"insert into t select {values} from generate_series(1, 100) i",
    )
    source = PostgresSource(driver.definition("t"))
    for rows in (1000, 50, 7, 1):
        found = await read_all(source, "t", rows)
        assert (len(found), len(set(found))) == (100, 100)
    await source.close()


async def test_a_chunk_is_bounded_in_bytes(
    driver: PostgresWalDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "SOURCE_CHUNK_BYTES", 100_000)
    await driver.create_table("orders")
    await driver.execute(
        "insert into orders select i, 'a', 1, repeat('x', 30000) from generate_series(1, 50) i",
        "insert into orders values (51, 'large', 1, repeat('x', 300000))",
    )
    source = PostgresSource(driver.definition("orders"))
    (table,) = await source.tables()
    assert len((await source.snapshot(table, None, 100)).rows) == 3
    assert len(await read_all(source, "orders", 100)) == 51
    assert limits.SOURCE_CHUNK_BYTES > 100_000
    await source.close()


async def _waits_for_standby(url: str) -> bool:
    """Whether new sessions have the setting."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        row = await (await connection.execute("show synchronous_standby_names")).fetchone()
        return row == ("absent",)


async def test_a_chunk_has_what_the_tail_has_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a synchronous standby that does not answer, a commit is in the log, and the tail returns
    it, but no session sees its rows. A chunk without them would be wrong."""
    monkeypatch.setattr(snapshot, "VISIBLE_SECONDS", 0.3)
    settings = SETTINGS | {"synchronous_commit": "on"}
    with running(max(releases(), key=int), settings) as cluster:
        async with PostgresWalDriver.opened(cluster) as driver:
            await driver.create_table("orders")
            source = PostgresSource(driver.definition("orders"))
            (table,) = await source.tables()
            position = await source.start()
            await driver.execute(
                "alter system set synchronous_standby_names = 'absent'", "select pg_reload_conf()"
            )
            await eventually(partial(_waits_for_standby, driver.url))
            items = source.changes(position)
            writing = asyncio.create_task(
                driver.execute("insert into orders values (1, 'a', 1, null)")
            )
            while not isinstance(item := await anext(items), TransactionPart):
                pass
            assert not writing.done()
            with pytest.raises(SourceUnavailable, match="stays invisible"):
                await source.snapshot(table, None, 10)
            await driver.execute(
                "set synchronous_commit = local",
                "alter system reset synchronous_standby_names",
                "select pg_reload_conf()",
            )
            await writing
            chunk = await source.snapshot(table, None, 10)
            assert len(chunk.rows) == 1
            assert source.contains(chunk.low, item.position or "")
            await items.aclose()
            await source.remove()
            await source.close()
