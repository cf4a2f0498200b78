"""Which columns may be hidden columns under another name, so that they are hidden as well. Pure.

A shape has the names of columns and their order, not their numbers in PostgreSQL. But between two
shapes, columns only move to the left, and added ones come last. Where that does not tell a renamed
column from an added one, it counts as renamed: a value is left out rather than shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from headwater.model import Column, Table
from headwater.pipeline.tables.options import TableOptions, strictest


def followed(options: TableOptions, shapes: Sequence[Table]) -> TableOptions:
    """The options with `inherited`: the treatments of columns that may be hidden ones. A column
    that `include` names is shown. `shapes` are those of one table, the oldest first."""
    if not (options.exclude or options.mask or options.hash):
        return options
    for before, after in pairwise(shapes):
        found = dict(options.inherited)
        for old, new in _heirs(before.columns, after.columns, options):
            if options.named(new) == "value" and new not in options.include:
                found[new] = strictest(options.treatment(old), found.get(new, "value"))
        options = msgspec.structs.replace(options, inherited=tuple(sorted(found.items())))
    return options


def _heirs(
    before: Sequence[Column], after: Sequence[Column], options: TableOptions
) -> Iterator[tuple[str, str]]:
    """Each hidden column with each later column that it may have become.

    >>> columns = lambda text: [Column(name, "text", "text") for name in text.split()]
    >>> hidden = TableOptions(mask=("card",))
    >>> list(_heirs(columns("id card note"), columns("id pan note tag"), hidden))
    [('card', 'pan')]
    >>> list(_heirs(columns("id card note"), columns("id note"), hidden))
    []
    """
    same = {0: 0} | {i + 1: j + 1 for i, j in _unmoved(before, after)}
    for i, column in enumerate(before, 1):
        if i in same or options.treatment(column.name) == "value":
            continue
        left = max(each for each in same if each < i)
        right = min((each for each in same if each > i), default=None)
        low, high = same[left] + 1, same[left] + i - left
        if right is not None:
            low, high = max(low, same[right] - (right - i)), min(high, same[right] - 1)
        known = {each.name for each in before}
        for each in after[low - 1 : high]:
            # A column that kept its name may have changed places with one of its type only.
            if each.name not in known or each.declared == column.declared:
                yield column.name, each.name


def _unmoved(before: Sequence[Column], after: Sequence[Column]) -> list[tuple[int, int]]:
    """The places of columns that are the same by their names and places."""
    places = {column.name: place for place, column in enumerate(after)}
    both = [(i, places[c.name]) for i, c in enumerate(before) if c.name in places]
    found: list[tuple[int, int]] = []
    for i, j in both:
        in_order = all((a < i) == (b < j) for a, b in both if a != i)
        last = found[-1] if found else (-1, -1)
        if in_order and j - last[1] <= i - last[0]:
            found.append((i, j))
    return found
