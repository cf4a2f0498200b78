"""Images of rows from the WAL are the same texts that triggers write, for values of every type."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

import pytest

from headwater.database import Connection, connect
from headwater.log.reading.reader import LogReader
from headwater.testing.values import prepare, types, values
from tests.support.databases import fresh_database
from tests.support.generators.sizes import first_seed, size
from tests.support.log_probe import enable, rows, run
from tests.support.wal_capture import capturing, enable_wal

SEED = first_seed(41)
VALUES = size("wal_values", 12, large=2_000)
"""Of each type."""

TYPES = """
    create type mood as enum ('sad', 'so "so"', 'glad');
    create domain positive as numeric check (value > 0);
    create type point3 as (x int, "y y" text, at timestamptz, tags text[]);
    create domain place as point3;
    create table samples (
      id int primary key, mood mood, positive positive, point point3, place place, moods mood[],
      points point3[], "Büro ""\\" text default e'a\\b\t\n"', raw json, doc jsonb, day date,
      span daterange, bits bit varying, cash money, flags "char", vector int2vector,
      fixed char(6), binary_ bytea, long text);
"""

ROWS = (
    "1, 'sad', 1.50, row(1, 'a \"b\"', '2026-01-02 03:04:05.6+02', '{x,NULL,\"y z\"}'),"
    " row(2, null, '-infinity', null), '{sad,glad}', array[row(1,'',null,'{}')::point3, null],"
    ' default, \'{"a":\n 1,  "b" : "\\u0000"}\', \'{"b": 1, "a": [1.0, null]}\','
    " '0044-03-15 BC', '[2026-01-01,2026-02-01)', B'0101', 12.5, 'x', '1 2 3', 'ab',"
    " '\\x00ff', repeat('long ', 5000)",
    "2" + ", null" * 18,
)


@pytest.fixture(params=["embedded", "system"])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    server = (
        request.getfixturevalue("postgres").url
        if request.param == "embedded"
        else request.getfixturevalue("system_postgres")
    )
    with fresh_database(server, installed=True) as url:
        yield url


@pytest.mark.timeout(300 + VALUES)
async def test_an_image_from_the_wal_is_the_image_of_a_trigger(database: str) -> None:
    count = 0
    async with (
        await connect(database, purpose="test", application_path=True) as connection,
        await connect(database, purpose="reader", application_path=True) as reading,
        capturing(database),
    ):
        await prepare(connection)
        names = await types(connection)
        found = {name: texts for name in names if (texts := await _values(connection, name))}
        columns = ", ".join(f"v{number} {name}" for number, name in enumerate(found))
        for table in ("by_trigger", "by_wal"):
            await run(connection, f"create table {table} (id int primary key, {columns})")
        await enable(connection, "by_trigger")
        await enable_wal(connection, "by_wal")
        for number, (name, texts) in enumerate(found.items()):
            count += len(texts)
            listed = ", ".join([f"(%s, %s::{name})"] * len(texts))
            first = number * 10_000
            numbered = [each for pair in enumerate(texts, first) for each in pair]
            await connection.execute(
                f"insert into by_trigger (id, v{number}) values {listed}".encode(), numbered
            )
            await run(
                connection,
                f"insert into by_wal select * from by_trigger where id >= {first} order by id",
            )
        assert await _differences(reading) == []
    print(f"\nseed {SEED}: {count:,} values of {len(found)} types")
    assert count > 3 * len(found)


async def test_images_of_types_that_users_made(database: str) -> None:
    async with (
        await connect(database, purpose="test", application_path=True) as connection,
        await connect(database, purpose="reader", application_path=True) as reading,
        capturing(database),
    ):
        await run(connection, TYPES.replace("samples", "by_trigger"))
        await run(connection, "create table by_wal (like by_trigger including all)")
        await enable(connection, "by_trigger")
        await enable_wal(connection, "by_wal")
        for table in ("by_trigger", "by_wal"):
            for row in ROWS:
                await run(connection, f"insert into {table} values ({row})")
            await run(
                connection,
                f"update {table} set mood = 'glad'",  # the long text is not in the new row
                f"update {table} set id = id + 10 where id = 1",
                f"update {table} set mood = mood",
                f"delete from {table}",
            )
        assert await _differences(reading) == []


async def _values(connection: Connection, name: str) -> list[str]:
    chance = random.Random(zlib.crc32(name.encode()) + SEED)
    found = await values(connection, name, chance, VALUES)
    return found if len(found) <= VALUES else chance.sample(found, VALUES)


async def _differences(connection: Connection) -> list[tuple[object, ...]]:
    """Waits until the log is complete, and returns rows of one table that the other lacks."""
    reader = await LogReader.open(connection)
    await reader.now(connection)
    counts = await rows(connection, f"select table_name, count(*) from ({_LOGGED}) l group by 1")
    assert len(dict(counts)) == 2, counts
    assert len(set(dict(counts).values())) == 1, counts
    return await rows(
        connection,
        f"with logged as ({_LOGGED})"
        " select n, op, before, after from logged where table_name = 'by_trigger'"
        " except select n, op, before, after from logged where table_name = 'by_wal'",
    )


_LOGGED = """
    select s.table_name, l.op, l.before::text as before, l.after::text as after,
           row_number() over (partition by s.table_name order by l.seq) as n
    from headwater.log l
    join (select distinct on (id) id, table_name from headwater.shapes) s on s.id = l.shape
    where l.op <> 'R'
"""
