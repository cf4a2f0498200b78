"""The steps from one list of rows to another, by key: sent to clients that request deltas.

Pure. Few changes need few steps: the longest run of rows in the same order stays in place, the
others move. The steps are the deltas of a live query, and clients apply them in the same way: one
after the other, each index as of that moment.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from headwater import limits
from headwater.errors import ResultError
from headwater.model import Enter, Key, Leave, Move, Row, Update

_ROW_STEPS_MAX = 500
"""Row deltas of one query result in one message. If there are more, all rows are sent."""


RowStep: TypeAlias = Enter | Leave | Move | Update
Rows: TypeAlias = dict[Key, Row]
"""Rows by key, in their order."""


def rows_of(result: bytes, key: Sequence[str], query: str) -> Rows:
    """The rows of a result. ResultError if it is not a list of rows with unique keys.

    >>> rows_of(b'[{"id": 1, "name": "a"}]', ["id"], "people")
    {(1,): {'id': 1, 'name': 'a'}}
    """
    if len(result) > limits.ROW_DELTA_BYTES_MAX:
        raise _too_large(query, f"{limits.ROW_DELTA_BYTES_MAX:,} bytes")
    found = msgspec.json.decode(result)
    if not isinstance(found, list):
        raise _no_rows(query, "the result is not a list")
    if len(found) > limits.ROW_DELTA_ROWS_MAX:
        raise _too_large(query, f"{limits.ROW_DELTA_ROWS_MAX:,} rows")
    rows: Rows = {}
    for index, row in enumerate(found):
        try:
            key_of = tuple(row[name] for name in key)
            if key_of in rows:
                raise _no_rows(query, f"two rows have the key {list(key_of)}")
        except (TypeError, KeyError) as error:
            raise _no_rows(query, f"row {index} has no key {', '.join(key)}") from error
        rows[key_of] = row
    return rows


def _too_large(query: str, bound: str) -> ResultError:
    return ResultError(
        f"query {query} cannot be sent as row deltas: its result has more than {bound}",
        code="result_too_large",
        hint="Subscribe without delta, or ask for fewer rows.",
    )


def _no_rows(query: str, reason: str) -> ResultError:
    return ResultError(
        f"query {query} cannot be sent as row deltas: {reason}",
        code="result_key",
        hint="Subscribe without delta, or declare a key that every row has and no two share.",
    )


def entering(rows: Rows) -> tuple[Enter, ...]:
    """All rows, for a client that has none."""
    return tuple(Enter(key, row, i) for i, (key, row) in enumerate(rows.items()))


def steps(old: Rows, new: Rows) -> tuple[RowStep, ...] | None:
    """The steps from the old rows to the new ones; None if sending all rows takes less.

    >>> steps({(1,): {"id": 1}, (2,): {"id": 2}}, {(2,): {"id": 2}, (3,): {"id": 3}})
    (Leave(key=(1,), index=0), Enter(key=(3,), row={'id': 3}, index=1, cursor=()))
    """
    current = [key for key in old if key in new]
    moving = _moving(current, [key for key in new if key in old])
    updated = [key for key in current if key not in moving and not _same(old[key], new[key])]
    entering = len(new) - len(current)
    if len(old) - len(current) + len(moving) + entering + len(updated) > _ROW_STEPS_MAX:
        return None
    found: list[RowStep] = [*_leaving(old, new), *_placing(current, moving, new)]
    if updated:
        index_of = {key: index for index, key in enumerate(new)}
        found += (Update(key, new[key], index_of[key]) for key in updated)
    return tuple(found)


_EXACT = frozenset({str, int, bool, type(None)})


def _same(old: Row, new: Row) -> bool:
    """Whether two rows are the same JSON. To Python, 1 and true are equal.

    >>> _same({"id": 1}, {"id": 1}), _same({"id": 1}, {"id": True}), _same({"n": [1]}, {"n": [1.0]})
    (True, False, False)
    """
    return bool(old == new) and all(
        type(one) is type(other) and (type(one) in _EXACT or repr(one) == repr(other))
        for one, other in zip(old.values(), new.values(), strict=True)
    )


def _leaving(old: Rows, new: Rows) -> list[RowStep]:
    """From the end, so that no step changes the index of another."""
    leaving = [(index, key) for index, key in enumerate(old) if key not in new]
    return [Leave(key, index) for index, key in reversed(leaving)]


def _placing(current: list[Key], moving: set[Key], new: Rows) -> list[RowStep]:
    """Put every new or moved row directly after its predecessor. The other rows are then in their
    places."""
    found: list[RowStep] = []
    held = set(current)
    before: Key | None = None
    least = 0  # The row before is not in front of this.
    for key, row in new.items():
        if key in moving:
            source = current.index(key)
            del current[source]
            least -= source < least
            index = 0 if before is None else current.index(before, least) + 1
            found.append(Move(key, row, source, index))
        elif key not in held:
            index = 0 if before is None else current.index(before, least) + 1
            found.append(Enter(key, row, index))
        else:
            before = key
            continue
        current.insert(index, key)
        before, least = key, index
    return found


def _moving(old: list[Key], new: list[Key]) -> set[Key]:
    """The smallest set of rows that must move: all but a longest run of rows in the same order."""
    if old == new:
        return set()
    place = {key: index for index, key in enumerate(old)}
    tails: list[int] = []
    ends: list[Key] = []
    before: dict[Key, Key | None] = {}
    for key in new:
        at = bisect_left(tails, place[key])
        before[key] = ends[at - 1] if at else None
        tails[at : at + 1] = [place[key]]
        ends[at : at + 1] = [key]
    staying: set[Key] = set()
    last: Key | None = ends[-1]
    while last is not None:
        staying.add(last)
        last = before[last]
    return set(new) - staying
