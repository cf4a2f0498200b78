"""Finds the intervals that contain a point. Finding, adding and removing take logarithmic time.

A treap: a search tree of intervals that random weights keep shallow. Each node has the highest end
below it. Intervals are closed; equal ones share a node.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, TypeAlias, TypeVar

Item = TypeVar("Item", bound=Hashable)
Bound: TypeAlias = tuple[Any, ...]


class _IntervalNode(Generic[Item]):
    __slots__ = ("high", "items", "left", "low", "right", "top", "weight")

    def __init__(self, low: Bound, high: Bound, weight: int) -> None:
        self.low = low
        self.high = high
        self.weight = weight
        self.items: set[Item] = set()
        self.top = high
        self.left: _IntervalNode[Item] | None = None
        self.right: _IntervalNode[Item] | None = None

    def before(self, low: Bound, high: Bound) -> bool:
        return self.low < low or (self.low == low and self.high < high)

    def update(self) -> None:
        self.top = self.high
        if self.left is not None and self.left.top > self.top:
            self.top = self.left.top
        if self.right is not None and self.right.top > self.top:
            self.top = self.right.top


_Tree: TypeAlias = _IntervalNode[Item] | None


class Intervals(Generic[Item]):
    """A set of (low, high, item)."""

    __slots__ = ("_root", "_weight")

    def __init__(self) -> None:
        self._root: _Tree[Item] = None
        self._weight = 1

    def add(self, low: Bound, high: Bound, item: Item) -> None:
        node = self._find(low, high)
        if node is None:
            # A linear congruential generator: random enough for a treap, and the same in every run.
            self._weight = (self._weight * 6364136223846793005 + 1442695040888963407) % 2**64
            node = _IntervalNode(low, high, self._weight >> 16)
            left, right = _split(self._root, low, high)
            self._root = _merge(_merge(left, node), right)
        node.items.add(item)

    def remove(self, low: Bound, high: Bound, item: Item) -> None:
        node = self._find(low, high)
        if node is None:
            return
        node.items.discard(item)
        if not node.items:
            self._root = _without(self._root, low, high)

    def containing(self, point: Bound) -> list[set[Item]]:
        """The items of every interval that contains the point."""
        found: list[set[Item]] = []
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            if node is None or node.top < point:
                continue
            waiting.append(node.left)
            if node.low <= point:
                waiting.append(node.right)
                if point <= node.high:
                    found.append(node.items)
        return found

    def everything(self) -> list[set[Item]]:
        found: list[set[Item]] = []
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            if node is not None:
                found.append(node.items)
                waiting += (node.left, node.right)
        return found

    def __bool__(self) -> bool:
        return self._root is not None

    def _find(self, low: Bound, high: Bound) -> _Tree[Item]:
        node = self._root
        while node is not None and not (node.low == low and node.high == high):
            node = node.right if node.before(low, high) else node.left
        return node


def _split(node: _Tree[Item], low: Bound, high: Bound) -> tuple[_Tree[Item], _Tree[Item]]:
    """The intervals before this one, and the others."""
    if node is None:
        return None, None
    if node.before(low, high):
        node.right, after = _split(node.right, low, high)
        node.update()
        return node, after
    before, node.left = _split(node.left, low, high)
    node.update()
    return before, node


def _merge(left: _Tree[Item], right: _Tree[Item]) -> _Tree[Item]:
    """Both trees as one; all of left comes before all of right."""
    if left is None or right is None:
        return left if right is None else right
    if left.weight > right.weight:
        left.right = _merge(left.right, right)
        left.update()
        return left
    right.left = _merge(left, right.left)
    right.update()
    return right


def _without(node: _Tree[Item], low: Bound, high: Bound) -> _Tree[Item]:
    assert node is not None
    if node.low == low and node.high == high:
        return _merge(node.left, node.right)
    if node.before(low, high):
        node.right = _without(node.right, low, high)
    else:
        node.left = _without(node.left, low, high)
    node.update()
    return node
