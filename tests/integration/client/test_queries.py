"""Queries, mutations and subscribed queries, from a client over real sockets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from headwater import Backoff, Connection, connect, connect_sync, limits
from headwater.errors import (
    ConfigError,
    ConnectionFailed,
    HeadwaterError,
    InvalidQuery,
    LimitExceeded,
    NotFound,
    Refused,
    ResyncRequired,
    TimedOut,
    Unavailable,
)
from headwater.model import Position
from headwater.protocol import Ask, Error, Mutate, QueryCall, Subscribe, Unsubscribe, Wait
from headwater.testing.gateway_process import Served, serving
from tests.integration.client.test_client import WAIT_SECONDS, client, ids, next_of, until
from tests.support.fake_gateway import FakeGateway, fake_gateway


@pytest.fixture
async def fake() -> AsyncIterator[FakeGateway]:
    async with fake_gateway() as fake:
        yield fake


@pytest.fixture(params=["ws", "sse"])
def transport(request: pytest.FixtureRequest) -> Any:
    return request.param


def received(fake: FakeGateway, kind: type[Any]) -> list[Any]:
    return [message for message in fake.seen if isinstance(message, kind)]


async def raised(task: asyncio.Task[Any]) -> BaseException:
    await asyncio.wait([task])
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    assert error is not None
    return error


# ------------------------------------------------------------------------ single calls


async def test_a_query_and_a_mutation(fake: FakeGateway, transport: Any) -> None:
    async with client(fake, transport) as hw:
        assert await hw.query("all_orders", region=7) == []
        placed = await hw.mutate("put", {"id": 1}, amount=5)
        assert (placed.value, placed.position) == (1, fake.position)
        assert await hw.query("all orders?", {"after": 1}) == [{"id": 1, "amount": 5}]
    (mutation,) = received(fake, Mutate)
    assert (mutation.name, mutation.args) == ("put", {"id": 1, "amount": 5})
    first, second = received(fake, Ask)
    assert (first.name, first.args, first.after) == ("all_orders", {"region": 7}, None)
    # The client sends the position of its own write by itself.
    assert (second.name, second.args, second.after) == (
        "all orders?",
        {"after": 1},
        placed.position,
    )


async def test_a_query_after_another_position(fake: FakeGateway, transport: Any) -> None:
    async with client(fake, transport) as hw:
        await hw.mutate("put", id=1, amount=5)
        await hw.query("all_orders", after=Position("ab", 7, 7))
        with pytest.raises(InvalidQuery, match="after"):
            await hw.query("all_orders", after="yesterday")
    assert received(fake, Ask)[0].after == "ab-7:7:"


async def test_wait_for(fake: FakeGateway, transport: Any) -> None:
    async with client(fake, transport) as hw, hw.subscribe("all_orders") as orders:
        placed = await hw.mutate("put", id=1, amount=5)
        await hw.wait_for(placed.position)
        assert orders.value == [{"id": 1, "amount": 5}]
        with pytest.raises(InvalidQuery, match="position"):
            await hw.wait_for("")
    (waited,) = received(fake, Wait)
    assert waited.position == placed.position


REFUSALS: list[tuple[Error, type[HeadwaterError]]] = [
    (Error("sold_out", "none is left", hint="Wait."), Refused),
    (Error("refused", "no"), Refused),
    (Error("timed_out", "too slow", retryable=True), TimedOut),
    (Error("invalid_query", "region: expected an integer"), InvalidQuery),
    (Error("limit", "too often", retryable=True, retry_after_secs=7.0), LimitExceeded),
]


@pytest.mark.parametrize(("refusal", "kind"), REFUSALS)
async def test_refusals(
    fake: FakeGateway,
    transport: Any,
    refusal: Error,
    kind: type[HeadwaterError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headwater.client.calls._CLIENT_REPEAT_SECONDS", 5.0)  # less than it asks
    fake.status |= {"sold_out": 422, "refused": 422, "timed_out": 504}
    async with client(fake, transport) as hw:
        for ask in (hw.query, hw.mutate, lambda _: hw.wait_for("ab-7:7:")):
            fake.call_refusals = [refusal]
            with pytest.raises(kind) as caught:
                await ask("all_orders")
            error = caught.value
            assert (error.code, str(error)) == (refusal.code, refusal.message)
            assert (error.hint, error.retryable) == (refusal.hint, refusal.retryable)
        assert await hw.query("all_orders") == []
        assert hw.reconnects == 0


async def test_a_token_that_ended_refuses_a_mutation(fake: FakeGateway, transport: Any) -> None:
    fake.call_refusals = [Error("token_expired", "over")]
    async with client(fake, transport) as hw:
        with pytest.raises(HeadwaterError, match="over"):
            await hw.mutate("put", id=1, amount=5)


async def test_arguments_that_cannot_be_sent(fake: FakeGateway) -> None:
    async with client(fake, "ws") as hw:
        with pytest.raises(InvalidQuery):
            await hw.query("all_orders", what=object())
        with pytest.raises(LimitExceeded):
            hw.subscribe("all_orders", text="x" * limits.REQUEST_BYTES_MAX)
        assert await hw.query("all_orders") == []


async def test_not_open(fake: FakeGateway) -> None:
    hw = client(fake, "ws")
    with pytest.raises(ConfigError):
        await hw.query("all_orders")
    async with hw:
        pass
    with pytest.raises(ConfigError):
        await hw.mutate("put", id=1, amount=1)


# ------------------------------------------------------------------------ a lost connection


async def unanswered(fake: FakeGateway, hw: Connection, kind: type[Any]) -> asyncio.Task[Any]:
    """A call that the gateway has received and does not answer."""
    fake.answers = False
    calls: dict[type[Any], Callable[[], Any]] = {
        Ask: lambda: hw.query("all_orders"),
        Mutate: lambda: hw.mutate("put", id=1, amount=5),
        Wait: lambda: hw.wait_for("ab-7:7:"),
    }
    task = asyncio.create_task(calls[kind]())
    await until(lambda: received(fake, kind))
    return task


@pytest.mark.parametrize("kind", [Ask, Wait])
async def test_a_call_without_effects_is_repeated(
    fake: FakeGateway, transport: Any, kind: Any
) -> None:
    async with client(fake, transport) as hw:
        task = await unanswered(fake, hw, kind)
        fake.answers = True
        fake.cut()
        await task
        assert len(received(fake, kind)) == 2


async def test_a_mutation_is_repeated_with_its_key(fake: FakeGateway, transport: Any) -> None:
    async with client(fake, transport) as hw:
        task = await unanswered(fake, hw, Mutate)
        fake.answers = True
        fake.put(1, 6)
        fake.cut()
        assert (await task).value == 1
        assert await hw.query("all_orders") == [{"id": 1, "amount": 6}]
        await hw.mutate("put", id=1, amount=7)
    keys = [message.idempotency_key for message in received(fake, Mutate)]
    assert keys[0] == keys[1] != keys[2]
    assert len(keys[0]) >= 22  # 128 random bits


RATE = Error("limit", "too often", retryable=True, retry_after_secs=0.01)
STARTING = Error("unavailable", "starting", retryable=True)
CONFLICT = Error("conflict", "others write", retryable=True)
RUNNING = Error("still_running", "wait for it", retryable=True)


async def test_a_mutation_that_is_refused_for_now(fake: FakeGateway, transport: Any) -> None:
    fake.status |= {"conflict": 503, "still_running": 503}
    async with client(fake, transport) as hw:
        fake.call_refusals = [RATE, STARTING, CONFLICT, RUNNING]
        assert (await hw.mutate("put", id=1, amount=5)).value == 1
    calls = received(fake, Mutate)
    assert len(calls) == 5
    assert len({message.idempotency_key for message in calls}) == 1


async def test_a_mutation_that_is_refused_for_long(
    fake: FakeGateway, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an attempt before may have succeeded, the last refusal does not say how it ended."""
    monkeypatch.setattr("headwater.client.calls._CLIENT_REPEAT_SECONDS", 0.2)
    async with client(fake, transport) as hw:
        fake.call_refusals = [STARTING] * 1000
        with pytest.raises(Unavailable, match="starting"):
            await hw.mutate("put", id=1, amount=5)
        fake.call_refusals, before = [], len(received(fake, Mutate))
        fake.answers = False
        task = asyncio.create_task(hw.mutate("put", id=1, amount=5))
        await until(lambda: len(received(fake, Mutate)) > before)
        fake.answers = True
        fake.call_refusals = [STARTING] * 1000
        fake.cut()
        error = await raised(task)
        assert isinstance(error, ConnectionFailed)
        assert (error.code, error.retryable) == ("outcome_unknown", False)


async def test_a_mutation_is_not_repeated_when_its_key_may_be_forgotten(
    fake: FakeGateway, transport: Any
) -> None:
    """The client's machine was suspended, and the gateway would run the mutation once more."""
    async with client(fake, transport) as hw:
        task = await unanswered(fake, hw, Mutate)
        later = time.time() + limits.CLIENT_MUTATION_SECONDS
        hw._calls._requests._clock = lambda: later
        fake.answers = True
        fake.cut()
        error = await raised(task)
        assert isinstance(error, ConnectionFailed)
        assert (error.code, error.retryable) == ("outcome_unknown", False)
        assert len(received(fake, Mutate)) == 1
        assert (await hw.mutate("put", id=1, amount=5)).value == 1


async def test_a_key_that_the_caller_gives(fake: FakeGateway, transport: Any) -> None:
    async with client(fake, transport) as hw:
        for amount in (5, 6):
            await hw.mutate("put", idempotency_key="order-7", id=1, amount=amount)
        assert await hw.query("all_orders") == [{"id": 1, "amount": 5}]
        for wrong in ("", "a b", "x" * 129):
            with pytest.raises(InvalidQuery, match="idempotency_key: expected"):
                await hw.mutate("put", idempotency_key=wrong, id=1, amount=5)
    assert len(received(fake, Mutate)) == 2


async def test_a_mutation_that_was_not_sent_waits_for_a_connection(
    fake: FakeGateway, transport: Any
) -> None:
    async with client(fake, transport) as hw:
        fake.refusals = [Error("unavailable", "starting", retryable=True)] * 3
        fake.cut()
        await until(lambda: hw.session is None)
        assert (await hw.mutate("put", id=1, amount=5)).value == 1
        assert len(received(fake, Mutate)) == 1


async def test_a_wait_covers_subscriptions_that_resume_after_a_reconnect(
    fake: FakeGateway, transport: Any
) -> None:
    async with client(fake, transport) as hw, hw.subscribe("all_orders") as orders:
        task = await unanswered(fake, hw, Wait)
        fake.answers = True
        fake.cut()
        fake.put(1, 5)
        await task
        assert ids(orders.value) == [1]


@pytest.mark.parametrize("kind", [Ask, Mutate, Wait])
async def test_the_end_of_the_connection_ends_its_calls(
    fake: FakeGateway, transport: Any, kind: Any
) -> None:
    async with client(fake, transport) as hw:
        task = await unanswered(fake, hw, kind)
    error = await raised(task)
    assert isinstance(error, ConnectionFailed)
    assert error.code == ("outcome_unknown" if kind is Mutate else "connection")


async def test_giving_up_raises_the_reason(fake: FakeGateway, transport: Any) -> None:
    async with client(fake, transport) as hw:
        task = await unanswered(fake, hw, Ask)
        fake.refusals = [Error("forbidden", "not any more")] * 2
        fake.cut()
        assert str(await raised(task)) == "not any more"
        with pytest.raises(HeadwaterError, match="not any more"):
            await hw.query("all_orders")


async def test_a_caller_that_is_cancelled_is_forgotten(fake: FakeGateway, transport: Any) -> None:
    async with client(fake, transport) as hw:
        task = await unanswered(fake, hw, Ask)
        task.cancel()
        assert isinstance(await raised(task), asyncio.CancelledError)
        fake.answers = True
        fake.cut()
        await until(lambda: hw.reconnects == 1)
        assert await hw.query("all_orders") == []
        assert len(received(fake, Ask)) == 2


async def test_a_call_cancelled_before_it_is_sent_is_not_sent(
    fake: FakeGateway, transport: Any
) -> None:
    async with client(fake, transport) as hw:
        fake.refusals = [Error("unavailable", "starting", retryable=True)] * 3
        fake.cut()
        await until(lambda: hw.session is None)
        task = asyncio.create_task(hw.mutate("put", id=1, amount=5))
        await asyncio.sleep(0)
        task.cancel()
        await raised(task)
        assert await hw.query("all_orders") == []
    assert received(fake, Mutate) == []


async def test_calls_at_once_are_bounded(
    fake: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.client.calls.CLIENT_CALLS_AT_ONCE", 2)
    fake.answers = False
    async with client(fake, "ws") as hw:
        tasks = [asyncio.create_task(hw.query("all_orders", n=n)) for n in range(5)]
        await until(lambda: len(received(fake, Ask)) == 2)
        fake.answers = True
        fake.cut()
        assert await asyncio.gather(*tasks) == [[]] * 5
    assert sorted({ask.args["n"] for ask in received(fake, Ask)}) == [0, 1, 2, 3, 4]


async def test_a_slow_reader_of_a_feed_can_make_other_calls(
    fake: FakeGateway, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CLIENT_TRANSACTIONS_MAX", 2)
    async with client(fake, transport) as hw, hw.changes("orders") as feed:
        for id in range(1, 8):
            fake.put(id, id)
        seen = list[int]()
        async for transaction in feed:
            seen.append(transaction.changes[0].key["id"])
            if len(seen) <= 5:
                async with asyncio.timeout(WAIT_SECONDS):
                    await hw.mutate("put", id=10 + len(seen), amount=1)
                    async with hw.live("orders") as orders:
                        await orders.reanchor((1,))
            if len(seen) == 12:
                break
        assert seen == [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 14, 15]
        assert hw.reconnects == 0
    assert len(received(fake, Subscribe)) > 1


# ------------------------------------------------------------------------ subscribed


@pytest.fixture(params=[False, True], ids=["whole", "delta"])
def delta(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_results_now_and_after_every_change(
    fake: FakeGateway, transport: Any, delta: bool
) -> None:
    fake.put(1, 10)
    async with client(fake, transport) as hw:
        results = aiter(hw.subscribe("all_orders", {"delta": 1}, delta=delta, region=7))
        assert await next_of(results) == [{"id": 1, "amount": 10}]
        fake.put(2, 20)
        assert ids(await next_of(results)) == [1, 2]
        await results.aclose()
        await until(lambda: received(fake, Unsubscribe))
    (subscribe,) = received(fake, Subscribe)
    assert subscribe.query == QueryCall("all_orders", {"delta": 1, "region": 7}, delta)


async def test_a_slow_reader_skips_to_the_latest(
    fake: FakeGateway, transport: Any, delta: bool
) -> None:
    async with client(fake, transport) as hw, hw.subscribe("all_orders", delta=delta) as orders:
        results = aiter(orders)
        assert await next_of(results) == []
        for id in range(1, 6):
            fake.put(id, id)
        await until(lambda: len(orders.value) == 5)
        assert ids(await next_of(results)) == [1, 2, 3, 4, 5]
        assert orders.position == fake.position
        await results.aclose()


async def test_a_query_continues_after_a_reconnect(
    fake: FakeGateway, transport: Any, delta: bool
) -> None:
    async with client(fake, transport) as hw, hw.subscribe("all_orders", delta=delta) as orders:
        results = aiter(orders)
        await next_of(results)
        position = orders.position
        fake.cut()
        await until(lambda: hw.reconnects == 1 and hw.session)
        fake.put(1, 10)
        # An equal result is not sent again: the first event is the change.
        assert ids(await next_of(results)) == [1]
        await results.aclose()
    first, second = received(fake, Subscribe)
    assert (first.since, second.since) == (None, position)


async def test_a_failure_is_reported_beside_the_value(
    fake: FakeGateway, transport: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fake.put(1, 10)
    async with client(fake, transport) as hw, hw.subscribe("all_orders") as orders:
        results = aiter(orders)
        await next_of(results)
        with caplog.at_level(logging.WARNING, "headwater.client"):
            fake.fail()
            await until(lambda: orders.error)
        assert isinstance(orders.error, TimedOut)
        assert "all_orders may be out of date: it took too long" in caplog.text
        assert ids(orders.value) == [1]
        fake.put(2, 20)
        assert ids(await next_of(results)) == [1, 2]
        assert orders.error is None
        await results.aclose()


async def test_a_query_that_cannot_be_followed(fake: FakeGateway, transport: Any) -> None:
    fake.subscription_refusals = [Error("sold_out", "none is left")]
    async with client(fake, transport) as hw:
        with pytest.raises(Refused, match="none is left"):
            await next_of(aiter(hw.subscribe("all_orders")))


# ------------------------------------------------------------------------ blocking


async def test_blocking(fake: FakeGateway) -> None:
    def work() -> list[Any]:
        with connect_sync(fake.url) as hw:
            placed = hw.mutate("put", id=1, amount=5)
            hw.wait_for(placed.position)
            seen = [hw.query("all_orders"), next(iter(hw.subscribe("all_orders", region=7)))]
            with hw.subscribe("all_orders", delta=True) as orders:
                assert (orders.error, orders.position) == (None, placed.position)
                seen.append(orders.value)
            with pytest.raises(InvalidQuery):
                hw.wait_for("yesterday")
            return seen

    assert await asyncio.to_thread(work) == [[{"id": 1, "amount": 5}]] * 3


# ------------------------------------------------------------------------ a real gateway

SHOP = """
from headwater import Headwater
from headwater.errors import Refused

hw = Headwater()
hw.table("orders")

@hw.query(key="id")
async def open_orders(ctx, region: int) -> list[dict]:
    sql = "select id, amount from orders where region = %s and amount > 0 order by id"
    return await ctx.fetch(sql, region)

@hw.query
async def ratio(ctx) -> int:
    rows = await ctx.fetch("select 100 / min(amount) as ratio from orders")
    return rows[0]["ratio"] or 0

@hw.mutation
async def place_order(ctx, region: int, id: int, amount: int) -> int:
    if amount < 0:
        raise Refused("nothing is ordered", code="nothing", hint="Order something.")
    await ctx.execute("insert into orders values (%s, %s, %s)", id, region, amount)
    return id

@hw.mutation
async def clear(ctx) -> int:
    return await ctx.execute("delete from orders")
"""


@pytest.fixture
async def shop(url: str, tmp_path: Path) -> AsyncIterator[Served]:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        await connection.execute("create table orders (id int primary key, region int, amount int)")
    (tmp_path / "shop.py").write_text(SHOP)
    with serving(url, tmp_path, program="shop:hw", limits_requests_per_second=10_000) as gateway:
        yield gateway


async def test_a_client_reads_its_own_writes(shop: Served, transport: Any, delta: bool) -> None:
    async with asyncio.timeout(60), connect(shop.url, transport=transport) as hw:
        async with hw.subscribe("open_orders", region=7, delta=delta) as orders:
            for id in range(1, 11):
                placed = await hw.mutate("place_order", region=7, id=id, amount=5)
                assert placed.value == id
                assert ids(await hw.query("open_orders", region=7)) == list(range(1, id + 1))
                await hw.wait_for(placed.position)
                assert ids(orders.value) == list(range(1, id + 1))
        assert (hw.reconnects, hw.diverged) == (0, 0)


async def test_refusals_by_functions(shop: Served, transport: Any) -> None:
    async with asyncio.timeout(60), connect(shop.url, transport=transport) as hw:
        with pytest.raises(Refused) as refused:
            await hw.mutate("place_order", region=7, id=1, amount=-1)
        assert (refused.value.code, refused.value.hint) == ("nothing", "Order something.")
        with pytest.raises(InvalidQuery, match="region"):
            await hw.query("open_orders", region="north")
        with pytest.raises(NotFound) as unknown:
            await next_of(aiter(hw.subscribe("closed_orders")))
        assert unknown.value.code == "query_unknown"
        with pytest.raises(ResyncRequired, match="another log"):
            await hw.wait_for("ab-7:7:")
        hw._written = Position.parse("ab-7:7:")  # as after the database was restored
        assert isinstance(await hw.query("open_orders", region=7), list)


async def test_a_query_that_fails_and_recovers(shop: Served, transport: Any) -> None:
    async with (
        asyncio.timeout(60),
        connect(shop.url, transport=transport) as hw,
        hw.subscribe("ratio") as ratio,
    ):
        broken = await hw.mutate("place_order", region=7, id=1, amount=0)
        await hw.wait_for(broken.position)
        assert ratio.error is not None
        assert ratio.value == 0
        cleared = await hw.mutate("clear")
        await hw.wait_for(cleared.position)
        await until(lambda: ratio.error is None)


async def test_a_gateway_that_is_started_again(
    shop: Served, url: str, tmp_path: Path, transport: Any
) -> None:
    port = urlsplit(shop.url).port or 0
    options: dict[str, Any] = {"transport": transport, "backoff": lambda: Backoff((0.1, 0.5), 100)}
    async with (
        asyncio.timeout(60),
        connect(shop.url, **options) as hw,
        hw.subscribe("open_orders", region=7) as orders,
    ):
        await asyncio.to_thread(shop.kill)
        asking = asyncio.create_task(hw.query("open_orders", region=7))
        with serving(url, tmp_path, program="shop:hw", port=port):
            assert await asking == []
            placed = await hw.mutate("place_order", region=7, id=1, amount=5)
            await hw.wait_for(placed.position)
            assert ids(orders.value) == [1]
