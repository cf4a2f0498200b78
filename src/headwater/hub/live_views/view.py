"""A live view: the state that identical live queries share, and its subscriptions.

A view is *live* when its first result has arrived. From then on, every flush that changes it makes
one frame for all its subscribers. While an `InitialSnapshot` is read, later changes are stored with
it. Nothing here waits: the flush and the initial snapshots call it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import chain
from typing import Any, Protocol

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
from headwater.protocol import Deltas, Frame, ResetMessage, ResetReason, Snapshot, result_hash

_VIEW_QUERY_FACTOR = 6
"""The memory of a query is this many times its text: parsed, bound, compiled and routed."""

_VIEW_STEP_BYTES = 1024
"""The memory of a live query is counted in steps of this many bytes, so that most changes do not
change the sums."""

_OPENING_CHANGES_MAX = 50_000
"""Changes stored for a live query while its first result is read. With more it is read again."""


logger = logging.getLogger(__name__)


class LiveView(View):
    """The state that identical live queries share."""

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
        """Set while it is behind the flushes."""
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

    @property
    def followers(self) -> int:
        """How many subscriptions it has, with those that wait for its result."""
        receivers = sum(len(snapshot.receivers) for snapshot in self.snapshots)
        return len(self.subscribers) + len(self.waiting) + receivers

    @property
    def held(self) -> int:
        """Rows in memory; keys for a streamed result."""
        state = self.state
        return state.buffered if isinstance(state, Window) else len(state.members)

    @property
    def bytes(self) -> int:
        """An estimate of its memory, in steps: its rows, those that are being read, its query. Rows
        that are read for a comparison do not count, because users did not ask for it."""
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
        """The frame with the present rows: a snapshot, or a reset for a subscriber that has others.
        Callers get the same frame until the rows change or `forget_whole` is called."""
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
        """The hash of the present result, if a subscriber verifies; None for a result that is too
        large to be hashed in every flush."""
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
        """The frame for the deltas of a flush; None if there are none."""
        self.weigh()  # rows of the cushion may have changed without a delta
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

    # -------------------------------------------------------------------- subscriptions

    def attach(self, subscription: LiveSubscription) -> None:
        self.subscribers.add(subscription)
        self.verifiers += subscription.verify
        self.weigh()
        if subscription.verify:
            self._whole = {}  # the stored frames may have no hash

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
    """The rows of a streamed result after its last reset."""
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
"""How often in a row a subscription is opened again after a failure, because its table changed or
for an unknown reason."""


def attempts_left(*subscriptions: Iterable[LiveSubscription]) -> bool:
    """Whether to open them once more."""
    for subscription in [each for some in subscriptions for each in some]:
        subscription.attempts += 1
        if subscription.attempts > _ATTEMPTS_MAX:
            return False
    return True


class InitialSnapshot:
    """A result that is being read beside the flushes, and the changes since its snapshot.

    When it has arrived, the view is live with it. A live view continues while it is read again for
    a comparison (`quiet`), or while a streamed result is read for new subscribers.
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
        """The number of its share: the results that are read in the snapshot of one flush. 0 for
        none."""
        self.receivers: list[LiveSubscription] = []
        """Subscriptions that are sent a streamed result part by part: all that waited when it
        started."""
        self.again()

    def again(self, reason: ResetReason = "resync") -> None:
        """Start over with another snapshot. Receivers may have parts of this one, so they are sent
        a reset: with the reason they wait with already, else with this one."""
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
        """It is read in this snapshot. Subscriptions that wait for a streamed result get this one.
        Later ones may have seen something newer, and wait for another."""
        if self.wanted and self.is_for_newcomers:
            self.receivers, self.view.waiting = self.view.waiting, []
        self.started, self.position, self.share = True, position, share

    @property
    def is_for_newcomers(self) -> bool:
        """Whether it is a streamed result, which is sent to new subscribers as it is read."""
        return self.view.query.mode == "streamed" and not self.quiet

    @property
    def owners(self) -> list[Owner]:
        """The owners that reading it counts for: the first user that waits, and the table."""
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
        """No subscriber waits for it: remove it."""
        if self in self.view.snapshots:
            self.view.snapshots.remove(self)
            self.view.weigh()

    def put_back(self, changes: Iterable[Sequence[Change]]) -> None:
        """Changes that a flush did not apply. They come before the changes since."""
        self.changes = [*(change for each in changes for change in each), *self.changes]

    def store(self, changes: Sequence[Change]) -> bool:
        """Store changes of a later flush. False if there are too many."""
        self.changes += changes
        return len(self.changes) <= _OPENING_CHANGES_MAX


class LiveHome(Protocol):
    """The registry, as its subscriptions use it."""

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
        """The user that its memory and its reads count for; None for the application itself."""
        self.holding: Holding | None = None
        """The memory of its view, while it counts for the owner."""
        self.query = query
        self.access = access
        self.verify = verify
        self.deliver: Callable[[Frame], None] = subscriber.deliver
        self.target: LiveView | None = None
        self.attempts = 0
        self.caught_up = 0
        """The last flush that it has through a whole result, sent outside of `fan_out`."""
        self.reason: ResetReason | None = None
        """The reason of its next reset; None if its next whole result is a snapshot."""
        self.joined = 0
        """The last flush before it began to wait for a whole result. It gets no older result."""
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
        """The client is behind: send the whole present result."""
        if not self.closed:
            self._views.resend(self, reason)

    async def reanchor(self, after: list[Any] | None) -> None:
        """Move the window: it begins after another cursor."""
        await self._views.reanchor(self, after)

    async def change_access(self, access: Access) -> None:
        """Continue with another access."""
        await self._views.change_access(self, access)

    # -------------------------------------------------------------------- for the hub

    def expect(self, reason: ResetReason) -> None:
        """Wait for another whole result."""
        if not self.begun:
            return
        self.reason = reason
        self._arrived.renew()

    async def settled(self, position: Position) -> None:
        """Wait until it was sent its whole result, and until its view does not lag behind the
        position: then it was sent the changes of all flushes up to there."""
        while not self.closed:
            await self._arrived.wait()
            lag = None if self.target is None else self.target.lag
            if lag is None or lag.covers(position):
                return
            await self._flushes.changed()

    def begin(self, frames: Iterable[Frame], *, resumed: bool = False, whole: bool = True) -> None:
        """Send its result, or the frames that it missed. Without `whole`, only a part of it."""
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
            self.reason = reason  # the rest may have to be read again
            self._arrived.renew()

    def hand(self, frame: Frame, *, whole: bool = True) -> None:
        """Send one more frame to this subscriber. Without `whole`, a part of its result."""
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
        """It was sent everything it waited for."""
        self.reason = None
        self.attempts = 0
        self._arrived.settle()
