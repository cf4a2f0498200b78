"""Reads of the past for users of a gateway: in threads, and bounded in time, bytes and number.

A thread cannot be ended from outside. So each read looks at the clock between its parts, statements
in the database have a timeout, and a read keeps its place among the others until its thread ends,
also if its user no longer waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from headwater.errors import ConfigError, HeadwaterError, LimitExceeded, NotFound, TimedOut
from headwater.gateway.quotas import QuotaOwner
from headwater.limits import (
    PAST_BYTES_MAX,
    PAST_REQUESTS_AT_ONCE,
    PAST_REQUESTS_PER_USER,
    PAST_SECONDS_MAX,
    QUOTA_RETRY_SECONDS,
)

Answer = TypeVar("Answer")

Check = Callable[[], None]
"""Raises where a read must end."""


class PastReads:
    """The reads of one gateway."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(PAST_REQUESTS_AT_ONCE)
        self._of_owner: Counter[QuotaOwner] = Counter()
        self._running: set[asyncio.Task[Any]] = set()

    async def ended(self) -> None:
        """Wait until the threads of all reads have ended."""
        if self._running:
            await asyncio.wait(set(self._running))

    async def run(self, owner: QuotaOwner, read: Callable[[Check, float], Answer]) -> Answer:
        """The answer of a read, which gets a check and its seconds; TimedOut if that takes too
        long, LimitExceeded for too many reads of one owner."""
        if self._of_owner[owner] >= PAST_REQUESTS_PER_USER:
            raise LimitExceeded(
                f"{PAST_REQUESTS_PER_USER} requests of this {owner[0]} about the past are running",
                code="past_requests_per_user",
                hint="Wait for their answers.",
                retry_after=QUOTA_RETRY_SECONDS,
            )
        self._of_owner[owner] += 1
        try:
            async with asyncio.timeout(PAST_SECONDS_MAX) as patience:
                await self._begin(owner)
                end = patience.when() or 0.0
                return await self._read(owner, read, end - asyncio.get_running_loop().time())
        except TimeoutError:
            raise _timed_out() from None

    async def _begin(self, owner: QuotaOwner) -> None:
        try:
            await self._slots.acquire()
        except BaseException:
            self._leave(owner)
            raise

    async def _read(
        self, owner: QuotaOwner, read: Callable[[Check, float], Answer], seconds: float
    ) -> Answer:
        end, is_over = time.monotonic() + seconds, False

        def check() -> None:
            if is_over or time.monotonic() > end:
                raise _timed_out()

        running = asyncio.create_task(asyncio.to_thread(_translated, read, check, seconds))
        self._running.add(running)
        running.add_done_callback(partial(self._ended, owner))
        try:
            return await asyncio.shield(running)
        finally:
            is_over = True

    def _ended(self, owner: QuotaOwner, done: asyncio.Task[Any]) -> None:
        self._running.discard(done)
        self._slots.release()
        self._leave(owner)
        if not done.cancelled():
            done.exception()  # its user may not wait any more

    def _leave(self, owner: QuotaOwner) -> None:
        self._of_owner[owner] -= 1
        if not self._of_owner[owner]:
            del self._of_owner[owner]


def check_size(count: int) -> None:
    """Refuse a read that may have to look at many bytes."""
    if count > PAST_BYTES_MAX:
        raise LimitExceeded(
            f"the row's past is spread over {count:,} bytes, more than {PAST_BYTES_MAX:,}",
            code="past_bytes",
            hint="Ask for it on the command line, which has no such bound: headwater history.",
        )


def _translated(read: Callable[[Check, float], Answer], check: Check, seconds: float) -> Answer:
    """ConfigError names what the lake lacks: the gateway's settings are not the user's fault."""
    check()
    try:
        return read(check, seconds)
    except ConfigError as error:
        raise NotFound(
            "the past of this table is not stored",
            code="past_unknown",
            hint="A pipeline has to write the table to the lake that the gateway's setting [lake]"
            " location names.",
        ) from error


def _timed_out() -> HeadwaterError:
    return TimedOut(
        f"the past of the row could not be read within {PAST_SECONDS_MAX:.0f} seconds",
        hint="Try again when the gateway is less busy.",
    )
