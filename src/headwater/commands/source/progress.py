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
from headwater.database import Connection, translated
from headwater.errors import NotFound, PositionLost, SourceError, SourceRefused

LOOK_SECONDS = 0.5


async def wait_until_live(connection: Connection, name: str, *, json: bool) -> SourceState:
    """Returns when every table is live. SourceError if the source fails."""
    bar = None if json else _bar()
    last: dict[str, Any] = {}
    with bar or nullcontext():
        task = None if bar is None else bar.add_task(name, total=None, rows="")
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
            if source.state == "running" and await _is_copied(connection, name):
                return source
    raise NotFound(f"source {name} was removed")


async def _is_copied(connection: Connection, name: str) -> bool:
    """Whether no table is being copied, and no copy is requested. The state of the source is
    written a moment later than that of its tables."""
    with translated():
        cursor = await connection.execute(_COPIES, {"name": name})
        return await cursor.fetchone() is None


_COPIES = """
    select from headwater.source_definitions
    where name = %(name)s and resnapshot is not null
    union all
    select from headwater.source_tables
    where source = %(name)s and state in ('copying', 'recopying')
    limit 1
"""


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
