"""Reads rows of tables in the snapshot of a transaction that the caller began.

Rows have the same form as in the log: the statement uses the expression that capture writes images
with, and the rows go through the same decoder. So a row that is read equals the same row in a
change. Many queries are sent together; when one of them fails, they are sent one by one, and each
has its own answer or error.

A query with a scope executes code of the table's owner (a policy) as the scope's role. That code
can leave the role, and then has the role that the connection logged in with. So such queries are
sent only over connections for users' roles (`live_views.background`). Settings that it changes are
undone with a savepoint before the next query in the same transaction.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import psycopg

from headwater import limits
from headwater.database import PINNED_PATH, Connection
from headwater.errors import ResultError
from headwater.hub.loop_time import Turn
from headwater.hub.reading.tables import KnownTable
from headwater.live.filters.sql import Sql
from headwater.live.needs import Need
from headwater.live.query import BoundQuery
from headwater.live.statements import select_keys, statement
from headwater.log.images import ImageDecoder
from headwater.log.reconnect import is_lost
from headwater.model import Key, Row


class Scope(msgspec.Struct, frozen=True):
    """The role and claims that a query is read with. `checked` means that row-level security may
    hide rows from the role: rows from the log must be checked before they are sent."""

    role: str
    claims: str
    checked: bool


@dataclass(frozen=True, slots=True)
class SnapshotQuery:
    """A statement over one table, and the scope to read it with."""

    known: KnownTable
    sql: Sql
    scope: Scope | None = None
    keys_only: bool = False
    """Whether its rows have only the columns of the primary key."""

    @property
    def decode(self) -> ImageDecoder:
        return self.known.decode_key if self.keys_only else self.known.decode

    @classmethod
    def of_need(
        cls,
        known: KnownTable,
        query: BoundQuery,
        need: Need,
        scope: Scope | None,
        *,
        most: int | None = None,
    ) -> SnapshotQuery:
        """The query for a need. With `most`, the answer fails if it has more bytes."""
        rows = images(known, statement(query, need))
        return cls(known, rows if most is None else within(rows, most), scope)

    @property
    def settings(self) -> dict[str, str]:
        """Settings for this query only."""
        if self.scope is None:
            return {}
        found = {"request.jwt.claims": self.scope.claims, "role": self.scope.role}
        return {"search_path": PINNED_PATH, **found} if self.known.names_relations else found


def images(known: KnownTable, rows: Sql) -> Sql:
    """The rows of a statement as images of the log."""
    image = known.image.replace("%", "%%")
    return rows.wrapped(f"select ({image})::pg_catalog.text from (", ") o")


def within(rows: Sql, most: int) -> Sql:
    """The same images; after this many bytes, null for each further one."""
    return rows.wrapped(
        f"select case when t.bytes operator(pg_catalog.<=) {most} then t.image end from ("
        "select i.image, pg_catalog.sum(pg_catalog.octet_length(i.image))"
        " over (rows unbounded preceding) as bytes from (",
        ") i (image)) t",
    )


def of_keys(known: KnownTable, keys: Sequence[Key], scope: Scope | None) -> SnapshotQuery:
    """Which of the rows with these keys the scope can see. For most tables only keys are read."""
    rows = select_keys(known.table, tuple(keys), whole=not known.plain)
    return SnapshotQuery(known, images(known, rows), scope, keys_only=known.plain)


RowsOrError: TypeAlias = list[Row] | Exception
"""The rows, the error of the driver, or the error of decoding them."""


async def ask(
    connection: Connection, questions: Sequence[SnapshotQuery], *, seconds: float = 0.0
) -> list[RowsOrError]:
    """The rows of each query, or its error. Only a lost connection is raised. After `seconds`, the
    remaining queries are not sent, and count as timed out."""
    return (await _ask(connection, questions, seconds, ()))[0]


async def ask_in_flush(
    connection: Connection,
    questions: Sequence[SnapshotQuery],
    *,
    seconds: float = limits.FLUSH_QUESTIONS_SECONDS,
) -> list[RowsOrError]:
    """The same within the time of a flush. A table that was rewritten after the snapshot looks
    empty in it, so its answers count as errors."""
    oids = {question.known.table.oid for question in questions}
    answers, found = await _ask(connection, questions, seconds, oids)
    if not any(found.values()):
        return answers
    error = psycopg.errors.SerializationFailure("the table was rewritten meanwhile")
    return [
        error if found.get(question.known.table.oid) else answer
        for question, answer in zip(questions, answers, strict=True)
    ]


_Rewritten: TypeAlias = dict[int, bool]

UNLOCK = "select pg_catalog.pg_advisory_unlock_all()"
"""A rollback does not release advisory locks that code of a table's owner has taken. Maintenance of
the log would wait for them."""


async def _ask(
    connection: Connection,
    questions: Sequence[SnapshotQuery],
    seconds: float,
    oids: Collection[int],
) -> tuple[list[RowsOrError], _Rewritten]:
    try:
        return await _ask_together(connection, questions, oids)
    except psycopg.Error as error:
        if lost(error):
            raise
        await connection.execute("rollback to savepoint headwater_questions")
        await connection.execute(UNLOCK)
        if len(questions) == 1:
            return [error], {}
    until = time.monotonic() + seconds if seconds else None
    answers: list[RowsOrError] = []
    for question in questions:
        if until is not None and time.monotonic() > until:
            answers.append(psycopg.errors.QueryCanceled("asked for too long"))
        else:
            answers += (await _ask(connection, [question], 0.0, ()))[0]
    return answers, await rewritten(connection, oids) if oids else {}


async def rewritten(connection: Connection, oids: Iterable[int]) -> _Rewritten:
    """Whether each of the tables was rewritten after the snapshot. Dropped tables are left out."""
    cursor = await connection.execute(_REWRITTEN, (list(oids),))
    return dict(await cursor.fetchall())


# The function uses the present catalog, the query the catalog in the snapshot. It uses nothing of
# the schema headwater, which the question role may not read.
_REWRITTEN = """
    with recursive members (root, oid) as (
      select asked, asked from pg_catalog.unnest(%s::pg_catalog.oid[]) asked
      union
      select m.root, i.inhrelid
      from members m
      join pg_catalog.pg_inherits i on i.inhparent operator(pg_catalog.=) m.oid
    )
    select m.root::pg_catalog.int8,
           pg_catalog.bool_or(
             coalesce(pg_catalog.pg_relation_filenode(c.oid), 0)
             operator(pg_catalog.<>) c.relfilenode)
    from members m join pg_catalog.pg_class c on c.oid operator(pg_catalog.=) m.oid
    group by m.root
"""


async def _ask_together(
    connection: Connection, questions: Sequence[SnapshotQuery], oids: Collection[int]
) -> tuple[list[RowsOrError], _Rewritten]:
    cursors = []
    checking = None
    turn = Turn()
    async with connection.pipeline():
        await connection.execute("savepoint headwater_questions")
        for question in questions:
            settings = question.settings
            if settings:
                calls = ", ".join(["pg_catalog.set_config(%s, %s, true)"] * len(settings))
                values = [each for pair in settings.items() for each in pair]
                if "search_path" not in settings:
                    # Functions that a policy calls find names as the application's sessions do.
                    await connection.execute("set local search_path to default")
                await connection.execute(f"select {calls}".encode(), values)
            sql = question.sql
            cursors.append(await connection.execute(sql.text.encode(), sql.values))
            # Also undoes settings by code of the table's owner: a policy, or a function of an
            # index, which runs while the statement is planned.
            await connection.execute("rollback to savepoint headwater_questions")
            await turn.over()
        if oids:
            checking = await connection.execute(_REWRITTEN, (list(oids),))
        await connection.execute(UNLOCK)
        await connection.execute("release savepoint headwater_questions")
    answers = []
    for question, cursor in zip(questions, cursors, strict=True):
        answers.append(_decoded(question, await cursor.fetchall()))
        await turn.over()
    return answers, {} if checking is None else dict(await checking.fetchall())


def _decoded(question: SnapshotQuery, rows: Sequence[tuple[str]]) -> RowsOrError:
    try:
        if rows and rows[-1][0] is None:
            return _too_large(question)
        return list(map(question.decode, (image for (image,) in rows)))
    except Exception as error:
        return error


def _too_large(question: SnapshotQuery) -> ResultError:
    return ResultError(
        f"{question.known.table.label}: a result of more than {limits.OPENING_BYTES_MAX:,} bytes,"
        " counted with all columns of its rows",
        code="result_too_large",
        hint="Ask for fewer rows.",
    )


def lost(error: psycopg.Error) -> bool:
    """Whether the connection was lost. A cancelled statement is not a lost connection."""
    return not isinstance(error, psycopg.errors.QueryCanceled) and is_lost(error)


async def allow_any_plan(connection: Connection) -> None:
    """In a transaction of a connection that reads the log: its planner settings are for the log
    only."""
    seconds = limits.FLUSH_QUESTION_SECONDS
    async with connection.pipeline():
        await connection.execute("set local enable_seqscan = on")
        await connection.execute("set local plan_cache_mode = auto")
        await connection.execute(
            f"set local statement_timeout = '{int(seconds * 1000)}ms'".encode()
        )
