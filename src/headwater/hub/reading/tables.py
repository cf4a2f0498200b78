"""Looks up enabled tables: their shape, how their rows are read, and whether policies apply.

Every subscription looks its table up again, because it may have been disabled or altered. Lookups
at the same time share one statement. What depends only on the shape (decoders, parts of statements)
is cached by the id of the shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec
import psycopg

from headwater import limits
from headwater.database import Connection, connect, translate
from headwater.errors import (
    CaptureError,
    DatabaseError,
    HeadwaterError,
    InvalidQuery,
    Unavailable,
)
from headwater.log.images import ImageDecoder
from headwater.log.reconnect import is_lost
from headwater.model import Column, Table, with_operators
from headwater.protocol import Wire

_Asked: TypeAlias = tuple[str, bool]
"""A name, and whether the table must be enabled."""

FORMATS = (
    "-c datestyle=ISO -c intervalstyle=iso_8601 -c bytea_output=hex -c extra_float_digits=1"
    " -c lc_monetary=C"
)
"""Connection options that make the server write values as capture does."""


@dataclass(frozen=True, slots=True)
class KnownTable:
    """A table as it is now."""

    table: Table
    image: str
    """The SQL expression that makes a log image of the row `o`, as capture does."""
    secured: bool
    """Whether row-level security is enabled."""
    decode: ImageDecoder
    decode_key: ImageDecoder
    """For images with only the primary key."""
    wire: Wire
    source: str | None = None
    """The source that it is a mirror of."""
    feed_only: bool = False
    """Whether its rows are not stored: it has changes only."""

    def check_has_rows(self) -> None:
        """Raise InvalidQuery for the table of a feed-only source."""
        if self.feed_only:
            label = self.table.label
            raise InvalidQuery(
                f"table {label} has no rows: source {self.source} is feed only",
                hint=f"Follow its changes: hw.changes({label!r}). To query it, remove the source"
                " and declare it without feed_only.",
            )

    @property
    def plain(self) -> bool:
        """Whether the image is simply the row as JSON: then columns can be left out."""
        return self.image == "pg_catalog.row_to_json(o.*)"

    @property
    def names_relations(self) -> bool:
        """Whether it has values that are written differently under another search path."""
        return any(column.type.removesuffix("[]") in _NAMES for column in self.table.columns)


_NAMES = frozenset(
    f"reg{kind}"
    for kind in ("class", "type", "proc", "procedure", "oper", "operator", "collation", "namespace",
                 "role", "config", "dictionary")
)  # fmt: skip


TableIdentity: TypeAlias = int | tuple[str, str]


def identities(table: Table) -> tuple[TableIdentity, ...]:
    """The oid and the name: a change may be of another table that got the name."""
    return table.oid, (table.schema, table.name)


_Values: TypeAlias = Sequence[Any] | Mapping[str, Any] | None


class LookupConnection:
    """A connection for short queries, one after the other. It is opened for the first query, and
    again after it was lost."""

    def __init__(self, url: str, *, purpose: str) -> None:
        self._url = url
        self._purpose = purpose
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()

    async def ask(self, statement: str, values: _Values) -> list[tuple[Any, ...]]:
        """Raises the driver's errors; Unavailable if the database cannot be reached."""
        async with self._lock:
            reused = self._connection is not None
            try:
                return await self._ask(statement, values)
            except (psycopg.Error, DatabaseError) as error:
                if not is_lost(error):
                    raise
                await self.close()
                if not reused:
                    raise _away() from error
            # The open connection may have been lost long ago: try once with a new one.
            try:
                return await self._ask(statement, values)
            except (psycopg.Error, DatabaseError) as error:
                if not is_lost(error):
                    raise
                await self.close()
                raise _away() from error

    async def _ask(self, statement: str, values: _Values) -> list[tuple[Any, ...]]:
        if self._connection is None:
            self._connection = await connect(self._url, purpose=self._purpose, options=FORMATS)
        try:
            async with asyncio.timeout(limits.LOOKUP_SECONDS):
                cursor = await self._connection.execute(statement.encode(), values)
                return await cursor.fetchall()
        except TimeoutError as error:
            await self.close()
            raise _away() from error

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class Tables:
    """Finds tables by name, over a connection of its own."""

    def __init__(self, url: str, question_url: str | None = None) -> None:
        self._connection = LookupConnection(url, purpose="tables")
        self._question_url = question_url
        self._question_role: str | None = None
        self._wanted: dict[_Asked, asyncio.Future[KnownTable]] = {}
        self._task: asyncio.Task[None] | None = None
        self._shapes: dict[int, KnownTable] = {}

    async def find(self, name: str, *, captured: bool = True) -> KnownTable:
        """The enabled table of that name; with `captured=False`, any table with a primary key.
        CaptureError if there is none."""
        asked = name, captured
        future = self._wanted.get(asked)
        if future is None:
            future = self._wanted[asked] = asyncio.get_running_loop().create_future()
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._look_up())
        return await asyncio.shield(future)

    async def find_each(self, names: Iterable[str]) -> dict[str, KnownTable]:
        return {name: await self.find(name) for name in names}

    async def ask(self, statement: str, values: _Values) -> list[tuple[Any, ...]]:
        """Run any other query about tables. Raises the driver's errors."""
        return await self._connection.ask(statement, values)

    async def question_role(self) -> str | None:
        """The role of `question_url`; None without one. Unavailable if it cannot connect."""
        if self._question_url is not None and self._question_role is None:
            connection = LookupConnection(self._question_url, purpose="questions")
            try:
                ((self._question_role,),) = await connection.ask(_SESSION_USER, None)
            finally:
                await connection.close()
        return self._question_role

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._refuse(self._wanted)
        await self._connection.close()

    def _refuse(self, wanted: dict[_Asked, asyncio.Future[KnownTable]]) -> None:
        for future in wanted.values():
            _resolve(future, Unavailable("the hub is stopping", hint="Try again elsewhere."))

    async def _look_up(self) -> None:
        """Look up all wanted names together, until none is left."""
        while self._wanted:
            wanted, self._wanted = self._wanted, {}
            try:
                found = await self._found(list(wanted))
                for asked in wanted.keys() - found.keys():
                    found[asked] = await self._missing(*asked)
            except asyncio.CancelledError:
                self._refuse(wanted)
                raise
            for asked, future in wanted.items():
                _resolve(future, found[asked])

    async def _missing(self, name: str, captured: bool) -> CaptureError:
        """Why a table is not found."""
        with suppress(psycopg.Error, HeadwaterError):
            for source, state in await self.ask(_UNFINISHED, {"name": name}):
                return CaptureError(
                    f"table {name} is the mirror of source {source}, which is {state}: it is not"
                    " copied yet",
                    hint=f"See what it does or needs: headwater source status {source}",
                )
        return _not_enabled(name, captured)

    async def _found(self, asked: list[_Asked]) -> dict[_Asked, KnownTable | HeadwaterError]:
        try:
            shapes = list(self._shapes)
            names, captured = [name for name, _ in asked], [only for _, only in asked]
            rows = await self.ask(_LOOK_UP, (names, captured, shapes, shapes, shapes))
        except psycopg.Error as error:
            if len(asked) == 1:
                return {asked[0]: _no_table(asked[0][0], error)}
            # One of them is not a valid name. The others are looked up one by one.
            alone = [await self._found([one]) for one in asked]
            return {one: found for each in alone for one, found in each.items()}
        except HeadwaterError as error:
            return dict.fromkeys(asked, error)
        return {(name, captured): self._known(*row) for name, captured, *row in rows}

    def _known(
        self,
        shape: int,
        secured: bool,
        source: str | None,
        feed_only: bool | None,
        oid: int,
        description: dict[str, Any] | None,
        image: str,
        operators: dict[str, list[str]],
    ) -> KnownTable:
        """The server describes a shape only once, because that takes long."""
        if description is not None:
            columns = tuple(
                with_operators(column, operators)
                for column in msgspec.convert(description["columns"], tuple[Column, ...])
            )
            key = tuple(description["key"])
            virtual = tuple(description.get("virtual", ()))
            names = description["schema"], description["name"]
            table = Table(shape, *names, columns, key, oid, virtual)
            decoders = ImageDecoder(table), ImageDecoder(_key_part(table))
            self._shapes[shape] = KnownTable(table, image, secured, *decoders, Wire(table))
        return replace(
            self._shapes[shape], secured=secured, source=source, feed_only=bool(feed_only)
        )


def _away() -> Unavailable:
    return Unavailable("the database cannot be reached", hint="Try again in a moment.")


def _key_part(table: Table) -> Table:
    columns = tuple(column for column in table.columns if column.name in table.key)
    return msgspec.structs.replace(table, columns=columns)


def _resolve(future: asyncio.Future[KnownTable], found: KnownTable | HeadwaterError) -> None:
    if future.done():
        return
    if isinstance(found, HeadwaterError):
        future.set_exception(found)
        future.exception()  # the task that waited may have ended: asyncio must not warn
    else:
        future.set_result(found)


def _not_enabled(name: str, captured: bool) -> CaptureError:
    if not captured:
        return CaptureError(
            f"there is no table {name} with a primary key",
            hint="Check the spelling and the schema (sales.orders), and that it has a key.",
        )
    return CaptureError(
        f"table {name} is not enabled", hint=f"Enable it first: headwater enable {name}"
    )


def _no_table(name: str, error: psycopg.Error) -> HeadwaterError:
    if isinstance(
        error, psycopg.errors.SyntaxError | psycopg.errors.InvalidName | psycopg.DataError
    ):
        return CaptureError(
            f"{name!r:.100} is not the name of a table",
            hint="A table is named orders or sales.orders; capitals and blanks are quoted.",
        )
    return translate(error)


_UNFINISHED = """
    select s.name, s.state from headwater.sources s
    where exists (select from headwater.source_tables t
                  where t.source = s.name and t.state = 'copying'
                    and t.relid = headwater.find_table(%(name)s))
       or s.state <> 'running' and not s.feed_only
          and starts_with(%(name)s, s.into_schema || '.')
          and headwater.find_table(%(name)s) is null
"""
"""A source whose mirror of this name is not complete, or not even created."""

_SESSION_USER = "select session_user::pg_catalog.text"

_LOOK_UP = """
    with found as materialized (
      select asked.name, asked.captured, c.oid as relid, headwater.shape_id(c.oid) as shape,
             c.relrowsecurity
      from unnest(%s::text[], %s::boolean[]) asked (name, captured)
      join pg_class c on c.oid = headwater.find_table(asked.name)
      where case when asked.captured
            then exists (select from headwater.tables t where t.relid = c.oid and t.enabled)
            else c.relkind in ('r', 'p') and exists (
              select from pg_index i where i.indrelid = c.oid and i.indisprimary) end
    )
    select f.name, captured, shape, relrowsecurity, m.source, s.feed_only, f.relid::bigint,
           case when shape <> all (%s::bigint[]) then headwater.describe(f.relid) end,
           case when shape <> all (%s::bigint[]) then headwater.image('o', f.relid, f.relid) end,
           case when shape <> all (%s::bigint[]) then headwater.operators(f.relid) end
    from found f
    left join headwater.source_tables m on m.relid = f.relid
    left join headwater.sources s on s.name = m.source
"""
