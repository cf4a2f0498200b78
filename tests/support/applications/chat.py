"""A chat: tables, an application with topics as `headwater serve` runs it, and viewers over SSE
(as an EventSource) and over WebSocket. A viewer records text that shrinks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from headwater import connect
from headwater.client.subscriptions.topics import Topic
from headwater.database import Connection
from headwater.protocol import Remove
from tests.gateway.test_oracle import quick
from tests.support.log_probe import run

PROGRAM = """
from headwater import Headwater

hw = Headwater()
hw.table("messages")

@hw.topic("chat:{id}", entity="messages")
async def chat(ctx, id: int) -> bool:
    return bool(await ctx.fetch_value(
        "select true from members where chat_id = %s and name = %s", id, ctx.user or "anybody"))

hw.topic("room:{chat_id}", table="messages", parents={"chats": "chat_id"})
hw.topic("org:{id}", poke=True)

@hw.topic("broken:{id}", poke=True)
async def broken(ctx, id: str) -> bool:
    raise RuntimeError("the secret of the house")

@hw.query
async def messages(ctx, chat: int) -> list:
    return await ctx.fetch("select * from messages where chat_id = %s order by id", chat)

@hw.mutation
async def say(ctx, id: int, chat: int, content: str) -> None:
    await ctx.execute("insert into messages values (%s, %s, %s)", id, chat, content)
    await ctx.signal(f"chat:{chat}", [id])
"""


async def open_chat(connection: Connection, folder: Path) -> None:
    """Make the tables, and the program as `chat:hw`."""
    await run(
        connection,
        "create table chats (id int primary key, title text)",
        "create table messages (id int primary key, chat_id int, content text, state text)",
        "create table members (chat_id int, name text)",
        "insert into chats values (1, 'one'), (42, 'forty-two')",
        "insert into members values (42, 'ann'), (42, 'anybody'), (1, 'anybody')",
    )
    (folder / "chat.py").write_text(PROGRAM)


class Table:
    """The rows of a viewer, folded from the operations that it received."""

    def __init__(self) -> None:
        self.rows: dict[Any, Any] = {}
        self.shrunk: list[Any] = []
        self.batches = 0
        self.pulls = 0

    def take(self, op: str, entity: str, key: Any, row: Any) -> None:
        place = entity, *key
        if op == "remove":
            self.rows.pop(place, None)
            return
        before = (self.rows.get(place) or {}).get("content") or ""
        after = row.get("content") or ""
        if not after.startswith(before):
            self.shrunk.append((before[-20:], after[-20:]))
        self.rows[place] = row

    def content(self, id: int) -> str | None:
        row = self.rows.get(("messages", id))
        return None if row is None else row["content"]


class Client(Table):
    """Follows a topic with the Python client."""

    def __init__(self, topic: Topic) -> None:
        super().__init__()
        self.topic = topic

    async def follow(self) -> None:
        async for ops in self.topic:
            self.batches += 1
            self.pulls += ops.pull
            for op in ops:
                if isinstance(op, Remove):
                    self.take("remove", op.entity, op.key, None)
                else:
                    self.take("upsert", op.entity, op.key, op.row)


class EventSource(Table):
    """Follows topics as a browser's EventSource does: over SSE, with `Last-Event-ID` when it
    connects again, and no other state."""

    def __init__(self, url: str, topics: str, **headers: str) -> None:
        super().__init__()
        self.url = url
        self.topics = topics
        self.headers = headers
        self.last_id: str | None = None
        self.opened = 0
        self.messages: list[dict[str, Any]] = []
        self.views: dict[str, int] = {}
        self.session = ""

    async def follow(self) -> None:
        while True:
            with suppress(httpx.HTTPError):
                await self._connection()
            await asyncio.sleep(0.05)

    async def _connection(self) -> None:
        headers = dict(self.headers)
        if self.last_id is not None:
            headers["last-event-id"] = self.last_id
        async with (
            httpx.AsyncClient(trust_env=False, timeout=30) as http,
            http.stream(
                "GET", f"{self.url}/v1/stream", params={"topics": self.topics}, headers=headers
            ) as response,
        ):
            if response.status_code != 200:
                return
            self.opened += 1
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    self.last_id = line.removeprefix("id: ")
                elif line.startswith("data: "):
                    self._receive(json.loads(line.removeprefix("data: ")))

    def _receive(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "hello":
                self.session = message["session"]
            case "subscribed":
                self.views[message["id"]] = message["view"]
            case "topic":
                self.batches += bool(message["ops"])
                for op in message["ops"]:
                    self.take(op["op"], op["entity"], op["key"], op.get("row"))
            case "poke" | "gap":
                self.pulls += 1
        self.messages.append(message)

    @property
    def errors(self) -> dict[str | None, str]:
        return {m.get("id"): m["code"] for m in self.messages if m["type"] == "error"}


@asynccontextmanager
async def following(*viewers: Client | EventSource) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(viewer.follow()) for viewer in viewers]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended


__all__ = ["Client", "EventSource", "connect", "following", "open_chat", "quick"]
