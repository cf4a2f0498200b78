"""An application with queries and mutations over a database, served in this process. The test
decides when the functions that wait may continue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection
from websockets.asyncio.client import connect as connect_websocket

from headwater.errors import Refused
from headwater.gateway.gateway import Gateway
from headwater.gateway.http.app import create_app
from headwater.hub.hub import Hub
from headwater.queries.events import Events
from headwater.queries.execution.mutations import MutationRunner
from headwater.queries.functions import Mutation, Query
from headwater.settings import make_settings
from tests.support.servers import ours

GENEROUS = {"limits_requests_per_second": 100_000, "limits_subscriptions_per_user": 1000}


class Application:
    """Its functions, a gate that some of them wait at, and how many wait."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.waiting = 0
        self.broken = False

    async def _at_the_gate(self) -> None:
        self.waiting += 1
        await self.gate.wait()

    @property
    def queries(self) -> dict[str, Query]:
        async def open_orders(ctx: Any, region: int) -> list[dict[str, Any]]:
            rows: list[dict[str, Any]] = await ctx.fetch(
                "select id, amount::int from orders where region = %s and status = 'new'"
                " order by id",
                region,
            )
            return rows

        async def count(ctx: Any) -> int:
            rows = await ctx.fetch("select count(*)::int as n from orders")
            if self.broken:
                raise RuntimeError("the secret of the house")
            return int(rows[0]["n"])

        async def whole(ctx: Any) -> list[Any]:
            return list(await ctx.fetch("select * from orders order by id"))

        async def caller(ctx: Any) -> dict[str, Any]:
            await ctx.fetch("select count(*) from orders")
            return {"user": ctx.user, "tenant": ctx.tenant, "plan": ctx.claims.get("plan")}

        async def trace(ctx: Any) -> str:
            return str(ctx.trace_id)

        async def closed(ctx: Any) -> None:
            raise Refused("not on sundays", code="closed", hint="Come back on Monday.")

        async def crash(ctx: Any) -> None:
            raise RuntimeError("the secret of the house")

        async def odd(ctx: Any) -> int:
            return "seven"  # type: ignore[return-value]

        async def gated(ctx: Any, number: int = 0) -> str:
            await self._at_the_gate()
            return "open"

        found = [
            Query("open_orders", open_orders, key="id"),
            Query("slow", gated, timeout=0.05),
            *(
                Query(body.__name__, body)
                for body in (count, whole, caller, trace, closed, crash, odd, gated)
            ),
        ]
        return {query.name: query for query in found}

    @property
    def mutations(self) -> dict[str, Mutation]:
        async def place(ctx: Any, id: int, region: int = 1, amount: int = 0) -> int:
            await ctx.execute(
                "insert into orders (id, region, status, amount) values (%s, %s, 'new', %s)",
                id,
                region,
                amount,
            )
            return id

        async def place_gated(ctx: Any, id: int) -> int:
            await self._at_the_gate()
            return await place(ctx, id)

        async def closed(ctx: Any) -> None:
            await place(ctx, 999)
            raise Refused("not on sundays", code="closed", hint="Come back on Monday.")

        async def crash(ctx: Any) -> None:
            raise RuntimeError("the secret of the house")

        async def odd(ctx: Any) -> int:
            return "seven"  # type: ignore[return-value]

        async def caller(ctx: Any) -> dict[str, Any]:
            return {"user": ctx.user, "tenant": ctx.tenant, "plan": ctx.claims.get("plan")}

        found = [
            Mutation(body.__name__, body)
            for body in (place, place_gated, closed, crash, odd, caller)
        ]
        return {mutation.name: mutation for mutation in found}


class Site:
    """The application, running."""

    def __init__(self, application: Application, gateway: Gateway, port: int) -> None:
        self.application = application
        self.gateway = gateway
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=60)

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        content = {} if body is None else {"json": body}
        return await self.http.post(path, **content, **options)

    async def place(self, id: int, **args: Any) -> str:
        """Place an order with a mutation; returns its position."""
        answer = await self.post("/v1/mutation/place", {"id": id, **args})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["position"])

    @asynccontextmanager
    async def socket(self, **headers: str) -> AsyncIterator[Socket]:
        where = f"{self.url.replace('http', 'ws')}/v1/ws"
        async with connect_websocket(where, additional_headers=headers) as connection:
            yield Socket(connection)

    @asynccontextmanager
    async def events(
        self, path: str, method: str = "GET", **options: Any
    ) -> AsyncIterator[EventStream]:
        async with self.http.stream(method, path, **options) as response:
            assert response.status_code == 200, await response.aread()
            yield EventStream(response)

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(name, labels) or 0.0


class Socket:
    """A WebSocket, by its messages."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, **message: Any) -> None:
        await self.connection.send(json.dumps(message))

    async def receive(self) -> dict[str, Any]:
        """The next message that is not a keepalive."""
        async with asyncio.timeout(60):
            while (message := json.loads(await self.connection.recv()))["type"] == "keepalive":
                pass
        return dict(message)

    async def receive_type(self, type: str) -> dict[str, Any]:
        """The next message of that type."""
        while (message := await self.receive())["type"] != type:
            pass
        return message


class EventStream:
    """A stream, by its messages; `ids` are those of the events so far."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.ids: list[str | None] = []

    async def receive(self) -> dict[str, Any]:
        id = None
        async with asyncio.timeout(60):
            async for line in self._lines:
                if line.startswith("id: "):
                    id = line.removeprefix("id: ")
                elif line.startswith("data: "):
                    self.ids.append(id)
                    return dict(json.loads(line.removeprefix("data: ")))
        raise AssertionError("the stream has ended")

    async def receive_type(self, type: str) -> dict[str, Any]:
        while (message := await self.receive())["type"] != type:
            pass
        return message


@asynccontextmanager
async def running(url: str, **settings: Any) -> AsyncIterator[Site]:
    """Serve the application over that database, inside the block."""
    application = Application()
    chosen = make_settings(GENEROUS | settings)
    events = Events()
    runner = MutationRunner(url, chosen, events=events)
    try:
        async with Hub(url, settings=chosen, events=events) as hub:
            gateway = Gateway(
                hub,
                chosen,
                url=url,
                queries=application.queries,
                mutations=application.mutations,
                runner=runner,
                metrics=hub.metrics,
            )
            async with gateway, ours(create_app(lambda: gateway)) as port:
                site = Site(application, gateway, port)
                async with site.http:
                    yield site
                application.gate.set()
                await gateway.stop()
    finally:
        await runner.close()
