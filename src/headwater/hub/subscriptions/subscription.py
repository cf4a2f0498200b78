"""The base class of all subscriptions of the hub: how one begins, ends, and is waited for."""

from __future__ import annotations

import logging

from headwater.errors import HeadwaterError, Unavailable
from headwater.hub.subscriptions.arrival import Arrival
from headwater.hub.subscriptions.subscriber import Subscriber

logger = logging.getLogger(__name__)


class HubSubscription:
    """One subscription of one subscriber. `_leave` is different for each kind."""

    __slots__ = ("_arrived", "begun", "closed", "subscriber")

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.begun = False
        """Whether its subscriber was sent that it has begun. Before, errors are raised to the
        caller."""
        self.closed = False
        self._arrived = Arrival()

    async def arrived(self) -> None:
        """Wait until its result was sent. Raises the error if there is none."""
        await self._arrived.wait()

    def close(self) -> None:
        """End it. Nothing is delivered after this."""
        if self.closed:
            return
        self.closed = True
        self._leave()
        self._arrived.settle(self._closed_early())

    def fail(self, error: HeadwaterError) -> None:
        """End it with an error: raised to the caller before it has begun, sent afterwards."""
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
        """Remove it from its registry. It is closed already."""
        raise NotImplementedError

    def _closed_early(self) -> HeadwaterError | None:
        """The error for tasks that wait when it is closed."""
        return None


def not_taken() -> HeadwaterError:
    """The error for a subscription whose subscriber raised one in `deliver`."""
    return Unavailable(
        "a message could not be sent; the gateway's log has the reason",
        hint="Subscribe again: nothing is lost.",
    )
