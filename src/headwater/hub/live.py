"""Live views: what identical live queries share, who follows them, and what they are sent.

A view is *live* once its first result is there; from then on every flush that alters it makes one
frame for all its subscribers. While an `Opening` reads a result, the changes that belong behind it
are kept with it. Nothing here waits: the flush and the openings drive it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec

from headwater import limits
from headwater.errors import HeadwaterError
from headwater.fair_queue import Owner
from headwater.hub.arrival import Arrival
from headwater.hub.costs import Cost
from headwater.hub.lag import Lag
from headwater.hub.questions import Scope
from headwater.hub.recent import Recent
from headwater.hub.subscriber import Access, Subscriber, not_taken
from headwater.hub.tables import KnownTable
from headwater.live.query import BoundQuery, LiveQuery
from headwater.live.streamed import Streamed
from headwater.live.view import View, new_state
from headwater.live.window import Window
from headwater.memory import Holding
from headwater.model import Change, Delta, Enter, Match, Position, Reset, Unmatch, Update
from headwater.protocol import Deltas, Frame, ResetReason, Snapshot, result_hash
from headwater.protocol import Reset as ResetMessage

if TYPE_CHECKING:
    from headwater.hub.lives import Lives

logger = logging.getLogger(__name__)


class ViewInfo(msgspec.Struct, frozen=True):
    """A view as the console and `status` show it."""

    id: int
    table: str
    query: dict[str, Any]
    mode: str
    scope: str | None
    """The role that it is read as; None for Headwater's own."""
    subscribers: int
    rows: int
    live: bool


class LiveView(View):
    """The shared state behind identical live queries."""

    __slots__ = (
        "_base_bytes", "_whole", "cost", "holding", "known", "lag", "live", "openings", "recent",
        "removed", "verifiers", "waiting", "wish",
    )  # fmt: skip

    scope: Scope | None
    subscribers: set[LiveSubscription]  # type: ignore[assignment]

    def __init__(self, id: int, query: BoundQuery, scope: Any) -> None:
        super().__init__(id, query, scope)
        self.known: KnownTable
        self.wish: LiveQuery
        self.live = False
        self.lag: Lag | None = None
        """While it is behind the flushes."""
        self.removed = False
        self.openings: list[Opening] = []
        self.waiting: list[LiveSubscription] = []
        self.recent = Recent()
        self.verifiers = 0
        self.cost = Cost()
        self.holding: Holding | None = None
        """Its memory, and the users who follow it."""
        self._base_bytes = limits.VIEW_BYTES + limits.VIEW_QUERY_FACTOR * len(query.canonical)
        self._whole: dict[ResetReason | None, Frame] = {}

    # -------------------------------------------------------------------- what it shows

    def info(self) -> ViewInfo:
        return ViewInfo(
            self.id,
            self.query.table.label,
            self.wish.to_json(),
            self.query.mode,
            None if self.scope is None else self.scope.role,
            self.followers,
            self.held,
            self.live,
        )

    @property
    def followers(self) -> int:
        """How many follow it, or will when its result is there."""
        told = sum(len(opening.told) for opening in self.openings)
        return len(self.subscribers) + len(self.waiting) + told

    @property
    def held(self) -> int:
        """Rows in memory; of a streamed result, their keys."""
        state = self.state
        return state.buffered if isinstance(state, Window) else len(state.members)

    @property
    def bytes(self) -> int:
        """An estimate of its memory, in steps: its rows, those that are being read, its query."""
        bytes = self._base_bytes + self.state.bytes
        if self.openings:
            bytes += sum(opening.state.bytes for opening in self.openings)
        return -(-bytes // limits.VIEW_STEP_BYTES) * limits.VIEW_STEP_BYTES

    def weigh(self) -> None:
        """Count the memory that it takes now."""
        if self.holding is not None and not self.removed:
            self.holding.resize(self.bytes)

    def rows(self) -> tuple[Enter, ...]:
        """The visible rows as they are sent."""
        assert isinstance(self.state, Window)
        return tuple(map(self.known.wire.delta, self.state.snapshot().rows))  # type: ignore[arg-type]

    def whole(self, position: str, reason: ResetReason | None) -> Frame:
        """The present rows: a snapshot, or a reset for one who has others. Whoever asks before
        they change, or the frame is forgotten, gets the same one."""
        if reason not in self._whole or self._whole[reason].position != position:
            rows = self.rows()
            self._whole[reason] = Frame(
                Snapshot(self.id, position, rows, hash=self.hash(rows))
                if reason is None
                else ResetMessage(self.id, position, reason, rows, hash=self.hash(rows))
            )
            self.recent.mark(position)
        return self._whole[reason]

    def forget_whole(self) -> None:
        self._whole = {}

    def hash(self, rows: Sequence[Enter] | None = None) -> int | None:
        """Of the present result, while somebody wants to verify; None for one that is too large to
        be hashed with every flush."""
        if not self.verifiers or not isinstance(self.state, Window):
            return None
        columns = len(self.query.columns or self.query.table.columns)
        if self.state.buffered * columns > limits.VERIFY_VALUES_MAX:
            return None
        rows = self.rows() if rows is None else rows
        texts = (value for row in rows for value in row.row.values() if isinstance(value, str))
        if sum(map(len, texts)) > limits.VERIFY_CHARS_MAX:
            return None
        return result_hash((row.key, row.row) for row in rows)

    def frame(self, position: str, at: datetime, deltas: list[Delta]) -> Frame | None:
        """What all subscribers are sent for the deltas of a flush; None for nothing."""
        self.weigh()  # rows behind the visible ones have come and gone without a delta
        if not deltas:
            return None
        self._whole = {}
        wire = self.known.wire.delta
        steps = tuple(wire(delta) for delta in deltas if not isinstance(delta, Reset))
        if len(steps) == len(deltas):
            return Frame(Deltas(self.id, position, at, steps, self.hash()))
        if isinstance(self.state, Window):
            return self.whole(position, "table")
        matches = tuple(map(wire, _matches(deltas)))
        return Frame(ResetMessage(self.id, position, "table", matches))  # type: ignore[arg-type]

    # -------------------------------------------------------------------- who follows it

    def attach(self, subscription: LiveSubscription) -> None:
        self.subscribers.add(subscription)
        self.verifiers += subscription.verify
        self.weigh()
        if subscription.verify:
            self._whole = {}  # what is there may be without a hash

    def detach(self, subscription: LiveSubscription) -> None:
        if subscription in self.waiting:
            self.waiting.remove(subscription)
        for opening in self.openings:
            if subscription in opening.told:
                opening.told.remove(subscription)
        if subscription in self.subscribers:
            self.subscribers.remove(subscription)
            self.verifiers -= subscription.verify

    def differs(self, state: Window | Streamed) -> bool:
        """Whether a streamed result that was read again has other members."""
        ours = self.state
        return (
            isinstance(state, Streamed)
            and isinstance(ours, Streamed)
            and state.members != ours.members
        )

    def take(self, state: Window | Streamed) -> None:
        """From here on the view is live with this state."""
        self.state = state
        self.live = True
        self._whole = {}
        self.weigh()


def _matches(deltas: Iterable[Delta]) -> Iterable[Match]:
    """A streamed result that was emptied on the way, and what came since."""
    rows: dict[Any, Match] = {}
    for delta in deltas:
        match delta:
            case Reset():
                rows.clear()
            case Match(key, row) | Update(key, row):
                rows[key] = Match(key, row)
            case Unmatch(key):
                rows.pop(key, None)
    return rows.values()


_ATTEMPTS_MAX = 3
"""How often a subscription is opened again, one failure after the other, because its table changed
meanwhile or for a reason that was not foreseen."""


def attempts_left(*subscriptions: Iterable[LiveSubscription]) -> bool:
    """Whether to try once more to give them a result."""
    for subscription in [each for some in subscriptions for each in some]:
        subscription.attempts += 1
        if subscription.attempts > _ATTEMPTS_MAX:
            return False
    return True


class Opening:
    """A result being read beside the flushes, and the changes that came after its snapshot.

    When it is there the view is live with it. A view that was live before goes on meanwhile: where
    it is read again to be compared (`quiet`), or where a streamed result is read for newcomers.
    """

    __slots__ = (
        "__weakref__", "arrived", "changes", "position", "quiet", "share", "started", "state",
        "told", "view",
    )  # fmt: skip

    def __init__(self, view: LiveView, *, quiet: bool = False) -> None:
        self.view = view
        self.quiet = quiet
        self.share: int
        """Of those results that are read in the snapshot of one flush; 0 for none so far."""
        self.told: list[LiveSubscription] = []
        """Those who are handed a streamed result part by part: all who waited when it started."""
        self.again()

    def again(self, reason: ResetReason = "resync") -> None:
        """Know nothing, and wait for a snapshot. Subscribers may have parts of another one: they
        are sent a reset, for the reason that they wait for one already or else for this one."""
        self.state = new_state(self.view.query)
        self.changes: list[Change] = []
        self.position: Position | None = None
        self.share = 0
        self.started = False
        self.arrived = False
        for subscription in self.told:
            if not subscription.closed:
                subscription.expect(subscription.reason or reason)
                self.view.waiting.append(subscription)
        self.told = []
        self.view.weigh()

    def start(self, position: Position, share: int) -> None:
        """A snapshot was lent to read it in. Those who wait for a streamed result get this one;
        who comes from here on may have seen more than the snapshot has, and waits for another."""
        if self.wanted and self.is_for_newcomers:
            self.told, self.view.waiting = self.view.waiting, []
        self.started, self.position, self.share = True, position, share

    @property
    def is_for_newcomers(self) -> bool:
        """Whether it is a streamed result, which is handed to those who wait as it is read."""
        return self.view.query.mode == "streamed" and not self.quiet

    @property
    def owners(self) -> list[Owner]:
        """Whom reading it counts for: who asked first of those that wait, and the table."""
        table: Owner = ("table", self.view.known.table.oid)
        waiting = chain(self.told, self.view.waiting, self.view.subscribers)
        first = next(waiting, None)
        return [table] if first is None or first.owner is None else [first.owner, table]

    @property
    def wanted(self) -> bool:
        """Whether anybody still waits for it."""
        if self not in self.view.openings:
            return False
        if not self.is_for_newcomers:
            return bool(self.view.subscribers or self.view.waiting)
        return any(not each.closed for each in (self.told if self.started else self.view.waiting))

    def drop(self) -> None:
        """Nobody waits for it any more."""
        if self in self.view.openings:
            self.view.openings.remove(self)
            self.view.weigh()

    def put_back(self, changes: Iterable[Sequence[Change]]) -> None:
        """Those that a flush could not take after all: they come before what came since."""
        self.changes = [*(change for each in changes for change in each), *self.changes]

    def keep(self, changes: Sequence[Change]) -> bool:
        """Changes of a later flush; False where there are too many to keep."""
        self.changes += changes
        return len(self.changes) <= limits.OPENING_CHANGES_MAX


class LiveSubscription:
    """One subscriber's live query. Made by `Hub.live`."""

    __slots__ = (
        "_arrived", "_lives", "_told_of", "access", "attempts", "begun", "caught_up", "closed",
        "deliver", "holding", "joined", "owner", "query", "reason", "subscriber", "target",
        "verify",
    )  # fmt: skip

    def __init__(
        self,
        lives: Lives,
        query: LiveQuery,
        subscriber: Subscriber,
        access: Access,
        verify: bool,
        owner: Owner | None = None,
    ) -> None:
        self._lives = lives
        self.owner = owner
        """Whom its memory and reading its result count for; None for the application itself."""
        self.holding: Holding | None = None
        """That of its view, while it counts there."""
        self.query = query
        self.access = access
        self.subscriber = subscriber
        self.verify = verify
        self.deliver: Callable[[Frame], None] = subscriber.deliver
        self.target: LiveView | None = None
        self.begun = False
        """Whether its subscriber has heard of it; before, errors are raised where it is made."""
        self.closed = False
        self.attempts = 0
        self.caught_up = 0
        """The flush up to which it was told everything out of turn."""
        self.reason: ResetReason | None = None
        """What its next whole result is called; None for a snapshot, its first."""
        self.joined = 0
        """The last flush before it began to wait for a whole result: it gets none from before."""
        self._told_of = 0
        self._arrived = Arrival()

    @property
    def view(self) -> int:
        assert self.target is not None, "it has not begun"
        return self.target.id

    def is_of(self, schema: str, name: str) -> bool:
        """Whether it is over this table."""
        view = self.target
        return view is not None and (view.known.table.schema, view.known.table.name) == (
            schema,
            name,
        )

    def close(self) -> None:
        """End it; nothing is delivered any more."""
        if not self.closed:
            self.closed = True
            self._lives.forget(self)
            self._arrived.settle()
            self._lives.stir()

    def resync(self, reason: ResetReason) -> None:
        """The client fell behind: tell it the whole present state."""
        if not self.closed:
            self._lives.resync(self, reason)

    async def reanchor(self, after: list[Any] | None) -> None:
        """Slide the window to begin behind another cursor."""
        await self._lives.reanchor(self, after)

    async def change_access(self, access: Access) -> None:
        """Go on with other rights."""
        await self._lives.change_access(self, access)

    # -------------------------------------------------------------------- for the hub

    async def arrived(self) -> None:
        """Wait until its whole result, or the error, was handed over; the error is raised."""
        await self._arrived.wait()

    def expect(self, reason: ResetReason) -> None:
        """Another whole result is to come."""
        if not self.begun:
            return
        self.reason = reason
        self._arrived.renew()

    async def settled(self, position: Position) -> None:
        """Wait until the result that is being read for it, if one is, was handed over whole, and
        until its view does not lag behind the position: then it was handed what every flush up to
        there changed."""
        while not self.closed:
            await self._arrived.wait()
            lag = None if self.target is None else self.target.lag
            if lag is None or lag.covers(position):
                return
            await self._lives.stirred()

    def begin(self, frames: Iterable[Frame], *, resumed: bool = False, whole: bool = True) -> None:
        """Its result, or what it missed of it, is handed over; a part of it, unless `whole`."""
        view = self.target
        assert view is not None
        try:
            if not self.begun or self._told_of != view.id:
                self.begun, self._told_of = True, view.id
                self.subscriber.subscribed(view.id, key=view.query.table.key, resumed=resumed)
            for frame in frames:
                if not self.closed:
                    self.deliver(frame)
        except Exception:
            logger.exception("a subscriber of view %d failed to take its result", view.id)
            self.fail(not_taken())
            return
        reason = self.reason
        self.done()
        if not whole:
            self.reason = reason  # until the rest of it is there, it may have to be read again
            self._arrived.renew()

    def hand(self, frame: Frame, *, whole: bool = True) -> None:
        """One more frame, to this subscriber alone; a part of its result, unless `whole`."""
        if self.closed:
            return
        try:
            self.deliver(frame)
        except Exception:
            logger.exception("a subscriber of view %d failed to take a frame", self.view)
            self.fail(not_taken())
            return
        if whole:
            self.done()

    def done(self) -> None:
        """Everything it waited for was handed over."""
        self.reason = None
        self.attempts = 0
        self._arrived.settle()

    def fail(self, error: HeadwaterError) -> None:
        """It is over. Who still waits for it gets the error raised, anybody else is told."""
        if self.closed:
            return
        self.closed = True
        self._lives.forget(self)
        self._lives.stir()
        if not self.begun:
            self._arrived.settle(error)
            return
        self._arrived.settle()
        try:
            self.subscriber.failed(error)
        except Exception:
            logger.exception("a subscriber failed to take an error")
