"""A gateway calls the functions that docs/design/006-a-walk.md names, as a profiler sees it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import psycopg
from websockets.asyncio.client import ClientConnection

import headwater
from tests.support.gateway_client import served
from tests.support.walk import Walk, walks

SOURCE = headwater.__file__.removesuffix("headwater/__init__.py")
CHANGE, *_, SUBSCRIPTION = walks()


@contextmanager
def profiled() -> Iterator[set[str]]:
    """The functions of Headwater that this thread calls, as `module:Qualified.name`."""
    called = set[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE):
            module = code.co_filename.removeprefix(SOURCE).removesuffix(".py").replace("/", ".")
            called.add(f"{module}:{code.co_qualname}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(before)


def missing(walk: Walk, called: set[str]) -> list[str]:
    return [f"{p.place}:{p.name}" for p in walk.python if f"{p.place}:{p.name}" not in called]


async def message(socket: ClientConnection, type: str) -> dict[str, Any]:
    while True:
        found: dict[str, Any] = json.loads(await socket.recv())
        if found["type"] == type:
            return found


async def test_a_gateway_calls_what_the_walks_name(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as database:
        database.execute("create table orders (id int primary key, amount int)")
        database.execute("insert into orders values (1, 5)")
    query = {"table": "orders", "order": [["amount", "desc"]], "limit": 20}
    async with (
        asyncio.timeout(30),
        served(url, lambda hw: hw.table("orders")) as gateway,
        gateway.socket() as socket,
        await psycopg.AsyncConnection.connect(url, autocommit=True) as writer,
    ):
        await message(socket, "hello")
        with profiled() as called:
            await socket.send(json.dumps({"type": "subscribe", "id": "1", "live": query}))
            await message(socket, "snapshot")
        assert missing(SUBSCRIPTION, called) == []
        with profiled() as called:
            await writer.execute("insert into orders values (2, 9)")
            found = await message(socket, "deltas")
        assert missing(CHANGE, called) == []
        assert [delta["key"] for delta in found["deltas"]] == [[2]]
