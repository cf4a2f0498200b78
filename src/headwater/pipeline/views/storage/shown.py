"""The table of a view that users read: the columns of the result, and `row_id`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from headwater.pipeline.views.definitions import ROW_ID, StreamingView
from headwater.pipeline.views.results import Result, RowResult

Database = psycopg.Connection[tuple[Any, ...]]

UNSCALED = 18
"""The scale with which a numeric without scale is read: zeros at its end are removed."""


class ShownTable:
    """The table of a view, with the columns of one generation."""

    def __init__(self, view: StreamingView, result: Result) -> None:
        self.name = sql.Identifier(view.schema, view.table)
        self._label = self.name.as_string(None)
        self._result = result

    def show(
        self,
        database: Database,
        relation: int | None,
        before: Result | None,
        statements: Sequence[sql.Composed],
        values: dict[str, Any] | None = None,
    ) -> int:
        """Write rows by statements; returns the table's oid. A new table is captured after it was
        filled: its first rows are no changes."""
        is_new = relation is None or not _exists(database, relation)
        if is_new:
            self._create(database)
        elif before is not None and _columns(before) != _columns(self._result):
            self._alter(database, before)
        for statement in statements:
            database.execute(statement, values)
        if is_new:
            self._index(database)
            self._enable(database)
        row = database.execute("select %s::regclass::oid::bigint", (self._label,)).fetchone()
        assert row is not None
        return int(row[0])

    def _create(self, database: Database) -> None:
        columns = [
            sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind))
            for name, kind in self._result.columns
        ]
        database.execute(
            sql.SQL("create table {} ({} uuid primary key, {})").format(
                self.name, sql.Identifier(ROW_ID), sql.SQL(", ").join(columns)
            )
        )

    def _index(self, database: Database) -> None:
        for names in _indexes(self._result):
            keys = sql.SQL(", ").join(map(sql.Identifier, names))
            database.execute(sql.SQL("create index on {} ({})").format(self.name, keys))

    def _enable(self, database: Database) -> None:
        database.execute("select headwater.enable_reactivity(%s)", (self._label,))

    def _alter(self, database: Database, before: Result) -> None:
        """Give the table the columns of this generation. Dropping a column drops its index."""
        old, new = dict(before.columns), dict(self._result.columns)
        steps = [
            sql.SQL("drop column {}").format(sql.Identifier(name))
            for name, kind in old.items()
            if new.get(name) != kind
        ]
        steps += (
            sql.SQL("add column {} {}").format(sql.Identifier(name), sql.SQL(kind))
            for name, kind in new.items()
            if old.get(name) != kind
        )
        if steps:
            database.execute(
                sql.SQL("alter table {} {}").format(self.name, sql.SQL(", ").join(steps))
            )
        if _indexes(before) != _indexes(self._result):
            self._index(database)
        self._enable(database)


def _columns(result: Result) -> object:
    return result.columns, _indexes(result)


def _indexes(result: Result) -> list[list[str]]:
    """The columns of each index: the key, and the column that changed rows are found by."""
    key = [field.name for field in result.key]
    if isinstance(result, RowResult) and result.local[0].column != key[0]:
        return [key, [result.local[0].column]]
    return [key]


def _exists(database: Database, relation: int) -> bool:
    found = database.execute("select from pg_class where oid = %s", (relation,))
    return found.fetchone() is not None


def upsert(table: ShownTable, names: Sequence[str], rows: sql.Composable) -> sql.Composed:
    """The statement that writes rows (`row_id` and the columns), and only those that differ."""
    columns = [sql.Identifier(name) for name in names]
    listed = sql.SQL(", ").join
    return sql.SQL(
        "insert into {shown} as v ({id}, {names}) {rows}"
        " on conflict ({id}) do update set ({names}) = row({news})"
        " where row({olds}) is distinct from row({news})"
    ).format(
        shown=table.name,
        id=sql.Identifier(ROW_ID),
        # Also the key: after a rebuild, the same digest may stand for another name or type.
        names=listed(columns),
        rows=rows,
        news=listed([sql.SQL("excluded.{}").format(name) for name in columns]),
        olds=listed([sql.SQL("v.{}").format(name) for name in columns]),
    )
