"""No user makes another wait: not with slow queries and mutations, not with a locked table."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headwater.database import Connection
from headwater.database import connect as connect_database
from tests.gateway.auth.test_tokens import SECRET, token
from tests.support.applications.query_functions import Site, running
from tests.support.applications.shop import open_shop, until
from tests.support.log_probe import enable, run


def bearer(user: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token(sub=user)}"}


async def is_served(site: Site, number: int, **headers: str) -> None:
    """A user's mutation, query and live query are answered."""
    answers = [
        await site.post("/v1/mutation/place", {"id": number}, headers=headers),
        await site.post("/v1/query/open_orders", {"region": number}, headers=headers),
    ]
    assert [answer.status_code for answer in answers] == [200, 200], [a.text for a in answers]
    async with site.socket(**headers) as socket:
        live = {"table": "orders", "limit": 1 + number % 50}
        await socket.send(type="subscribe", id="s", live=live)
        assert (await socket.receive_type("snapshot"))["rows"]


@pytest.mark.parametrize("how", ["socket", "http"])
async def test_a_user_with_slow_calls_and_a_locked_table(
    url: str, connection: Connection, how: str
) -> None:
    await open_shop(connection, rows=10)
    await run(connection, "create table locked (id int primary key)")
    await enable(connection, "locked")
    locker = await connect_database(url, purpose="test", application_path=True)
    await run(locker, "begin", "lock table locked in access exclusive mode")
    settings = {"auth_secret": SECRET, "mutation_connections": 4, "query_concurrency": 8}
    async with running(url, **settings) as site, site.socket(**bearer("eve")) as hostile:
        calls = list[asyncio.Task[Any]]()

        async def call(kind: str, name: str, args: dict[str, int]) -> None:
            if how == "http":
                path, headers = f"/v1/{kind}/{name}", bearer("eve")
                calls.append(asyncio.create_task(site.post(path, args, headers=headers)))
            else:
                id = f"{kind}{args}"
                await hostile.send(
                    type=kind.replace("mutation", "mutate"), id=id, name=name, args=args
                )

        for number in range(20):
            await call("mutation", "place_gated", {"id": 1_000 + number})
            await call("query", "gated", {"number": number})
            live = {"table": "locked", "limit": 1 + number}
            await hostile.send(type="subscribe", id=f"s{number}", live=live)
        # Half of four connections, and a quarter of eight.
        await until(lambda: site.application.waiting == 4)
        for number in (1, 2, 3):
            await is_served(site, 100 + number, **bearer("ann"))
        assert site.application.waiting == 4
        assert not any(task.done() for task in calls)
        site.application.gate.set()
        await run(locker, "commit")
        await until(lambda: site.application.waiting == 40)
        for _ in range(20):
            await hostile.receive_type("snapshot")
        for answer in await asyncio.gather(*calls):
            assert answer.status_code == 200
    await locker.close()


async def test_requests_without_a_user_are_limited_by_address(
    url: str, connection: Connection
) -> None:
    await open_shop(connection, rows=10)
    async with running(url, mutation_connections=4) as site:
        calls = [
            asyncio.create_task(site.post("/v1/mutation/place_gated", {"id": 1_000 + number}))
            for number in range(6)
        ]
        await until(lambda: site.application.waiting == 2)
        # The application itself is not bounded.
        runner = site.gateway.calls._runner
        assert runner is not None
        await runner.signal("topic")
        assert site.application.waiting == 2
        site.application.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 6
