"""Writes a streaming view to PostgreSQL: its record in `headwater.views`, batches, and rebuilds.

A batch is one transaction together with its number, and touches only the groups that it changes. A
new generation is built beside the old one and replaces it in one transaction. The statements over
the tables of a generation are in `tables`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import psycopg
import pyarrow as pa
from psycopg import sql

from headwater import limits
from headwater.database import connect_blocking, translate
from headwater.errors import HeadwaterError, PipelineError
from headwater.model import Position, Table
from headwater.pipeline.failpoints import failpoint
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.views.definitions import StreamingView
from headwater.pipeline.views.groups import GroupDeltas
from headwater.pipeline.views.results import ViewResult
from headwater.pipeline.views.tables import Database, ViewTables


class ViewRecord(msgspec.Struct, frozen=True):
    """A row of `headwater.views`."""

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
    query_id: str | None
    batch: int | None
    batch_end: str | None

    @property
    def position(self) -> Position:
        assert self.built is not None
        return Position.parse(self.built)

    @property
    def offset(self) -> Offset:
        assert self.reached is not None
        return Offset.from_dict(msgspec.json.decode(self.reached))

    @property
    def columns(self) -> ViewResult:
        return msgspec.json.decode(self.result or "", type=ViewResult)

    @property
    def shapes(self) -> dict[str, Table]:
        """The tables by parameter."""
        return msgspec.json.decode(self.tables or "{}", type=dict[str, Table])


class ViewBatch(msgspec.Struct, frozen=True):
    """The number and the end of a batch."""

    query_id: str
    number: int
    end: Offset

    @property
    def end_text(self) -> str:
        return offset_text(self.end)


def offset_text(offset: Offset) -> str:
    return msgspec.json.encode(offset.to_dict()).decode()


_STATE = ", ".join(name for name in ViewRecord.__struct_fields__)


class ViewStore:
    """Writes one view to the database, over a connection of its own."""

    def __init__(self, url: str, view: StreamingView) -> None:
        self._url = url
        self._view = view
        self._connection: Database | None = None

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    @contextmanager
    def transaction(self) -> Iterator[Database]:
        """A transaction; errors name the view."""
        try:
            if self._connection is None or self._connection.closed:
                self._connection = _connect(self._url)
            with self._connection.transaction():
                yield self._connection
        except psycopg.errors.UndefinedTable as error:
            raise PipelineError(
                f"a table of view {self._view.name} is missing: {error.diag.message_primary}",
                hint=f"Rebuild the view: headwater view rebuild {self._view.name}",
            ) from error
        except psycopg.Error as error:
            found = translate(error, self._url)
            named = type(found)(f"view {self._view.name}: {found}", hint=found.hint)
            raise named from error

    # -------------------------------------------------------------------- its row

    def state(self) -> ViewRecord:
        """The record of the view; created for a new view."""
        with self.transaction() as database:
            database.execute(_NEW, (self._view.name,))
            return _state(database, self._view.name)

    def fail(self, error: HeadwaterError | None) -> None:
        """Save the view's error, or None."""
        text = None if error is None else str(error)[: limits.PIPELINE_ERROR_CHARS_MAX]
        with self.transaction() as database:
            database.execute(_FAIL, {"name": self._view.name, "error": text})

    # -------------------------------------------------------------------- building

    def begin(self, state: ViewRecord, result: ViewResult) -> ViewTables:
        """Create empty tables for the next generation."""
        tables = ViewTables(self._view, state.number, state.generation + 1, result)
        with self.transaction() as database:
            if _state(database, self._view.name).generation != state.generation:
                raise self._shared()
            self._check_free(database, state)
            tables.drop(database)
            tables.create(database)
        return tables

    def add(self, tables: ViewTables, changes: pa.Table) -> None:
        """Add rows to a generation that is not visible yet."""
        with self.transaction() as database:
            for part in GroupDeltas.of(tables.result, changes):
                tables.add(database, part)

    def swap(
        self,
        tables: ViewTables,
        *,
        definition: str,
        shapes: dict[str, Table],
        built: Position,
        batch: ViewBatch | None,
    ) -> ViewRecord:
        """Replace the generation before, in one transaction."""
        name = self._view.name
        values = {
            "name": name,
            "generation": tables.generation,
            "definition": definition,
            "result": tables.result.text,
            "tables": msgspec.json.encode(shapes).decode(),
            "built": str(built),
            "reached": offset_text(Offset(built)),
            "query_id": None if batch is None else batch.query_id,
            "batch": None if batch is None else batch.number,
            "batch_end": None if batch is None else batch.end_text,
        }
        with self.transaction() as database:
            before = _state(database, name)
            if before.generation != tables.generation - 1:
                raise self._shared()
            self._check_free(database, before)
            values["relation"] = tables.show(
                database, before.relation, before.columns if before.result else None
            )
            database.execute(_SWAP, values)
            if before.generation:
                ViewTables(self._view, before.number, before.generation, before.columns).drop(
                    database
                )
            return _state(database, name)

    def _shared(self) -> PipelineError:
        return PipelineError(
            f"another process writes to view {self._view.name}, too",
            hint="Let only one pipeline maintain the view.",
            retryable=True,
        )

    def _check_free(self, database: Database, state: ViewRecord) -> None:
        name = sql.Identifier(self._view.schema, self._view.table).as_string(database)
        (found,) = _row(database.execute("select to_regclass(%s)::oid::bigint", (name,)))
        if found is not None and found != state.relation:
            raise PipelineError(
                f"view {self._view.name}: a table of that name exists, and is not the view's",
                hint='Give the view another name: @hw.view(name="…"), or rename the table.',
            )

    # -------------------------------------------------------------------- batches

    def apply(
        self, tables: ViewTables, state: ViewRecord, changes: Sequence[pa.Table], batch: ViewBatch
    ) -> ViewRecord:
        """Add the effect of a batch together with its number, in one transaction."""
        with self.transaction() as database:
            now = _state(database, self._view.name)
            if _marker(now) != _marker(state):
                raise self._shared()
            touched: dict[str, None] = {}
            for each in changes:
                for part in GroupDeltas.of(tables.result, each):
                    tables.add(database, part)
                    touched |= dict.fromkeys(part.ids)
            # Only now: a join may remove a row of the view before it adds another one.
            tables.refresh(database, list(touched))
            values = {
                "name": self._view.name,
                "query_id": batch.query_id,
                "batch": batch.number,
                "end": batch.end_text,
            }
            database.execute(_NOTE, values)
            failpoint("applying")
        return msgspec.structs.replace(
            now,
            query_id=batch.query_id,
            batch=batch.number,
            batch_end=batch.end_text,
            reached=batch.end_text,
        )


def _marker(state: ViewRecord) -> tuple[object, ...]:
    return state.generation, state.query_id, state.batch, state.batch_end


def _connect(url: str) -> Database:
    return connect_blocking(
        url,
        purpose="pipeline",
        prepare_threshold=2,
        # Spark continues once a batch is committed: the batch must be on disk then.
        options="-c jit=off -c synchronous_commit=on",
    )


def _state(database: Database, name: str) -> ViewRecord:
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


_NEW = """
    insert into headwater.views (name, state) values (%s, 'new') on conflict (name) do nothing
"""

_FAIL = """
    update headwater.views set error = %(error)s
    where name = %(name)s and error is distinct from %(error)s
"""

_NOTE = """
    update headwater.views
    set query_id = %(query_id)s, batch = %(batch)s, batch_end = %(end)s, reached = %(end)s,
        changed_at = clock_timestamp()
    where name = %(name)s
"""

_SWAP = """
    update headwater.views
    set state = 'live', relation = %(relation)s, generation = %(generation)s,
        definition = %(definition)s, result = %(result)s, tables = %(tables)s, built = %(built)s,
        reached = %(reached)s, query_id = %(query_id)s, batch = %(batch)s,
        batch_end = %(batch_end)s, error = null, built_at = clock_timestamp(),
        changed_at = clock_timestamp()
    where name = %(name)s
"""
