"""Replay: writes a table again from its events.

`rebuild` makes the table as it was at a moment. `reapply` repeats its changes in another table,
each transaction as one and with its actor, so that followers of that table see the same history.
`emit` yields the changes. A call with the same arguments continues where the last one stopped;
`ReplayRun` has its state.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from datetime import UTC, datetime
from itertools import chain, groupby
from pathlib import Path
from typing import TypeVar, overload

import msgspec

from headwater.errors import ConfigError, ResyncRequired
from headwater.limits import CURSOR_SAVE_SECONDS
from headwater.model import Actor, Position, Transaction
from headwater.pipeline.lake.moments import Moment, aware
from headwater.pipeline.lake.schemas import split
from headwater.pipeline.reading import state
from headwater.pipeline.reading.changes import (
    ChangeGroup,
    ChangeRange,
    StoredChange,
    bounded,
    in_order,
)
from headwater.pipeline.reading.lake import Lake, TableState
from headwater.pipeline.replay.targets import ReplayRun, ReplayTarget, opened

_REPLAY_CHUNK_ROWS = 5_000
"""Rows that a replay writes in one transaction when it rebuilds a table."""


ProgressCallback = Callable[[int, int], None]
"""Called with the number that is done, and the total."""


def _ignore(done: int, total: int) -> None:
    return


# ------------------------------------------------------------------------ moments


@overload
def moment_text(when: Moment) -> str: ...
@overload
def moment_text(when: None) -> None: ...
@overload
def moment_text(when: Moment | None) -> str | None: ...
def moment_text(when: Moment | None) -> str | None:
    """A moment as text, as a run stores it."""
    if when is None:
        return None
    when = aware(when)
    return str(when) if isinstance(when, Position) else when.astimezone(UTC).isoformat()


def read_moment(text: str) -> Moment:
    """Read what `moment_text` wrote."""
    try:
        return Position.parse(text)
    except ValueError:
        return datetime.fromisoformat(text)


# ------------------------------------------------------------------------ rebuilding


def rebuild(
    lake: Lake,
    url: str,
    table: str,
    *,
    into: str,
    until: Moment | None = None,
    restart: bool = False,
    progress: ProgressCallback = _ignore,
) -> ReplayRun:
    """Make the table as it was at a moment, under another name."""
    with opened(url) as database:
        target = ReplayTarget(database, into)
        asked = ReplayRun(table, "rebuild", None, moment_text(until), None, "")
        run = target.take(asked, restart=restart)
        if run is not None and run.done:
            return run
        end = lake.settle(until) if run is None else read_moment(run.end)
        found = lake.state(table, end)
        if run is None:
            run = msgspec.structs.replace(asked, end=moment_text(end), shape=found.table.id)
            target.create(found.table, run)
        run = _seed(target, found, run, progress)
        done = msgspec.structs.replace(run, done=True)
        with target.step(run) as note:
            target.demand_values(found.table)
            note(done)
        return done


def _seed(
    target: ReplayTarget, found: TableState, run: ReplayRun, progress: ProgressCallback
) -> ReplayRun:
    """Write the first state to the table, chunk by chunk; the rest of it if a part is written."""
    total = found.rows.count()
    for keys, images in _chunks(found, run.key, total):
        after = msgspec.structs.replace(run, key=keys[-1], count=run.count + len(keys))
        with target.step(run) as note:
            target.fill(images)
            note(after)
        run = after
        progress(run.count, total)
    return _moved(target, run, msgspec.structs.replace(run, seeded=True))


def _chunks(
    found: TableState, after: str | None, total: int
) -> Iterator[tuple[list[str], list[str]]]:
    """Keys and images in the order of the keys, after the key `after`."""
    from pyspark.sql import functions as f

    rows = found.rows if after is None else found.rows.filter(f.col("key") > after)
    names = state.names_of(found.passed)
    for chunk in bounded(in_order(rows, ("key",), total), _REPLAY_CHUNK_ROWS):
        images = [_renamed(row["image"], names.get(row["shape"])) for row in chunk]
        yield [row["key"] for row in chunk], images


def _renamed(image: str, names: Mapping[str, str] | None) -> str:
    """An image with the present names of its columns."""
    if names is None:
        return image
    values = split(image)
    parts = (f"{json.dumps(new)}:{values[old]}" for new, old in names.items() if old in values)
    return f"{{{','.join(parts)}}}"


# ------------------------------------------------------------------------ repeating changes


def reapply(
    lake: Lake,
    url: str,
    table: str,
    *,
    into: str,
    since: Moment | None = None,
    until: Moment | None = None,
    speed: float | None = None,
    restart: bool = False,
    progress: ProgressCallback = _ignore,
) -> ReplayRun:
    """Repeat each transaction in a table that starts with the state of the original at `since`."""
    with opened(url) as database:
        target = ReplayTarget(database, into)
        asked = ReplayRun(table, "emit", moment_text(since), moment_text(until), None, "")
        run = target.take(asked, restart=restart)
        if run is None:
            run = _begin(lake, target, asked, since, until)
        elif run.done:
            run = _next(lake, target, run)
        if not run.seeded:
            assert run.start is not None
            seeded = _seed(target, lake.state(table, read_moment(run.start)), run, _ignore)
            # From here on changes are counted.
            run = _moved(target, seeded, msgspec.structs.replace(seeded, count=0))
        change_range = lake.change_range(table, _start(run), read_moment(run.end), after=run.last)
        for transaction in paced(_whole(change_range), speed, _begun):
            run = _apply(target, change_range, run, transaction)
            progress(run.count, change_range.changes)
        return _moved(target, run, msgspec.structs.replace(run, done=True))


def _begin(
    lake: Lake, target: ReplayTarget, asked: ReplayRun, since: Moment | None, until: Moment | None
) -> ReplayRun:
    end = lake.settle(until)
    start, found = _first_state(lake, asked.source, since)
    run = msgspec.structs.replace(
        asked, start=moment_text(start), end=moment_text(end), shape=found.table.id
    )
    target.create(found.table, run)
    return run


def _first_state(lake: Lake, table: str, since: Moment | None) -> tuple[Moment, TableState]:
    if since is not None:
        start = lake.settle(since)
        return start, lake.state(table, start)
    start = lake.first_moment(table)
    try:
        return start, lake.state(table, start)
    except ResyncRequired:
        # The first state is unknown: start with the first snapshot.
        snapshot = lake.first_snapshot(table)
        if snapshot is None:
            raise
        return snapshot, lake.state(table, snapshot)


def _next(lake: Lake, target: ReplayTarget, run: ReplayRun) -> ReplayRun:
    """Continue a finished replay without an end, with the changes since then."""
    return _moved(target, run, _further(lake, run))


def _further(lake: Lake, run: ReplayRun) -> ReplayRun:
    if run.until is not None:
        return msgspec.structs.replace(run, count=0)
    end = moment_text(lake.settle(None))
    return msgspec.structs.replace(run, start=run.end, end=end, last=0, count=0, done=False)


def _moved(target: ReplayTarget, before: ReplayRun, after: ReplayRun) -> ReplayRun:
    if after != before:
        with target.step(before) as note:
            note(after)
    return after


def _start(run: ReplayRun) -> Moment | None:
    return None if run.start is None else read_moment(run.start)


def _whole(change_range: ChangeRange) -> Iterator[tuple[ChangeGroup, Iterator[ChangeGroup]]]:
    """Each transaction: its first part, and an iterator over the further parts."""
    groups = change_range.groups()
    for first in groups:
        yield first, _rest(first, groups)


def _rest(first: ChangeGroup, groups: Iterator[ChangeGroup]) -> Iterator[ChangeGroup]:
    group = first
    while not group.complete:
        group = next(groups)
        yield group


def _begun(transaction: tuple[ChangeGroup, Iterator[ChangeGroup]]) -> datetime:
    return transaction[0].events[-1].at


def _apply(
    target: ReplayTarget,
    change_range: ChangeRange,
    run: ReplayRun,
    transaction: tuple[ChangeGroup, Iterator[ChangeGroup]],
) -> ReplayRun:
    """Repeat a transaction as one."""
    with target.step(run) as note:
        shape, count, last = run.shape, run.count, run.last
        for group in chain(transaction[:1], transaction[1]):
            for (which, op, actor), found in groupby(group.events, _alike):
                events = list(found)
                if which != shape:
                    target.adapt(change_range.table(shape), change_range.table(which))
                    shape = which
                if op == "reset":
                    raise _reset(run, events[0])
                target.act(actor)
                target.apply(change_range.table(shape), op, events)
            count, last = count + len(group.events), group.last
        after = msgspec.structs.replace(run, shape=shape, count=count, last=last)
        note(after)
    return after


def _alike(event: StoredChange) -> tuple[int, str, Actor]:
    return event.shape, event.op, event.actor


def _reset(run: ReplayRun, event: StoredChange) -> ResyncRequired:
    return ResyncRequired(
        f"rows of {run.source} changed at {event.at:%Y-%m-%d %H:%M:%S.%f} without events (a reset)",
        hint=f"Replay the changes after it: --since '{event.at.isoformat()}'",
    )


# ------------------------------------------------------------------------ emitting changes


def emit(
    lake: Lake,
    table: str,
    *,
    since: Moment | None = None,
    until: Moment | None = None,
    speed: float | None = None,
    cursor: Path | None = None,
    restart: bool = False,
) -> Generator[Transaction, None, None]:
    """The transactions of a table between two moments. A transaction counts as processed when the
    next one is requested. With a cursor, the same call continues after the last one that was
    processed; without an `until`, up to the new end of the lake."""
    run = _taken(lake, table, since, until, None if restart else cursor)
    cursor_file = _CursorFile(cursor)
    try:
        change_range = lake.change_range(table, _start(run), read_moment(run.end), after=run.last)
        for transaction in paced(change_range.transactions(), speed, _time):
            yield transaction
            if transaction.complete:
                run = msgspec.structs.replace(
                    run,
                    last=transaction.changes[-1].seq,
                    count=run.count + len(transaction.changes),
                )
                cursor_file.save_when_due(run)
        run = msgspec.structs.replace(run, done=True)
    finally:
        cursor_file.save(run)


def _taken(
    lake: Lake, table: str, since: Moment | None, until: Moment | None, cursor: Path | None
) -> ReplayRun:
    asked = ReplayRun(table, "emit", moment_text(since), moment_text(until), None, "")
    if cursor is None or not cursor.exists():
        start = None if since is None else moment_text(lake.settle(since))
        return msgspec.structs.replace(asked, start=start, end=moment_text(lake.settle(until)))
    try:
        run = msgspec.json.decode(cursor.read_bytes(), type=ReplayRun)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{cursor} is not the cursor of a replay", hint="Name another file, or use --restart."
        ) from error
    if not run.is_same(asked):
        raise ConfigError(
            f"{cursor} is the cursor of another replay, a {run}",
            hint="Give the same arguments to continue it, name another file, or start again with "
            "--restart.",
        )
    return _further(lake, run) if run.done else run


class _CursorFile:
    """A cursor in a file, which is replaced as a whole."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._saved_at = time.monotonic()

    def save_when_due(self, run: ReplayRun) -> None:
        if time.monotonic() - self._saved_at >= CURSOR_SAVE_SECONDS:
            self.save(run)

    def save(self, run: ReplayRun) -> None:
        self._saved_at = time.monotonic()
        if self._path is None:
            return
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_bytes(msgspec.json.encode(run))
        os.replace(new, self._path)


# ------------------------------------------------------------------------ pace


Item = TypeVar("Item")


def _time(item: Transaction) -> datetime:
    return item.at


def paced(
    items: Iterator[Item], speed: float | None, time_of: Callable[[Item], datetime]
) -> Iterator[Item]:
    """The items with their original pauses, divided by the speed; None is for no pauses."""
    if speed is None:
        yield from items
        return
    began, first = time.monotonic(), None
    for item in items:
        at = time_of(item)
        first = first or at
        time.sleep(max(0.0, (at - first).total_seconds() / speed - (time.monotonic() - began)))
        yield item
