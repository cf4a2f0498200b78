"""Limits and measures the time that work beside the flushes keeps the event loop busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

_LOOP_TURN_SECONDS = 0.002
"""After this long, work beside the flushes yields to the event loop."""


_T = TypeVar("_T")


class Turn:
    """Divides work: `await turn.over()` after each piece yields when the time is over."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def over(self) -> None:
        if time.perf_counter() - self._began >= _LOOP_TURN_SECONDS:
            await asyncio.sleep(0)
            self._began = time.perf_counter()


class Metered(Awaitable[_T], Generic[_T]):
    """Awaits a coroutine and counts its processor time."""

    def __init__(self, work: Coroutine[Any, Any, _T]) -> None:
        self._work = work
        self.seconds = 0.0

    def __await__(self) -> Generator[Any, Any, _T]:
        resume = partial(self._work.send, None)
        while True:
            began = time.thread_time()
            try:
                waits_for = resume()
            except StopIteration as end:
                result: _T = end.value
                return result
            finally:
                self.seconds += time.thread_time() - began
            try:
                yield waits_for
                resume = partial(self._work.send, None)
            except BaseException as error:
                resume = partial(self._work.throw, error)
