"""What must be read from the database because memory cannot decide it.

A window or a streamed query returns an `Outcome`: its deltas, and its needs. The needs of the last
outcome replace earlier ones. Their rows must be read in one database snapshot that contains exactly
the changes applied so far.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from headwater.model import Cursor, Delta, Key


class Undecided(Exception):
    """Memory cannot decide; the database can."""


class Unplaced(Exception):
    """Memory cannot place a row in the order, because of a value in it."""


def undecided() -> bool:
    raise Undecided


class Refill(msgspec.Struct, frozen=True):
    """The next `count` rows of the query's order after a cursor, or from the very start."""

    after: Cursor | None
    count: int


class Order(msgspec.Struct, frozen=True):
    """Of the rows with these keys, those that match the filter and are not after `until`, in the
    query's order."""

    keys: tuple[Key, ...]
    until: Cursor | None


class Check(msgspec.Struct, frozen=True):
    """Of the rows with these keys, those that match the filter, in any order."""

    keys: tuple[Key, ...]


Need: TypeAlias = Refill | Order | Check


class Outcome(msgspec.Struct, frozen=True):
    """Deltas to send now, and what must be read for the next ones."""

    deltas: tuple[Delta, ...] = ()
    needs: tuple[Need, ...] = ()


NOTHING = Outcome()
