"""The rows of a view that is maintained key by key, in PostgreSQL.

The table that users read has all there is: its rows are replaced for the values that changed. Only
a new generation has a table of its own, until it replaces the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from psycopg import sql

from headwater.errors import PipelineError
from headwater.pipeline.views.definitions import StreamingView
from headwater.pipeline.views.results import Result, ResultField, RowResult
from headwater.pipeline.views.source_rows import Values
from headwater.pipeline.views.storage.groups import digest, texts
from headwater.pipeline.views.storage.shown import UNSCALED, Database, ShownTable, upsert
from headwater.pipeline.views.storage.staging import Staging, counted, rows_of


class RowTables:
    """The tables of one generation of a view."""

    def __init__(
        self, view: StreamingView, number: int, generation: int, result: RowResult
    ) -> None:
        self.generation = generation
        self.result = result
        self._view = view
        self._shown = ShownTable(view, result)
        self._stage = f"view_{number}_{generation}_stage"

    def staging(self) -> Staging:
        columns = [("id", "text"), *((f"c{at}", "text") for at in range(len(self.result.fields)))]
        return Staging({self._stage: tuple(columns)})

    def create(self, database: Database) -> None:
        """Nothing: `staging` has the rows of a generation until it is shown."""

    def drop(self, database: Database) -> None:
        for statement in self.staging().drop():
            database.execute(statement)

    # -------------------------------------------------------------------- a generation

    def show(
        self, database: Database, relation: int | None, before: Result | None, runs: Sequence[str]
    ) -> int:
        """Write this generation to the table that users read; returns its oid. Only differences are
        written."""
        rows, given = rows_of(self._stage), counted(runs)
        twice = sql.SQL("select s.id from {} s group by s.id having count(*) > 1 limit 1")
        if database.execute(twice.format(rows), given).fetchone():
            raise self._twice()
        gone = sql.SQL(
            "delete from {shown} v where not exists (select from {rows} s where s.id::uuid ="
            " v.row_id)"
        ).format(shown=self._shown.name, rows=rows)
        return self._shown.show(
            database, relation, before, [gone, self._upsert(sql.SQL("{} s").format(rows))], given
        )

    def _upsert(self, rows: sql.Composable) -> sql.Composed:
        columns = [sql.SQL(", ") + _value(at, field) for at, field in enumerate(self.result.fields)]
        chosen = sql.SQL("select s.id::uuid{} from {}").format(sql.SQL("").join(columns), rows)
        return upsert(self._shown, [name for name, _ in self.result.columns], chosen)

    def _twice(self) -> PipelineError:
        names = ", ".join(field.name for field in self.result.key)
        return PipelineError(
            f"view {self._view.name}: two rows of its result have the same {names}",
            hint="Name all columns that identify a row: @hw.view(key=[…])",
        )

    # -------------------------------------------------------------------- changes

    def replace(self, database: Database, rows: pa.Table, touched: Mapping[str, Values]) -> None:
        """Replace the rows that have the touched values in the columns that the view is local
        to."""
        named = _staged(self.result, rows)
        ids = named["id"]
        if len(set(ids)) < len(ids):
            raise self._twice()
        given: dict[str, Any] = dict(named) | {"ids": ids}
        local = self._touched(touched, given)
        others = sql.SQL(
            "select from {shown} v where v.row_id = any(%(ids)s::text[]::uuid[])"
            " and ({local}) is not true limit 1"
        ).format(shown=self._shown.name, local=local)
        if ids and database.execute(others, given).fetchone():
            raise self._twice()
        database.execute(
            sql.SQL(
                "delete from {shown} v where {local} and v.row_id <> all(%(ids)s::text[]::uuid[])"
            ).format(shown=self._shown.name, local=local),
            given,
        )
        if ids:
            arrays = ", ".join(f"%({name})s::text[]" for name in named)
            database.execute(
                self._upsert(sql.SQL(f"unnest({arrays}) s ({', '.join(named)})")), given
            )

    def _touched(self, touched: Mapping[str, Values], given: dict[str, Any]) -> sql.Composed:
        """Whether a row has touched values."""
        types = dict(self.result.columns)
        tests = []
        for at, (name, values) in enumerate(touched.items()):
            given |= {f"l{at}": sorted(values.texts), f"n{at}": values.has_null}
            tests.append(
                sql.SQL(
                    f"({{column}} = any(%(l{at})s::text[]::{types[name]}[])"
                    f" or (%(n{at})s and {{column}} is null))"
                ).format(column=sql.Identifier("v", name))
            )
        return sql.SQL(" and ").join(tests)


def _value(at: int, field: ResultField) -> sql.Composable:
    text = f"s.c{at}::{field.type}"
    return sql.SQL(f"trim_scale({text})" if field.scale == UNSCALED else text)


def staged_batch(result: RowResult, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of the result, as they are written to the staging table."""
    return pa.RecordBatch.from_pydict(
        {name: pa.array(values, pa.string()) for name, values in _staged(result, batch).items()}
    )


def _staged(result: RowResult, rows: pa.RecordBatch | pa.Table) -> dict[str, list[Any]]:
    columns = [texts(_one(rows.column(at))) for at in range(len(result.fields))]
    # The columns of the result are in the order of its fields.
    ids = [digest(key) for key in zip(*columns[: len(result.key)], strict=True)]
    return {"id": ids, **{f"c{at}": values for at, values in enumerate(columns)}}


def _one(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
