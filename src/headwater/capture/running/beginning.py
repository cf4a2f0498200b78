"""What happens before the changes of a source are read: mirrors and definition are brought
together, and the position to begin at is found. All of it is one transaction. It is tried first and
rolled back before anything is made at the source, so a table that is refused leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import msgspec

from headwater.capture.mirror import positions, tables
from headwater.capture.mirror.tables import Mirror
from headwater.capture.running.check import same_target
from headwater.capture.running.filters import row_filter
from headwater.capture.source import Source, SourceDefinition, SourceTable
from headwater.database import Connection
from headwater.errors import SourceRefused


class Beginning(NamedTuple):
    """The mirrors by the names of their tables, and the saved position."""

    mirrors: dict[str, Mirror]
    position: str


async def begin(connection: Connection, source: Source, definition: SourceDefinition) -> Beginning:
    """Bring everything together. No transaction is open while the source is asked: it may be on the
    same server, and wait there for all transactions to end."""
    described = await source.tables()
    problem = same_target(described)
    if problem is not None:
        raise SourceRefused(problem.what, hint=problem.fix)
    requested = await _requested(connection, definition.name)
    saved = await positions.saved(connection, definition.name)
    known = await tables.load_all(connection, definition.name, definition.into)
    _check_missing(definition, {table.name for table in described}, known)
    copies_all = "*" in requested
    start = saved
    followed = {name for name, each in known.items() if each.state not in ("dropped", "removed")}
    if saved is None or copies_all or any(table.name not in followed for table in described):
        async with connection.transaction(force_rollback=True):
            await _bring_together(connection, source, definition, described, requested)
        start = await source.start()
    async with connection.transaction():
        mirrors = await _bring_together(connection, source, definition, described, requested)
        if saved is None or copies_all:
            await positions.save(connection, definition.name, saved, start)
            saved = start
    assert saved is not None
    return Beginning(mirrors, saved)


def _check_missing(
    definition: SourceDefinition, described: Container[str], known: Container[str]
) -> None:
    """A table that was mirrored before may be gone. One that never existed is a mistake."""
    for spec in definition.tables:
        if spec.name not in described and spec.name not in known:
            raise SourceRefused(
                f"the table {spec.name} does not exist at the source",
                hint="Create it, or correct the definition of the source.",
            )


async def _requested(connection: Connection, name: str) -> list[str]:
    """The tables to copy again, as the database has it now."""
    cursor = await connection.execute(
        "select coalesce(resnapshot, '{}') from headwater.source_definitions where name = %s",
        (name,),
    )
    row = await cursor.fetchone()
    return [] if row is None else list(row[0])


async def _bring_together(
    connection: Connection,
    source: Source,
    definition: SourceDefinition,
    described: list[SourceTable],
    requested: list[str],
) -> dict[str, Mirror]:
    mirrors = await tables.load(connection, definition.name, definition.into, requested)
    await tables.refuse_triggers(connection, mirrors.values())
    for table in described:
        await bring_up(connection, definition, mirrors, table)
    await _note_absent(connection, definition, mirrors, {table.name for table in described})
    if requested:
        await _begin_copies(connection, definition, mirrors, requested)
    for mirror in mirrors.values():
        if mirror.columns:
            row_filter(source, definition, mirror)  # raises for a predicate that does not fit
    return mirrors


async def bring_up(
    connection: Connection,
    definition: SourceDefinition,
    mirrors: dict[str, Mirror],
    table: SourceTable,
) -> Mirror:
    """Create the mirror of a table, or give it the columns that the table has now. It keeps its
    version: changes that are still to be read may be of the old one (`TableVersions`)."""
    mirror = mirrors.get(table.name)
    if mirror is None:
        mirror = await tables.create(
            connection, definition.name, definition.into, table, feed_only=definition.feed_only
        )
        mirrors[table.name] = mirror
        return mirror
    copies = mirror.state in ("dropped", "removed")
    if copies:
        await tables.read_columns(connection, mirror)
        mirror.state = "live"
        await tables.save(connection, mirror)
    table = msgspec.structs.replace(table, version=mirror.description.version)
    if mirror.description != msgspec.structs.replace(table, target=mirror.description.target):
        copies |= await tables.alter(connection, mirror, table)
        await tables.save(connection, mirror)
    if copies and not definition.feed_only:
        await tables.begin_copy(connection, mirror)
    return mirror


async def _note_absent(
    connection: Connection,
    definition: SourceDefinition,
    mirrors: dict[str, Mirror],
    described: set[str],
) -> None:
    """The mirrors of tables that the source or the definition no longer has stay as they are, and
    are no longer written."""
    wanted = {spec.name for spec in definition.tables}
    for mirror in mirrors.values():
        if mirror.name not in described and mirror.state not in ("dropped", "removed"):
            is_declared = not wanted or mirror.name in wanted
            mirror.state = "dropped" if is_declared else "removed"
            await tables.drop_staging(connection, mirror)
            await tables.save(connection, mirror)


async def _begin_copies(
    connection: Connection,
    definition: SourceDefinition,
    mirrors: dict[str, Mirror],
    requested: list[str],
) -> None:
    """Begin the copies that were requested. The request is done with this transaction."""
    for mirror in mirrors.values():
        wanted = "*" in requested or mirror.name in requested
        if wanted and mirror.state not in ("dropped", "removed") and not definition.feed_only:
            await tables.begin_copy(connection, mirror)
    await connection.execute(
        "update headwater.source_definitions set resnapshot = null"
        " where name = %s and resnapshot = %s",
        (definition.name, requested),
    )
