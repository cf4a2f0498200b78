"""Finds what a statement reads: tables through views and functions, columns, and the row predicate
if the statement is simple. When in doubt, it reports more rows, never fewer.

`catalog` follows the statement and `predicate` reads its conditions. Both become an `Analysis`,
which is cached until an object that it depends on is altered. Its tables are those of the log: a
partition counts as the table that is enabled. Tables that are not captured are listed.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec
import psycopg

from headwater import limits
from headwater.database import Connection, connect, translate
from headwater.errors import DatabaseError, NotInstalled, Unavailable
from headwater.live.filters.filter import Filter
from headwater.log.reconnect import is_lost
from headwater.model import Table
from headwater.queries.analysis.catalog import Reads, Relation, UnknownReads, Use, Walk
from headwater.queries.analysis.fingerprints import (
    ALL_MEMBERSHIPS,
    WHOLE_CATALOG,
    Object,
    Prints,
    prints_of,
)
from headwater.queries.analysis.predicate import Name, bind, find
from headwater.queries.analysis.search_path import NameLookup
from headwater.queries.analysis.statements import Executed, Read, Statement

_ANALYSES_MAX = 10_000
"""Statements whose analyses are cached. The one used longest ago is dropped first."""


T = TypeVar("T")


class TableRead(msgspec.Struct, frozen=True):
    """One captured table as a statement reads it, for any values of its parameters."""

    table: Table
    columns: frozenset[str] | None = None
    """The columns it uses; None for any."""
    conditions: tuple[Filter, ...] = ()
    """Conditions that a row must meet. `predicate.StatementParameter` stands for a parameter."""
    through: tuple[str, ...] = ()
    """The views, functions and policies through which it is read."""


class Analysis(msgspec.Struct, frozen=True):
    """What one statement reads.

    With `everything`, it may read any table (an opaque function): every change counts.
    `uncaptured` names tables that it reads and that are not captured: their changes are missed.
    """

    statement: Statement
    everything: bool = False
    uncaptured: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """For people: why it may read more than the statement says."""
    tables: tuple[TableRead, ...] = ()
    refused: str | None = None
    """Why the database refused it: it is invalid, or is not a query."""

    def reads(self, executed: Executed) -> tuple[Read, ...]:
        """What the statement read with these values."""
        return tuple(
            Read(each.table, each.columns, bind(each.conditions, each.table, executed.values))
            for each in self.tables
        )


class _CachedAnalysis(msgspec.Struct, frozen=True):
    """An analysis and the objects that it depends on."""

    analysis: Analysis
    prints: Prints


class _Key(msgspec.Struct, frozen=True):
    """A statement, its role, and how its session finds names (None for our own session)."""

    statement: Statement
    role: str | None = None
    session: NameLookup | None = None


class Analyst:
    """Analyses statements over a connection of its own. Analyses are cached until the catalog
    changes."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()
        self._cache: OrderedDict[_Key, _CachedAnalysis] = OrderedDict()
        self._running: dict[_Key, asyncio.Task[Analysis]] = {}
        self._settings: dict[str, str] = {}
        self._epoch = 0

    async def analyse(
        self, statement: Statement, role: str | None = None, session: NameLookup | None = None
    ) -> Analysis:
        """What the statement reads if that role executes it (None for the session's own role) in
        such a session (None for one like ours)."""
        known = self.known(statement, role, session)
        if known is not None:
            return known
        key = _Key(statement, role, session)
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(self._analyse(key))
            task.add_done_callback(lambda done: self._answered(key, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not task.cancelled() or (caller is not None and caller.cancelling()):
                raise
            raise Unavailable(
                "this gateway is stopping", hint="Connect again in a moment."
            ) from None

    def known(
        self, statement: Statement, role: str | None = None, session: NameLookup | None = None
    ) -> Analysis | None:
        """The same, if it is cached."""
        key = _Key(statement, role, session)
        cached = self._cache.get(key)
        if cached is None:
            return None
        self._cache.move_to_end(key)
        return cached.analysis

    async def recheck(self) -> set[Statement]:
        """Check everything that analyses depend on (views, functions, types, policies, tables,
        roles, search paths, captured tables). Analyses that are no longer valid are forgotten.
        Returns their statements."""
        cached = dict(self._cache)
        objects = {item for each in cached.values() for item in each.prints}
        prints = await self._in_transaction(lambda connection: prints_of(connection, objects))
        self._epoch += 1
        return self._forget(
            key
            for key, each in cached.items()
            if any(prints[item] != was for item, was in each.prints.items())
        )

    async def note_settings(self) -> None:
        """Call this before a session begins: later changes of settings are then noticed."""
        if not self._settings:
            self._settings = await self._in_transaction(_settings)

    async def settings_changed(self, users: Iterable[str]) -> bool:
        """Whether a session that begins now has other settings than one that began before: those of
        the database, of one of these roles, or of the server."""
        before, now = self._settings, await self._in_transaction(_settings)
        self._settings = now
        if not before or all(before.get(of) == now.get(of) for of in (_OF_ALL, _OF_US, *users)):
            return False
        self._epoch += 1
        self._forget([key for key in self._cache if key.session is None])
        async with self._lock:
            await self._disconnect()
        return True

    def forget(self, table_oids: Iterable[int]) -> set[Statement]:
        """Tables were altered: forget analyses that depend on them. Returns their statements."""
        self._epoch += 1
        altered = set(table_oids)
        return self._forget(
            [
                key
                for key, each in self._cache.items()
                # The table, or a partition of it, may be captured now.
                if each.analysis.uncaptured
                or any(read.table.oid in altered for read in each.analysis.tables)
                or any(oid in altered for kind, oid in each.prints if kind == "relation")
            ]
        )

    def forget_all(self) -> None:
        """Any table may have been altered: forget all analyses."""
        self._epoch += 1
        self._cache.clear()

    def forget_statements(self, statements: frozenset[Statement]) -> None:
        """Forget the analyses of these statements."""
        self._epoch += 1
        self._forget([key for key in self._cache if key.statement in statements])

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._disconnect()

    def _forget(self, keys: Iterable[_Key]) -> set[Statement]:
        forgotten = set()
        for key in keys:
            self._cache.pop(key, None)
            forgotten.add(key.statement)
        return forgotten

    def _answered(self, key: _Key, task: asyncio.Task[Analysis]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # The caller may have been cancelled: log no unread exception.

    async def _analyse(self, key: _Key) -> Analysis:
        cached, epoch = await self._in_transaction(lambda connection: self._walk(connection, key))
        if epoch == self._epoch:
            self._cache[key] = cached
            if len(self._cache) > _ANALYSES_MAX:
                self._cache.popitem(last=False)
        return cached.analysis

    async def _walk(self, connection: Connection, key: _Key) -> tuple[_CachedAnalysis, int]:
        """The analysis, and the epoch in which it began."""
        statement, epoch = key.statement, self._epoch
        await connection.execute("savepoint headwater_walk")
        try:
            walk = Walk(connection)
            found = await walk.follow(statement.sql, statement.types, key.session, key.role)
        except UnknownReads as refused:
            await connection.execute("rollback to headwater_walk")
            note = f"the database cannot analyse the statement: {refused}"
            unknown = Analysis(statement, everything=True, notes=(note,), refused=str(refused))
            return _CachedAnalysis(unknown, await prints_of(connection, _ANYTHING)), epoch
        return _CachedAnalysis(_analysis(statement, found), found.prints), epoch

    # ---- the connection

    async def _in_transaction(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Do the work in a transaction that is rolled back. If the open connection was lost, the
        work is done once more over a new one."""
        async with self._lock:
            if self._connection is not None:
                try:
                    return await self._attempt(work)
                except (psycopg.Error, DatabaseError) as error:
                    if not is_lost(error):
                        raise
            try:
                return await self._attempt(work)
            except (psycopg.Error, DatabaseError) as error:
                if is_lost(error):
                    raise Unavailable(
                        "the database cannot be reached", hint="Try again in a moment."
                    ) from error
                if isinstance(error, psycopg.Error):
                    raise translate(error, self._url) from error
                raise

    async def _attempt(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        try:
            if self._connection is None:
                self._connection = await connect(self._url, purpose="analysis", options=_FORMATS)
            async with asyncio.timeout(limits.LOOKUP_SECONDS):
                return await _rolled_back(self._connection, work)
        except TimeoutError as error:
            await self._disconnect()
            raise Unavailable(
                "the database took too long to analyse a statement",
                hint="Another session may hold a lock on one of its tables. Try again.",
            ) from error
        except asyncio.CancelledError:
            await self._disconnect()
            raise
        except (psycopg.Error, DatabaseError) as error:
            if is_lost(error):
                await self._disconnect()
            raise

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


_FORMATS = (
    "-c datestyle=ISO -c intervalstyle=iso_8601 -c bytea_output=hex -c extra_float_digits=1"
    " -c jit=off"
)


async def _rolled_back(connection: Connection, work: Callable[[Connection], Awaitable[T]]) -> T:
    await connection.execute("begin isolation level repeatable read read write")
    given_up = False
    try:
        # This takes the snapshot: later alterations differ from the stored fingerprints.
        cursor = await connection.execute("select to_regclass('headwater.captures') is not null")
        if await cursor.fetchone() != (True,):
            raise NotInstalled(
                "Headwater is not installed in this database", hint="Run: headwater init"
            )
        return await work(connection)
    except asyncio.CancelledError:
        given_up = True  # the connection may not answer any more
        raise
    finally:
        if not given_up and not connection.closed:
            await connection.execute("rollback")


_ANYTHING: tuple[Object, ...] = (WHOLE_CATALOG, ALL_MEMBERSHIPS)
"""What a refused statement depends on: after any change it may be accepted."""


_OF_ALL, _OF_US = "", " "


async def _settings(connection: Connection) -> dict[str, str]:
    """The settings of new sessions, by role."""
    cursor = await connection.execute(_SETTINGS)
    return dict(await cursor.fetchall())


# A search path in the server's configuration applies to every session, also to ours.
_SETTINGS = """
    select ' ', session_user::text || s.reset_val
    from pg_catalog.pg_settings s where s.name = 'search_path'
    union all
    select coalesce(r.rolname::text, ''),
           string_agg(concat_ws(' ', s.setdatabase, s.setconfig), ' ' order by s.setdatabase)
    from pg_catalog.pg_db_role_setting s left join pg_catalog.pg_roles r on r.oid = s.setrole
    where s.setdatabase in (0, (select oid from pg_catalog.pg_database
                                where datname = pg_catalog.current_database()))
    group by 1
"""

# ------------------------------------------------------------------------ the analysis


def _analysis(statement: Statement, found: Reads) -> Analysis:
    """The analysis, from what was found in the catalog."""
    notes = [*(f"any change may concern it: {why}" for why in found.widened), *found.notes]
    uncaptured: dict[str, None] = {}
    reads: dict[int, list[tuple[Relation, Use]]] = {}
    for oid, use in found.uses.items():
        relation = found.relations.get(oid)
        if relation is None or not relation.is_read:
            continue
        why = _why_uncaptured(relation, use, found)
        if why is not None:
            uncaptured[relation.label + FEED_ONLY * relation.feed_only] = None
            notes.append(why)
        for root in relation.roots:
            reads.setdefault(root, []).append((relation, use))
    conditions = _conditions(statement, found, reads)
    tables = [_table_read(root, uses, found, conditions) for root, uses in reads.items()]
    return Analysis(
        statement,
        everything=bool(found.widened),
        uncaptured=tuple(uncaptured),
        notes=tuple(notes),
        tables=tuple(sorted(tables, key=lambda read: read.table.label)),
    )


FEED_ONLY = " (feed only)"
"""Follows the name of a table whose rows are not stored."""

_KINDS = {
    "m": "a materialized view; it changes when it is refreshed",
    "f": "a foreign table; its changes happen elsewhere",
    "S": "a sequence, which has no rows to capture",
}


def _why_uncaptured(relation: Relation, use: Use, found: Reads) -> str | None:
    label = relation.label
    if relation.schema in ("pg_catalog", "information_schema"):
        return f"{label} is a system table: its changes are not captured"
    if relation.kind in _KINDS:
        return f"{label} is {_KINDS[relation.kind]}"
    if relation.temporary:
        return f"{label} is a temporary table: its changes are not captured"
    if relation.feed_only:
        return f"{label} has no rows: its source is feed only, and a change feed has its changes"
    if not relation.captured:
        return f"{label} is not enabled: its changes are not captured (headwater enable {label})"
    captured = {c.name for root in relation.roots for c in found.tables[root].columns}
    used = relation.columns.keys() if use.whole else use.columns & relation.columns.keys()
    if relation.oid in relation.roots:
        used -= relation.generated  # made from the other columns, whether images have it or not
    own = sorted({relation.columns[number] for number in used} - captured)
    if own:
        return f"{', '.join(own)} of {label} is not captured: its parent table has no such column"
    return None


def _table_read(
    root: int,
    uses: list[tuple[Relation, Use]],
    found: Reads,
    conditions: dict[int, tuple[Filter, ...]],
) -> TableRead:
    through = {label: None for _, use in uses for label in use.through}
    columns: set[str] | None = set()
    for relation, use in uses:
        # A row that moves to another partition gets another key, so it is not an update.
        hidden = relation.generated | relation.recast
        if use.whole or use.columns & hidden or len(relation.roots) > 1:
            columns = None
        elif columns is not None:
            columns |= {relation.columns[n] for n in use.columns if n in relation.columns}
    return TableRead(
        found.tables[root],
        None if columns is None else frozenset(columns),
        conditions.get(root, ()),
        tuple(through),
    )


def _conditions(
    statement: Statement, found: Reads, reads: dict[int, list[tuple[Relation, Use]]]
) -> dict[int, tuple[Filter, ...]]:
    """The conditions on each table that is read only once, by the statement itself."""
    plain: dict[Name, tuple[int, Table]] = {}
    for root, uses in reads.items():
        relation, use = uses[0]
        alone = len(uses) == 1 and relation.roots == (root,) and relation.captured
        alone = alone and not relation.recast
        if alone and use.direct and not use.indirect:
            plain[relation.schema, relation.name] = root, found.tables[root]
    understood = find(
        found.printed,
        {name: table for name, (_, table) in plain.items()},
        found.parameters,
        moments=_MOMENT_WORDS.search(statement.sql) is None,
    )
    return {plain[name][0]: conditions for name, conditions in understood.items()}


_MOMENT_WORDS = re.compile(r"now|today|tomorrow|yesterday", re.IGNORECASE)
