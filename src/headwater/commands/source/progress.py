"""Shows the first copy of a source until it is live: a bar with an estimate for people, a line for
each step for programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from headwater.admin.sources import BROKEN, copied_share
from headwater.capture.mirror import registry
from headwater.capture.mirror.registry import SourceState
from headwater.commands.output import as_json, err, print_note
from headwater.database import Connection
from headwater.errors import NotFound, PositionLost, SourceError, SourceRefused

LOOK_SECONDS = 0.5


async def wait_until_live(connection: Connection, name: str, *, json: bool) -> SourceState:
    """Returns when every table is live. SourceError if the source fails."""
    bar = None if json else _bar()
    last: dict[str, Any] = {}
    with bar or nullcontext():
        task = None if bar is None else bar.add_task(name, total=None)
        warned = False
        async for source in _states(connection, name):
            if json and (step := _step(source)) != last:
                last = step
                print(as_json(step), flush=True)
            elif bar is not None and task is not None:
                _draw(bar, task, source)
                if source.runner is None and source.state == "waiting" and not warned:
                    warned = True
                    print_note(
                        "Waiting for a process that runs it: headwater serve, or headwater"
                        " source run"
                    )
            if source.state in BROKEN:
                raise _failure(source)
            if is_live(source):
                return source
    raise NotFound(f"source {name} was removed")


def is_live(source: SourceState) -> bool:
    """Whether it runs, and all of its tables are copied."""
    states = {table.state for table in source.tables}
    return source.state == "running" and not states & {"copying", "recopying"}


async def _states(connection: Connection, name: str) -> AsyncIterator[SourceState]:
    """The states of the source, one after the other, until it is removed."""
    while True:
        found = [each for each in await registry.sources(connection) if each.name == name]
        if not found:
            return
        yield found[0]
        await asyncio.sleep(LOOK_SECONDS)


def _step(source: SourceState) -> dict[str, Any]:
    return {
        "source": source.name,
        "state": source.state,
        "copied": sum(table.copied for table in source.tables),
        "estimate": sum(table.estimate or 0 for table in source.tables) or None,
        "live": sum(table.state == "live" for table in source.tables),
        "tables": len(source.tables),
    }


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[rows]}"),
        console=err,
        transient=True,
    )


def _draw(bar: Progress, task: TaskID, source: SourceState) -> None:
    step = _step(source)
    share = copied_share(source.tables)
    estimate = f" of about {step['estimate']:,}" if step["estimate"] else ""
    rows = f"{source.state}: {step['copied']:,}{estimate} rows"
    if share is None:
        bar.update(task, total=None, rows=rows)
    else:
        bar.update(task, total=1.0, completed=share, rows=rows)


def _failure(source: SourceState) -> SourceError:
    kinds: dict[str, type[SourceError]] = {"refused": SourceRefused, "lost": PositionLost}
    error = kinds.get(source.state, SourceError)
    return error(f"source {source.name}: {source.error or source.state}", hint=source.hint)
