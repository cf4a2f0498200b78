"""The steps from one list of keys to another. Each index is that of the moment of its step.

Leaves come first, from the back, so that no index is changed by an earlier step, and the list never
exceeds its limit. Then come moves, each to the place after its new predecessor. Then come enters
and updates from front to back, when everything before them is in place.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import NamedTuple, TypeAlias

from headwater.model import Key


class Leaves(NamedTuple):
    key: Key
    at: int


class Moves(NamedTuple):
    key: Key
    source: int
    at: int


class Enters(NamedTuple):
    key: Key
    at: int


class Stays(NamedTuple):
    """The row changed, and stays at its place."""

    key: Key
    at: int


ListStep: TypeAlias = Leaves | Moves | Enters | Stays


def steps(old: list[Key], new: list[Key], touched: Container[Key]) -> Iterator[ListStep] | None:
    """The steps from old to new, in which only touched rows move. None if that is not possible.

    >>> list(steps([(1,), (2,), (3,)], [(3,), (1,), (4,)], {(2,), (3,), (4,)}))
    [Leaves(key=(2,), at=1), Moves(key=(3,), source=1, at=0), Enters(key=(4,), at=2)]
    """
    staying = frozenset(old).intersection(new)
    anchored = [key for key in old if key in staying and key not in touched]
    if anchored != [key for key in new if key in staying and key not in touched]:
        return None
    return _steps(old, new, staying, touched)


def _steps(
    old: list[Key], new: list[Key], staying: frozenset[Key], touched: Container[Key]
) -> Iterator[ListStep]:
    now = list(old)
    for index in range(len(old) - 1, -1, -1):
        if old[index] not in staying:
            del now[index]
            yield Leaves(old[index], index)
    moved = set()
    for key, behind in _touched_with_predecessor(new, staying, touched):
        source = now.index(key)
        del now[source]
        index = 0 if behind is None else now.index(behind) + 1
        now.insert(index, key)
        if index != source:
            moved.add(key)
            yield Moves(key, source, index)
    for index, key in enumerate(new):
        if key not in staying:
            yield Enters(key, index)
        elif key in touched and key not in moved:
            yield Stays(key, index)


def _touched_with_predecessor(
    new: list[Key], staying: frozenset[Key], touched: Container[Key]
) -> Iterator[tuple[Key, Key | None]]:
    behind: Key | None = None
    for key in new:
        if key in staying:
            if key in touched:
                yield key, behind
            behind = key
