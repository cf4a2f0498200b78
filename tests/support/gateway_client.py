"""A gateway in this process over a real socket, and clients with tokens."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import jwt
from websockets.asyncio.client import connect as connect_websocket

from headwater import Headwater
from tests.support.servers import ours

SECRET = "a secret that is long enough for SHA-256 and more"


def token(*, secret: str = SECRET, **claims: Any) -> str:
    return jwt.encode({"sub": "ann", "exp": time.time() + 3600, **claims}, secret, "HS256")


def bearer(**claims: Any) -> dict[str, str]:
    return {"authorization": f"Bearer {token(**claims)}"}


class Gateway:
    """A gateway in this process, and clients of it."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False)

    async def ticket(self, **claims: Any) -> str:
        answer = await self.http.post("/v1/tickets", headers=bearer(**claims))
        return str(answer.raise_for_status().json()["ticket"])

    async def code(self, method: str, path: str, **options: Any) -> str | None:
        """The error code of a request; None if it succeeds."""
        async with self.http.stream(method, path, **options) as response:
            if response.is_success:
                return None
            error = json.loads(await response.aread())["error"]
            assert error["message"]
            return str(error["code"])

    def socket(self, path: str = "", **options: Any) -> connect_websocket:
        return connect_websocket(f"ws://127.0.0.1:{self.port}/v1/ws{path}", **options)


@asynccontextmanager
async def served(
    url: str, declare: Callable[[Headwater], object] = lambda hw: None, **settings: Any
) -> AsyncIterator[Gateway]:
    hw = Headwater(url, **settings)
    declare(hw)
    app = hw.asgi()
    async with hw, ours(app) as port:
        gateway = Gateway(port)
        async with gateway.http:
            yield gateway
