"""The tables of a streaming view in PostgreSQL.

    headwater.views           a row for each view: its generation, and its last batch (`store`)
    headwater.view_7_2_groups a row for each group: how many rows, totals
    headwater.view_7_2_a3     for min, max, count distinct and floats: each value of a group, and
                              its count
    revenue                   the table that users read: the key and the final values

A group is identified by a digest of its key, `row_id`: so a key may contain NULL, and a rebuilt
view has the same rows. A row whose values did not change is not written, so that followers get no
empty changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import psycopg
from psycopg import sql

from headwater.errors import PipelineError
from headwater.pipeline.views.definitions import ROW_ID, StreamingView
from headwater.pipeline.views.groups import GROUPS_AT_ONCE, GroupDeltas
from headwater.pipeline.views.results import Aggregate, ViewResult

Database = psycopg.Connection[tuple[Any, ...]]

_LONG = ("text", "bytea")
"""Values of these types may be too long for an index; a digest identifies them."""


class ViewTables:
    """The tables of one generation of a view, and the statements over them."""

    def __init__(
        self, view: StreamingView, number: int, generation: int, result: ViewResult
    ) -> None:
        self.generation = generation
        self.result = result
        self._shown = sql.Identifier(view.schema, view.table)
        self._view = view
        self._label = sql.Identifier(view.schema, view.table).as_string(None)
        self._prefix = f"view_{number}_{generation}"
        self._groups = sql.Identifier("headwater", f"{self._prefix}_groups")
        self._add_groups = self._adding()
        self._refresh = self._showing(some=True)
        self._less_than_none = self._negative()

    def _values(self, at: int) -> sql.Identifier:
        return sql.Identifier("headwater", f"{self._prefix}_a{at}")

    def _with_values(self) -> Iterator[tuple[int, Aggregate]]:
        return ((at, a) for at, a in enumerate(self.result.aggregates) if a.has_values)

    # -------------------------------------------------------------------- making

    def create(self, database: Database) -> None:
        columns: list[sql.Composable] = [sql.SQL("id uuid primary key, rows bigint not null")]
        columns += (
            sql.SQL("{} {}").format(_key(at), sql.SQL(field.type))
            for at, field in enumerate(self.result.key)
        )
        for at, each in enumerate(self.result.aggregates):
            columns.append(sql.SQL(f"a{at}_total bigint not null default 0"))
            if not each.has_values and each.kind != "count":
                columns.append(sql.SQL(f"a{at}_sum numeric not null"))
        database.execute(
            sql.SQL("create table {} ({})").format(self._groups, sql.SQL(", ").join(columns))
        )
        for at, each in self._with_values():
            self._create_values(database, at, each)

    def _create_values(self, database: Database, at: int, each: Aggregate) -> None:
        digest_column = "digest bytea not null, " if each.input in _LONG else ""
        key = "digest" if digest_column else "value"
        database.execute(
            sql.SQL(
                f"create table {{}} (id uuid not null, {digest_column}value {each.input} not null,"
                f" n bigint not null, primary key (id, {key}))"
            ).format(self._values(at))
        )
        # An index of values without rows, which are removed right after.
        database.execute(sql.SQL("create index on {} (id) where n <= 0").format(self._values(at)))

    def drop(self, database: Database) -> None:
        for table in (self._groups, *(self._values(at) for at, _ in self._with_values())):
            database.execute(sql.SQL("drop table if exists {}").format(table))

    # -------------------------------------------------------------------- adding

    def add(self, database: Database, part: GroupDeltas) -> None:
        keys = {f"k{at}": key for at, key in enumerate(part.keys)}
        database.execute(
            self._add_groups, {"ids": part.ids, "rows": part.rows, **keys, **part.totals}
        )
        for at, each in self._with_values():
            ids, values, weights = part.values[at]
            if ids:
                database.execute(
                    self._adding_values(at, each), {"ids": ids, "values": values, "n": weights}
                )
                database.execute(self._removing_values(at), {"ids": list(set(ids))})

    def _adding(self) -> sql.Composed:
        """The statement that adds to groups."""
        given: list[tuple[str, str, str]] = [
            (f"k{at}", f"text[]::{field.type}[]", f"k{at}")
            for at, field in enumerate(self.result.key)
        ]
        columns, chosen, sums = (
            ["id", "rows"],
            ["d.id", "d.rows"],
            ["rows = g.rows + excluded.rows"],
        )
        for name, _, _ in given:
            columns.append(name)
            chosen.append(f"d.{name}")
        for at, each in enumerate(self.result.aggregates):
            if each.has_values:
                continue
            given.append((f"a{at}_total", "bigint[]", ""))
            columns.append(f"a{at}_total")
            chosen.append(f"d.a{at}_total")
            sums.append(f"a{at}_total = g.a{at}_total + excluded.a{at}_total")
            if each.kind != "count":
                given += (
                    (f"a{at}_{sign}", "text[]::numeric[]", "") for sign in ("added", "removed")
                )
                columns.append(f"a{at}_sum")
                chosen.append(f"coalesce(d.a{at}_added, 0) - coalesce(d.a{at}_removed, 0)")
                sums.append(f"a{at}_sum = g.a{at}_sum + excluded.a{at}_sum")
        arrays = "".join(f", %({name})s::{kind}" for name, kind, _ in given)
        names = "".join(f", {name}" for name, _, _ in given)

        return sql.SQL(
            f"insert into {{}} as g ({', '.join(columns)}) select {', '.join(chosen)}"
            f" from unnest(%(ids)s::text[]::uuid[], %(rows)s::bigint[]{arrays})"
            f" d (id, rows{names})"
            f" on conflict (id) do update set {', '.join(sums)}"
        ).format(self._groups)

    def _adding_values(self, at: int, each: Aggregate) -> sql.Composed:
        """The statement that adds to the values of groups, and counts new distinct values."""
        digest = {"text": "sha256(convert_to(d.value, 'UTF8')), ", "bytea": "sha256(d.value), "}
        digest_column = digest.get(each.input, "")
        columns, target = ("digest, ", "id, digest") if digest_column else ("", "id, value")
        count = ""
        if each.kind == "count_distinct":
            count = (
                f" update {{groups}} g set a{at}_total = g.a{at}_total + a.n from"
                " (select id, count(*) as n from added where is_new group by id) a"
                " where g.id = a.id"
            )
        return sql.SQL(
            f"with added as (insert into {{values}} as v (id, {columns}value, n)"
            f" select d.id, {digest_column}d.value, sum(d.n)"
            f" from unnest(%(ids)s::text[]::uuid[], %(values)s::text[]::{each.input}[],"
            " %(n)s::int[]) d (id, value, n) group by d.id, d.value having sum(d.n) <> 0"
            f" on conflict ({target}) do update set n = v.n + excluded.n"
            " returning v.id, v.xmax = 0 as is_new)"
            f"{count or ' select 1'}"
        ).format(values=self._values(at), groups=self._groups)

    def _removing_values(self, at: int) -> sql.Composed:
        counted = self.result.aggregates[at].kind == "count_distinct"
        delete = "delete from {values} where n <= 0 and n = 0 and id = any(%(ids)s::text[]::uuid[])"
        if not counted:
            return sql.SQL(delete).format(values=self._values(at))
        return sql.SQL(
            f"with gone as ({delete} returning id)"
            f" update {{groups}} g set a{at}_total = g.a{at}_total - a.n"
            " from (select id, count(*) as n from gone group by id) a where g.id = a.id"
        ).format(values=self._values(at), groups=self._groups)

    # -------------------------------------------------------------------- showing

    def refresh(self, database: Database, ids: Sequence[str]) -> None:
        """Write the present values of groups to the table that users read."""
        for at in range(0, len(ids), GROUPS_AT_ONCE):
            some = {"ids": ids[at : at + GROUPS_AT_ONCE]}
            if database.execute(self._less_than_none, some).fetchone():
                raise PipelineError(
                    f"view {self._view.name}: a change removes a row that the view does not have",
                    hint="Check that its function gives the same result for the same row every "
                    f"time, then rebuild it: headwater view rebuild {self._view.name}",
                )
            for statement in self._refresh:
                database.execute(statement, some)

    def _negative(self) -> sql.Composed:
        """The statement that finds a group or a value with a negative count."""
        ids = "id = any(%(ids)s::text[]::uuid[])"
        parts = [sql.SQL(f"select from {{}} where rows < 0 and {ids}").format(self._groups)]
        parts += (
            sql.SQL(f"select from {{}} where n <= 0 and n < 0 and {ids}").format(self._values(at))
            for at, _ in self._with_values()
        )
        return sql.SQL(" union all ").join(parts) + sql.SQL(" limit 1")

    def _showing(self, *, some: bool) -> tuple[sql.Composed, ...]:
        names = [sql.Identifier(name) for name, _ in self.result.columns]
        shown = [_key(at) for at in range(len(self.result.key))]
        final = [self._final(at, each) for at, each in enumerate(self.result.aggregates)]
        listed = sql.SQL(", ").join
        only = sql.SQL(" and g.id = any(%(ids)s::text[]::uuid[])" if some else "")
        among = sql.SQL("v.row_id = any(%(ids)s::text[]::uuid[]) and" if some else "")
        gone = sql.SQL(
            "delete from {shown} v where {among} not exists"
            " (select from {groups} g where g.id = v.row_id and g.rows > 0)"
        ).format(shown=self._shown, groups=self._groups, among=among)
        write = sql.SQL(
            "insert into {shown} as v ({id}, {names})"
            " select g.id, {values} from {groups} g where g.rows > 0{only}"
            " on conflict ({id}) do update set ({values_of}) = row({news})"
            " where ({olds}) is distinct from ({news})"
        ).format(
            shown=self._shown,
            groups=self._groups,
            id=sql.Identifier(ROW_ID),
            names=listed(names),
            values=listed([sql.SQL("g.{}").format(each) for each in shown] + final),
            only=only,
            # Also the key: after a rebuild, the same digest may stand for another name or type.
            values_of=listed(names),
            news=listed([sql.SQL("excluded.{}").format(name) for name in names]),
            olds=listed([sql.SQL("v.{}").format(name) for name in names]),
        )
        empty = sql.SQL("delete from {groups} g where g.rows = 0{only}").format(
            groups=self._groups, only=only
        )
        return gone, write, empty

    def _final(self, at: int, each: Aggregate) -> sql.Composed:
        """The final value of an aggregate, of a group g."""
        total, added = f"g.a{at}_total", f"g.a{at}_sum"
        values = "from {values} v where v.id = g.id"
        if each.scale == _UNSCALED:
            added = f"trim_scale({added})"
        match each.kind:
            case "count" | "count_distinct":
                text = total
            case "min" | "max":
                order = "desc" if each.kind == "max" else "asc"
                text = f"(select v.value {values} order by v.value {order} limit 1)"
                if each.scale == _UNSCALED:
                    text = f"trim_scale({text})"
            case "sum" if each.has_values:
                text = f"(select sum(v.value::double precision * v.n order by v.value) {values})"
            case _ if each.has_values:
                text = (
                    "(select sum(v.value::double precision * v.n order by v.value) / sum(v.n)"
                    f" {values})"
                )
            case "sum":
                text = f"case when {total} > 0 then {added} end"
            case _:
                text = f"case when {total} > 0 then {added} / {total} end"
        return sql.SQL(f"({text})::{each.type}").format(values=self._values(at))

    def show(self, database: Database, relation: int | None, before: ViewResult | None) -> int:
        """Write this generation to the table that users read; returns its oid. Only differences are
        written."""
        if relation is None or not _exists(database, relation):
            self._create_shown(database)
        elif before is not None and before.columns != self.result.columns:
            self._alter_shown(database, before)
        for statement in self._showing(some=False):
            database.execute(statement)
        row = database.execute("select %s::regclass::oid::bigint", (self._label,)).fetchone()
        assert row is not None
        return int(row[0])

    def _create_shown(self, database: Database) -> None:
        columns = [
            sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind))
            for name, kind in self.result.columns
        ]
        database.execute(
            sql.SQL("create table {} ({} uuid primary key, {})").format(
                self._shown, sql.Identifier(ROW_ID), sql.SQL(", ").join(columns)
            )
        )
        self._index(database)
        database.execute("select headwater.enable_reactivity(%s)", (self._label,))

    def _index(self, database: Database) -> None:
        keys = [sql.Identifier(field.name) for field in self.result.key]
        statement = sql.SQL("create index on {} ({})").format(self._shown, sql.SQL(", ").join(keys))
        database.execute(statement)

    def _alter_shown(self, database: Database, before: ViewResult) -> None:
        """Give the table the columns of this generation. Dropping a column drops its index."""
        old, new = dict(before.columns), dict(self.result.columns)
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
                sql.SQL("alter table {} {}").format(self._shown, sql.SQL(", ").join(steps))
            )
        if before.key != self.result.key:
            self._index(database)
        database.execute("select headwater.enable_reactivity(%s)", (self._label,))


_UNSCALED = 18
"""The scale with which a numeric without scale is read: zeros at its end are removed."""


def _key(at: int) -> sql.Composable:
    return sql.SQL(f"k{at}")


def _exists(database: Database, relation: int) -> bool:
    found = database.execute("select from pg_class where oid = %s", (relation,))
    return found.fetchone() is not None
