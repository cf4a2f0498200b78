"""The event bus: which handlers get which events, and that a failing handler affects no other."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from headwater import limits
from headwater.errors import ConfigError
from headwater.queries.events import Events, QueryEvent

EVENT = QueryEvent(
    function="f", kind="query", sql="select $1, $2", parameters=("secret", 5), operation="select",
    rows=1, seconds=0.1, trace_id="t",
)  # fmt: skip


async def test_parameters_are_redacted_unless_asked_for() -> None:
    events, redacted, whole = Events(), list[QueryEvent](), list[QueryEvent]()
    events.on("query", redacted.append)
    events.on("query", whole.append, parameters=True)
    events.emit(EVENT)
    assert [event.parameters for event in redacted] == [("str", "int")]
    assert whole == [EVENT]


def test_wanted() -> None:
    events = Events()
    events.on("error", print)
    assert (events.wanted("error"), events.wanted("query")) == (True, False)


def test_an_event_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="there is no event 'queries'"):
        Events().on("queries", print)  # type: ignore[arg-type]


def test_a_handler_that_cannot_be_called() -> None:
    with pytest.raises(ConfigError, match="the handler of 'change' cannot be called: 5"):
        Events().on("change", 5)  # type: ignore[arg-type]


async def test_a_failing_handler_does_not_affect_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    events, received = Events(), asyncio.Event()

    def fails(event: Any) -> None:
        raise ValueError("at once")

    async def fails_later(event: Any) -> None:
        raise ValueError("later")

    async def receives(event: Any) -> None:
        received.set()

    for handler in (fails, fails_later, receives):
        events.on("query", handler)
    events.emit(EVENT)
    await asyncio.wait_for(received.wait(), 20)
    assert [str(r.exc_info[1]) for r in caplog.records if r.exc_info] == ["at once", "later"]


async def test_events_beyond_the_bound_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    events, go, begun = Events(), asyncio.Event(), 0

    async def waits(event: Any) -> None:
        nonlocal begun
        begun += 1
        await go.wait()

    events.on("query", waits)
    for _ in range(limits.EVENT_HANDLERS_AT_ONCE + 5):
        events.emit(EVENT)
    await asyncio.sleep(0)
    assert begun == limits.EVENT_HANDLERS_AT_ONCE
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    await events.close()
