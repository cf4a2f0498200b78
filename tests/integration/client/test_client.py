"""The client over real sockets: what it receives, which failures it survives, and its errors."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from headwater import Backoff, Connection, Live, connect, connect_sync, limits
from headwater.errors import (
    ConfigError,
    ConnectionFailed,
    Diverged,
    Forbidden,
    InvalidQuery,
    LimitExceeded,
    Unauthorized,
)
from headwater.live.filters.filter import c
from headwater.model import Enter, Leave, Reset
from headwater.protocol import Authenticate, Error, Subscribe, Unsubscribe
from tests.integration.test_docs import blocks, run_snippet
from tests.support.fake_gateway import FakeGateway, fake_gateway
from tests.support.paths import ROOT

WAIT_SECONDS = 20.0
HOWTO = ROOT / "docs" / "howto" / "follow-from-python.md"


@pytest.fixture
async def fake() -> AsyncIterator[FakeGateway]:
    async with fake_gateway() as fake:
        yield fake


@pytest.fixture(params=["ws", "sse"])
def transport(request: pytest.FixtureRequest) -> Any:
    return request.param


def quick() -> Backoff:
    return Backoff(seconds=(0.01, 0.05))


def client(fake: FakeGateway, transport: Any, **options: Any) -> Connection:
    return connect(fake.url, transport=transport, **{"backoff": quick, **options})


def ids(rows: list[Any]) -> list[int]:
    return [row["id"] for row in rows]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def next_of(items: AsyncGenerator[Any, None]) -> Any:
    async with asyncio.timeout(WAIT_SECONDS):
        return await anext(items)


async def read_on(items: AsyncGenerator[Any, None]) -> None:
    while True:
        await next_of(items)


# ------------------------------------------------------------------------ live queries


async def test_rows_now_and_after_every_change(fake: FakeGateway, transport: Any) -> None:
    fake.put(1, 10)
    async with client(fake, transport) as hw:
        rows = aiter(hw.live("orders", where=c.amount > 5, order="id", limit=20))
        assert await next_of(rows) == [{"id": 1, "amount": 10}]
        fake.put(2, 20)
        assert ids(await next_of(rows)) == [1, 2]
        fake.remove(1)
        assert ids(await next_of(rows)) == [2]
        await rows.aclose()
    (asked,) = [m for m in fake.seen if isinstance(m, Subscribe)]
    assert asked.live == {
        "table": "orders",
        "where": ["amount", ">", 5],
        "order": [["id"]],
        "limit": 20,
    }


async def test_a_slow_reader_of_rows_gets_the_latest(fake: FakeGateway, transport: Any) -> None:
    async with client(fake, transport) as hw, hw.live({"table": "orders"}) as orders:
        rows = aiter(orders)
        assert await next_of(rows) == []
        for id in range(1, 6):
            fake.put(id, id)
        await until(lambda: len(orders.rows) == 5)
        assert ids(await next_of(rows)) == [1, 2, 3, 4, 5]
        await rows.aclose()


async def test_deltas(fake: FakeGateway, transport: Any) -> None:
    fake.put(1, 10)
    async with client(fake, transport) as hw, hw.live("orders", verify=True) as orders:
        assert (orders.rows, orders.keys) == ([{"id": 1, "amount": 10}], [(1,)])
        assert (orders.key_columns, orders.cursor((1,))) == (("id",), (1,))
        batches = orders.deltas()
        first = await next_of(batches)
        assert first.deltas == (Reset((Enter((1,), {"id": 1, "amount": 10}, 0, (1,)),)),)
        fake.remove(1)
        second = await next_of(batches)
        assert second.deltas == (Leave((1,), 0),)
        assert (second.position, second.at) == (
            orders.position,
            datetime(2026, 1, 31, 12, tzinfo=UTC),
        )
        await batches.aclose()


async def test_a_slow_reader_of_deltas_gets_a_reset(
    fake: FakeGateway, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CLIENT_BATCHES_MAX", 3)
    async with client(fake, transport) as hw, hw.live("orders") as orders:
        batches = orders.deltas()
        assert (await next_of(batches)).deltas == (Reset(),)
        for id in range(1, 6):
            fake.put(id, id)
        await until(lambda: len(orders.rows) == 5)
        (reset,) = (await next_of(batches)).deltas
        assert isinstance(reset, Reset)
        assert [enter.key for enter in reset.rows] == [(1,), (2,), (3,), (4,), (5,)]
        fake.remove(3)
        assert (await next_of(batches)).deltas == (Leave((3,), 2),)
        await batches.aclose()


async def test_a_window_slides(fake: FakeGateway, transport: Any) -> None:
    for id in range(1, 5):
        fake.put(id, id)
    async with client(fake, transport) as hw, hw.live("orders") as orders:
        second = orders.cursor((2,))
        await orders.reanchor(second)
        assert ids(orders.rows) == [3, 4]
        await orders.reanchor(second)  # it is there already
        with pytest.raises(InvalidQuery, match="expected an integer"):
            await orders.reanchor(["x"])
        fake.put(5, 5)
        await until(lambda: ids(orders.rows) == [3, 4, 5])
        fake.cut()
        fake.put(6, 6)
        await until(lambda: ids(orders.rows) == [3, 4, 5, 6])


async def test_many_on_one_connection(fake: FakeGateway, transport: Any) -> None:
    async with client(fake, transport) as hw:
        async with (
            hw.live("orders") as all_,
            hw.live("orders") as same,
            hw.live("orders", limit=9) as few,
        ):
            fake.put(1, 1)
            await until(lambda: [ids(each.rows) for each in (all_, same, few)] == [[1], [1], [1]])
            fake.cut()
            fake.put(2, 2)
            await until(lambda: [len(each.rows) for each in (all_, same, few)] == [2, 2, 2])
        assert (hw.diverged, hw.reconnects) == (0, 1)


async def test_leaving_a_loop_unsubscribes(fake: FakeGateway, transport: Any) -> None:
    async with client(fake, transport) as hw:
        async for _ in hw.live("orders"):
            break
        await until(lambda: any(isinstance(message, Unsubscribe) for message in fake.seen))
        assert not any(session.views for session in fake.sessions.values())


async def test_too_many_requests_do_not_keep_a_subscription(fake: FakeGateway) -> None:
    """Over WebSocket the gateway never refuses to end a subscription."""
    fake.unsubscription_refusals = [
        Error("rate", "too many requests", retryable=True, retry_after_secs=0.01)
    ]
    fake.status["rate"] = 429
    async with client(fake, "sse") as hw:
        async with hw.live("orders"):
            assert any(session.views for session in fake.sessions.values())
        await until(lambda: not any(session.views for session in fake.sessions.values()))


async def test_a_reader_ends_with_the_connection(fake: FakeGateway, transport: Any) -> None:
    async def read() -> list[Any]:
        return [rows async for rows in orders]

    async with client(fake, transport) as hw:
        orders = hw.live("orders")
        reading = asyncio.create_task(read())
        await until(lambda: orders.position)
    assert await reading == [[]]
    with pytest.raises(ConfigError, match="not open"):
        await anext(aiter(hw.live("orders")))


# ------------------------------------------------------------------------ the documentation


async def test_the_examples(fake: FakeGateway, transport: Any) -> None:
    for id in range(1, 6):
        fake.put(id, 10 * id)
    names = {
        "c": c,
        "connect": lambda url: client(fake, transport),
        "url": fake.url,
        "place_order": lambda: fake.put(6, 60),
        "print": lambda *values: None,
    }
    examples = [b.text for b in blocks(HOWTO) if b[:2] == ("python", "client")]
    for example in examples:
        async with asyncio.timeout(WAIT_SECONDS):
            await run_snippet(example, HOWTO.name, names)
        fake.put(7, 70)
    assert len(examples) == 4


# ------------------------------------------------------------------------ what is refused


REFUSED: list[tuple[Error, type[Exception]]] = [
    (Error("token_expired", "the token has expired"), Unauthorized),
    (Error("forbidden", "not for you"), Forbidden),
]


@pytest.mark.parametrize(("refusal", "kind"), REFUSED)
async def test_a_connection_refused_for_good(
    refusal: Error, kind: type[Exception], fake: FakeGateway, transport: Any
) -> None:
    fake.refusals = [refusal]
    with pytest.raises(kind, match=refusal.message):
        await client(fake, transport).__aenter__()
    assert len(fake.tokens) == 1


async def test_a_connection_refused_for_now(fake: FakeGateway, transport: Any) -> None:
    full = Error("limit", "too many sessions", retryable=True, retry_after_secs=0.02)
    fake.refusals = [full, full]
    async with client(fake, transport) as hw:
        assert hw.reconnects == 0
    assert len(fake.tokens) == 3


async def test_a_limit_that_stays(fake: FakeGateway, transport: Any) -> None:
    fake.refusals = [Error("limit", "full", retryable=True, retry_after_secs=0.01)] * 10
    with pytest.raises(LimitExceeded, match="full"):
        await client(fake, transport).__aenter__()
    assert len(fake.tokens) == 10


async def test_no_gateway_listens(transport: Any) -> None:
    async with fake_gateway() as gone:
        url = gone.url
    with pytest.raises(ConnectionFailed, match="gave up after 3 failures") as caught:
        await connect(
            url, transport=transport, backoff=lambda: Backoff((0.01, 0.01), failures_max=3)
        ).__aenter__()
    assert caught.value.hint


@pytest.mark.parametrize("url", ["", "localhost:8484", "ftp://localhost", []])
def test_no_url(url: Any) -> None:
    with pytest.raises(ConfigError):
        connect(url)


async def test_a_query_refused(fake: FakeGateway, transport: Any) -> None:
    fake.subscription_refusals = [Error("invalid_query", "where: no", hint="Do.")]
    async with client(fake, transport) as hw:
        with pytest.raises(InvalidQuery, match="where: no"):
            async with hw.live("orders"):
                pass
        with pytest.raises(InvalidQuery, match="unknown operator"):
            hw.live("orders", where=["id", "~", 1])
        with pytest.raises(InvalidQuery, match="since"):
            hw.changes(since="yesterday")
        async with hw.live("orders") as orders:
            assert orders.rows == []


async def test_a_query_refused_for_now(fake: FakeGateway, transport: Any) -> None:
    busy = Error("unavailable", "the database cannot be reached", retryable=True)
    fake.subscription_refusals = [busy, busy]
    async with client(fake, transport) as hw, hw.live("orders") as orders:
        assert orders.rows == []
        # A subscription that has begun waits longer than a new one.
        fake.subscription_refusals = [busy] * 4
        fake.put(1, 1)
        fake.cut()
        fake.put(2, 2)
        await until(lambda: ids(orders.rows) == [1, 2])


async def test_a_limit_of_subscriptions(fake: FakeGateway, transport: Any) -> None:
    full = Error("limit", "501 subscriptions", retryable=True, retry_after_secs=0.01)
    fake.subscription_refusals = [full] * limits.CLIENT_SUBSCRIBE_ATTEMPTS_MAX
    async with client(fake, transport) as hw:
        with pytest.raises(LimitExceeded, match="501"):
            async with hw.live("orders"):
                pass
    assert fake.subscription_refusals == []


async def test_a_subscription_ended_by_the_gateway(fake: FakeGateway, transport: Any) -> None:
    async with client(fake, transport) as hw:
        rows = aiter(hw.live("orders"))
        await next_of(rows)
        fake.send(Error("forbidden", "no longer yours", id="1"))
        with pytest.raises(Forbidden, match="no longer yours"):
            await next_of(rows)


# ------------------------------------------------------------------------ what is survived


@pytest.mark.parametrize("resumes", [True, False])
async def test_a_lost_connection(resumes: bool, fake: FakeGateway, transport: Any) -> None:
    fake.resumes = resumes
    async with client(fake, transport) as hw, hw.live("orders", verify=True) as orders:
        for id in range(1, 6):
            fake.put(2 * id, id)
            fake.cut()
            fake.put(2 * id + 1, id)
            await until(lambda: len(orders.rows) == len(fake.rows))
        assert ids(orders.rows) == list(range(2, 12))
        assert (hw.diverged, hw.reconnects) == (0, 5)


@pytest.mark.parametrize("code", [1012, 4401])
async def test_a_connection_that_the_gateway_closes(
    code: int, fake: FakeGateway, transport: Any
) -> None:
    async with client(fake, transport) as hw, hw.live("orders") as orders:
        fake.close_connections(code)
        fake.put(1, 1)
        await until(lambda: ids(orders.rows) == [1])


async def test_a_refusal_before_a_lost_connection(fake: FakeGateway, transport: Any) -> None:
    """The refusal was about something else, and does not prevent a reconnect."""
    async with client(fake, transport) as hw, hw.live("orders") as orders:
        fake.send(Error("subscription_unknown", "this session has no subscription '1'"))
        fake.close_connections(1001)
        await until(lambda: hw.reconnects == 1)
        fake.put(1, 1)
        await until(lambda: ids(orders.rows) == [1])


async def test_a_silent_connection_is_replaced(fake: FakeGateway, transport: Any) -> None:
    fake.keepalive = 0.02
    async with client(fake, transport) as hw:
        await until(lambda: hw.reconnects >= 2)


async def test_rows_that_diverge_are_read_again(fake: FakeGateway, transport: Any) -> None:
    fake.put(1, 1)
    async with client(fake, transport) as hw, hw.live("orders") as orders:
        fake.send_wrong_delta()
        assert ids(orders.rows) == [1]
        await until(lambda: hw.diverged == 1)
        fake.put(2, 2)
        await until(lambda: ids(orders.rows) == [1, 2])
        assert hw.reconnects == 0


async def test_rows_that_diverge_repeatedly_raise_an_error(
    fake: FakeGateway, transport: Any
) -> None:
    async with client(fake, transport) as hw, hw.live("orders") as orders:
        rows = aiter(orders)
        await next_of(rows)
        for lies in range(1, limits.CLIENT_DIVERGED_MAX + 1):
            await until(lambda: orders.position)
            fake.send_wrong_delta()
            await until(lambda lies=lies: hw.diverged == lies)  # type: ignore[misc]
        with pytest.raises(Diverged):
            await read_on(rows)


async def test_another_gateway_takes_over(transport: Any) -> None:
    async with fake_gateway() as second:
        async with fake_gateway() as first:
            urls = [first.url, second.url]
            hw = await connect(urls, transport=transport, backoff=quick).__aenter__()
            orders = await hw.live("orders").__aenter__()
        second.put(1, 1)
        await until(lambda: ids(orders.rows) == [1])
        await hw.__aexit__()


async def test_unknown_messages_are_ignored(fake: FakeGateway, transport: Any) -> None:
    class Novelty(Error, frozen=True, tag="novelty"):
        pass

    async with client(fake, transport) as hw, hw.live("orders") as orders:
        fake.send(Novelty("a", "b"))
        fake.put(1, 1)
        await until(lambda: ids(orders.rows) == [1])
        assert hw.reconnects == 0


# ------------------------------------------------------------------------ change feeds


async def test_a_feed(fake: FakeGateway, transport: Any) -> None:
    async with client(fake, transport) as hw, hw.changes("orders") as feed:
        transactions = aiter(feed)
        for id in range(1, 4):
            fake.put(id, id)
            transaction = await next_of(transactions)
            assert [(change.op, change.key) for change in transaction.changes] == [
                ("insert", {"id": id})
            ]
            assert transaction.position == fake.position
            fake.cut()
        fake.gap(transaction.position)
        fake.remove(1)
        assert (await next_of(transactions)).changes[0].op == "delete"
        await transactions.aclose()


async def test_a_feed_from_a_position(fake: FakeGateway, transport: Any) -> None:
    fake.put(1, 1)
    since = fake.position
    fake.put(2, 2)
    async with client(fake, transport) as hw:
        async for transaction in hw.changes("orders", since=since):
            assert transaction.changes[0].key == {"id": 2}
            break


async def test_a_slow_reader_of_a_feed_delays_its_connection(
    fake: FakeGateway, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CLIENT_TRANSACTIONS_MAX", 5)
    async with client(fake, transport) as hw, hw.changes("orders") as feed:
        orders = await hw.live("orders", limit=500).__aenter__()
        for id in range(300):
            fake.put(id, id)
        await until(lambda: len(orders.rows) >= 5)
        transactions = aiter(feed)
        seen = [(await next_of(transactions)).changes[0].key["id"] for _ in range(300)]
        assert seen == list(range(300))
        await transactions.aclose()
        await until(lambda: len(orders.rows) == 300)


async def test_leaving_a_feed_that_delays_its_connection(
    fake: FakeGateway, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CLIENT_TRANSACTIONS_MAX", 1)
    async with client(fake, transport) as hw, hw.live("orders") as orders:
        async with hw.changes("orders"):
            for id in range(50):
                fake.put(id, id)
        await until(lambda: len(orders.rows) == 50)


# ------------------------------------------------------------------------ tokens


async def test_a_new_token_is_requested_for_each_connection(
    fake: FakeGateway, transport: Any
) -> None:
    numbers = itertools.count()
    async with client(fake, transport, token=lambda: f"token {next(numbers)}") as hw:
        fake.cut()
        await until(lambda: hw.reconnects == 1)
    assert fake.tokens == ["token 0", "token 1"]


async def test_a_token_is_renewed_on_the_open_connection(fake: FakeGateway, transport: Any) -> None:
    async def token() -> str:
        return "fresh"

    fake.expires_at = datetime.now(UTC) + timedelta(seconds=1)
    async with client(fake, transport, token=token) as hw:
        await until(lambda: Authenticate("fresh") in fake.seen)
        assert hw.reconnects == 0


def expire(fake: FakeGateway) -> None:
    """The gateway ends every session because its token has ended."""
    fake.send(Error("token_expired", "the token has expired"))
    fake.close_connections(4401)


async def until_ended(orders: Live) -> None:
    async for _ in orders.deltas():
        pass


async def test_a_token_that_is_a_text_and_was_refused_is_not_sent_again(
    fake: FakeGateway, transport: Any
) -> None:
    async with client(fake, transport, token="t") as hw:
        orders = hw.live("orders")
        await orders.__aenter__()
        expire(fake)
        with pytest.raises(Unauthorized, match="the token has expired") as caught:
            await until_ended(orders)
    assert "function that returns a new token" in str(caught.value.hint)
    assert fake.tokens == ["t"]


async def test_a_function_is_asked_for_another_token_once(
    fake: FakeGateway, transport: Any
) -> None:
    numbers = itertools.count()
    async with client(fake, transport, token=lambda: f"token {next(numbers)}") as hw:
        orders = hw.live("orders")
        await orders.__aenter__()
        expire(fake)
        await until(lambda: hw.reconnects == 1 and fake.sessions)
        expire(fake)
        with pytest.raises(Unauthorized, match="the token has expired"):
            await until_ended(orders)
    assert fake.tokens == ["token 0", "token 1"]


async def test_a_function_whose_token_was_refused_is_asked_again(
    fake: FakeGateway, transport: Any
) -> None:
    fake.refusals = [Error("token_expired", "the token has expired")]
    numbers = itertools.count()
    async with client(fake, transport, token=lambda: f"token {next(numbers)}"):
        assert fake.tokens == ["token 0", "token 1"]


async def test_a_token_function_that_fails(fake: FakeGateway, transport: Any) -> None:
    def token() -> str:
        raise OSError("the issuer is away")

    with pytest.raises(ConnectionFailed, match="the issuer is away"):
        await client(fake, transport, token=token).__aenter__()


# ------------------------------------------------------------------------ without an event loop


@pytest.fixture
def in_thread() -> Callable[[Callable[[], Any]], Awaitable[Any]]:
    """The fake gateway needs this loop; a blocking program gets a thread."""
    return lambda work: asyncio.wait_for(asyncio.to_thread(work), WAIT_SECONDS)


async def test_blocking(
    fake: FakeGateway, transport: Any, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]
) -> None:
    fake.put(1, 1)
    loop = asyncio.get_running_loop()

    def work() -> list[Any]:
        seen = list[Any]()
        with connect_sync(fake.url, transport=transport, token="t") as hw:
            for rows in hw.live("orders", limit=10):
                seen.append(ids(rows))
                if len(rows) == 2:
                    break
                loop.call_soon_threadsafe(fake.put, 2, 2)
            with hw.live("orders") as orders, hw.changes("orders") as feed:
                orders.reanchor(orders.cursor((1,)))
                seen.append((ids(orders.rows), orders.keys, orders.key_columns))
                loop.call_soon_threadsafe(fake.put, 3, 3)
                seen.append(next(iter(feed)).changes[0].key)
                seen.append(type(next(orders.deltas()).deltas[0]))
                assert orders.position
                assert feed.position
            with pytest.raises(InvalidQuery):
                hw.live("orders", where=["id", "~", 1])
            assert (hw.diverged, hw.reconnects, hw.session) == (0, 0, "session 1")
        return seen

    seen = await in_thread(work)
    assert seen == [[1], [1, 2], ([2], [(2,)], ("id",)), {"id": 3}, Reset]
    gc.collect()


async def test_blocking_refusals(
    fake: FakeGateway, in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]
) -> None:
    fake.refusals = [Error("forbidden", "not for you")]

    def work() -> None:
        blocking = connect_sync(fake.url)
        with pytest.raises(ConfigError):
            blocking.live("orders")
        with pytest.raises(Forbidden):
            blocking.__enter__()
        with connect_sync(fake.url) as hw:
            rows: Iterator[Any] = iter(hw.live("orders"))
            assert next(rows) == []
        assert list(rows) == []

    await in_thread(work)


async def test_an_async_reader_can_be_cancelled(fake: FakeGateway, transport: Any) -> None:
    async with client(fake, transport) as hw:
        async with aclosing(aiter(hw.live("orders"))) as rows:
            await anext(rows)
            waiting = asyncio.create_task(anext(rows))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        await until(lambda: any(isinstance(message, Unsubscribe) for message in fake.seen))
