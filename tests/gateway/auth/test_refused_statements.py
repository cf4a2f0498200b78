"""A statement that the database refuses because of a client: its constants, its claims, or a row
that a policy cannot handle. The client gets an error of its own request, not an unavailable
gateway."""

from __future__ import annotations

import json
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psycopg
import pytest

from headwater import connect
from headwater.client.connection import Connection as Client
from headwater.client.subscriptions.subscription import Live
from headwater.errors import Forbidden, FunctionFailed, HeadwaterError, InvalidQuery
from headwater.testing.gateway_process import Served, serving
from tests.gateway.auth.test_authorization import SECRET, token
from tests.gateway.test_oracle import LENIENT, quick
from tests.support.databases import fresh_database, passable_folder

PROGRAM = """
from headwater import Headwater, Context, MutationContext

hw = Headwater()
hw.table("jobs")
hw.table("notes")

hw.query("longer", sql="select id from jobs where took > %(took)s::interval", args={"took": str})
hw.query("own", sql="select id from notes")

@hw.query
async def own_notes(ctx: Context) -> list:
    return await ctx.fetch("select id from notes")

@hw.mutation
async def touch(ctx: MutationContext) -> int:
    return await ctx.execute("update notes set text = text")
"""

STATEMENTS = """
    create table jobs (id int primary key, took interval);
    insert into jobs values (1, '1 hour');
    create table notes (id int primary key, tenant int, share int default 1, text text);
    insert into notes values (1, 7, 1, 'secret'), (2, 8, 1, 'hidden');
    create role {role} nologin;
    grant select on jobs to {role};
    grant select, update on notes to {role};
    alter table notes enable row level security;
    create policy own on notes to {role} using (
      case when tenant = (current_setting('request.jwt.claims')::json ->> 'tenant_number')::int
      then 10 / share > 0 else false end);
    select headwater.enable_reactivity('jobs'), headwater.enable_reactivity('notes');
"""


@pytest.fixture(scope="module")
def database(postgres: Any) -> Iterator[tuple[str, str]]:
    role = f"tenant_{random.randrange(10**9)}"
    with (
        fresh_database(postgres.url, installed=True) as url,
        psycopg.connect(url, autocommit=True) as owner,
    ):
        owner.execute(STATEMENTS.format(role=role).encode())
        yield url, role
        owner.execute(f"drop owned by {role}; drop role {role}".encode())


@pytest.fixture(scope="module")
def gateway(database: tuple[str, str]) -> Iterator[Served]:
    url, role = database
    with passable_folder() as folder:
        (folder / "jobs.py").write_text(PROGRAM)
        settings = {**LENIENT, "auth_secret": SECRET, "auth_role": role}
        with serving(url, folder, program="jobs:hw", **settings) as served:
            yield served


@pytest.fixture
def client(gateway: Served) -> Callable[[Any], Client]:
    def connected(tenant: Any) -> Client:
        given = token("ann", tenant_number=tenant)
        return connect(gateway.url, token=given, backoff=quick)

    return connected


async def refused(asked: Any) -> HeadwaterError:
    """The error with which a subscription does not begin, or a call ends."""
    try:
        if isinstance(asked, Awaitable):
            await asked
        else:
            async with asked:
                pass
    except HeadwaterError as error:
        return error
    raise AssertionError("it was not refused")


BAD = [["took", ">", "a while"]]


async def test_a_constant_that_does_not_fit_the_type(client: Callable[[Any], Client]) -> None:
    async with client(7) as hw:
        for asked in (
            hw.live("jobs", where=BAD),
            hw.query("longer", took="a while"),
            hw.subscribe("longer", took="a while"),
        ):
            found = await refused(asked)
            assert isinstance(found, InvalidQuery), found
            assert "invalid input syntax for type interval" in str(found)


def test_over_http_the_request_is_refused(gateway: Served) -> None:
    for user, query, status in (
        (7, {"table": "jobs", "where": BAD}, 400),
        ("seven", {"table": "notes"}, 403),
    ):
        answer = gateway.get(
            "/v1/live",
            params={"q": json.dumps(query)},
            headers={"authorization": f"Bearer {token('ann', tenant_number=user)}"},
        )
        assert (answer.status_code, answer.json()["error"]["retryable"]) == (status, False)


async def test_a_claim_that_a_policy_cannot_handle(client: Callable[[Any], Client]) -> None:
    async with client("seven") as hw:
        found = await refused(hw.live("notes"))
        assert isinstance(found, Forbidden)
        assert "22P02" in str(found)
        assert "claims of the token" in str(found.hint)
        for asked in (hw.query("own"), hw.subscribe("own"), hw.query("own_notes")):
            assert not (await refused(asked)).retryable
        assert isinstance(await refused(hw.mutate("touch")), FunctionFailed)
    async with client(7) as hw, hw.live("notes") as live:  # others are as before
        assert [row["id"] for row in live.rows] == [1]


async def test_a_row_that_a_policy_cannot_handle_ends_the_views_that_read_it(
    database: tuple[str, str], gateway: Served, client: Callable[[Any], Client]
) -> None:
    """The policy divides by a value of the row, but only for those of its tenant."""
    with psycopg.connect(database[0], autocommit=True) as owner:
        async with (
            client(7) as seven,
            client(8) as eight,
            seven.live("notes") as live,
            eight.live("notes") as other,
        ):
            owner.execute("update notes set share = 0 where id = 1")
            with pytest.raises(Forbidden, match="22012") as caught:
                await _until(live, lambda: False)
            assert "division" not in str(caught.value)
            owner.execute("update notes set text = 'seen' where id = 2")
            await _until(other, lambda: other.rows[0]["text"] == "seen")
        owner.execute("update notes set share = 1")
    assert "division by zero" in gateway.log.read_text()


async def _until(live: Live, condition: Callable[[], bool]) -> None:
    async for _ in live.deltas():
        if condition():
            return
