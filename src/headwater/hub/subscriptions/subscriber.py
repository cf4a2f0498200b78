"""Who subscribes, and what a subscriber may see: the contract between the hub and the gateway."""

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
    that policies find in `request.jwt.claims`. Only rows that match `where` are ever its own.
    `whole` is for admins, whom row-level security hides nothing of a change feed from. A feed or
    topic may begin at most `history` ago; None for the whole log.
    """

    role: str | None = None
    claims: str = "{}"
    where: Filter = EVERYTHING
    whole: bool = False
    history: timedelta | None = None


class Settling(Protocol):
    """A subscription of any kind, as `Hub.reached` waits for it."""

    def settled(self, position: Position) -> Awaitable[None]:
        """Return once its subscriber was handed everything up to a position that the hub has
        reached, or was sent the error, or has ended it."""


class Subscriber(Protocol):
    """One subscription of one session. None of these calls waits or raises; a subscription whose
    `deliver` raises has missed a frame, and is over."""

    def subscribed(self, view: int, *, key: tuple[str, ...], resumed: bool) -> None:
        """Frames that name this view are for you from here on. Said again when the view changes."""

    def deliver(self, frame: Frame) -> None:
        """A snapshot, deltas, a reset, changes or a gap. Many subscribers get the same frame."""

    def failed(self, error: HeadwaterError) -> None:
        """The subscription is over; the hub has forgotten it."""

    def room(self) -> Awaitable[None]:
        """Wait until the client has taken most of what it was sent. For results too large to be
        handed over at once."""
