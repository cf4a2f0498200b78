"""What gateways write about themselves: only while an admin uses the console, only changes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from headwater.database import Connection
from headwater.gateway.activity import ACTIVITY_PERIOD, Activity, _text
from headwater.gateway.gateway import Gateway
from headwater.hub.hub import Hub
from headwater.identity import ANONYMOUS, Identity
from headwater.limits import ACTIVITY_DETAIL_CHARS_MAX
from headwater.metrics import quantile
from headwater.protocol import Deltas, Frame, Subscribe
from headwater.settings import Settings
from tests.gateway.test_subscriptions import Sink
from tests.support.applications.shop import open_shop

LOOK = Subscribe("look", live={"table": "headwater.activity"})
ORDERS = Subscribe("orders", live={"table": "orders", "where": [["region", "=", 1]]})


@pytest.fixture
async def shop(connection: Connection) -> Connection:
    await open_shop(connection, rows=20)
    await connection.execute("select headwater.enable_reactivity('headwater.activity')")
    return connection


@asynccontextmanager
async def gateways(url: str, count: int) -> AsyncIterator[list[Gateway]]:
    """Several gateways. The test decides when they write."""
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            hub = await stack.enter_async_context(Hub(url))
            quiet = Gateway(hub, Settings(), url=url, activity_period=timedelta(hours=1))
            made = await stack.enter_async_context(quiet)
            values = made._connections.values
            made.activity = Activity(hub, made.metrics, values, ACTIVITY_PERIOD)
            stack.push_async_callback(made.activity._leave)
            found.append(made)
        yield found


async def joined(gateway: Gateway, *requests: Subscribe, identity: Identity = ANONYMOUS) -> Any:
    it = gateway.open(identity, address="127.0.0.1", transport="sse", local=True)
    it.attach(Sink())
    for request in requests:
        await gateway.subscribe(it, request)
    return it


async def written(connection: Connection) -> list[tuple[Any, ...]]:
    cursor = await connection.execute(
        "select kind, type, name, subscriptions, rows from headwater.activity order by 1, 2, 3"
    )
    return await cursor.fetchall()


async def log_length(connection: Connection) -> int:
    cursor = await connection.execute("select count(*) from headwater.log")
    row = await cursor.fetchone()
    assert row is not None
    return int(row[0])


async def test_nothing_is_written_without_an_open_console(shop: Connection, url: str) -> None:
    async with gateways(url, 1) as (gateway,):
        await joined(gateway, ORDERS)
        before = await log_length(shop)
        for _ in range(3):
            await gateway.activity.round()
        assert await written(shop) == []
        assert await log_length(shop) == before
        assert gateway.activity._database is None, "it took a connection"


async def test_sessions_and_views_are_written_while_a_console_is_open(
    shop: Connection, url: str
) -> None:
    async with gateways(url, 1) as (gateway,):
        ann = Identity("ann", "acme")
        await joined(gateway, ORDERS, identity=ann)
        looking = await joined(gateway, LOOK)
        await gateway.activity.round()
        assert await written(shop) == [
            ("gateway", None, _host(), 2, 0),
            ("session", "sse", "ann", 1, 0),
            ("session", "sse", None, 1, 0),
            ("view", "live", "headwater.activity", 1, 0),
            ("view", "live", "orders", 1, 4),
        ]
        cursor = await shop.execute(
            "select detail from headwater.activity where name in ('ann', 'orders') order by kind"
        )
        (session,), (view,) = await cursor.fetchall()
        assert (session["address"], session["tenant"]) == ("127.0.0.1", "acme")
        assert view["query"] == {"table": "orders", "where": {"and": [["region", "=", 1]]}}

        gateway.release(looking)
        await gateway.activity.round()
        assert await written(shop) == []


async def test_costs(shop: Connection, url: str) -> None:
    """A delta is made once, and sent to both."""
    async with gateways(url, 1) as (gateway,):
        one, other = await joined(gateway, ORDERS), await joined(gateway, ORDERS)
        await joined(gateway, LOOK)
        await shop.execute("update orders set note = 'dear' where id = 1")
        await gateway.hub.flushes.next_flush()
        (deltas,) = [m for m in one.sink.got if isinstance(m, Deltas)]
        assert deltas in other.sink.got
        await gateway.activity.round()
        cursor = await shop.execute(
            "select subscriptions, sent, bytes, runs, seconds > 0 from headwater.activity"
            " where name = 'orders'"
        )
        assert await cursor.fetchall() == [(2, 1, 2 * Frame(deltas).size, 1, True)]


async def test_bytes_sent_to_ended_sessions_count(shop: Connection, url: str) -> None:
    async with gateways(url, 1) as (gateway,):
        ended = await joined(gateway, ORDERS)
        ended.sink.sent, ended.sink.sent_bytes = 1_000, 1_000_000
        await joined(gateway, LOOK)
        gateway.release(ended)
        gateway.release(ended)
        await gateway.activity.round()
        cursor = await shop.execute(
            "select sent / 1000, bytes / 1000000 from headwater.activity where kind = 'gateway'"
        )
        assert await cursor.fetchall() == [(1, 1)]


async def test_other_tasks_run_while_sessions_are_counted(
    shop: Connection, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.gateway.usage._ACTIVITY_TURN_ITEMS", 1)
    async with gateways(url, 1) as (gateway,):
        await joined(gateway, LOOK)
        going = await joined(gateway, ORDERS)
        counting = asyncio.create_task(gateway.activity.usage.entries())
        await asyncio.sleep(0)
        assert not counting.done()
        gateway.release(going)
        own, *others = await counting
        assert own.kind == "gateway"
        assert [each.kind for each in others].count("session") == 2


async def test_the_secret_of_a_session_is_not_written(shop: Connection, url: str) -> None:
    async with gateways(url, 1) as (gateway,):
        it = await joined(gateway, LOOK)
        await gateway.activity.round()
        cursor = await shop.execute("select to_json(a)::text from headwater.activity a")
        assert all(it.session.id not in text for (text,) in await cursor.fetchall())


async def test_only_what_changed_is_written_again(shop: Connection, url: str) -> None:
    async with gateways(url, 1) as (gateway,):
        await joined(gateway, ORDERS)
        await joined(gateway, Subscribe("idle", live={"table": "orders", "limit": 1}))
        activity = gateway.activity
        await joined(gateway, LOOK)
        await activity.round()
        await gateway.hub.flushes.next_flush()
        start = await _seq(shop)
        await activity.round()
        cursor = await shop.execute(
            "select distinct after ->> 'kind', after ->> 'name' from headwater.log"
            " where seq > %s order by 1, 2",
            (start,),
        )
        again = await cursor.fetchall()
        assert ("view", "orders") not in again
        assert [kind for kind, _ in again if kind == "gateway"] == ["gateway"]


async def test_all_gateways_write_when_one_console_is_open(shop: Connection, url: str) -> None:
    async with gateways(url, 2) as (one, other):
        await joined(other, ORDERS)
        await other.activity.round()
        assert await written(shop) == []
        looking = await joined(one, LOOK)
        await one.activity.round()
        await other.activity.round()
        assert ("view", "live", "orders", 1, 4) in await written(shop)

        one.release(looking)
        await one.activity.round()
        await other.activity.round()
        assert await written(shop) == []


async def test_a_gateway_that_died_is_forgotten(shop: Connection, url: str) -> None:
    await shop.execute(
        "insert into headwater.activity (gateway, kind, id, since, alive_until)"
        " select 'dead', kind, '1', now(), now() - interval '1 second'"
        " from unnest(array['gateway', 'session']) kind"
    )
    await shop.execute(
        "insert into headwater.activity (gateway, kind, id, since, alive_until)"
        " values ('alive', 'gateway', '1', now(), now() + interval '1 minute')"
    )
    async with gateways(url, 1) as (gateway,):
        await joined(gateway, LOOK)
        await gateway.activity.round()
        cursor = await shop.execute("select distinct gateway from headwater.activity")
        assert {name for (name,) in await cursor.fetchall()} == {"alive", gateway.activity.gateway}


async def test_each_gateway_sets_its_own_timeout(shop: Connection, url: str) -> None:
    async with gateways(url, 2) as (slow, fast):
        slow.activity.period = timedelta(minutes=1)
        await joined(slow, LOOK)
        await joined(fast, LOOK)
        await slow.activity.round()
        later = "update headwater.activity set {0} = {0} - interval '30 seconds'"
        for column in ("updated_at", "alive_until"):
            await shop.execute(later.format(column).encode())
        await fast.activity.round()
        cursor = await shop.execute("select gateway from headwater.activity where kind = 'gateway'")
        assert {name for (name,) in await cursor.fetchall()} == {
            slow.activity.gateway, fast.activity.gateway
        }  # fmt: skip


async def test_the_table_is_filled_at_once_and_emptied_at_the_end(
    shop: Connection, url: str
) -> None:
    hour = timedelta(hours=1)
    async with Hub(url) as hub:
        async with Gateway(hub, Settings(), url=url, activity_period=hour) as gateway:
            it = await joined(gateway, LOOK)
            sink = it.sink
            async with asyncio.timeout(20):
                while "deltas" not in sink.names:
                    await hub.flushes.next_flush()
            assert len(await written(shop)) == 3
        assert await written(shop) == []


async def test_activity_survives_a_lost_connection(shop: Connection, url: str) -> None:
    async with gateways(url, 1) as (gateway,):
        await joined(gateway, LOOK)
        await gateway.activity.round()
        await shop.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'headwater activity' and datname = current_database()"
        )
        await gateway.activity._try_round()
        await gateway.activity._try_round()
        assert len(await written(shop)) == 3


async def test_sessions_that_ended_while_the_database_was_down(shop: Connection, url: str) -> None:
    async with gateways(url, 1) as (gateway,):
        await joined(gateway, LOOK)
        ended = await joined(gateway, ORDERS)
        await gateway.activity.round()
        assert [kind for kind, *_ in await written(shop)].count("session") == 2
        await gateway.activity._drop()
        gateway.release(ended)
        await gateway.activity.round()
        assert [kind for kind, *_ in await written(shop)].count("session") == 1


async def test_rows_that_another_gateway_removed_are_written_again(
    shop: Connection, url: str
) -> None:
    async with gateways(url, 1) as (gateway,):
        await joined(gateway, LOOK, ORDERS)
        await gateway.activity.round()
        before = await written(shop)
        await shop.execute("delete from headwater.activity")
        await gateway.activity.round()
        assert [row[:3] for row in await written(shop)] == [row[:3] for row in before]


async def test_rows_are_removed_also_after_an_interrupted_write(shop: Connection, url: str) -> None:
    async with gateways(url, 1) as (gateway,):
        looking = await joined(gateway, LOOK)
        await gateway.activity.round()
        await gateway.activity._drop()
        gateway.release(looking)
        async with asyncio.timeout(20):
            while await written(shop):  # The server may take a moment to release the lock.
                await gateway.activity.round()


async def test_a_long_query_is_cut(shop: Connection, url: str) -> None:
    async with gateways(url, 1) as (gateway,):
        where = [["id", "in", list(range(1000))]]
        await joined(gateway, LOOK, Subscribe("long", live={"table": "orders", "where": where}))
        await gateway.activity.round()
        cursor = await shop.execute(
            "select length(detail ->> 'cut') from headwater.activity where name = 'orders'"
        )
        assert await cursor.fetchall() == [(ACTIVITY_DETAIL_CHARS_MAX,)]


def test_a_nul_is_not_written() -> None:
    assert json.loads(_text(["a\0b", "\\u0000", "\\\0", "\0\0"])) == [
        "a\ufffdb", "\\u0000", "\\\ufffd", "\ufffd\ufffd"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [([10, 10, 10], 0.5, 0.5), ([0, 10, 10], 0.99, 1.99), ([0, 0, 10], 0.5, 2)],
)
def test_quantiles(counts: list[float], share: float, expected: float) -> None:
    assert quantile([1, 2, float("inf")], counts, share) == pytest.approx(expected)


async def _seq(connection: Connection) -> int:
    cursor = await connection.execute("select last_value from headwater.log_seq")
    row = await cursor.fetchone()
    assert row is not None
    return int(row[0])


_host = socket.gethostname
