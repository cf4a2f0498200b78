"""The contract between the flush loop and the parts of the hub.

A part is one kind of subscription: live views, reactive queries, topics, change feeds. The flush
loop calls the methods of `Part` on all of them, in one order, and uses nothing else of them. A part
uses the flush (`Flush`), the progress of the flushes (`FlushState`) and what all parts share
(`Resources`), but no other part. A new kind of subscription is a new part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from headwater.database import Connection
from headwater.model import Position, Table, Transaction

logger = logging.getLogger(__name__)


class Flush(Protocol):
    """One flush: the new changes, and a snapshot of the database that contains exactly the
    transactions up to `position`."""

    number: int
    """The number of its step, when that has begun: `FlushState.number`."""
    since: Position
    position: Position
    written: int
    """How far the WAL was written when the snapshot was taken."""
    transactions: Sequence[Transaction]
    """The transactions committed after `since`, in the order of the log."""
    changes: Sequence[Transaction]
    """The same without signals, which only topics use."""
    touched: int
    """How many views the flush has changed, for tracing. Parts add to it."""
    connection: Connection
    """A connection in the snapshot, for short statements only: all other parts wait for them."""

    async def export(self) -> str:
        """The id of the snapshot. Other connections can import it until the flush ends."""

    async def allow_any_plan(self) -> None:
        """Call this before the first statement on `connection` that does not read the log."""


class Part:
    """A kind of subscription. Every method is optional. A fault in one subscription must not affect
    another, so no method raises for it. Methods that are not async never wait."""

    def start(self) -> None:
        """The hub starts: start the tasks that run beside the flushes."""

    async def prepare(self, flush: Flush) -> None:
        """Find the subscriptions that the flush affects, read what that needs, and lend the
        snapshot to readers beside the flush. Send nothing yet."""

    async def send(self, flush: Flush) -> None:
        """In the step: bring every state to the position of the flush, and send the changes."""

    def unsent(self, flush: Flush) -> None:
        """The step failed. What this part has not sent must be read again."""

    def ended(self, flush: Flush) -> None:
        """The step is over, or has failed."""

    async def check(self, flush: Flush) -> None:
        """After the step, still in the snapshot: compare what was sent with the database."""

    def sweep(self) -> None:
        """After each flush: release what is no longer needed."""

    async def prepare_skip(self, tables: Collection[Table]) -> None:
        """Before `skipped`, if the changed tables are known: look up what that needs."""

    def skipped(self, since: Position, until: Position, tables: Collection[Table] | None) -> None:
        """There were more changes than one flush takes, and they were skipped: changes of these
        tables, or of any table (None). Results that depend on them are read again as of `until`, or
        from the log."""

    def skip_failed(self) -> None:
        """`skipped` raised: anything may have changed."""

    def resync(self) -> None:
        """The log no longer has all changes: read everything again, and inform clients."""

    def lost(self) -> None:
        """The database cannot be reached. Refuse subscriptions that wait for a first result."""

    def restarted(self) -> None:
        """The server was restarted, and may use transaction ids a second time: a position that was
        not on disk may then mean other transactions."""

    async def recheck(self, seconds: float) -> None:
        """Check rights and tables again: the log does not show when they change. Expensive reads
        are spread over this many seconds."""

    async def close(self) -> None:
        """The hub stops: end all subscriptions and connections."""


def call_each(parts: Iterable[Part], call: Callable[[Part], None]) -> None:
    """Call every part, also if one of them raises: no later call repeats this one."""
    for part in parts:
        try:
            call(part)
        except Exception:
            logger.exception("a part of the hub failed")
