"""What tests of the hub share: a subscriber that folds what it is sent, and the true answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from headwater.client.replica import Replica
from headwater.database import Connection
from headwater.errors import HeadwaterError
from headwater.live.query import LiveQuery
from headwater.model import Reset as ResetDelta
from headwater.protocol import (
    Changes,
    Deltas,
    Failed,
    Frame,
    Gap,
    Reset,
    Result,
    Snapshot,
    read_server,
)


class Recorder:
    """A subscriber that keeps everything, over the wire and back, and folds it as a client does."""

    def __init__(self) -> None:
        self.replica = Replica()
        self.messages: list[Any] = []
        self.frames: list[Frame] = []
        self.views: list[int] = []
        self.resumed: list[bool] = []
        self.error: HeadwaterError | None = None
        self.value: Any = None
        self.failure: Failed | None = None
        self.fault: Exception | None = None
        self.position: str | None = None
        self._more = False
        self._news = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()

    # -------------------------------------------------------------------- the contract

    def subscribed(self, view: int, *, key: tuple[str, ...], resumed: bool) -> None:
        self.views.append(view)
        self.resumed.append(resumed)
        self._news.set()

    def deliver(self, frame: Frame) -> None:
        try:
            message = read_server(frame.json)
            assert message.view == self.views[-1]  # type: ignore[union-attr]
            self.frames.append(frame)
            self.messages.append(message)
            self._fold(message)
        except Exception as fault:
            self.fault = self.fault or fault
            raise
        finally:
            self._news.set()

    def failed(self, error: HeadwaterError) -> None:
        assert self.error is None
        self.error = error
        self._news.set()

    async def room(self) -> None:
        await self.reads.wait()

    # -------------------------------------------------------------------- what a client does

    def _fold(self, message: Any) -> None:
        match message:
            case Snapshot() | Reset():
                assert isinstance(message, Reset) or self._more or not self._had_snapshot()
                if not self._more or isinstance(message, Reset):
                    self.replica.apply([ResetDelta()])
                self.replica.apply(message.rows, message.hash)
                self._more = message.more
            case Deltas():
                assert not self._more
                self.replica.apply(message.deltas, message.hash)
            case Result():
                self.value, self.failure = message.value, None
            case Failed():
                self.failure = message
            case Changes() | Gap():
                pass
        self.position = message.position

    def _had_snapshot(self) -> bool:
        return sum(isinstance(each, Snapshot) for each in self.messages) > 1

    # -------------------------------------------------------------------- for tests

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.replica.rows]

    def kinds(self) -> list[str]:
        return [type(message).__name__.lower() for message in self.messages]

    async def until(self, condition: Callable[[], Any], seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while self.fault is None and not condition():
                self._news.clear()
                await self._news.wait()
        if self.fault is not None:
            raise self.fault

    async def until_rows(self, rows: list[dict[str, Any]]) -> None:
        await self.until(lambda: self.rows == rows)


def live(table: str, **query: Any) -> LiveQuery:
    return LiveQuery.from_json({"table": table, **query})


async def answer(connection: Connection, statement: str) -> list[dict[str, Any]]:
    """The database's own answer, as JSON gives it on the wire."""
    cursor = await connection.execute(f"select row_to_json(o)::text from ({statement}) o".encode())
    return [msgspec.json.decode(text) for (text,) in await cursor.fetchall()]
