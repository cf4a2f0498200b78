"""Live views: what identical live queries share, who follows them, and what they are sent.

A view is *live* once its first result is there; from then on every flush that alters it makes one
frame for all its subscribers. While an `InitialSnapshot` is read, the changes that belong behind
it are stored with it. Nothing here waits: the flush and the initial snapshots drive it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, Protocol

import msgspec

from headwater import limits
from headwater.fair_queue import Owner
from headwater.hub.flush_state import FlushState
from headwater.hub.live_views.lag import Lag
from headwater.hub.live_views.replay_buffer import ReplayBuffer
from headwater.hub.reading.snapshot_queries import Scope
from headwater.hub.reading.tables import KnownTable
from headwater.hub.subscriptions.costs import Cost
from headwater.hub.subscriptions.subscriber import Access, Subscriber
from headwater.hub.subscriptions.subscription import HubSubscription, not_taken
from headwater.live.query import BoundQuery, LiveQuery
from headwater.live.state.streamed import Streamed
from headwater.live.state.window import Window
from headwater.live.view import View, new_state
from headwater.memory import Holding
from headwater.model import Change, Delta, Enter, Match, Position, Reset, Unmatch, Update
from headwater.protocol import Deltas, Frame, ResetReason, Snapshot, result_hash
from headwater.protocol import Reset as ResetMessage

_VIEW_QUERY_FACTOR = 6
"""How many times its text a query takes in memory: as it was asked, bound, compiled and routed."""

_VIEW_STEP_BYTES = 1024
"""The memory of a live query is counted in steps of this many bytes, so that most changes leave the
sums as they are."""

_OPENING_CHANGES_MAX = 50_000
"""Changes stored for a live query while its first result is read. With more it is read again."""


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
        "_base_bytes",
        "_whole",
        "cost",
        "holding",
        "known",
        "lag",
        "live",
        "removed",
        "replay",
        "request",
        "snapshots",
        "verifiers",
        "waiting",
    )  # fmt: skip

    scope: Scope | None
    subscribers: set[LiveSubscription]  # type: ignore[assignment]

    def __init__(self, id: int, query: BoundQuery, scope: Any) -> None:
        super().__init__(id, query, scope)
        self.known: KnownTable
        self.request: LiveQuery
        self.live = False
        self.lag: Lag | None = None
        """While it is behind the flushes."""
        self.removed = False
        self.snapshots: list[InitialSnapshot] = []
        self.waiting: list[LiveSubscription] = []
        self.replay = ReplayBuffer()
        self.verifiers = 0
        self.cost = Cost()
        self.holding: Holding | None = None
        """Its memory, and the users who follow it."""
        self._base_bytes = limits.VIEW_BYTES + _VIEW_QUERY_FACTOR * len(query.canonical)
        self._whole: dict[ResetReason | None, Frame] = {}

    # -------------------------------------------------------------------- what it shows

    def info(self) -> ViewInfo:
        return ViewInfo(
            self.id,
            self.query.table.label,
            self.request.to_json(),
            self.query.mode,
            None if self.scope is None else self.scope.role,
            self.followers,
            self.held,
            self.live,
        )

    @property
    def followers(self) -> int:
        """How many follow it, or will when its result is there."""
        receivers = sum(len(snapshot.receivers) for snapshot in self.snapshots)
        return len(self.subscribers) + len(self.waiting) + receivers

    @property
    def held(self) -> int:
        """Rows in memory; of a streamed result, their keys."""
        state = self.state
        return state.buffered if isinstance(state, Window) else len(state.members)

    @property
    def bytes(self) -> int:
        """An estimate of its memory, in steps: its rows, those that are being read, its query.
        What is read to be compared is none of its users' doing, and does not count for them."""
        bytes = self._base_bytes + self.state.bytes
        if self.snapshots:
            bytes += sum(each.state.bytes for each in self.snapshots if not each.quiet)
        return -(-bytes // _VIEW_STEP_BYTES) * _VIEW_STEP_BYTES

    def weigh(self) -> None:
        """Count the memory that it takes now."""
        if self.holding is not None and not self.removed:
            self.holding.resize(self.bytes)

    def rows(self) -> tuple[Enter, ...]:
        """The visible rows as they are sent."""
        assert isinstance(self.state, Window)
        return tuple(map(self.known.wire.delta, self.state.snapshot().rows))  # type: ignore[arg-type]

    def whole(self, position: str, reason: ResetReason | None) -> Frame:
        """The present rows: a snapshot, or a reset for one who has others. Callers before
        they change, or the frame is forgotten, gets the same one."""
        if reason not in self._whole or self._whole[reason].position != position:
            rows = self.rows()
            self._whole[reason] = Frame(
                Snapshot(self.id, position, rows, hash=self.hash(rows))
                if reason is None
                else ResetMessage(self.id, position, reason, rows, hash=self.hash(rows))
            )
            self.replay.mark(position)
        return self._whole[reason]

    def forget_whole(self) -> None:
        self._whole = {}

    def hash(self, rows: Sequence[Enter] | None = None) -> int | None:
        """Of the present result, while a subscriber wants to verify; None for one that is too large
        to be hashed with every flush."""
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
        for snapshot in self.snapshots:
            if subscription in snapshot.receivers:
                snapshot.receivers.remove(subscription)
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


class InitialSnapshot:
    """A result being read beside the flushes, and the changes that came after its snapshot.

    When it is there the view is live with it. A view that was live before continues meanwhile:
    where it is read again to be compared (`quiet`), or where a streamed result is read for
    newcomers.
    """

    __slots__ = (
        "__weakref__",
        "arrived",
        "changes",
        "position",
        "quiet",
        "receivers",
        "share",
        "started",
        "state",
        "view",
    )  # fmt: skip

    def __init__(self, view: LiveView, *, quiet: bool = False) -> None:
        self.view = view
        self.quiet = quiet
        self.share: int
        """Of those results that are read in the snapshot of one flush; 0 for none so far."""
        self.receivers: list[LiveSubscription] = []
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
        for subscription in self.receivers:
            if not subscription.closed:
                subscription.expect(subscription.reason or reason)
                self.view.waiting.append(subscription)
        self.receivers = []
        self.view.weigh()

    def start(self, position: Position, share: int) -> None:
        """A snapshot was lent to read it in. Those who wait for a streamed result get this one;
        who comes from here on may have seen more than the snapshot has, and waits for another."""
        if self.wanted and self.is_for_newcomers:
            self.receivers, self.view.waiting = self.view.waiting, []
        self.started, self.position, self.share = True, position, share

    @property
    def is_for_newcomers(self) -> bool:
        """Whether it is a streamed result, which is handed to those who wait as it is read."""
        return self.view.query.mode == "streamed" and not self.quiet

    @property
    def owners(self) -> list[Owner]:
        """Whom reading it counts for: who asked first of those that wait, and the table."""
        table: Owner = ("table", self.view.known.table.oid)
        waiting = chain(self.receivers, self.view.waiting, self.view.subscribers)
        first = next(waiting, None)
        return [table] if first is None or first.owner is None else [first.owner, table]

    @property
    def wanted(self) -> bool:
        """Whether a subscriber still waits for it."""
        if self not in self.view.snapshots:
            return False
        if not self.is_for_newcomers:
            return bool(self.view.subscribers or self.view.waiting)
        return any(
            not each.closed for each in (self.receivers if self.started else self.view.waiting)
        )

    def drop(self) -> None:
        """No subscriber waits for it any more."""
        if self in self.view.snapshots:
            self.view.snapshots.remove(self)
            self.view.weigh()

    def put_back(self, changes: Iterable[Sequence[Change]]) -> None:
        """Those that a flush could not take after all: they come before what came since."""
        self.changes = [*(change for each in changes for change in each), *self.changes]

    def store(self, changes: Sequence[Change]) -> bool:
        """Changes of a later flush; False where there are too many to keep."""
        self.changes += changes
        return len(self.changes) <= _OPENING_CHANGES_MAX


class LiveHome(Protocol):
    """What a subscription asks of the registry that it belongs to."""

    def forget(self, subscription: LiveSubscription) -> None: ...

    def resend(self, subscription: LiveSubscription, reason: ResetReason) -> None: ...

    async def reanchor(self, subscription: LiveSubscription, after: list[Any] | None) -> None: ...

    async def change_access(self, subscription: LiveSubscription, access: Access) -> None: ...


class LiveSubscription(HubSubscription):
    """One subscriber's live query. Made by `Hub.live`."""

    __slots__ = (
        "_flushes", "_introduced_as", "_views", "access", "attempts", "caught_up", "deliver",
        "holding", "joined", "owner", "query", "reason", "target", "verify",
    )  # fmt: skip

    def __init__(
        self,
        views: LiveHome,
        flushes: FlushState,
        query: LiveQuery,
        subscriber: Subscriber,
        access: Access,
        verify: bool,
        owner: Owner | None = None,
    ) -> None:
        super().__init__(subscriber)
        self._views = views
        self._flushes = flushes
        self.owner = owner
        """Whom its memory and reading its result count for; None for the application itself."""
        self.holding: Holding | None = None
        """That of its view, while it counts there."""
        self.query = query
        self.access = access
        self.verify = verify
        self.deliver: Callable[[Frame], None] = subscriber.deliver
        self.target: LiveView | None = None
        self.attempts = 0
        self.caught_up = 0
        """The flush up to which it was sent everything out of turn."""
        self.reason: ResetReason | None = None
        """What its next whole result is called; None for a snapshot, its first."""
        self.joined = 0
        """The last flush before it began to wait for a whole result: it gets none from before."""
        self._introduced_as = 0

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

    def _leave(self) -> None:
        self._views.forget(self)
        self._flushes.announce()

    def resync(self, reason: ResetReason) -> None:
        """The client fell behind: tell it the whole present state."""
        if not self.closed:
            self._views.resend(self, reason)

    async def reanchor(self, after: list[Any] | None) -> None:
        """Slide the window to begin behind another cursor."""
        await self._views.reanchor(self, after)

    async def change_access(self, access: Access) -> None:
        """Continue with other rights."""
        await self._views.change_access(self, access)

    # -------------------------------------------------------------------- for the hub

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
            await self._flushes.changed()

    def begin(self, frames: Iterable[Frame], *, resumed: bool = False, whole: bool = True) -> None:
        """Its result, or what it missed of it, is handed over; a part of it, unless `whole`."""
        view = self.target
        assert view is not None
        try:
            if not self.begun or self._introduced_as != view.id:
                self.begun, self._introduced_as = True, view.id
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
