"""A role named headwater, as in the documentation: `"$user"` in its search path is the schema of
our own tables. A bare name in the application must never mean one of these."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headwater import Headwater
from headwater import connect as connect_client
from headwater.database import Connection, application_path, connect, connect_blocking
from headwater.pipeline.replay.targets import ReplayTarget
from headwater.testing.gateway_process import serving
from tests.integration.commands.test_cli import headwater
from tests.support.log_probe import rows, run

PROGRAM = """
    from headwater import Headwater

    hw = Headwater()
    hw.table("tickets")

    @hw.query
    async def seats(ctx):
        return await ctx.fetch("select seat from tickets order by id")

    @hw.mutation
    async def book(ctx, id: int, seat: str):
        await ctx.execute("insert into tickets (id, seat) values (%s, %s)", id, seat)
"""


@pytest.fixture(params=["postgres", "system_postgres"])
def server_url(request: pytest.FixtureRequest) -> str:
    server = request.getfixturevalue(request.param)
    return str(server if isinstance(server, str) else server.url)


@pytest.fixture
async def admin(empty_url: str) -> AsyncIterator[Connection]:
    connection = await connect(empty_url, purpose="test", application_path=True)
    await run(
        connection,
        "create role headwater login",
        f"grant create on database {connection.info.dbname} to headwater",
        "create table tickets (id int primary key, seat text)",
        "grant all on tickets to headwater",
    )
    yield connection
    await run(connection, "drop owned by headwater cascade", "drop role headwater")
    await connection.close()


@pytest.fixture
def own_url(empty_url: str, admin: Connection) -> str:
    return empty_url.replace("postgres@", "headwater@")


async def test_a_bare_name_is_a_table_of_the_application(
    own_url: str, admin: Connection, tmp_path: Path
) -> None:
    for command in (["init"], ["enable", "tickets"]):
        assert headwater(*command, "--url", own_url).returncode == 0
    (tmp_path / "booking.py").write_text(textwrap.dedent(PROGRAM))
    with serving(own_url, tmp_path, program="booking:hw") as gateway:
        async with (
            asyncio.timeout(60),
            connect_client(gateway.url) as client,
            client.live("tickets") as live,
            client.subscribe("seats") as seats,
        ):
            await client.mutate("book", id=1, seat="1A")
            async for _ in live:
                if [row["seat"] for row in live.rows] == ["1A"]:
                    break
            async for _ in seats:
                if seats.value == [{"seat": "1A"}]:
                    break
            assert [row["seat"] for row in await client.query("seats")] == ["1A"]
    assert await rows(admin, "select seat from public.tickets") == [("1A",)]
    captured = "select schema_name from headwater.tables where enabled and table_name = 'tickets'"
    assert await rows(admin, captured) == [("public",)]


async def test_connections_of_the_application_do_not_see_our_tables(own_url: str) -> None:
    async with Headwater(own_url) as hw, hw.connection() as connection:
        await run(connection, "select seat from tickets", "reset all", "select seat from tickets")
        await run(connection, "discard all", "select seat from tickets")
        assert await hw.enable("tickets") == "tickets"


async def test_a_replay_writes_to_the_applications_schema(own_url: str, admin: Connection) -> None:
    assert headwater("init", "--url", own_url).returncode == 0
    with connect_blocking(own_url, purpose="test") as database:
        assert ReplayTarget(database, "tickets")._qualified == '"public"."tickets"'
        assert ReplayTarget(database, "rebuilt")._qualified == '"public"."rebuilt"'


@pytest.mark.parametrize(
    ("path", "user", "expected"),
    [
        ('"$user", public', "headwater", '"public"'),
        ('"$user", public', "shop", '"$user", public'),
        ("headwater, public", "headwater", "headwater, public"),
        ('"$user"', "headwater", ""),
        ("a b", "headwater", "a b"),
    ],
)
def test_the_path_of_the_application(path: str, user: str, expected: str) -> None:
    assert application_path(path, user) == expected
