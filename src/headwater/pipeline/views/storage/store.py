"""Writes a streaming view to PostgreSQL: its record in `headwater.views`, batches, and rebuilds.

A batch is one transaction together with the position that the view has reached, and touches only
the rows that it changes. A new generation is built beside the old one and replaces it in one
transaction. The statements over the tables of a generation are in `group_tables` and `row_tables`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeAlias

import msgspec
import psycopg
from psycopg import sql

from headwater import limits
from headwater.database import translate
from headwater.errors import HeadwaterError, PipelineError, TableLocked
from headwater.model import Position, Table
from headwater.pipeline.failpoints import failpoint
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.views.definitions import StreamingView
from headwater.pipeline.views.results import Result, ViewResult, decoded
from headwater.pipeline.views.source_rows import Values
from headwater.pipeline.views.storage.connections import ViewConnections, translated
from headwater.pipeline.views.storage.group_tables import GroupTables
from headwater.pipeline.views.storage.row_tables import RowTables
from headwater.pipeline.views.storage.shown import Database
from headwater.pipeline.views.storage.staging import StagedRows

Generation: TypeAlias = GroupTables | RowTables


class ViewRecord(msgspec.Struct, frozen=True):
    """A row of `headwater.views`. `reached` is the position whose changes are in the view."""

    name: str
    number: int
    state: str
    relation: int | None
    generation: int
    definition: str | None
    result: str | None
    tables: str | None
    built: str | None
    reached: str | None

    @property
    def position(self) -> Position | None:
        """The position that the view has reached. None for a view of an earlier release that
        stopped between two positions."""
        offset = Offset.from_dict(msgspec.json.decode(self.reached or "{}"))
        return offset.position if offset.until is None else None

    @property
    def columns(self) -> Result:
        return decoded(self.result or "")

    @property
    def shapes(self) -> dict[str, Table]:
        """The tables by parameter."""
        return msgspec.json.decode(self.tables or "{}", type=dict[str, Table])


_STATE = ", ".join(name for name in ViewRecord.__struct_fields__)


def generation_of(view: StreamingView, number: int, generation: int, result: Result) -> Generation:
    """The tables of a generation."""
    if isinstance(result, ViewResult):
        return GroupTables(view, number, generation, result)
    return RowTables(view, number, generation, result)


class ViewStore:
    """Writes one view to the database."""

    def __init__(self, connections: ViewConnections, view: StreamingView) -> None:
        self._connections = connections
        self._view = view

    @contextmanager
    def transaction(self) -> Iterator[Database]:
        """A transaction; errors name the view."""
        try:
            with self._connections.transaction() as database:
                yield database
        except psycopg.errors.UndefinedTable as error:
            raise PipelineError(
                f"a table of view {self._view.name} is missing: {error.diag.message_primary}",
                hint=f"Rebuild the view: headwater view rebuild {self._view.name}",
            ) from error
        except psycopg.errors.LockNotAvailable as error:
            # Not waited for any longer: the session may itself wait for a table that the caller
            # has locked to read it.
            raise TableLocked(
                f"view {self._view.name}: its table, or one that belongs to it, is locked by"
                " another session",
                hint="It is written when that session has ended its transaction.",
            ) from error
        except psycopg.Error as error:
            raise translated(error, self._connections.url, self._view.name) from error

    # -------------------------------------------------------------------- its record

    def record(self) -> ViewRecord:
        """The record of the view; created for a new view."""
        with self.transaction() as database:
            database.execute(_NEW, (self._view.name,))
            return _record(database, self._view.name)

    def fail(self, error: HeadwaterError | None) -> None:
        """Save the view's error, or None."""
        text = None if error is None else str(error)[: limits.PIPELINE_ERROR_CHARS_MAX]
        with self.transaction() as database:
            database.execute(_FAIL, {"name": self._view.name, "error": text})

    def advance(self, record: ViewRecord, until: Position) -> ViewRecord:
        """Note that the view has every change up to a position, where none changes it."""
        with self._applying(record) as database:
            return self._advance(database, record, until)

    def _advance(self, database: Database, record: ViewRecord, until: Position) -> ViewRecord:
        reached = _offset_text(until)
        values = {"name": record.name, "reached": reached}
        database.execute(_ADVANCE, values)
        return msgspec.structs.replace(record, reached=reached)

    # -------------------------------------------------------------------- building

    def resume(self, record: ViewRecord) -> Generation:
        """The tables of the present generation, with empty staging tables. What a process that was
        killed has left is removed."""
        result = record.columns
        tables = generation_of(self._view, record.number, record.generation, result)
        with self._applying(record) as database:
            self._prepare(database, record, tables)
        return tables

    def begin(self, record: ViewRecord, result: Result) -> Generation:
        """Create empty tables for the next generation."""
        tables = generation_of(self._view, record.number, record.generation + 1, result)
        with self.transaction() as database:
            if _record(database, self._view.name).generation != record.generation:
                raise self._shared()
            self._check_free(database, record)
            self._prepare(database, record, tables)
            tables.create(database)
        return tables

    def _prepare(self, database: Database, record: ViewRecord, tables: Generation) -> None:
        """Create the staging tables. The view has only these, and the groups of its generation."""
        self._drop_others(database, record.number, rf"{record.generation}_(groups|a\d+)$")
        for statement in tables.staging().create():
            database.execute(statement)

    def _drop_others(self, database: Database, number: int, kept: str) -> None:
        """Drop the inner tables of the view but those that match."""
        own = f"^view_{number}_"
        for (name,) in database.execute(_INNER, {"own": own, "kept": own + kept}).fetchall():
            database.execute(sql.SQL("drop table {}").format(sql.Identifier("headwater", name)))

    def swap(
        self,
        tables: Generation,
        rows: StagedRows,
        *,
        definition: str,
        shapes: dict[str, Table],
        built: Position,
        at: datetime,
    ) -> ViewRecord:
        """Replace the generation before with what tasks have staged, in one transaction. The tables
        were read at the position `built`, at that time. The view stays due if a build was requested
        since by `dependent_views`: this one may lack rows that were changed without the log."""
        name = self._view.name
        values = {
            "name": name,
            "generation": tables.generation,
            "definition": definition,
            "result": tables.result.text,
            "tables": msgspec.json.encode(shapes).decode(),
            "built": str(built),
            "at": at,
            "reached": _offset_text(built),
        }
        with self.transaction() as database:
            before = _record(database, name)
            if before.generation != tables.generation - 1:
                raise self._shared()
            self._check_free(database, before)
            rows.check(database)
            values["relation"] = self._shown(database, tables, before, rows)
            failpoint("swapping")
            database.execute(_SWAP, values)
            self._drop_others(database, before.number, f"{tables.generation}_")
            rows.clear(database)
            return _record(database, name)

    def _shown(
        self, database: Database, tables: Generation, before: ViewRecord, rows: StagedRows
    ) -> int:
        columns = before.columns if before.result else None
        if isinstance(tables, RowTables):
            return tables.show(database, before.relation, columns, rows)
        tables.add(database, rows)
        return tables.show(database, before.relation, columns)

    def _shared(self) -> PipelineError:
        return PipelineError(
            f"another process writes to view {self._view.name}, too",
            hint="Let only one pipeline maintain the view.",
            retryable=True,
        )

    def _check_free(self, database: Database, record: ViewRecord) -> None:
        name = sql.Identifier(self._view.schema, self._view.table).as_string(database)
        (found,) = _row(database.execute("select to_regclass(%s)::oid::bigint", (name,)))
        if found is not None and found != record.relation:
            raise PipelineError(
                f"view {self._view.name}: a table of that name exists, and is not the view's",
                hint='Give the view another name: @hw.view(name="…"), or rename the table.',
            )

    # -------------------------------------------------------------------- batches

    def add(
        self, tables: GroupTables, record: ViewRecord, rows: StagedRows, until: Position
    ) -> ViewRecord:
        """Add what changes add to groups, together with the position, in one transaction."""
        with self._applying(record) as database:
            rows.check(database)
            tables.add(database, rows)
            # Only now: a join may remove a row of the view before it adds another one.
            for ids in tables.ids(database, rows):
                tables.refresh(database, ids)
            return self._applied(database, record, rows, until)

    def replace(
        self,
        tables: RowTables,
        record: ViewRecord,
        rows: StagedRows,
        touched: Mapping[str, Values],
        until: Position,
    ) -> ViewRecord:
        """Replace the rows of touched values, together with the position, in one transaction."""
        with self._applying(record) as database:
            rows.check(database)
            tables.replace(database, rows, touched)
            return self._applied(database, record, rows, until)

    @contextmanager
    def _applying(self, record: ViewRecord) -> Iterator[Database]:
        """A transaction that changes the view from the state of its record."""
        with self.transaction() as database:
            now = _record(database, self._view.name)
            if (now.generation, now.reached) != (record.generation, record.reached):
                raise self._shared()
            yield database
        failpoint("applied")

    def _applied(
        self, database: Database, record: ViewRecord, rows: StagedRows, until: Position
    ) -> ViewRecord:
        rows.clear(database)
        found = self._advance(database, record, until)
        failpoint("applying")
        return found


def due_views(connections: ViewConnections) -> set[str]:
    """The views for which a rebuild was requested."""
    try:
        with connections.transaction() as database:
            found = database.execute("select name from headwater.views where state = 'due'")
            return {name for (name,) in found.fetchall()}
    except psycopg.Error as error:
        raise translate(error, connections.url) from error


def _offset_text(position: Position) -> str:
    return msgspec.json.encode(Offset(position).to_dict()).decode()


def _record(database: Database, name: str) -> ViewRecord:
    query = f"select {_STATE} from headwater.views where name = %s for update".encode()
    row = database.execute(query, (name,)).fetchone()
    if row is None:
        raise PipelineError(
            f"view {name} was dropped while the pipeline maintained it",
            hint="Remove its function from the application, or start the pipeline again.",
        )
    return ViewRecord(*row)


def _row(cursor: psycopg.Cursor[tuple[Any, ...]]) -> tuple[Any, ...]:
    row = cursor.fetchone()
    assert row is not None
    return row


_INNER = """
    select relname from pg_class where relnamespace = 'headwater'::regnamespace and relkind = 'r'
      and relname ~ %(own)s and relname !~ %(kept)s
"""

_NEW = """
    insert into headwater.views (name, state) values (%s, 'new') on conflict (name) do nothing
"""

_FAIL = """
    update headwater.views set error = %(error)s
    where name = %(name)s and error is distinct from %(error)s
"""

_ADVANCE = """
    update headwater.views set reached = %(reached)s, changed_at = clock_timestamp()
    where name = %(name)s
"""

_SWAP = """
    update headwater.views
    set state = case when changed_at > %(at)s then 'due' else 'live' end,
        relation = %(relation)s, generation = %(generation)s,
        definition = %(definition)s, result = %(result)s, tables = %(tables)s, built = %(built)s,
        reached = %(reached)s, query_id = null, batch = null, batch_end = null, error = null,
        built_at = clock_timestamp(), changed_at = clock_timestamp()
    where name = %(name)s
"""
