"""What the database stores about sources: their definitions, their state, and what was requested
of them. Commands and the application declare sources and request changes here. A runner notices
through a notification, or at its next look.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, Literal, TypeAlias

import msgspec

from headwater.capture.kinds import has_references, kind_of, resolve
from headwater.capture.source import SourceDefinition
from headwater.database import Connection, is_reserved, translated
from headwater.errors import ConfigError, NotFound

CHANNEL = "headwater:sources"
"""Notified when a definition or a request changes."""

DeclaredBy: TypeAlias = Literal["command", "application", "file"]

State: TypeAlias = Literal[
    "waiting", "checking", "copying", "running", "paused", "failed", "refused", "lost", "diverged",
    "stopped", "removing",
]  # fmt: skip

TableStateName: TypeAlias = Literal["copying", "live", "recopying", "dropped", "removed"]


class DeclaredSource(msgspec.Struct, frozen=True):
    """A definition, and what was requested since. `resnapshot` lists tables to copy again, `*` for
    all."""

    definition: SourceDefinition
    declared_by: DeclaredBy
    paused: bool = False
    resnapshot: tuple[str, ...] = ()
    removing: bool = False
    drop_mirrors: bool = False


class TableState(msgspec.Struct, frozen=True):
    """A table of a source. While it is copied, `copied` of about `estimate` rows are here."""

    name: str
    target: str
    state: TableStateName
    copied: int = 0
    estimate: int | None = None


class SourceState(msgspec.Struct, frozen=True):
    """A source as its runner last reported it: a row of `headwater.sources`."""

    name: str
    kind: str
    into_schema: str
    feed_only: bool
    tables: tuple[TableState, ...]
    position: str | None
    committed_at: datetime | None
    lag: float | None
    state: State
    error: str | None
    hint: str | None
    changes: int
    transactions: int
    lag_bytes: int | None
    warning: str | None
    runner: str | None
    updated_at: datetime


async def declare(
    connection: Connection, definition: SourceDefinition, declared_by: DeclaredBy
) -> bool:
    """Declare a source, or change the definition of one. Returns whether anything changed."""
    _check(definition)
    stored = _stored(definition)
    with translated():
        async with connection.transaction():
            await connection.execute(
                "lock table headwater.source_definitions in share row exclusive mode"
            )
            known = {d.definition.name: d for d in await definitions(connection)}
            present = known.get(definition.name)
            if present is not None and present.definition == definition and not present.removing:
                return False
            _check_against(definition, list(known.values()))
            await connection.execute(_DECLARE, (definition.name, stored, declared_by))
            await connection.execute(
                _REGISTER,
                (definition.name, _kind(definition.url), definition.into, definition.feed_only),
            )
            await connection.execute(_FORGET_FAILURE, (definition.name,))
            await _notify(connection)
    return True


_DECLARE = """
    insert into headwater.source_definitions (name, definition, declared_by)
    values (%s, %s::json, %s)
    on conflict (name) do update
    set definition = excluded.definition, declared_by = excluded.declared_by
"""

_REGISTER = """
    insert into headwater.sources (name, kind, into_schema, feed_only) values (%s, %s, %s, %s)
    on conflict (name) do update set kind = excluded.kind
"""


_FORGET_FAILURE = """
    update headwater.sources set state = 'waiting', error = null, hint = null
    where name = %s and state in ('failed', 'refused', 'lost', 'diverged')
"""
"""What was wrong before a request is not the answer to it."""


async def definitions(connection: Connection) -> list[DeclaredSource]:
    """All sources that are declared, in the order of their names."""
    with translated():
        cursor = await connection.execute(
            "select name, definition, declared_by, paused, coalesce(resnapshot, '{}'), removing,"
            " drop_mirrors from headwater.source_definitions order by name"
        )
        rows = await cursor.fetchall()
    return [
        DeclaredSource(
            msgspec.convert({"name": name, **found}, SourceDefinition), by, paused,
            tuple(tables), removing, drops,
        )
        for name, found, by, paused, tables, removing, drops in rows
    ]  # fmt: skip


async def sources(connection: Connection) -> list[SourceState]:
    """The state of every source, in the order of their names."""
    names = SourceState.__struct_fields__
    with translated():
        cursor = await connection.execute(
            f"select {', '.join(names)} from headwater.sources order by name"
        )
        rows = await cursor.fetchall()
    return [msgspec.convert(dict(zip(names, row, strict=True)), SourceState) for row in rows]


async def tables_of(connection: Connection, name: str) -> list[str]:
    """The tables of a source that were ever mirrored, in the order of their names."""
    with translated():
        cursor = await connection.execute(
            "select name from headwater.source_tables where source = %s order by name", (name,)
        )
        return [row[0] for row in await cursor.fetchall()]


async def request_pause(connection: Connection, name: str) -> None:
    """Stop applying changes until `request_resume`. The source stores them meanwhile."""
    await _request(connection, name, "paused = true")


async def request_resume(connection: Connection, name: str) -> None:
    await _request(connection, name, "paused = false")


async def request_resnapshot(
    connection: Connection, name: str, tables: tuple[str, ...] = ()
) -> None:
    """Copy these tables again, or all. Mirrors serve the old rows until the copy is complete."""
    if tables:
        await _check_tables(connection, name, tables)
    with translated():
        async with connection.transaction():
            await connection.execute(_FORGET_FAILURE, (name,))
            await _request(
                connection,
                name,
                "resnapshot = case when %(tables)s::text[] = '{*}' or '*' = any (resnapshot)"
                " then '{*}' else coalesce(resnapshot, '{}') || %(tables)s::text[] end",
                {"tables": list(tables) or ["*"]},
            )


async def request_remove(connection: Connection, name: str, *, drop: bool = False) -> None:
    """Remove what capture needs at the source, and the definition. The mirrors stay as ordinary
    tables, or are dropped with `drop`."""
    await _request(connection, name, "removing = true, drop_mirrors = %(drop)s", {"drop": drop})


async def _request(
    connection: Connection, name: str, assignment: str, values: dict[str, Any] | None = None
) -> None:
    with translated():
        async with connection.transaction():
            cursor = await connection.execute(
                (
                    f"update headwater.source_definitions set {assignment} where name = %(name)s"
                ).encode(),
                {"name": name, **(values or {})},
            )
            if cursor.rowcount == 0:
                raise await _unknown(connection, name)
            await _notify(connection)


async def _unknown(connection: Connection, name: str) -> NotFound:
    known = [declared.definition.name for declared in await definitions(connection)]
    there = f"There are: {', '.join(known)}." if known else "No source is declared."
    return NotFound(f"there is no source {name}", hint=there)


async def _check_tables(connection: Connection, name: str, tables: tuple[str, ...]) -> None:
    known = await tables_of(connection, name)
    missing = [table for table in tables if table not in known]
    if missing:
        raise NotFound(
            f"source {name} has no table {missing[0]}", hint=f"It has: {', '.join(known)}."
        )


async def _notify(connection: Connection) -> None:
    await connection.execute("select pg_notify(%s, '')", (CHANNEL,))


def _stored(definition: SourceDefinition) -> str:
    fields = msgspec.to_builtins(definition)
    del fields["name"]
    return msgspec.json.encode(fields).decode()


def _kind(url: str) -> str:
    """`unknown` while the scheme itself comes from an environment that is not here."""
    try:
        return kind_of(resolve(url))
    except ConfigError:
        if has_references(url.partition("://")[0]) or has_references(url):
            scheme = url.partition("://")[0]
            return "unknown" if has_references(scheme) else kind_of(url)
        raise


# ------------------------------------------------------------------------ checks


def _check(definition: SourceDefinition) -> None:
    if not _NAME.fullmatch(definition.name):
        raise ConfigError(
            f"{definition.name!r:.80} cannot be the name of a source: it has letters, digits, - and"
            " _, at most 50",
            hint="For example: shop",
        )
    if not definition.into or len(definition.into.encode()) > 63 or is_reserved(definition.into):
        raise ConfigError(
            f"source {definition.name}: {definition.into!r:.80} cannot be the schema of mirrors",
            hint='Give a schema of its own, such as into = "shop".',
        )
    _kind(definition.url)
    names = [table.name for table in definition.tables]
    for table in definition.tables:
        if table.columns is not None and table.exclude:
            raise ConfigError(
                f"source {definition.name}, table {table.name}: give columns or exclude, not both"
            )
        if names.count(table.name) > 1:
            raise ConfigError(f"source {definition.name} lists the table {table.name} twice")


_NAME = re.compile(r"[\w-]{1,50}")


def _check_against(definition: SourceDefinition, known: list[DeclaredSource]) -> None:
    """What another source has, and what cannot be changed while a source exists."""
    name = definition.name
    for other in known:
        has = other.definition
        if has.name != name and has.into == definition.into:
            raise ConfigError(
                f"the schema {definition.into} is that of source {has.name}",
                hint="Give each source a schema of its own.",
            )
        if has.name != name:
            continue
        if other.removing:
            raise ConfigError(
                f"source {name} is being removed", hint="Declare it again when it is gone."
            )
        if (has.into, has.feed_only) != (definition.into, definition.feed_only):
            raise ConfigError(
                f"source {name} mirrors into {has.into}: schema and feed_only cannot be changed",
                hint=f"Remove it first: headwater source remove {name}",
            )
        if _kind(has.url) != _kind(definition.url):
            raise ConfigError(
                f"source {name} is a {_kind(has.url)} database",
                hint=f"Remove it first: headwater source remove {name}",
            )
