"""Generated DDL, writes from sessions with cached plans, and maintenance in any order: afterwards a
follower of the log, a live client and a reactive query have the table's rows."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import psycopg
import pytest

from headwater.database import Connection, connect
from headwater.errors import HeadwaterError
from headwater.hub.hub import Hub
from tests.integration.hub.test_reactive import Follower, query
from tests.support.generators import ddl
from tests.support.generators.sizes import first_seed, size
from tests.support.log_probe import enable, rows, run
from tests.support.subscribers import Recorder, answer, live

HISTORIES = size("ddl", 1, large=100)
FIRST = first_seed(0)
STEPS = 40
TABLE = "items"


@pytest.fixture(params=["postgres", "system_postgres"])
def server_url(request: pytest.FixtureRequest) -> str:
    server = request.getfixturevalue(request.param)
    return server if isinstance(server, str) else str(server.url)


@pytest.fixture
async def sessions(url: str) -> AsyncIterator[list[Connection]]:
    found = [await connect(url, purpose="test", application_path=True) for _ in range(3)]
    yield found
    for each in found:
        await each.close()


async def attempt(session: Connection, statement: str) -> str:
    """Execute it, alone or as several statements; a refused statement changes nothing."""
    try:
        for part in statement.split(";"):
            await run(session, part)
    except psycopg.Error as error:
        await run(session, "rollback", "set session_replication_role = origin")
        return f"{statement}  -- {error.diag.message_primary}"
    return statement


@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + HISTORIES))
async def test_the_log_ends_with_the_rows_of_the_table(
    seed: int, url: str, connection: Connection, sessions: list[Connection]
) -> None:
    rng = random.Random(seed)
    version = connection.info.server_version
    story: list[str] = [*ddl.TYPES, *ddl.schema(rng, TABLE)]
    await run(connection, *story)
    while len(await rows(connection, f"select from {TABLE}")) < 8:
        story.append(await attempt(connection, ddl.write(rng, TABLE)))
    await enable(connection, TABLE)
    for session in sessions * 7:  # until plans are cached
        story += [await attempt(session, ddl.write(rng, TABLE))]
    async with Hub(url, recheck=3600.0) as hub:
        # Between the DDL and its reset there is a difference; the reset alone must end it.
        hub.reconciler.seconds = 3600.0
        follower = await ddl.LogFollower.begin(url, TABLE)
        client, reactive = Recorder(), Follower()
        await hub.live(live(TABLE, limit=1000), client)
        await reactive.follow(hub, ALL)
        for _ in range(STEPS):
            session = rng.choice(sessions)
            match rng.randrange(10):
                case 0 | 1 | 2:
                    text = ddl.statements(rng, TABLE, version)
                case 3:
                    text = "select headwater.sync_tables()"
                case 4:
                    text = f"begin isolation level repeatable read;{ddl.write(rng, TABLE)};commit"
                case _:
                    text = ddl.write(rng, TABLE)
            story.append(await attempt(session, text))
            if rng.random() < 0.3:
                await follower.catch_up()
            if rng.random() < 0.2:
                await run(connection, "select headwater.sync_tables()")
                story.append("-- maintenance, and a look")
                await follower.expect_the_tables_rows(";\n".join(story))
        await run(connection, "select headwater.sync_tables()")
        assert await rows(connection, "select headwater.sync_tables()") == [(0,)]
        await follower.expect_the_tables_rows(";\n".join(story))
        await hub.recheck()
        expected = await answer(connection, await images(connection))
        so_far = ";\n".join(story)
        await same(client, lambda: client.rows, expected, so_far)
        await same(reactive, lambda: reactive.value, await answer(connection, EVERY), so_far)
        late, late_reactive = Recorder(), Follower()
        await hub.live(live(TABLE, limit=1000), late)
        assert late.rows == expected, so_far
        await late_reactive.follow(hub, ALL)
        await same(
            late_reactive, lambda: late_reactive.value, await answer(connection, EVERY), so_far
        )
        await follower.close()


EVERY = f"select id, a, b, s, m::text, l::text, f::text, p::text, doubled from {TABLE} order by id"


async def everything(ctx):  # type: ignore[no-untyped-def]
    return await ctx.fetch(EVERY)


ALL = query(everything)


async def images(connection: Connection) -> str:
    """The table without its virtual columns."""
    ((names,),) = await rows(
        connection,
        "select string_agg(quote_ident(c ->> 'name'), ', ') from jsonb_array_elements("
        f"headwater.describe('{TABLE}'::regclass) -> 'columns') c",
    )
    return f"select {names} from {TABLE} order by id"


async def same(recorder: Recorder, found, expected, so_far: str) -> None:  # type: ignore[no-untyped-def]
    try:
        await recorder.until(lambda: found() == expected, 20)
    except TimeoutError:
        assert found() == expected, so_far
    except HeadwaterError as error:
        raise AssertionError(so_far) from error
