"""Row-level security: rows that the database hides from a role are never sent to it.

The log has every row. So for a guarded view, the changed rows and the rows of the view are read
again as the role, in the snapshot of the flush. Hidden rows are applied as deletes, in one step
with the changes, so that no delta shows them. There is one query for each scope and table in a
flush.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice

from headwater import limits
from headwater.database import Connection
from headwater.hub.live_views.steps import ViewStep
from headwater.hub.live_views.view import LiveView
from headwater.hub.loop_time import Turn
from headwater.hub.reading.snapshot_queries import Scope, SnapshotQuery, ask_in_flush, of_keys
from headwater.live.state.window import Window
from headwater.model import Change, Key


async def hide(connection: Connection, steps: Iterable[ViewStep], now: datetime) -> int:
    """Add to each guarded step a delete for each row that its role does not see. If the query
    fails, the error of the step is set. Returns the number of queries."""
    groups: dict[tuple[Scope, int], list[ViewStep]] = {}
    for step in steps:
        scope = step.view.scope
        if scope is not None and scope.checked:
            groups.setdefault((scope, step.view.known.table.id), []).append(step)
    if not groups:
        return 0
    turn = Turn()
    # Once for all steps of a group: with very many views, one query each would take long.
    visible: dict[tuple[Scope, int], dict[Key, None]] = {}
    asked: list[tuple[tuple[Scope, int], tuple[Key, ...]]] = []
    questions: list[SnapshotQuery] = []
    for each, group in groups.items():
        visible[each] = await _all_held(group, turn)
        for part in _parts(visible[each]):
            asked.append((each, part))
            questions.append(of_keys(group[0].view.known, part, each[0]))
            await turn.over()
    answers = await ask_in_flush(connection, questions)
    for (each, part), question in zip(asked, questions, strict=True):
        answer = answers.pop(0)  # freeing all of them at once would take long, too
        if isinstance(answer, Exception):
            for step in groups[each]:
                step.error = answer
            continue
        for key in set(part).difference(map(question.known.table.key_of, answer)):
            del visible[each][key]
        await turn.over()
    hidden: list[tuple[ViewStep, list[Change]]] = []
    for each, group in groups.items():
        for step in group:
            if step.error is None:
                hidden.append((step, list(_deletes(step, visible[each], now))))
                await turn.over()
    for step, deletes in hidden:  # all or none: changes can be put back, but not these deletes
        step.changes.append(deletes)
    return len(questions)


async def _all_held(steps: Iterable[ViewStep], turn: Turn) -> dict[Key, None]:
    keys: dict[Key, None] = {}
    for step in steps:
        try:
            keys.update(dict.fromkeys(held_keys(step)))
        except TypeError as error:  # of a composite type
            step.error = error
        await turn.over()
    return keys


def held_keys(step: ViewStep) -> set[Key]:
    """The rows that a step may send: the changed ones, and those of its window."""
    keys = {change.key for changes in step.changes for change in changes if change.key}
    return keys.union(step.state.keys) if isinstance(step.state, Window) else keys


def _deletes(step: ViewStep, visible: dict[Key, None], now: datetime) -> Iterator[Change]:
    table = step.view.known.table
    for key in held_keys(step).difference(visible):
        yield Change(0, 0, now, table, "delete", key)


def _parts(keys: Iterable[Key]) -> Iterator[tuple[Key, ...]]:
    rest = iter(keys)
    while part := tuple(islice(rest, limits.WINDOW_ASK_KEYS_MAX)):
        yield part


def guarded(view: LiveView) -> bool:
    """Whether rows must be checked again before a new subscriber is sent them."""
    return view.scope is not None and view.scope.checked
