"""Tickets: used once, by any gateway, for a short time, and not readable in the database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import psycopg
import pytest

from headwater.database import Connection, connect
from headwater.errors import (
    LimitExceeded,
    PermissionMissing,
    Unauthorized,
    Unavailable,
)
from headwater.gateway.auth.tickets import Tickets, issue, redeem
from headwater.limits import TICKET_SECONDS, TICKETS_PER_USER_MAX
from headwater.log import maintenance
from tests.support.log_probe import rows, run

ANN, TOKEN = "ann", "header.claims.signature"


async def code(connection: Connection, text: str) -> str:
    with pytest.raises(Unauthorized) as caught:
        await redeem(connection, text)
    assert not text or text not in f"{caught.value} {caught.value.hint}"
    return caught.value.code


async def age(connection: Connection, seconds: float) -> None:
    """Make the tickets older by that much time."""
    await connection.execute(
        "update headwater.tickets set expires_at = expires_at - %s", (timedelta(seconds=seconds),)
    )


async def test_another_gateway_takes_it_once(connection: Connection, other: Connection) -> None:
    ticket = await issue(connection, ANN, TOKEN)
    assert await redeem(other, ticket.text) == TOKEN
    assert await code(connection, ticket.text) == "ticket"
    assert await code(other, ticket.text) == "ticket"


async def test_only_one_of_many_uses_of_a_ticket_succeeds(url: str) -> None:
    gateways = [await connect(url, purpose="test", application_path=True) for _ in range(8)]
    for _ in range(10):
        ticket = await issue(gateways[0], ANN, TOKEN)
        found = await asyncio.gather(
            *(redeem(gateway, ticket.text) for gateway in gateways), return_exceptions=True
        )
        assert found.count(TOKEN) == 1
        assert all(one == TOKEN or isinstance(one, Unauthorized) for one in found)
    for gateway in gateways:
        await gateway.close()


async def test_it_says_when_it_ends(connection: Connection) -> None:
    ticket = await issue(connection, ANN, TOKEN)
    ((now,),) = await rows(connection, "select clock_timestamp()")
    assert now < ticket.expires_at <= now + timedelta(seconds=TICKET_SECONDS)


async def test_an_expired_ticket_is_refused(connection: Connection) -> None:
    ticket = await issue(connection, ANN, TOKEN)
    await age(connection, TICKET_SECONDS)
    assert await code(connection, ticket.text) == "ticket"


MADE_UP = ["", "~", "x" * 43, "é" * 43, "x" * 1_000_000, "' or true --", "\0" * 43]


@pytest.mark.parametrize("text", MADE_UP, ids=lambda text: f"{text[:8]!a} {len(text)}")
async def test_made_up_tickets(text: str, connection: Connection) -> None:
    await issue(connection, ANN, TOKEN)
    assert await code(connection, text) == "ticket"


async def test_the_database_has_neither_ticket_nor_token(connection: Connection) -> None:
    ticket = await issue(connection, ANN, TOKEN)
    ((stored,),) = await rows(connection, "select tickets::text from headwater.tickets")
    assert ticket.text not in stored
    assert ticket.text.encode().hex() not in stored
    assert TOKEN not in stored
    assert await code(connection, stored[:43]) == "ticket"


async def test_a_ticket_that_was_written_by_hand(connection: Connection) -> None:
    """A role that can write to the table cannot make a ticket: it has no token."""
    text = "x" * 43
    for identity in ('{"user": "root"}', "e30=", "not base64"):
        await connection.execute(
            "insert into headwater.tickets values (sha256(%s), 'ann', %s, now() + interval '1h')",
            (text.encode(), identity),
        )
        assert await code(connection, text) == "ticket"


async def test_texts_differ(connection: Connection) -> None:
    texts = {(await issue(connection, f"user {n}", TOKEN)).text for n in range(50)}
    assert len(texts) == 50
    assert {len(text) for text in texts} == {43}


# ------------------------------------------------------------------------ how many


async def test_a_user_with_too_many_tickets(connection: Connection) -> None:
    first = await issue(connection, ANN, TOKEN)
    for _ in range(TICKETS_PER_USER_MAX - 1):
        await issue(connection, ANN, TOKEN)
    with pytest.raises(LimitExceeded, match="tickets of this user") as caught:
        await issue(connection, ANN, TOKEN)
    assert caught.value.code == "tickets_per_user"
    assert 1 <= caught.value.retry_after <= TICKET_SECONDS
    await issue(connection, '["other tenant","ann"]', TOKEN)
    await issue(connection, "", TOKEN)
    await redeem(connection, first.text)
    await issue(connection, ANN, TOKEN)


async def test_tickets_are_limited_over_all_gateways(url: str) -> None:
    gateways = [await connect(url, purpose="test", application_path=True) for _ in range(4)]
    tries = [issue(gateway, ANN, TOKEN) for gateway in gateways * 10]
    results = await asyncio.gather(*tries, return_exceptions=True)
    refused = [one for one in results if isinstance(one, LimitExceeded)]
    assert len(refused) == len(tries) - TICKETS_PER_USER_MAX
    for gateway in gateways:
        await gateway.close()


async def test_expired_tickets_are_removed_and_make_room(connection: Connection) -> None:
    for _ in range(TICKETS_PER_USER_MAX):
        await issue(connection, ANN, TOKEN)
    await age(connection, TICKET_SECONDS)
    await issue(connection, ANN, TOKEN)
    assert await rows(connection, "select count(*) from headwater.tickets") == [(1,)]


async def test_maintenance_removes_expired_tickets(connection: Connection) -> None:
    await issue(connection, ANN, TOKEN)
    await age(connection, TICKET_SECONDS)
    await issue(connection, "bob", TOKEN)
    await age(connection, TICKET_SECONDS / 2)
    await maintenance.once(connection)
    assert await rows(connection, "select account from headwater.tickets") == [("bob",)]


# ------------------------------------------------------------------------ rights


@pytest.fixture
async def stranger(connection: Connection, url: str) -> AsyncIterator[Connection]:
    """A role with every grant that the documentation gives to a reader."""
    await run(
        connection,
        "drop role if exists stranger",
        "create role stranger",
        "grant usage on schema headwater to stranger",
    )
    session = await connect(url, purpose="test", application_path=True)
    await session.execute("set role stranger")
    yield session
    await session.close()
    await run(connection, "drop owned by stranger", "drop role stranger")


FORBIDDEN = [
    "select * from headwater.tickets",
    "delete from headwater.tickets",
    "insert into headwater.tickets values ('x', 'ann', '{}', now() + interval '1 hour')",
    "select headwater.issue_ticket('x', 'ann', '{}', interval '1 hour', 5)",
    "select headwater.redeem_ticket('x')",
    "select headwater.trim_tickets()",
]


@pytest.mark.parametrize("statement", FORBIDDEN)
async def test_ordinary_roles_may_do_nothing(statement: str, stranger: Connection) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        await stranger.execute(statement.encode())


async def test_a_grant_on_all_tables_does_not_open_it(
    connection: Connection, stranger: Connection
) -> None:
    await issue(connection, ANN, TOKEN)
    await run(connection, "grant all on all tables in schema headwater to stranger")
    assert await rows(stranger, "select * from headwater.tickets") == []
    cursor = await stranger.execute("delete from headwater.tickets")
    assert cursor.rowcount == 0
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
        await stranger.execute(FORBIDDEN[2].encode())


async def test_a_grant_on_all_functions_does_not_open_it(
    connection: Connection, stranger: Connection
) -> None:
    await run(connection, "grant execute on all functions in schema headwater to stranger")
    others = (
        "select headwater.trim_requests()",
        "select headwater.trim_user_requests('x', 1, interval '1h', 1)",
        "select headwater.publish_once('{}', '{}', '{}', interval '1h', '{1}', '{x}')",
    )
    for statement in (*FORBIDDEN[3:], *others):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="gateway's role only"):
            await stranger.execute(statement.encode())


# ------------------------------------------------------------------------ a connection of its own


async def test_a_lost_connection_is_opened_again(url: str, connection: Connection) -> None:
    async with Tickets(url) as tickets:
        ticket = await tickets.issue(ANN, TOKEN)
        await run(
            connection,
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            " where application_name = 'headwater tickets' and datname = current_database()",
        )
        assert await tickets.redeem(ticket.text) == TOKEN


async def test_refusals_leave_the_connection_alone(url: str, connection: Connection) -> None:
    async with Tickets(url) as tickets:
        for _ in range(3):
            with pytest.raises(Unauthorized):
                await tickets.redeem("x" * 43)
        found = await rows(
            connection,
            "select count(*) from pg_stat_activity"
            " where application_name = 'headwater tickets' and datname = current_database()",
        )
        assert found == [(1,)]


async def test_many_at_once(url: str) -> None:
    async with Tickets(url) as tickets:
        users = [f"user {number}" for number in range(100)]
        issued = await asyncio.gather(*(tickets.issue(user, f"a {user}") for user in users))
        found = await asyncio.gather(*(tickets.redeem(ticket.text) for ticket in issued))
        assert found == [f"a {user}" for user in users]


async def test_a_client_that_leaves(url: str) -> None:
    async with Tickets(url) as tickets:
        await tickets.issue(ANN, TOKEN)
        for _ in range(5):
            leaving = asyncio.create_task(tickets.issue(ANN, TOKEN))
            await asyncio.sleep(0)
            leaving.cancel()
            await asyncio.wait([leaving])
        ticket = await tickets.issue(ANN, TOKEN)
        assert await tickets.redeem(ticket.text) == TOKEN


async def test_without_its_database_it_is_unavailable() -> None:
    async with Tickets("postgresql://unknown@127.0.0.1:1/nowhere") as tickets:
        with pytest.raises(Unavailable) as caught:
            await tickets.issue(ANN, TOKEN)
        assert caught.value.retryable


async def test_a_missing_right_is_named(url: str) -> None:
    async with Tickets(url) as tickets:
        await tickets.issue(ANN, TOKEN)
        connection = tickets._connection
        assert connection is not None
        await connection.execute("set role pg_monitor")
        with pytest.raises(PermissionMissing):
            await tickets.issue(ANN, TOKEN)
