"""Defects of queries and mutations at a gateway that users or attackers could use."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date
from decimal import Decimal
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, Field, SecretStr

from headwater import Headwater, connect
from headwater.database import Connection
from headwater.errors import ConfigError
from headwater.hub.flush import Flusher
from headwater.identity import ANONYMOUS
from headwater.limits import SESSION_QUEUE_BYTES_MAX
from headwater.model import Position
from headwater.protocol import QueryCall, Subscribe, Wait
from headwater.queries.arguments import Parameter, Signature, key_of
from headwater.queries.functions import Query
from tests.gateway.test_subscriptions import Sink
from tests.support.applications.query_functions import GENEROUS, running
from tests.support.applications.shop import open_shop, until
from tests.support.servers import ours


@pytest.fixture
async def hw(url: str, connection: Connection) -> Headwater:
    await open_shop(connection, rows=10)
    options: dict[str, Any] = dict(GENEROUS)
    return Headwater(url, **options)


@asynccontextmanager
async def served(hw: Headwater) -> AsyncIterator[httpx.AsyncClient]:
    app = hw.asgi()
    async with hw, ours(app) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
            yield http


def code(answer: httpx.Response) -> Any:
    return answer.json().get("error", {}).get("code")


# ------------------------------------------------------------------------ functions that fail oddly


async def _given_up() -> None:
    task = asyncio.ensure_future(asyncio.Event().wait())
    task.cancel()
    await task


class Odd(BaseException):
    """What no `except Exception` catches."""


async def test_a_function_that_is_cancelled_from_within_has_failed(
    hw: Headwater, caplog: pytest.LogCaptureFixture
) -> None:
    """It once left a query waiting for ever, its connection lost and a mutation unanswered."""

    async def cancelled(ctx: Any) -> None:
        await _given_up()

    async def leaving(ctx: Any) -> None:
        sys.exit(1)

    def leaving_thread(ctx: Any) -> None:
        sys.exit(1)

    async def odd(ctx: Any) -> None:
        raise Odd

    caplog.set_level(logging.CRITICAL)
    names = []
    for function in (cancelled, leaving, leaving_thread, odd):
        hw.query(function)
        hw.mutation(function)
        names.append(function.__name__)
    async with served(hw) as http:
        for name in names:
            for kind in ("query", "mutation"):
                answer = await http.post(f"/v1/{kind}/{name}")
                assert (name, answer.status_code, code(answer)) == (name, 500, "function_failed")


async def test_a_thread_that_raises_stop_iteration_has_failed(
    hw: Headwater, caplog: pytest.LogCaptureFixture
) -> None:
    """An asyncio future cannot hold it: the call waited until its time was over."""

    def first(ctx: Any) -> Any:
        return next(iter([]))

    caplog.set_level(logging.CRITICAL)
    hw.query(first)
    hw.mutation(first)
    async with served(hw) as http:
        for kind in ("query", "mutation"):
            answer = await http.post(f"/v1/{kind}/first")
            assert (answer.status_code, code(answer)) == (500, "function_failed")


async def test_a_statement_that_the_database_does_not_support_is_a_fault_of_the_query(
    hw: Headwater, caplog: pytest.LogCaptureFixture
) -> None:
    """It was taken for an outdated prepared statement, tried on three connections, and then
    reported as a retryable fault of the database."""

    @hw.query
    async def locked(ctx: Any) -> Any:
        return await ctx.fetch("select count(*) from orders for update")

    caplog.set_level(logging.CRITICAL)
    async with served(hw) as http:
        for _ in range(8):  # beyond the number after which a statement is prepared
            answer = await http.post("/v1/query/locked")
            assert (answer.status_code, code(answer)) == (500, "function_failed")


async def test_an_async_decorator_around_a_plain_function(hw: Headwater) -> None:
    """The function beneath says that it is not async; what is called is."""

    def loudly(function: Any) -> Any:
        @functools.wraps(function)
        async def wrapper(ctx: Any, **args: Any) -> Any:
            return function(ctx, **args).upper()

        return wrapper

    @hw.query
    @loudly
    def greet(ctx: Any, name: str) -> str:
        return f"hello {name}"

    async with served(hw) as http:
        answer = await http.post("/v1/query/greet", json={"name": "ann"})
        assert answer.json()["value"] == "HELLO ANN"


async def test_functions_with_an_endless_timeout(hw: Headwater) -> None:
    @hw.query(timeout=math.inf)
    async def one(ctx: Any) -> Any:
        return await ctx.fetch_value("select 1")

    @hw.mutation(timeout=1e12)
    async def two(ctx: Any) -> Any:
        return await ctx.fetch_value("select 2")

    async with served(hw) as http:
        assert (await http.post("/v1/query/one")).json()["value"] == 1
        assert (await http.post("/v1/mutation/two")).json()["value"] == 2


async def test_handlers_that_do_not_look_async(hw: Headwater) -> None:
    received: list[Any] = []

    class Listener:
        async def __call__(self, event: Any) -> None:
            received.append(event.sql)

    hw.on("query", Listener())
    hw.on("query", lambda event: Listener()(event))

    @hw.query
    async def one(ctx: Any) -> Any:
        return await ctx.fetch_value("select 1")

    async with hw:
        await one()
        await until(lambda: len(received) == 2)


# ------------------------------------------------------------------------ arguments


class Nameless:
    def __call__(self) -> int:
        return 1


@pytest.mark.parametrize("function", [functools.partial(int, "1"), Nameless(), max, dict])
def test_a_function_without_a_context_is_refused(function: Any) -> None:
    with pytest.raises(ConfigError):
        Query("name", function)


async def test_any_name_can_be_that_of_an_argument(hw: Headwater) -> None:
    """Also a name of one of our own parameters."""

    @hw.query
    async def sent(ctx: Any, identity: int, self: int) -> Any:
        sql = await ctx.fetch_value("select %(sql)s::int", sql=identity)
        return [sql, self]

    hw.query("plain", sql="select %(sql)s::int as sql, %(ctx)s::int as ctx, %(self)s::int as self")
    async with served(hw) as http:
        answer = await http.post("/v1/query/sent", json={"identity": 1, "self": 2})
        assert answer.json()["value"] == [1, 2]
        assert await sent(identity=3, self=4) == [3, 4]
        body = {"sql": 1, "ctx": 2, "self": 3}
        assert (await http.post("/v1/query/plain", json=body)).json()["value"] == [body]


async def test_keys_that_are_not_texts(hw: Headwater) -> None:
    """In JSON every key is one."""

    @hw.query
    async def prices(ctx: Any, of: dict[int, Decimal], at: dict[date, int]) -> list[Any]:
        return [[id, price] for id, price in of.items()] + [day.year for day in at]

    async with served(hw) as http:
        body = {"of": {"7": "1.50"}, "at": {"2026-01-01": 1}}
        answer = await http.post("/v1/query/prices", json=body)
        assert answer.json()["value"] == [[7, "1.50"], 2026]
        assert await prices(of={7: Decimal("1.50")}, at={}) == [[7, Decimal("1.50")]]
        answer = await http.post("/v1/query/prices", json={"of": {"x": 1}, "at": {}})
        assert (answer.status_code, code(answer)) == (400, "invalid_query")
        assert answer.json()["error"]["message"].startswith("args.of: a key: expected int")


class Login(BaseModel):
    password: SecretStr
    hidden: int = Field(default=0, exclude=True)


class Circle(BaseModel):
    size: int


class Square(BaseModel):
    size: int


class Drawn(BaseModel):
    shape: Circle | Square


def test_models_that_print_alike_have_different_keys() -> None:
    """A result for one password was given to a caller with another."""
    models: list[Any] = [
        Login(password=SecretStr("a")),
        Login(password=SecretStr("b")),
        Login(password=SecretStr("a"), hidden=1),
        Drawn(shape=Circle(size=1)),
        Drawn(shape=Square(size=1)),
    ]
    assert len({key_of(model) for model in models}) == len(models)
    assert key_of(Login(password=SecretStr("a"))) == key_of(models[0])
    for text in ("NaN", "sNaN"):  # equal to nothing, and not even to be hashed
        assert {key_of(Decimal(text))} == {key_of(Decimal(text))}


@pytest.mark.parametrize("depth", [50, 200, 480, 900])
async def test_deeply_nested_arguments_are_taken_or_refused(hw: Headwater, depth: int) -> None:
    """Keys of groups that are nested so deeply could be made, but not compared."""

    @hw.query
    async def echo(ctx: Any, x: Any) -> Any:
        return 1

    body = b'{"x":' + b"[" * depth + b"]" * depth + b"}"
    async with served(hw) as http:
        answers = [await http.post("/v1/query/echo", content=body) for _ in range(3)]
        expected = (200, None) if depth < 100 else (400, "invalid_query")
        assert [(each.status_code, code(each)) for each in answers] == [expected] * 3


def test_the_same_nested_arguments_have_the_same_key() -> None:
    signature = Signature("query x", [Parameter("x")])
    nested: Any = 1
    for _ in range(90):
        nested = [nested]
    assert signature.bind({"x": nested}).key == signature.bind({"x": nested}).key


# ------------------------------------------------------------------------ several gateways


async def test_another_gateway_shows_nothing_older(
    url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that came from a gateway with a newer position got older rows."""
    await open_shop(connection, rows=10)
    path = "/v1/query/open_orders/subscribe?delta=true"
    gate, flush = asyncio.Event(), Flusher.flush

    async def gated(self: Flusher) -> bool:
        await gate.wait()
        return await flush(self)

    async with running(url) as site, site.events(path, "POST", json={"region": 1}) as before:
        await before.receive_type("snapshot")
        await until(lambda: all(group.is_fresh for group in site.gateway.hub.reactive))
        monkeypatch.setattr(Flusher, "flush", gated)
        await connection.execute("insert into orders (id, region, status) values (60, 1, 'new')")
        now = await connection.execute("select headwater.log_id(), pg_current_snapshot()::text")
        row = await now.fetchone()
        assert row is not None
        headers = {"last-event-id": str(Position.of_snapshot(*row))}

        async def let_on() -> None:
            await until(lambda: len(site.gateway._connections) == 2)
            gate.set()

        letting = asyncio.create_task(let_on())
        async with site.events(path, "POST", json={"region": 1}, headers=headers) as stream:
            assert len((await stream.receive_type("snapshot"))["rows"]) == 3
        await letting


# ------------------------------------------------------------------------ the end


@pytest.mark.parametrize("transport", ["ws", "sse"])
async def test_a_mutation_is_answered_while_the_gateway_stops(
    url: str, connection: Connection, transport: Any
) -> None:
    """After every restart clients did not know the outcome of their writes."""
    await open_shop(connection, rows=10)
    async with running(url) as site, connect(site.url, transport=transport) as hw:
        mutating = asyncio.create_task(hw.mutate("place_gated", id=60))
        await until(lambda: site.application.waiting)
        stopping = asyncio.create_task(site.gateway.stop())
        await until(lambda: site.gateway.stopping)
        site.application.gate.set()
        assert (await mutating).value == 60
        await stopping


async def test_a_wait_is_not_answered_by_the_loss_of_the_database(hw: Headwater) -> None:
    """Waiting calls are refused then; a wait took the refusal for its answer."""
    gate = asyncio.Event()
    gate.set()

    @hw.query
    async def count(ctx: Any) -> Any:
        found = await ctx.fetch_value("select count(*) from orders")
        await gate.wait()
        return found

    @hw.query
    async def one(ctx: Any) -> int:
        return 1

    @hw.mutation
    async def place(ctx: Any, id: int) -> None:
        await ctx.execute("insert into orders (id) values (%s)", id)

    async with served(hw) as http, connect(str(http.base_url)) as client:
        assert hw.gateway is not None
        groups = hw.gateway.hub.reactive
        async with client.subscribe("count") as counted:
            await until(lambda: all(group.is_fresh for group in groups))
            gate.clear()
            placed = await client.mutate("place", id=60)
            waiting = asyncio.create_task(client.wait_for(placed.position))
            await until(lambda: any(group.waiters for group in groups))
            groups.lost()
            assert await client.query("one") == 1  # its answer would have come before
            assert not waiting.done()
            gate.set()
            await waiting
            assert counted.value == 11


async def test_a_call_beside_a_slow_query_does_not_wait_for_it(hw: Headwater) -> None:
    """Calls before the first connection waited in one queue, as long as the first of them took."""
    gate = asyncio.Event()

    @hw.query
    async def slow(ctx: Any) -> None:
        await gate.wait()

    @hw.query
    async def quick(ctx: Any) -> int:
        return 1

    async with served(hw):
        assert hw.gateway is not None
        calls = hw.gateway.calls
        first = asyncio.create_task(calls.ask("slow", {}, ANONYMOUS))
        second = asyncio.create_task(calls.ask("quick", {}, ANONYMOUS))
        await second
        assert not first.done()
        gate.set()
        await first


async def test_a_wait_is_answered_after_unsent_results(url: str, connection: Connection) -> None:
    """There is room for the answer already, and the result has not been sent yet."""
    await open_shop(connection, rows=10)
    async with running(url) as site:
        gateway, sink = site.gateway, Sink()
        client = gateway.open(ANONYMOUS, address="192.0.2.1", transport="sse")
        client.attach(sink)
        await gateway.subscribe(client, Subscribe("s", query=QueryCall("count")))
        sink.buffered = SESSION_QUEUE_BYTES_MAX + 1
        position = await site.place(60)
        await until(lambda: client.session.is_behind)
        sink.buffered = 0
        client.start(gateway.calls.begin(client, Wait("w", position)))
        assert (await site.post("/v1/query/count")).json()["value"] == 11
        sink.on_drain()
        await until(lambda: "answer" in sink.names)
        assert sink.names == ["hello", "subscribed", "result", "result", "answer"]
        gateway.release(client)
