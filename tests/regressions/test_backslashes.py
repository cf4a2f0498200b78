"""Databases and writers in which a backslash in a string literal is an escape."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.capture.postgres import schema
from headwater.database import Connection, connect
from headwater.hub.hub import Hub
from headwater.queries.context import Context
from headwater.queries.functions import Query
from tests.integration.hub.test_reactive import Follower
from tests.support.log_probe import enable, probing, run

OLD = "standard_conforming_strings = off"
# With names that need every kind of quoting.
TABLE = r'''"we'ird\t""x\'"'''
NAMES = (r'"a\"', r""""b'\"""", r'"c""\n"', r'"$$"', r'''"d\'"''')


@pytest.fixture(params=["postgres_url", "icu_postgres_url"])
def server_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture
async def old_url(empty_url: str) -> str:
    """The URL of a database with `standard_conforming_strings = off`, without Headwater."""
    connection = await connect(empty_url, purpose="test", application_path=True)
    await run(connection, f"alter database {connection.info.dbname} set {OLD}")
    await connection.close()
    return empty_url


async def test_installing(old_url: str) -> None:
    connection = await connect(old_url, purpose="test", application_path=True)
    await schema.install(connection)
    await run(connection, "create table t (id int primary key, s text)")
    await enable(connection, "t")
    async with probing(old_url) as probe:
        await run(connection, r"insert into t values (1, 'a\b')")
        assert [dict(change.after or {}) for change in await probe.changes()] == [
            {"id": 1, "s": "a\\b"}
        ]
    await connection.close()


async def backslashes(ctx: Context) -> Any:
    return await ctx.fetch(r"select id, s from t where s = 'a\b' order by id")


async def test_queries_with_backslashes_are_exact(old_url: str) -> None:
    connection = await connect(old_url, purpose="test", application_path=True)
    await schema.install(connection)
    await run(connection, "create table t (id int primary key, s text)")
    await enable(connection, "t")
    async with Hub(old_url) as hub:
        follower = await Follower().follow(hub, Query("backslashes", backslashes))
        await run(connection, r"insert into t values (1, E'a\\b'), (2, E'a\b')")
        await follower.until_value([{"id": 1, "s": "a\\b"}])
    await connection.close()


@pytest.fixture
async def writer(other: Connection) -> Connection:
    await run(other, f"set {OLD}", "set backslash_quote = on", "set escape_string_warning = on")
    await run(other, "set client_min_messages = warning")
    return other


@pytest.mark.parametrize("partitioned", [False, True])
async def test_a_writer_with_escape_strings(
    url: str, connection: Connection, writer: Connection, partitioned: bool
) -> None:
    columns = ", ".join(f"{name} text" for name in NAMES)
    notices: list[str] = []
    writer.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
    await run(
        connection,
        f"create table {TABLE} ({NAMES[0]} text primary key, {columns.partition(', ')[2]})"
        + (f" partition by list ({NAMES[0]})" if partitioned else ""),
        *([rf'create table "p\'" partition of {TABLE} default'] if partitioned else []),
    )
    await connection.execute("select headwater.enable_reactivity(%s)", (TABLE,))
    async with probing(url) as probe:
        for step in range(2):
            await run(
                writer,
                f"insert into {TABLE} values ('{step}')",
                f"update {TABLE} set {NAMES[1]} = 'b' where {NAMES[0]} = '{step}'",
                f"delete from {TABLE} where {NAMES[0]} = '{step}'",
            )
            story = await probe.story()
            assert story == [("insert", f"{step}"), ("update", f"{step}"), ("delete", f"{step}")]
            # From here on no function fits, and each statement is built when it is needed.
            await run(connection, rf'alter table {TABLE} add column "e\{step}" text')
        await run(writer, f"truncate {TABLE}")
        assert await probe.story() == [("truncate",)]
    assert notices == []


async def test_a_writer_with_escape_strings_may_enable_and_synchronise(
    connection: Connection, writer: Connection
) -> None:
    await run(connection, f"create table {TABLE} ({NAMES[0]} text primary key)")
    await writer.execute("select headwater.enable_reactivity($1)".replace("$1", "%s"), (TABLE,))
    await run(connection, rf'alter table {TABLE} add column "e\'" text')
    await run(writer, "select headwater.sync_tables()")
    await run(writer, f"insert into {TABLE} values ('1')")
    cursor = await connection.execute("select after from headwater.log order by seq desc limit 1")
    assert await cursor.fetchall() == [({NAMES[0].strip('"'): "1", "e\\'": None},)]


async def test_every_function_with_a_backslash_sets_its_meaning(connection: Connection) -> None:
    cursor = await connection.execute(
        "select oid::regprocedure::text from pg_proc where pronamespace = 'headwater'::regnamespace"
        " and strpos(prosrc, chr(92)) > 0 and not coalesce(proconfig, '{}')"
        " @> array['standard_conforming_strings=on']"
    )
    assert await cursor.fetchall() == []
