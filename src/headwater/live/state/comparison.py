"""Compares a maintained state with one that was read from the database in the same snapshot. Pure.

Rows are compared as they are sent, so 5.0 differs from 5.00. A window has the first rows of an
order up to its horizon, and two windows may have a different number of rows: the rows before both
horizons must be equal, and a complete window must have every row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from headwater.live.state.streamed import Streamed
from headwater.live.state.window import Window
from headwater.model import Key, Row

ResultState: TypeAlias = Window | Streamed


class Difference(msgspec.Struct, frozen=True):
    """The first row in which two states differ."""

    key: Key
    ours: Row | None
    """None if the state lacks the row. Empty for a streamed result, which has keys only."""
    theirs: Row | None
    in_both: bool
    """Whether both have the row, with different values or at different places."""
    visible: bool
    """Whether subscribers see the difference. Otherwise it is in the cushion of a window."""


def difference(
    ours: ResultState, theirs: ResultState, sent: Callable[[Row], Row]
) -> Difference | None:
    """The difference of our state from the database's; None if they are equal. `sent` converts a
    row to its form on the wire."""
    if isinstance(ours, Window) and isinstance(theirs, Window):
        return _of_windows(ours, theirs, sent)
    assert isinstance(ours, Streamed)
    assert isinstance(theirs, Streamed)
    for key in ours.members ^ theirs.members:
        held: Row | None = {} if key in ours.members else None
        true: Row | None = {} if key in theirs.members else None
        return Difference(key, held, true, in_both=False, visible=True)
    return None


def _of_windows(ours: Window, theirs: Window, sent: Callable[[Row], Row]) -> Difference | None:
    one, other = _rows(ours), _rows(theirs)
    keys, true_keys = list(one), list(other)
    found = _first(one, other, sent) or _first_place(ours, keys, theirs, true_keys)
    if found is None:
        return None
    limit = ours.limit
    visible = [(key, _text(one[key], sent)) for key in keys[:limit]]
    true = [(key, _text(other[key], sent)) for key in true_keys[:limit]]
    ours_row, true_row = one.get(found), other.get(found)
    in_both = ours_row is not None and true_row is not None
    return Difference(found, ours_row, true_row, in_both, visible != true)


def _rows(window: Window) -> dict[Key, Row]:
    return dict(zip(window.ordered_keys, window.buffer, strict=True))


def _first(one: dict[Key, Row], other: dict[Key, Row], sent: Callable[[Row], Row]) -> Key | None:
    """The first row that both have with different values."""
    for key, row in one.items():
        true = other.get(key)
        if true is not None and _text(row, sent) != _text(true, sent):
            return key
    return None


def _first_place(ours: Window, keys: list[Key], theirs: Window, true: list[Key]) -> Key | None:
    """The first row that is missing, surplus, or at another place."""
    for key, true_key in zip(keys, true, strict=False):
        if key != true_key:
            return key if key not in true else true_key
    known = min(len(keys), len(true))
    if len(keys) > known and theirs.complete:
        return keys[known]
    if len(true) > known and ours.complete:
        return true[known]
    return None


def _text(row: Row, sent: Callable[[Row], Row]) -> bytes:
    return msgspec.json.encode(sent(row))
