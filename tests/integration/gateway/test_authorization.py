"""The policy that the documentation shows does what it says, with the claims of sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from headwater.database import Connection
from headwater.gateway.auth.authorize_hook import AccessRequest, decide
from headwater.identity import Identity
from tests.integration.test_docs import blocks
from tests.support.log_probe import run
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "howto" / "authorisation.md"
(POLICY,) = [block.text for block in blocks(PAGE) if block[:2] == ("sql", "policy")]


@pytest.fixture
async def orders(connection: Connection) -> AsyncIterator[Connection]:
    await run(
        connection,
        "drop role if exists web, headwater_questions",
        "create table orders (id int primary key, owner text)",
        """insert into orders values (1, 'ann'), (2, 'bob'), (3, 'an"n'), (4, null)""",
        POLICY,
    )
    yield connection
    await run(connection, "drop table orders", "drop role web, headwater_questions")


async def seen(connection: Connection, identity: Identity) -> list[tuple[Any, ...]]:
    """What a query as this user returns, run as the hub runs it."""
    access = await decide(None, identity, AccessRequest(kind="live", table="orders"))
    async with connection.transaction():
        await connection.execute(f"set local role {access.role}".encode())
        await connection.execute(
            "select set_config('request.jwt.claims', %s, true)", (access.claims,)
        )
        cursor = await connection.execute("select id from orders order by id")
        return await cursor.fetchall()


@pytest.mark.parametrize(
    ("user", "rows"), [("ann", [(1,)]), ("bob", [(2,)]), ('an"n', [(3,)]), ("eve", [])]
)
async def test_users_see_their_own(
    user: str, rows: list[tuple[Any, ...]], orders: Connection
) -> None:
    identity = Identity(user, None, "web", {"sub": user, "exp": 1, "odd": "é\u0001\\"})
    assert await seen(orders, identity) == rows


async def test_a_user_without_claims_sees_nothing(orders: Connection) -> None:
    assert await seen(orders, Identity(role="web")) == []
