"""The contract between the flush loop and the parts of the hub.

A part is one kind of subscription: live views, reactive queries, topics, change feeds. The flush
loop drives all of them through the methods of `Part`, in one order, and knows nothing else of them;
a part knows the flush that it is shown (`Flush`), how far the flushes are (`FlushState`) and what
the hub lends it (`Resources`), and never another part. A new kind of subscription is a new part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from headwater.database import Connection
from headwater.model import Position, Table, Transaction

logger = logging.getLogger(__name__)


class Flush(Protocol):
    """One flush, as parts see it: the new changes, and a snapshot of the database that contains
    exactly everything up to `position`."""

    number: int
    """That of the step, once it has begun; `FlushState.number`."""
    since: Position
    position: Position
    written: int
    """How far the WAL was written when the snapshot was taken."""
    transactions: Sequence[Transaction]
    """What was committed after `since`, in the order of the log."""
    changes: Sequence[Transaction]
    """The same without signals, which concern topics only."""
    touched: int
    """How many views the flush has changed, for tracing. Parts count here."""
    connection: Connection
    """In the snapshot, for short statements: every other part waits for them."""

    async def export(self) -> str:
        """The id of the snapshot, for other connections to import while the flush lasts."""

    async def allow_any_plan(self) -> None:
        """To be called before the first statement on `connection` that needs a plan of its own."""


class Part:
    """A kind of subscription. Every method may be left out; none of them may raise for a fault in
    one subscription, which must harm no other. Methods that are not async never wait."""

    def start(self) -> None:
        """The hub starts: begin what runs beside the flushes."""

    async def prepare(self, flush: Flush) -> None:
        """Find out whom the flush concerns, read what is needed for that, and lend the snapshot to
        readers beside the flush. No subscriber is sent anything yet."""

    async def send(self, flush: Flush) -> None:
        """Within the step: take every state to the position of the flush, and send it."""

    def unsent(self, flush: Flush) -> None:
        """The step failed. What this part has not sent must be read again."""

    def ended(self, flush: Flush) -> None:
        """The step is over, also where it failed."""

    async def check(self, flush: Flush) -> None:
        """After the step, still in the snapshot: compare what was sent with the database."""

    def sweep(self) -> None:
        """After each flush: let go of what is not needed any more."""

    async def prepare_skip(self, tables: Collection[Table]) -> None:
        """Before `skipped`, where it is known which tables changed: look up what is needed."""

    def skipped(self, since: Position, until: Position, tables: Collection[Table] | None) -> None:
        """More was new than a flush takes: changes of these tables, or of any (None), were passed
        over. What rests on them is read again as of `until`, or from the log."""

    def skip_failed(self) -> None:
        """`skipped` raised: anything may have changed."""

    def resync(self) -> None:
        """The log cannot say what happened: everything is read again, and clients are informed."""

    def lost(self) -> None:
        """The database is away. What waits for a first result is refused."""

    def restarted(self) -> None:
        """The server was restarted, and may use transaction ids again: a position that was not on
        disk may come to mean something else."""

    async def recheck(self, seconds: float) -> None:
        """Look again at rights and tables, which no change in the log announces. Expensive reads
        are spread over this many seconds."""

    async def close(self) -> None:
        """The hub ends: end all subscriptions and connections."""


def call_each(parts: Iterable[Part], call: Callable[[Part], None]) -> None:
    """What only this call says is lost for a part that is not called: an error in one of them stops
    no other, nor the loop that follows the log."""
    for part in parts:
        try:
            call(part)
        except Exception:
            logger.exception("a part of the hub failed")
