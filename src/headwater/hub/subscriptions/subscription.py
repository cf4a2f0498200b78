"""What subscriptions of every kind have in common: how one begins, ends, and is waited for."""

from __future__ import annotations

import logging

from headwater.errors import HeadwaterError, Unavailable
from headwater.hub.subscriptions.arrival import Arrival
from headwater.hub.subscriptions.subscriber import Subscriber

logger = logging.getLogger(__name__)


class HubSubscription:
    """One subscriber of something. A kind of subscription says in `_leave` how it is forgotten."""

    __slots__ = ("_arrived", "begun", "closed", "subscriber")

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.begun = False
        """Whether its subscriber knows of it; before, errors are raised where it is made."""
        self.closed = False
        self._arrived = Arrival()

    async def arrived(self) -> None:
        """Wait until what it waits for, or the error, was handed over; the error is raised."""
        await self._arrived.wait()

    def close(self) -> None:
        """End it; nothing is delivered any more."""
        if self.closed:
            return
        self.closed = True
        self._leave()
        self._arrived.settle(self._closed_early())

    def fail(self, error: HeadwaterError) -> None:
        """It is over. The error is raised where its begin is waited for, or sent."""
        if self.closed:
            return
        if not self.begun:
            self._arrived.settle(error)
        self.close()
        if self.begun:
            try:
                self.subscriber.failed(error)
            except Exception:
                logger.exception("a subscriber failed to take an error")

    def _leave(self) -> None:
        """Forget it. It is closed already."""
        raise NotImplementedError

    def _closed_early(self) -> HeadwaterError | None:
        """What is raised where it was closed before what it waits for was there."""
        return None


def not_taken() -> HeadwaterError:
    """For a subscription whose subscriber raised an error instead of taking a frame."""
    return Unavailable(
        "a message could not be sent; the gateway's log has the reason",
        hint="Subscribe again: nothing is lost.",
    )
