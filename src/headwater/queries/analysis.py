"""Asks the database what a statement reads: tables through views and functions, columns, and the
row predicate where the statement is simple. Widened when in doubt, never narrowed.

`catalog` follows the statement and `predicate` reads its conditions; here the two become an
`Analysis`, which is kept until something it rests on is altered. Tables are what the log tells of:
a partition counts as the table that is enabled, and what nobody captures is named.
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
from headwater.live.filter import Filter
from headwater.log.follow import is_lost
from headwater.model import Table
from headwater.queries.catalog import (
    Found,
    Prints,
    Refused,
    Relation,
    Use,
    Walk,
    path_of,
    prints_of,
)
from headwater.queries.predicate import Name, bind, find
from headwater.queries.statements import Executed, Read, Statement

T = TypeVar("T")


class TableRead(msgspec.Struct, frozen=True):
    """One captured table as a statement reads it, whatever its parameters are."""

    table: Table
    columns: frozenset[str] | None = None
    """The columns it uses; None for any."""
    conditions: tuple[Filter, ...] = ()
    """What must be true of a row that counts; `predicate.Parameter` stands for a parameter."""
    through: tuple[str, ...] = ()
    """The views, functions and policies on the way to it."""


class Analysis(msgspec.Struct, frozen=True):
    """What one statement reads.

    With `everything`, it may read any table (an opaque function): every change counts.
    `uncaptured` names what it reads and nobody captures, so that a change would be missed.
    """

    statement: Statement
    everything: bool = False
    uncaptured: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """In words for people, where and why it was widened."""
    tables: tuple[TableRead, ...] = ()
    refused: str | None = None
    """Why the database would not look at it: it is wrong, or nothing that reads."""

    def reads(self, executed: Executed) -> tuple[Read, ...]:
        """What it read with these values."""
        return tuple(
            Read(each.table, each.columns, bind(each.conditions, each.table, executed.values))
            for each in self.tables
        )


class _Kept(msgspec.Struct, frozen=True):
    """An analysis and what it rests on. Without prints nothing is known of that."""

    analysis: Analysis
    prints: Prints
    path: str | None = None


_Key = tuple[Statement, str | None]


class Analyst:
    """Analyses statements over a connection of its own; each once, until the catalog changes."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Connection | None = None
        self._lock = asyncio.Lock()
        self._kept: OrderedDict[_Key, _Kept] = OrderedDict()
        self._asking: dict[_Key, asyncio.Task[Analysis]] = {}
        self._paths: dict[str, str] = {}
        self._epoch = 0

    async def analyse(self, statement: Statement, role: str | None = None) -> Analysis:
        """What the statement reads when that role executes it (None for Headwater's own)."""
        known = self.known(statement, role)
        if known is not None:
            return known
        key = (statement, role)
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.create_task(self._analyse(key))
            task.add_done_callback(lambda done: self._answered(key, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if not task.cancelled() or (caller is not None and caller.cancelling()):
                raise
            raise Unavailable("statements are no longer analysed", hint="Try elsewhere.") from None

    def known(self, statement: Statement, role: str | None = None) -> Analysis | None:
        """The same, if it need not be asked for."""
        kept = self._kept.get((statement, role))
        if kept is None:
            return None
        self._kept.move_to_end((statement, role))
        return kept.analysis

    async def recheck(self) -> set[Statement]:
        """Look again at everything that analyses rest on (views, functions, policies, tables,
        what is captured): the statements of analyses that no longer hold, which are forgotten."""
        kept = dict(self._kept)
        objects = {item for each in kept.values() for item in each.prints}
        roles = {role for _, role in kept if role is not None}

        async def look(connection: Connection) -> tuple[Prints, dict[str, str]]:
            relations = [oid for kind, oid in objects if kind == "relation"]
            functions = [oid for kind, oid in objects if kind == "function"]
            prints = await prints_of(connection, relations, functions)
            return prints, {role: await _path_or_empty(connection, role) for role in roles}

        prints, self._paths = await self._in_transaction(look)
        self._epoch += 1
        for key, each in kept.items():
            if not each.prints and self._kept.get(key) is each:
                del self._kept[key]  # what the server refused, it may take now
        return self._forget(
            key
            for key, each in kept.items()
            if any(prints[item] != was for item, was in each.prints.items())
            or (key[1] is not None and each.path != self._paths[key[1]])
        )

    def forget(self, table_oids: Iterable[int]) -> set[Statement]:
        """Tables were altered: forget what rests on them. Which statements that was."""
        self._epoch += 1
        altered = set(table_oids)
        return self._forget(
            [
                key
                for key, each in self._kept.items()
                # One of them may be captured now, or a partition of it.
                if each.analysis.uncaptured
                or any(read.table.oid in altered for read in each.analysis.tables)
                or any(oid in altered for kind, oid in each.prints if kind == "relation")
            ]
        )

    def forget_statements(self, statements: frozenset[Statement]) -> None:
        """Have these analysed again."""
        self._epoch += 1
        self._forget([key for key in self._kept if key[0] in statements])

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._disconnect()

    def _forget(self, keys: Iterable[_Key]) -> set[Statement]:
        forgotten = set()
        for key in keys:
            self._kept.pop(key, None)
            forgotten.add(key[0])
        return forgotten

    def _answered(self, key: _Key, task: asyncio.Task[Analysis]) -> None:
        del self._asking[key]
        if not task.cancelled():
            task.exception()  # whoever waited may have gone; that is no fault

    async def _analyse(self, key: _Key) -> Analysis:
        kept, epoch = await self._in_transaction(lambda connection: self._ask(connection, key))
        if epoch == self._epoch:
            self._kept[key] = kept
            if len(self._kept) > limits.ANALYSES_MAX:
                self._kept.popitem(last=False)
        return kept.analysis

    async def _ask(self, connection: Connection, key: _Key) -> tuple[_Kept, int]:
        """The analysis, and how often something had been forgotten when it was begun."""
        (statement, role), epoch = key, self._epoch
        try:
            path = None if role is None else await self._path(connection, role)
            found = await Walk(connection).follow(statement.sql, statement.types, path)
        except Refused as refused:
            note = f"the database does not say what it reads: {refused}"
            unknown = Analysis(statement, everything=True, notes=(note,), refused=str(refused))
            return _Kept(unknown, {}), epoch
        return _Kept(_analysis(statement, found), found.prints, path), epoch

    async def _path(self, connection: Connection, role: str) -> str:
        if role not in self._paths:
            self._paths[role] = await path_of(connection, role)
        return self._paths[role]

    # ---- the connection

    async def _in_transaction(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Do the work in a transaction that leaves nothing behind. A connection that was kept may
        have been cut long ago: then once more over a new one."""
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
                        "the database is away", hint="It is tried again by itself; try again."
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
                "the database takes too long to say what a statement reads",
                hint="Somebody may hold a lock on one of its tables; try again.",
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


_FORMATS = "-c datestyle=ISO -c intervalstyle=iso_8601 -c bytea_output=hex -c extra_float_digits=1"


async def _rolled_back(connection: Connection, work: Callable[[Connection], Awaitable[T]]) -> T:
    await connection.execute("begin isolation level repeatable read read write")
    given_up = False
    try:
        # The first question: what is altered from here on differs from what is remembered.
        cursor = await connection.execute("select to_regclass('headwater.captures') is not null")
        if await cursor.fetchone() != (True,):
            raise NotInstalled(
                "Headwater is not installed in this database", hint="Run: headwater init"
            )
        return await work(connection)
    except asyncio.CancelledError:
        given_up = True  # and so is the connection, which may not answer any more
        raise
    finally:
        if not given_up and not connection.closed:
            await connection.execute("rollback")


async def _path_or_empty(connection: Connection, role: str) -> str:
    try:
        return await path_of(connection, role)
    except Refused:
        return ""


# ------------------------------------------------------------------------ what was found, in words


def _analysis(statement: Statement, found: Found) -> Analysis:
    """An analysis out of what the catalog said."""
    notes = [*(f"any change counts: {why}" for why in found.widened), *found.notes]
    uncaptured: dict[str, None] = {}
    reads: dict[int, list[tuple[Relation, Use]]] = {}
    for oid, use in found.uses.items():
        relation = found.relations.get(oid)
        if relation is None or not relation.is_read:
            continue
        why = _why_uncaptured(relation, use, found)
        if why is not None:
            uncaptured[relation.label] = None
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


_KINDS = {
    "m": "a materialized view; it changes when it is refreshed",
    "f": "a foreign table; its changes happen elsewhere",
    "S": "a sequence, which has no rows to capture",
}


def _why_uncaptured(relation: Relation, use: Use, found: Found) -> str | None:
    label = relation.label
    if relation.schema in ("pg_catalog", "information_schema"):
        return f"{label} belongs to the server: its changes are not captured"
    if relation.kind in _KINDS:
        return f"{label} is {_KINDS[relation.kind]}"
    if relation.temporary:
        return f"{label} is a temporary table: its changes are not captured"
    if not relation.captured:
        return f"{label} is not enabled: its changes are not captured (headwater enable {label})"
    captured = {c.name for root in relation.roots for c in found.tables[root].columns}
    # What a virtual column is computed from may be any of the others.
    whole = use.whole or use.columns & relation.virtual
    used = relation.columns.keys() if whole else use.columns & relation.columns.keys()
    own = sorted({relation.columns[number] for number in used - relation.virtual} - captured)
    if own:
        return f"{', '.join(own)} of {label} is not captured: the table above it has no such column"
    return None


def _table_read(
    root: int,
    uses: list[tuple[Relation, Use]],
    found: Found,
    conditions: dict[int, tuple[Filter, ...]],
) -> TableRead:
    through = {label: None for _, use in uses for label in use.through}
    columns: set[str] | None = set()
    for relation, use in uses:
        # A row that goes to another partition gets another key, so that it is no update.
        if use.whole or use.columns & relation.generated or len(relation.roots) > 1:
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
    statement: Statement, found: Found, reads: dict[int, list[tuple[Relation, Use]]]
) -> dict[int, tuple[Filter, ...]]:
    """The conditions on each table that is read in one place only: the statement itself."""
    plain: dict[Name, tuple[int, Table]] = {}
    for root, uses in reads.items():
        relation, use = uses[0]
        alone = len(uses) == 1 and relation.roots == (root,) and relation.captured
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
