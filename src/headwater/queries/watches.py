"""Decides which executions a change may concern. May say yes too often; must never say no wrongly.

Pure. The cost of a change does not grow with the number of executions it does not concern.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from headwater.model import Change
from headwater.queries.statements import Read

Item = TypeVar("Item", bound=Hashable)


class Watches(Generic[Item]):
    """What every item reads."""

    def put(self, item: Item, reads: Iterable[Read], *, everything: bool = False) -> None:
        """From here on the item reads this, and nothing else."""
        raise NotImplementedError

    def remove(self, item: Item) -> None:
        """Nothing any more. Safe for one that is not there."""
        raise NotImplementedError

    def touched(self, changes: Iterable[Change]) -> set[Item]:
        """Whom the changes may concern."""
        raise NotImplementedError


def concerns(reads: Iterable[Read], changes: Iterable[Change]) -> bool:
    """The same for one who is not filed."""
    raise NotImplementedError
