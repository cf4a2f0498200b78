"""Application events: handlers are called for executed statements, errors and changes."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
from collections.abc import Callable, Coroutine
from datetime import datetime
from typing import Any, Literal, TypeAlias

import msgspec

from headwater.errors import ConfigError
from headwater.limits import EVENT_HANDLERS_AT_ONCE
from headwater.model import Actor, Key, Position

_EVENTS_DROPPED_SECONDS = 10.0
"""How often the log says that events were dropped."""


logger = logging.getLogger(__name__)


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
    """The code of its error."""


class ErrorEvent(msgspec.Struct, frozen=True):
    """A query or a mutation failed."""

    function: str
    kind: Literal["query", "mutation"]
    error: Exception
    code: str
    error_id: str | None
    """For unexpected errors: the id that the caller got instead of the details."""
    trace_id: str
    user_id: str | None = None


class ChangeEvent(msgspec.Struct, frozen=True):
    """A row changed, as recorded in the log."""

    table: str
    operation: str
    key: Key
    changed: tuple[str, ...]
    at: datetime
    actor: Actor
    position: Position


class GapEvent(msgspec.Struct, frozen=True):
    """No handler gets the changes after `since` and up to `position`: the log was trimmed, restored
    or lost before they could be read."""

    since: Position | None
    position: Position


Event: TypeAlias = QueryEvent | ErrorEvent | ChangeEvent | GapEvent
EventName: TypeAlias = Literal["query", "error", "change", "gap"]
Handler: TypeAlias = Callable[[Any], object]


class _Registration(msgspec.Struct, frozen=True):
    handler: Handler
    parameters: bool


class Events:
    """The handlers of an application, by event.

    A handler that is not async is called at once and should be quick. An async one runs as a task
    of its own. Exceptions of a handler are logged and have no other effect.
    """

    def __init__(self) -> None:
        self._registrations: dict[EventName, list[_Registration]] = {
            "query": [],
            "error": [],
            "change": [],
            "gap": [],
        }
        self._tasks: set[asyncio.Task[None]] = set()
        self._dropped = 0
        self._logged_at = -math.inf

    def on(self, name: EventName, handler: Handler, *, parameters: bool = False) -> None:
        """Call the handler with every event of that name. With `parameters`, statements have the
        values of their parameters."""
        if name not in self._registrations:
            raise ConfigError(
                f"there is no event {name!r}",
                hint=f"Events are {', '.join(self._registrations)}.",
            )
        if not callable(handler):
            raise ConfigError(
                f"the handler of {name!r} cannot be called: {handler!r:.100}",
                hint="Give a function that takes the event.",
            )
        self._registrations[name].append(_Registration(handler, parameters))

    def wanted(self, name: EventName) -> bool:
        """Whether an event has handlers. Callers skip costly work if not."""
        return bool(self._registrations[name])

    def emit(self, event: Event) -> None:
        """Call all handlers. Never raises and never waits."""
        match event:
            case QueryEvent():
                redacted = _redacted(event)
                for registration in self._registrations["query"]:
                    self._call(registration.handler, event if registration.parameters else redacted)
            case ErrorEvent():
                for registration in self._registrations["error"]:
                    self._call(registration.handler, event)
            case ChangeEvent():
                for registration in self._registrations["change"]:
                    self._call(registration.handler, event)
            case GapEvent():
                for registration in self._registrations["gap"]:
                    self._call(registration.handler, event)

    @property
    def has_room(self) -> bool:
        """Whether one more event fits, without dropping one because all handlers are busy."""
        free = EVENT_HANDLERS_AT_ONCE - len(self._tasks)
        return free >= len(self._registrations["change"])

    async def room(self) -> None:
        """Wait until there is room."""
        while not self.has_room:
            await asyncio.wait(set(self._tasks), return_when=asyncio.FIRST_COMPLETED)

    def _call(self, handler: Handler, event: Event) -> None:
        try:
            # Whether it is async is only known from the result: an object or a wrapper may be.
            work = handler(event)
            if not inspect.iscoroutine(work):
                return
            if len(self._tasks) >= EVENT_HANDLERS_AT_ONCE:
                work.close()
                self._drop()
            else:
                task = asyncio.get_running_loop().create_task(_awaited(work, event))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except Exception:
            logger.exception("a handler of %s failed", type(event).__name__)

    def _drop(self) -> None:
        self._dropped += 1
        now = time.monotonic()
        if now - self._logged_at >= _EVENTS_DROPPED_SECONDS:
            logger.warning(
                "%d events were dropped: %d handlers are still running",
                self._dropped,
                len(self._tasks),
            )
            self._dropped, self._logged_at = 0, now

    async def close(self) -> None:
        """End the handlers that are still running."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _awaited(work: Coroutine[Any, Any, object], event: Event) -> None:
    try:
        await work
    except Exception:
        logger.exception("a handler of %s failed", type(event).__name__)


def _redacted(event: QueryEvent) -> QueryEvent:
    names = tuple(type(value).__name__ for value in event.parameters)
    return msgspec.structs.replace(event, parameters=names)
