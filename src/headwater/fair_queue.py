"""A queue in which no owner can block another. Pure: it starts nothing and waits for nothing.

Every item has owners: the user who requested it, the table it reads. A bound for each kind of owner
says how many items of one owner may run at the same time. Items beyond it wait, and items of other
owners pass them. Owners take turns: the only item of one owner runs before the second item of an
owner with a thousand. An item runs from `next` until `done`.

The promises: an item never waits while all its owners are below their bounds and `next` is
called; and every item that may run is returned after finitely many others.

    >>> queue = FairQueue[str]({"user": 2})
    >>> for item in ("ann 1", "ann 2", "ann 3", "ann 4", "bob 1"):
    ...     queue.add(item, [("user", item[:3])])
    >>> [queue.next() for _ in range(4)]
    ['ann 1', 'bob 1', 'ann 2', None]
    >>> queue.done("ann 2")
    >>> queue.next()
    'ann 3'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeAlias, TypeVar

Item = TypeVar("Item", bound=Hashable)

Owner: TypeAlias = tuple[str, Hashable]
"""The kind and the id: ("user", "ann"), ("table", 16385)."""


_REMOVED_MIN = 100
"""Up to this many removed items stay in the queue before it is cleaned up."""


class _QueuedItem(NamedTuple):
    turn: int
    number: int
    item: object
    owners: tuple[Owner, ...]


class FairQueue(Generic[Item]):
    """Waiting items, and counts of running items. `bounds` has, for each kind of owner, how many
    items of one owner may run at once; a kind without an entry has no bound. The first owner of an
    item is the one that takes turns."""

    def __init__(self, bounds: Mapping[str, int]) -> None:
        self._bounds = dict(bounds)
        self._ready: list[_QueuedItem] = []
        # Entries that could not run because an owner was at its bound. When one of that owner's
        # items is done, one of them is tried again; if it cannot run, the next one is (`_offer`).
        self._parked: dict[Owner, list[_QueuedItem]] = {}
        self._waiting: dict[Item, _QueuedItem] = {}
        self._taken: dict[Item, _QueuedItem] = {}
        self._running: Counter[Owner] = Counter()
        self._turn = 0
        self._turns: dict[Owner | None, tuple[int, int]] = {}
        self._numbers = 0
        self._removed = 0

    def __len__(self) -> int:
        """The number of waiting items."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Item]:
        """The waiting items."""
        return iter(self._waiting)

    @property
    def running(self) -> int:
        return len(self._taken)

    @property
    def is_ready(self) -> bool:
        """Whether a waiting item may run."""
        return self._front() is not None

    def ready(self) -> Iterator[Item]:
        """Waiting items that are not known to be at a bound, approximately in the order in which
        they will run."""
        for entry in self._ready:
            if self._is_waiting(entry):
                yield entry.item  # type: ignore[misc]

    def at_bound(self, owner: Owner) -> bool:
        """Whether no further item of this owner may run now."""
        bound = self._bounds.get(owner[0])
        return bound is not None and self._running[owner] >= bound

    def add(self, item: Item, owners: Sequence[Owner] = ()) -> None:
        """Add a waiting item. An item that waits already stays where it is."""
        if item in self._waiting or item in self._taken:
            return
        first = owners[0] if owners else None
        waiting, last = self._turns.get(first, (0, 0))
        turn = max(self._turn, last) + 1
        self._turns[first] = (waiting + 1, turn)
        self._numbers += 1
        self._push(_QueuedItem(turn, self._numbers, item, tuple(owners)))

    def next(self, fits: Callable[[Item], bool] | None = None) -> Item | None:
        """The next item that may run and that `fits`; it counts as running from now on. None if
        there is none."""
        skipped: list[_QueuedItem] = []
        found: _QueuedItem | None = None
        while (entry := self._front()) is not None:
            heappop(self._ready)
            if fits is None or fits(entry.item):  # type: ignore[arg-type]
                found = entry
                break
            skipped.append(entry)
            self._offer(entry.owners)  # another item may run instead
        for entry in skipped:
            heappush(self._ready, entry)
        if found is None:
            return None
        item: Item = found.item  # type: ignore[assignment]
        self._forget(item)
        self._turn = max(self._turn, found.turn)
        self._taken[item] = found
        self._running.update(found.owners)
        return item

    def done(self, item: Item) -> None:
        """The item no longer runs. Does nothing for an item that does not run."""
        entry = self._taken.pop(item, None)
        if entry is not None:
            self._release(entry)

    def remove(self, item: Item) -> None:
        """Remove a waiting item. A running item continues until `done`."""
        if item in self._waiting:
            self._forget(item)
            self._removed += 1
            if self._removed > len(self._waiting) + _REMOVED_MIN:
                self._tidy()

    def _tidy(self) -> None:
        """Clean up removed items: parked ones could stay for a long time."""
        self._removed = 0
        self._parked.clear()
        self._ready = sorted(self._waiting.values())

    # -------------------------------------------------------------------- places

    def _front(self) -> _QueuedItem | None:
        """The first entry that may run. Entries before it that may not are parked."""
        while self._ready:
            entry = self._ready[0]
            if not self._is_waiting(entry):
                heappop(self._ready)
                self._offer(entry.owners)
                continue
            full = next((owner for owner in entry.owners if self.at_bound(owner)), None)
            if full is None:
                return entry
            heappop(self._ready)
            heappush(self._parked.setdefault(full, []), entry)
            self._offer(entry.owners)
        return None

    def _release(self, entry: _QueuedItem) -> None:
        for owner in entry.owners:
            self._running[owner] -= 1
            if not self._running[owner]:
                del self._running[owner]
        self._offer(entry.owners)

    def _offer(self, owners: Iterable[Owner]) -> None:
        """Try one parked entry of each owner that may run one more item."""
        for owner in owners:
            parked = self._parked.get(owner)
            if parked and not self.at_bound(owner):
                heappush(self._ready, heappop(parked))
                if not parked:
                    del self._parked[owner]

    def _push(self, entry: _QueuedItem) -> None:
        self._waiting[entry.item] = entry  # type: ignore[index]
        heappush(self._ready, entry)

    def _forget(self, item: Item) -> None:
        entry = self._waiting.pop(item)
        first = entry.owners[0] if entry.owners else None
        waiting, last = self._turns[first]
        if waiting == 1:
            del self._turns[first]
        else:
            self._turns[first] = (waiting - 1, last)

    def _is_waiting(self, entry: _QueuedItem) -> bool:
        return self._waiting.get(entry.item) is entry  # type: ignore[arg-type]
