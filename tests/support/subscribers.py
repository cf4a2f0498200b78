"""What tests of the hub share: subscribers that fold what they are sent, and the true answer, now
and at every position of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from headwater.client.state.replica import Replica
from headwater.database import Connection
from headwater.errors import HeadwaterError
from headwater.live.query import LiveQuery
from headwater.model import Position, Reset
from headwater.protocol import (
    Changes,
    Deltas,
    Failed,
    Frame,
    Gap,
    ResetMessage,
    Result,
    Snapshot,
    read_server,
    type_of,
)
from tests.support.log_probe import rows


class Recorder:
    """A subscriber that records every message, encoded and decoded, and folds it as a client
    does."""

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
        self._changed = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()

    # -------------------------------------------------------------------- the contract

    def subscribed(self, view: int, *, key: tuple[str, ...], resumed: bool) -> None:
        self.views.append(view)
        self.resumed.append(resumed)
        self._changed.set()

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
            self._changed.set()

    def failed(self, error: HeadwaterError) -> None:
        assert self.error is None
        self.error = error
        self._changed.set()

    async def room(self) -> None:
        await self.reads.wait()

    # -------------------------------------------------------------------- what a client does

    def _fold(self, message: Any) -> None:
        match message:
            case Snapshot() | ResetMessage():
                assert isinstance(message, ResetMessage) or self._more or not self._had_snapshot()
                if not self._more or isinstance(message, ResetMessage):
                    self.replica.apply([Reset()])
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
        return [type_of(message) for message in self.messages]

    async def until(self, condition: Callable[[], Any], seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while self.fault is None and not condition():
                self._changed.clear()
                await self._changed.wait()
        if self.fault is not None:
            raise self.fault

    async def until_rows(self, rows: list[dict[str, Any]]) -> None:
        await self.until(lambda: self.rows == rows)


class Historian(Recorder):
    """Records its rows at every position that it was sent. Positions never go back."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[tuple[Position, list[dict[str, Any]]]] = []

    def deliver(self, frame: Frame) -> None:
        super().deliver(frame)
        assert self.position is not None
        if getattr(self.messages[-1], "more", False):
            return
        position = Position.parse(self.position)
        if self.history and not position.covers(self.history[-1][0]):
            self.fault = self.fault or AssertionError(f"{position} after {self.history[-1][0]}")
        self.history.append((position, self.rows))


class Resubscriber(Recorder):
    """A subscriber that subscribes again whenever its subscription ends."""

    def __init__(self, begin: Callable[[Any], Any]) -> None:
        super().__init__()
        self._begin = begin
        self.handle: Any = None
        self.endings: list[HeadwaterError] = []

    async def subscribe(self) -> None:
        self.error, self._more = None, False
        self.messages.clear()
        try:
            self.handle = await self._begin(self)
        except HeadwaterError as error:
            self.handle = None
            self.endings.append(error)

    def leave(self) -> None:
        if self.handle is not None:
            self.handle.close()
        self.handle = None

    @property
    def follows(self) -> bool:
        return self.handle is not None and not self.handle.closed and self.error is None

    def failed(self, error: HeadwaterError) -> None:
        self.error = error
        self.endings.append(error)
        self._changed.set()

    def _had_snapshot(self) -> bool:
        return False  # it may have one for every time that it subscribed


class TableHistory:
    """The rows of a table with the key `id` at any position, computed from its first rows and the
    log."""

    def __init__(self, initial: list[dict[str, Any]], log: list[tuple[Any, ...]]) -> None:
        self._initial = {row["id"]: row for row in initial}
        self._log = log
        self._known: dict[str, dict[Any, dict[str, Any]]] = {}

    def at(self, position: Position) -> list[dict[str, Any]]:
        """Its rows in the order of their keys."""
        text = str(position)
        if text not in self._known:
            table = dict(self._initial)
            for xid, op, before, after in self._log:
                if not position.contains(xid):
                    continue
                if op == "T":
                    table.clear()
                if before is not None:
                    table.pop(before["id"], None)
                if after is not None:
                    table[after["id"]] = after
            self._known[text] = table
        return [row for _, row in sorted(self._known[text].items())]


async def logged(connection: Connection, table: str) -> list[tuple[Any, ...]]:
    """What the log has of a table, as a `TableHistory` takes it."""
    return await rows(
        connection,
        "select l.xid::text::bigint, l.op, l.before, l.after from headwater.log l"
        " where l.shape in (select id from headwater.shapes"
        f" where relid = '{table}'::regclass) order by l.seq",
    )


async def present_position(connection: Connection) -> Position:
    ((text,),) = await rows(connection, "select headwater.log_id() || '-' || pg_current_snapshot()")
    return Position.parse(text)


def live(table: str, **query: Any) -> LiveQuery:
    return LiveQuery.from_json({"table": table, **query})


async def answer(connection: Connection, statement: str) -> list[dict[str, Any]]:
    """The database's own answer, as JSON gives it on the wire."""
    cursor = await connection.execute(f"select row_to_json(o)::text from ({statement}) o".encode())
    return [msgspec.json.decode(text) for (text,) in await cursor.fetchall()]
