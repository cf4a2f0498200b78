"""The contract between the hub and the gateway: subscribers, and what they may see."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import timedelta
from typing import Protocol

import msgspec

from headwater.errors import HeadwaterError
from headwater.live.filters.filter import EVERYTHING, Filter
from headwater.model import Position
from headwater.protocol import Frame


class Access(msgspec.Struct, frozen=True):
    """What a subscriber may see of one table.

    `role` is the database role it reads as, None for Headwater's own; `claims` is the JSON text
    that policies find in `request.jwt.claims`. It gets only rows that match `where`. `whole` is for
    admins: row-level security does not hide rows of a change feed from them. A feed or topic may
    begin at most `history` ago; None for the whole log.
    """

    role: str | None = None
    claims: str = "{}"
    where: Filter = EVERYTHING
    whole: bool = False
    history: timedelta | None = None


class Settling(Protocol):
    """A subscription of any kind, for `Hub.reached`."""

    def settled(self, position: Position) -> Awaitable[None]:
        """Return when its subscriber was sent everything up to a position that the hub has reached,
        or an error, or when the subscription has ended."""


class Subscriber(Protocol):
    """One subscription of one session. These calls do not wait and do not raise. If `deliver`
    raises, the subscriber has missed a frame, and the hub ends the subscription."""

    def subscribed(self, view: int, *, key: tuple[str, ...], resumed: bool) -> None:
        """From here on, frames with this view are for this subscriber. Called again when it gets
        another view."""

    def deliver(self, frame: Frame) -> None:
        """A snapshot, deltas, a reset, changes or a gap. Many subscribers get the same frame."""

    def failed(self, error: HeadwaterError) -> None:
        """The subscription has ended with this error."""

    def room(self) -> Awaitable[None]:
        """Wait until the client has read most of what it was sent. For results that are too large
        for one frame."""
