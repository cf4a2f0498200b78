"""The event bus: tells the application what is executed, what fails and what changes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal, TypeAlias

import msgspec

from headwater.model import Actor, Key, Position


class QueryEvent(msgspec.Struct, frozen=True):
    """A statement was executed for a query or a mutation."""

    function: str
    kind: Literal["query", "mutation"]
    sql: str
    parameters: tuple[Any, ...]
    """Redacted to the names of their types unless the handler asked for them."""
    operation: str
    """What it did: `select`, `insert`, `update`, `delete`, …"""
    rows: int
    seconds: float
    trace_id: str
    user_id: str | None = None
    error: str | None = None
    """The code of the error that it met."""


class ErrorEvent(msgspec.Struct, frozen=True):
    """A query or a mutation failed."""

    function: str
    kind: Literal["query", "mutation"]
    error: Exception
    code: str
    error_id: str | None
    """For unexpected errors: what the caller was told instead of the details."""
    trace_id: str
    user_id: str | None = None


class ChangeEvent(msgspec.Struct, frozen=True):
    """A row changed, as the log tells it."""

    table: str
    operation: str
    key: Key
    changed: tuple[str, ...]
    at: datetime
    actor: Actor
    position: Position


Event: TypeAlias = QueryEvent | ErrorEvent | ChangeEvent
EventName: TypeAlias = Literal["query", "error", "change"]
Handler: TypeAlias = Callable[[Any], object]


class Events:
    """Who wants to hear of what."""

    def on(self, name: EventName, handler: Handler, *, parameters: bool = False) -> None:
        raise NotImplementedError

    def wanted(self, name: EventName) -> bool:
        """Whether anybody listens: what costs something is done only then."""
        raise NotImplementedError

    def emit(self, event: Event) -> None:
        """Tell everybody. Never raises and never waits."""
        raise NotImplementedError
