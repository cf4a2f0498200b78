"""The rows of a view that is maintained key by key, in PostgreSQL.

The table that users read has all there is: its rows are replaced for the values that changed. Only
a new generation has a table of its own, until it replaces the one before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from psycopg import sql

from headwater.errors import PipelineError
from headwater.pipeline.views.definitions import StreamingView
from headwater.pipeline.views.results import Result, ResultField, RowResult
from headwater.pipeline.views.source_rows import Values
from headwater.pipeline.views.storage.groups import digest, key_texts, texts
from headwater.pipeline.views.storage.shown import UNSCALED, Database, ShownTable, upsert
from headwater.pipeline.views.storage.staging import StagedRows, Staging


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

    # -------------------------------------------------------------------- a generation

    def show(
        self, database: Database, relation: int | None, before: Result | None, rows: StagedRows
    ) -> int:
        """Write this generation to the table that users read; returns its oid. Only differences are
        written."""
        self._check_unique(database, rows)
        gone = sql.SQL(
            "delete from {shown} v where not exists (select from {ids} s where s.id::uuid ="
            " v.row_id)"
        ).format(shown=self._shown.name, ids=rows.relation(self._stage, "id"))
        statements = [gone, self._upsert(rows)]
        return self._shown.show(database, relation, before, statements, rows.given)

    def _check_unique(self, database: Database, rows: StagedRows) -> None:
        twice = sql.SQL("select s.id from {} s group by s.id having count(*) > 1 limit 1")
        ids = rows.relation(self._stage, "id")
        if database.execute(twice.format(ids), rows.given).fetchone():
            raise self._twice()

    def _upsert(self, rows: StagedRows) -> sql.Composed:
        columns = [sql.SQL(", ") + _value(at, field) for at, field in enumerate(self.result.fields)]
        chosen = sql.SQL("select s.id::uuid{} from {} s").format(
            sql.SQL("").join(columns), rows.relation(self._stage)
        )
        return upsert(self._shown, [name for name, _ in self.result.columns], chosen)

    def _twice(self) -> PipelineError:
        names = ", ".join(field.name for field in self.result.key)
        return PipelineError(
            f"view {self._view.name}: two rows of its result have the same {names}",
            hint="Name all columns that identify a row: @hw.view(key=[…])",
        )

    # -------------------------------------------------------------------- changes

    def replace(self, database: Database, rows: StagedRows, touched: Mapping[str, Values]) -> None:
        """Replace the rows that have the touched values in the columns that the view is local
        to."""
        self._check_unique(database, rows)
        given = dict(rows.given)
        names = {
            "shown": self._shown.name,
            "ids": rows.relation(self._stage, "id"),
            "local": self._touched(touched, given),
        }
        # Counted: with `limit 1`, PostgreSQL would scan the table for a row that is not there.
        others = sql.SQL(
            "select count(*) from {shown} v where v.row_id in (select s.id::uuid from {ids} s)"
            " and ({local}) is not true"
        ).format(**names)
        if database.execute(others, given).fetchone() != (0,):
            raise self._twice()
        # Sets and an array, not a join: how many rows there are is not known to PostgreSQL, which
        # could choose a nested loop.
        gone = sql.SQL(
            "delete from {shown} v where v.row_id = any(array("
            "select v.row_id from {shown} v where {local} except select s.id::uuid from {ids} s))"
        ).format(**names)
        database.execute(gone, given)
        if rows.has(self._stage):
            database.execute(self._upsert(rows), given)

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


def view_rows(
    result: RowResult, batch: pa.RecordBatch, touched: Mapping[str, Values] | None = None
) -> pa.RecordBatch:
    """Rows of the result, as rows for the staging table. Those of other than the touched values may
    be incomplete, and are left out."""
    for name, values in ({} if touched is None else touched).items():
        at = result.columns.index((name, dict(result.columns)[name]))
        own = [each in values for each in key_texts(batch.column(at))]
        batch = batch.filter(pa.array(own, pa.bool_()))
    # The columns of the result are in the order of its fields.
    columns = [texts(batch.column(at)) for at in range(len(result.fields))]
    ids = [digest(key) for key in zip(*columns[: len(result.key)], strict=True)]
    named = {"id": ids, **{f"c{at}": values for at, values in enumerate(columns)}}
    return pa.RecordBatch.from_pydict(
        {name: pa.array(values, pa.string()) for name, values in named.items()}
    )
