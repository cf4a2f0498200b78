"""The rows of a live or reactive query in a client, folded from deltas.

Pure. The rows and their position are enough to resume after a lost connection. Nothing is guessed:
a batch that does not fit the rows, or leads to another hash than it has, raises `Diverged`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

import msgspec

from headwater import limits
from headwater.client.state.positions import is_older
from headwater.client.state.replica import Replica
from headwater.errors import Diverged, HeadwaterError
from headwater.model import Cursor, Delta, Enter, Key, Match, Reset, Row
from headwater.protocol import (
    Deltas,
    QueryCall,
    Reanchor,
    ResetMessage,
    Snapshot,
    Subscribe,
    Subscribed,
)  # fmt: skip


class RowsBatch(msgspec.Struct, frozen=True):
    """The deltas of a result that belong together. A snapshot is a batch that begins with a
    reset."""

    deltas: tuple[Delta, ...]
    position: str
    at: datetime | None = None
    """When the last of the changes was written; None for a snapshot."""


class RowsState:
    """The base of both kinds: everything except the request."""

    name: str
    """Its name in log messages."""
    streamed = False

    def __init__(self) -> None:
        self.wire_id = ""
        self.view: int | None = None
        self.position: str | None = None
        self.shown: str | None = None
        """The position of the latest rows that the program has seen, also while there is no
        position to resume from."""
        self.key: tuple[str, ...] = ()
        self._replica = Replica()
        self._waiting = True
        self._whole = False
        self._parts: list[Enter | Match] | None = None
        self._meanwhile: list[Deltas] = []
        self._diverged = 0

    @property
    def keys(self) -> list[Key]:
        return self._replica.keys

    @property
    def rows(self) -> list[Row]:
        return self._replica.rows

    @property
    def is_due(self) -> bool:
        """It was requested, and its rows are not received yet."""
        return self.view is None or self._waiting

    def cursor(self, key: Key) -> Cursor:
        return self._replica.cursor(key)

    def present(self) -> tuple[Delta, ...]:
        """A batch that leads from any state to the current rows."""
        rows = zip(self.keys, self.rows, strict=True)
        if self.streamed:
            return _replacing([Match(key, row) for key, row in rows])
        return _replacing(
            [Enter(key, row, i, self.cursor(key)) for i, (key, row) in enumerate(rows)]
        )

    def subscribe(self, wire_id: str, *, resume: bool) -> Subscribe:
        """The request for it, with its position if it is to be resumed."""
        self.wire_id, self.view, self._waiting = wire_id, None, True
        self._parts, self._meanwhile = None, []
        return self._request(self.position if resume else None)

    def _request(self, since: str | None) -> Subscribe:
        raise NotImplementedError

    def subscribed(self, message: Subscribed) -> None:
        self.view, self.key, self._waiting = message.view, message.key, not message.resumed
        # Parts of another view's result do not belong to this one.
        self._parts, self._meanwhile = None, []

    def receive(self, message: Snapshot | ResetMessage | Deltas) -> Iterator[RowsBatch]:
        """Fold a frame; the batch it completes, if any. Raises Diverged."""
        match message:
            case Deltas():
                yield from self._fold(message)
            case ResetMessage():
                self._waiting, self._parts = True, []
                yield from self._collect(message, moved=self._has_moved(message))
            case Snapshot() if self._waiting:
                yield from self._collect(message, moved=self._has_moved(message))

    def _has_moved(self, message: Snapshot | ResetMessage) -> bool:
        """Whether these are rows of another window than before."""
        return False

    def _collect(self, message: Snapshot | ResetMessage, *, moved: bool) -> Iterator[RowsBatch]:
        self._parts = [*(self._parts or ()), *message.rows]
        if message.more:
            return
        deltas, self._parts = _replacing(self._parts), None
        before = (self.keys, self.rows) if self._whole and not moved else None
        self.position, self._waiting = None, False
        self._replica.apply(deltas, message.hash)
        self.position, self._whole = message.position, True
        self.shown = message.position
        # After a reconnect the result is often the same; then the program is not notified.
        if before != (self.keys, self.rows):
            yield RowsBatch(deltas, message.position)
        meanwhile, self._meanwhile = self._meanwhile, []
        for later in meanwhile:
            if is_older(message.position, later.position):
                yield from self._fold(later)

    def _fold(self, message: Deltas) -> Iterator[RowsBatch]:
        if self._waiting:
            # Between the parts of a result. Before the first part there are no rows to apply it to.
            if self._parts is not None:
                self._meanwhile.append(message)
                if len(self._meanwhile) > limits.CLIENT_BATCHES_MAX:
                    raise Diverged("too much changed while the result was being received")
            return
        self.position = None
        self._replica.apply(message.deltas, message.hash)
        self.position, self._diverged = message.position, 0
        self.shown = message.position
        if message.deltas:
            yield RowsBatch(message.deltas, message.position, message.at)

    def diverged(self) -> bool:
        """Forget the rows. Returns whether to request another snapshot."""
        self._replica, self.position = Replica(), None
        self._whole, self._waiting = False, True
        self._diverged += 1
        return self._diverged < limits.CLIENT_DIVERGED_MAX


def _replacing(rows: list[Enter | Match] | list[Enter] | list[Match]) -> tuple[Delta, ...]:
    entering = tuple(row for row in rows if isinstance(row, Enter))
    matching = tuple(row for row in rows if isinstance(row, Match))
    return Reset(entering), *matching


class LiveState(RowsState):
    """A live query as the client knows it."""

    def __init__(self, query: dict[str, Any], verify: bool = False) -> None:
        super().__init__()
        self.name = str(query.get("table"))
        self.streamed = query.get("mode") == "streamed"
        self._query = query
        self._verify = verify
        self._moving: dict[str, Any] | None = None

    @property
    def is_moving(self) -> bool:
        return self._moving is not None

    def move(self, after: list[Any] | None, request: str | None = None) -> Reanchor:
        """The request for a window after another cursor. Until it is answered, the old window is
        followed."""
        self._moving = {**self._query, "after": after}
        return Reanchor(self.wire_id, after, request)

    def moved(self) -> None:
        """The gateway has moved the window. If no rows came with that, the window is empty, or this
        client is behind and gets the rows later."""
        if self._moving is not None:
            self._query, self._moving = self._moving, None
            self.position = None

    def stay(self) -> None:
        """The move was refused."""
        self._moving = None

    def _request(self, since: str | None) -> Subscribe:
        query = self._query
        if self._moving is not None:
            query, since = self._moving, None
        return Subscribe(self.wire_id, live=query, since=since, verify=self._verify)

    def _has_moved(self, message: Snapshot | ResetMessage) -> bool:
        if self._moving is None or (
            isinstance(message, ResetMessage) and message.reason != "window"
        ):
            return False
        self._query, self._moving = self._moving, None
        return True


class QueryRowsState(RowsState):
    """A reactive query whose rows come as deltas by their key."""

    def __init__(self, call: QueryCall) -> None:
        super().__init__()
        self.name = call.name
        self.error: HeadwaterError | None = None
        """Why the rows may be out of date."""
        self._call = call

    @property
    def value(self) -> list[Row]:
        return self.rows

    def _request(self, since: str | None) -> Subscribe:
        return Subscribe(self.wire_id, query=self._call, since=since)

    def subscribed(self, message: Subscribed) -> None:
        super().subscribed(message)
        if message.resumed:
            self.error = None

    def receive(self, message: Snapshot | ResetMessage | Deltas) -> Iterator[RowsBatch]:
        yield from super().receive(message)
        if not self._waiting:
            self.error = None
