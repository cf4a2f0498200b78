"""Removes a source: first what was made at the source, then its rows here.

A running process does this when it is requested. Because none may be running, the one that requests
it also runs the source until it is gone; the lease decides which of them does the work.
"""

from __future__ import annotations

import asyncio
from datetime import datetime

from headwater.capture.kinds import kind_of, open_source, resolve
from headwater.capture.mirror import registry
from headwater.capture.postgres.wal.slots import slot_name
from headwater.capture.running.runner import OpenSource
from headwater.capture.running.supervisor import Supervisor
from headwater.capture.source import Source, SourceDefinition
from headwater.capture.sqlite.shapes import OWN_PREFIX
from headwater.database import Connection
from headwater.errors import ConfigError, SourceUnavailable
from headwater.limits import SOURCE_REMOVE_SECONDS

_LOOK_SECONDS = 0.2


def left_behind(definition: SourceDefinition) -> str:
    """What stays at a source that is removed without asking it, and how to remove it there."""
    match stored_kind(definition):
        case "postgresql":
            return _left_at_postgres(definition)
        case "mysql" | "mongodb":
            return "nothing: it has no list of its readers"
        case "sqlite":
            prefix = f"{OWN_PREFIX}{definition.name}_"
            return f"the triggers and tables whose names begin with {prefix}; drop them"
    return "what the source needed to be captured"


def _left_at_postgres(definition: SourceDefinition) -> str:
    slot = definition.options.get("slot") or slot_name(definition.name)
    left = (
        f"the replication slot {slot}, which keeps WAL until it is dropped:"
        f" select pg_drop_replication_slot('{slot}')"
    )
    if definition.options.get("publication"):
        return left
    return f"{left}; and the publication: drop publication {slot_name(definition.name)}"


class _AbsentSource:
    """Stands for a source that is not asked: there is nothing to remove at it."""

    def __init__(self, definition: SourceDefinition) -> None:
        self.kind = stored_kind(definition)

    async def remove(self) -> None:
        return

    async def close(self) -> None:
        return


def stored_kind(definition: SourceDefinition) -> str:
    """The kind of a source, also where the environment of its URL is not here."""
    try:
        return kind_of(resolve(definition.url))
    except ConfigError:
        pass
    try:
        return kind_of(definition.url)
    except ConfigError:
        return "unknown"


def _absent(definition: SourceDefinition) -> Source:
    return _AbsentSource(definition)  # type: ignore[return-value]  # only removed and closed


async def remove_source(
    connection: Connection, url: str, name: str, *, drop: bool, force: bool
) -> None:
    """Remove a source; `drop` its mirrors too. With `force` it is not asked to remove what was made
    at it. SourceUnavailable if it is not removed in time: it then stays requested."""
    began = await _now(connection)
    await registry.request_remove(connection, name, drop=drop)
    opens: OpenSource = _absent if force else open_source
    supervisor = Supervisor(url, open_source=opens)
    running = asyncio.create_task(supervisor.run([name]))
    try:
        async with asyncio.timeout(SOURCE_REMOVE_SECONDS):
            problem = await _until_removed(connection, name, began)
    except TimeoutError:
        problem = "the process that runs it has not removed it yet"
    finally:
        await supervisor.stop()
        await asyncio.wait({running})
    if problem is not None:
        raise SourceUnavailable(
            f"source {name} is not removed: {problem}",
            hint="It is removed as soon as the source answers and a process runs it. To remove it"
            f" here only: headwater source remove {name} --force",
        )


async def _until_removed(connection: Connection, name: str, began: datetime) -> str | None:
    """Wait until it is gone. Returns the error if that fails."""
    while True:
        if name not in [each.definition.name for each in await registry.definitions(connection)]:
            return None
        for state in await registry.sources(connection):
            if state.name == name and state.updated_at > began and state.error is not None:
                return state.error
        await asyncio.sleep(_LOOK_SECONDS)


async def _now(connection: Connection) -> datetime:
    row = await (await connection.execute("select clock_timestamp()")).fetchone()
    assert row is not None
    found: datetime = row[0]
    return found
