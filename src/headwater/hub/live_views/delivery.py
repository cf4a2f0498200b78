"""Delivers the steps of a flush: frames to subscribers, results to those who wait for one.

A step is delivered as of the position of its flush: by the flush itself, or later by its background
job. Nothing here waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

from headwater.hub.live_views.registry import LiveViews
from headwater.hub.live_views.steps import ViewStep
from headwater.hub.live_views.view import InitialSnapshot, LiveSubscription
from headwater.hub.subscriptions.subscription import not_taken
from headwater.live.state.window import Window
from headwater.model import Position
from headwater.protocol import Frame

logger = logging.getLogger(__name__)


class Flushed(NamedTuple):
    """The number and position of a flush."""

    number: int
    position: Position
    text: str


class Delivery:
    """Applies steps and sends their results."""

    def __init__(self, views: LiveViews) -> None:
        self._views = views

    def apply(self, step: ViewStep) -> None:
        if step.error is None:
            began = time.perf_counter()
            self.attempt(step, step.apply)
            if step.changes:
                step.view.cost.ran(time.perf_counter() - began)

    def attempt(self, step: ViewStep, act: Callable[[], None]) -> None:
        """A view with a fault is read again; other views are not affected."""
        try:
            act()
        except Exception as error:
            self.fault(step, error)

    def fault(self, step: ViewStep, error: Exception) -> None:
        logger.error("view %d cannot take a flush: it is read again", step.view.id, exc_info=error)
        step.error = error

    def deliver(self, steps: Sequence[ViewStep], flushed: Flushed) -> None:
        """Send them to all subscribers of their views, as of this flush."""
        frames = [
            (step, frame)
            for step in steps
            if step.error is None
            and step.snapshot is None
            and (frame := self._frame(step, flushed))
        ]
        for step, frame in frames:
            fan_out(step.view.subscribers, frame, flushed.number)
            step.view.cost.sent(frame, len(step.view.subscribers))
            if not step.view.removed:
                self._views.replay_buffers.add(step.view.replay, frame, flushed.text)
            step.done = True
        for step in steps:
            if step.error is None and step.snapshot is not None:
                self.attempt(step, partial(self._finish, step, step.snapshot, flushed))
            if step.error is not None:
                self._views.step_failed(step.view, step.error)
            step.done = True
        for step in steps:
            self._views.welcome(step.view, flushed.number)

    def _frame(self, step: ViewStep, flushed: Flushed) -> Frame | None:
        """The encoded frame for its subscribers; None if there is nothing to send, or if it cannot
        be encoded."""
        at = step.at or datetime.now(UTC)
        try:
            frame = step.view.frame(flushed.text, at, step.deltas)
            if frame is not None:
                _ = frame.json
            return frame
        except Exception as error:
            self.fault(step, error)
            return None

    def _finish(self, step: ViewStep, snapshot: InitialSnapshot, flushed: Flushed) -> None:
        """A first result has arrived, as of this flush."""
        view = step.view
        if snapshot not in view.snapshots:
            return
        is_window = isinstance(step.state, Window)
        frame = None if is_window or snapshot.quiet else self._frame(step, flushed)
        if step.error is not None:
            return  # it is still in `snapshots`, and is read again
        view.snapshots.remove(snapshot)
        if snapshot.quiet and view.live:
            self._views.compare(view, step.state)
            return
        if not view.live and view.lag is not None and not view.lag.add(snapshot.changes):
            self._views.read_again(view, "resync")
            return
        if isinstance(step.state, Window):
            self._views.make_live(view, step.state)
            return
        if not view.live:
            view.take(step.state)
        elif view.differs(step.state):
            # Rights have changed: earlier subscribers have other rows than the new ones.
            lag = view.lag
            if view.subscribers:
                self._views.read_again(view, "access")
            self._views.replay_buffers.clear(view.replay)
            view.take(step.state)
            self._views.set_lag(view, lag)  # changes since then also apply to this state
        for subscription in list(snapshot.receivers):
            if not subscription.closed:
                view.attach(subscription)
                if frame is None:
                    subscription.done()
                else:
                    subscription.hand(frame)


def fan_out(subscribers: Iterable[LiveSubscription], frame: Frame, flush: int) -> None:
    """Send the same frame to all subscribers, except those who have this flush already."""
    for subscription in tuple(subscribers):
        if subscription.caught_up < flush and not subscription.closed:
            try:
                subscription.deliver(frame)
            except Exception:
                logger.exception(
                    "a subscriber of view %d failed to take a frame", subscription.view
                )
                subscription.fail(not_taken())
