"""Replay: a table from its events once more.

`rebuild` makes the table as it was at a moment. `reapply` makes its changes again, each transaction
as one, in the name of its actor: followers of the table it writes to see the same history. `emit`
hands the changes to whoever takes them. All of them go on where they were when they are asked for
the same again; what was settled at the beginning (`Run`) says what is left.
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
from headwater.limits import CURSOR_SAVE_SECONDS, REPLAY_CHUNK_ROWS
from headwater.model import Actor, Position, Transaction
from headwater.pipeline import state
from headwater.pipeline.changes import Event, Group, Stretch, in_order
from headwater.pipeline.lake import Lake, TableState
from headwater.pipeline.schemas import split
from headwater.pipeline.state import Moment
from headwater.pipeline.targets import Run, Target, opened

Told = Callable[[int, int], None]
"""Told how much is done, and of how much."""


def _nobody(done: int, total: int) -> None:
    return


# ------------------------------------------------------------------------ moments


@overload
def moment_text(when: Moment) -> str: ...
@overload
def moment_text(when: None) -> None: ...
@overload
def moment_text(when: Moment | None) -> str | None: ...
def moment_text(when: Moment | None) -> str | None:
    """A moment as a run keeps it."""
    if when is None:
        return None
    when = state.aware(when)
    return str(when) if isinstance(when, Position) else when.astimezone(UTC).isoformat()


def read_moment(text: str) -> Moment:
    """What `moment_text` wrote."""
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
    told: Told = _nobody,
) -> Run:
    """Make the table as it was at a moment, under another name."""
    with opened(url) as database:
        target = Target(database, into)
        asked = Run(table, "rebuild", None, moment_text(until), None, "")
        run = target.take(asked, restart=restart)
        if run is not None and run.done:
            return run
        end = lake.settle(until) if run is None else read_moment(run.end)
        found = lake.state(table, end)
        if run is None:
            run = msgspec.structs.replace(asked, end=moment_text(end), shape=found.table.id)
            target.create(found.table, run)
        run = _seed(target, found, run, told)
        done = msgspec.structs.replace(run, done=True)
        with target.step(run) as note:
            target.demand_values(found.table)
            note(done)
        return done


def _seed(target: Target, found: TableState, run: Run, told: Told) -> Run:
    """Bring the state into the table, chunk by chunk, the rest of it where some is there."""
    total = found.rows.count()
    for keys, images in _chunks(found, run.key, total):
        after = msgspec.structs.replace(run, key=keys[-1], count=run.count + len(keys))
        with target.step(run) as note:
            target.fill(images)
            note(after)
        run = after
        told(run.count, total)
    return _moved(target, run, msgspec.structs.replace(run, seeded=True))


def _chunks(
    found: TableState, after: str | None, total: int
) -> Iterator[tuple[list[str], list[str]]]:
    """Keys and images in the order of the keys, those behind one."""
    from pyspark.sql import functions as f

    rows = found.rows if after is None else found.rows.filter(f.col("key") > after)
    names = state.names_of(found.passed)
    keys: list[str] = []
    images: list[str] = []
    for row in in_order(rows, ("key",), total):
        keys.append(row["key"])
        images.append(_renamed(row["image"], names.get(row["shape"])))
        if len(keys) == REPLAY_CHUNK_ROWS:
            yield keys, images
            keys, images = [], []
    if keys:
        yield keys, images


def _renamed(image: str, names: Mapping[str, str] | None) -> str:
    """An image under the names that its columns have now."""
    if names is None:
        return image
    values = split(image)
    parts = (f"{json.dumps(new)}:{values[old]}" for new, old in names.items() if old in values)
    return f"{{{','.join(parts)}}}"


# ------------------------------------------------------------------------ making changes again


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
    told: Told = _nobody,
) -> Run:
    """Make each transaction again in a table that begins as the original was at `since`."""
    with opened(url) as database:
        target = Target(database, into)
        asked = Run(table, "emit", moment_text(since), moment_text(until), None, "")
        run = target.take(asked, restart=restart)
        if run is None:
            run = _begin(lake, target, asked, since, until)
        elif run.done:
            run = _next(lake, target, run)
        if not run.seeded:
            assert run.start is not None
            seeded = _seed(target, lake.state(table, read_moment(run.start)), run, _nobody)
            # From here on changes are counted.
            run = _moved(target, seeded, msgspec.structs.replace(seeded, count=0))
        stretch = lake.stretch(table, _start(run), read_moment(run.end), after=run.last)
        for transaction in paced(_whole(stretch), speed, _begun):
            run = _apply(target, stretch, run, transaction)
            told(run.count, stretch.changes)
        return _moved(target, run, msgspec.structs.replace(run, done=True))


def _begin(
    lake: Lake, target: Target, asked: Run, since: Moment | None, until: Moment | None
) -> Run:
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
        # What was there at first is not known: then from the first snapshot on.
        snapshot = lake.first_snapshot(table)
        if snapshot is None:
            raise
        return snapshot, lake.state(table, snapshot)


def _next(lake: Lake, target: Target, run: Run) -> Run:
    """What has come since the end of a replay that is done and was given none."""
    return _moved(target, run, _further(lake, run))


def _further(lake: Lake, run: Run) -> Run:
    if run.until is not None:
        return msgspec.structs.replace(run, count=0)
    end = moment_text(lake.settle(None))
    return msgspec.structs.replace(run, start=run.end, end=end, last=0, count=0, done=False)


def _moved(target: Target, before: Run, after: Run) -> Run:
    if after != before:
        with target.step(before) as note:
            note(after)
    return after


def _start(run: Run) -> Moment | None:
    return None if run.start is None else read_moment(run.start)


def _whole(stretch: Stretch) -> Iterator[tuple[Group, Iterator[Group]]]:
    """Each transaction, by its first part and those that follow, which come one by one."""
    groups = stretch.groups()
    for first in groups:
        yield first, _rest(first, groups)


def _rest(first: Group, groups: Iterator[Group]) -> Iterator[Group]:
    group = first
    while not group.complete:
        group = next(groups)
        yield group


def _begun(transaction: tuple[Group, Iterator[Group]]) -> datetime:
    return transaction[0].events[-1].at


def _apply(
    target: Target, stretch: Stretch, run: Run, transaction: tuple[Group, Iterator[Group]]
) -> Run:
    """Make a transaction again, as one."""
    with target.step(run) as note:
        shape, count, last = run.shape, run.count, run.last
        for group in chain(transaction[:1], transaction[1]):
            for (which, op, actor), found in groupby(group.events, _alike):
                events = list(found)
                if which != shape:
                    target.adapt(stretch.table(shape), stretch.table(which))
                    shape = which
                if op == "reset":
                    raise _reset(run, events[0])
                target.act(actor)
                target.apply(stretch.table(shape), op, events)
            count, last = count + len(group.events), group.last
        after = msgspec.structs.replace(run, shape=shape, count=count, last=last)
        note(after)
    return after


def _alike(event: Event) -> tuple[int, str, Actor]:
    return event.shape, event.op, event.actor


def _reset(run: Run, event: Event) -> ResyncRequired:
    return ResyncRequired(
        f"rows of {run.source} came or went at {event.at:%Y-%m-%d %H:%M:%S.%f} that no event tells"
        " of (a reset)",
        hint=f"Replay what lies behind it: --since '{event.at.isoformat()}'",
    )


# ------------------------------------------------------------------------ handing changes out


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
    """The transactions of a table between two moments. One is dealt with when the next is asked
    for, and with a cursor the same call goes on behind the last that was. Where no end was given,
    it then goes on to where the lake has come to since."""
    run = _taken(lake, table, since, until, None if restart else cursor)
    kept = _Kept(cursor)
    try:
        stretch = lake.stretch(table, _start(run), read_moment(run.end), after=run.last)
        for transaction in paced(stretch.transactions(), speed, _time):
            yield transaction
            if transaction.complete:
                run = msgspec.structs.replace(
                    run,
                    last=transaction.changes[-1].seq,
                    count=run.count + len(transaction.changes),
                )
                kept.now_and_then(run)
        run = msgspec.structs.replace(run, done=True)
    finally:
        kept.save(run)


def _taken(
    lake: Lake, table: str, since: Moment | None, until: Moment | None, cursor: Path | None
) -> Run:
    asked = Run(table, "emit", moment_text(since), moment_text(until), None, "")
    if cursor is None or not cursor.exists():
        start = None if since is None else moment_text(lake.settle(since))
        return msgspec.structs.replace(asked, start=start, end=moment_text(lake.settle(until)))
    try:
        run = msgspec.json.decode(cursor.read_bytes(), type=Run)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{cursor} is no cursor of a replay", hint="Name another file, or use --restart."
        ) from error
    if not run.is_same(asked):
        raise ConfigError(
            f"{cursor} is the cursor of another replay, a {run}",
            hint="Give the same arguments to go on with it, name another file, or begin anew with "
            "--restart.",
        )
    return _further(lake, run) if run.done else run


class _Kept:
    """A cursor in a file, replaced whole."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._saved_at = time.monotonic()

    def now_and_then(self, run: Run) -> None:
        if time.monotonic() - self._saved_at >= CURSOR_SAVE_SECONDS:
            self.save(run)

    def save(self, run: Run) -> None:
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
    """The items with the pauses that there were between them, divided by the speed; None is for no
    pauses."""
    if speed is None:
        yield from items
        return
    began, first = time.monotonic(), None
    for item in items:
        at = time_of(item)
        first = first or at
        time.sleep(max(0.0, (at - first).total_seconds() / speed - (time.monotonic() - began)))
        yield item
