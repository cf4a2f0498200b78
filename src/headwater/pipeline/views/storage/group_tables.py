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

from psycopg import sql

from headwater.errors import PipelineError
from headwater.pipeline.views.definitions import StreamingView
from headwater.pipeline.views.results import Aggregate, Result, ViewResult
from headwater.pipeline.views.storage.groups import GROUPS_AT_ONCE
from headwater.pipeline.views.storage.shown import UNSCALED, Database, ShownTable, upsert
from headwater.pipeline.views.storage.staging import StagedRows, Staging

_LONG = ("text", "bytea")
"""Values of these types may be too long for an index; a digest identifies them."""


class GroupTables:
    """The tables of one generation of a view, and the statements over them."""

    def __init__(
        self, view: StreamingView, number: int, generation: int, result: ViewResult
    ) -> None:
        self.generation = generation
        self.result = result
        self._shown = ShownTable(view, result)
        self._view = view
        self._prefix = f"view_{number}_{generation}"
        self._groups = sql.Identifier("headwater", f"{self._prefix}_groups")
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

    # -------------------------------------------------------------------- adding

    def add(self, database: Database, rows: StagedRows) -> None:
        """Add to the groups and their values."""
        groups, *values = rows.staging.tables
        database.execute(self._adding(rows.relation(groups)), rows.given)
        for (at, each), table in zip(self._with_values(), values, strict=True):
            if rows.has(table):
                added = self._adding_values(at, each, rows.relation(table))
                database.execute(added, rows.given)
                removed = self._removing_values(at, rows.relation(table, "id"))
                database.execute(removed, rows.given)

    def ids(self, database: Database, rows: StagedRows) -> Iterator[list[str]]:
        """The groups that rows belong to, some at a time."""
        groups = next(iter(rows.staging.tables))
        query = sql.SQL("select distinct s.id from {} s").format(rows.relation(groups, "id"))
        with database.cursor("headwater_ids") as cursor:
            cursor.execute(query, rows.given)
            while found := cursor.fetchmany(GROUPS_AT_ONCE):
                yield [id for (id,) in found]

    def staging(self) -> Staging:
        """Tables for what tasks add to this generation."""
        columns = [("id", "text"), ("rows", "bigint")]
        columns += ((f"k{at}", "text") for at in range(len(self.result.key)))
        for at, each in enumerate(self.result.aggregates):
            columns += (
                (f"a{at}_{part}", "bigint" if part == "total" else "text")
                for part in each.needs[1:]
                if part != "values"
            )
        values = (("id", "text"), ("value", "text"), ("n", "bigint"))
        tables = {f"{self._prefix}_stage": tuple(columns)}
        tables |= {f"{self._prefix}_stage{at}": values for at, _ in self._with_values()}
        return Staging(tables)

    def _adding(self, rows: sql.Composable) -> sql.Composed:
        """The statement that adds to groups, of which each may have several rows."""
        columns, chosen = ["id", "rows"], ["s.id::uuid", "sum(s.rows)::bigint"]
        sums = ["rows = g.rows + excluded.rows"]
        for at, field in enumerate(self.result.key):
            columns.append(f"k{at}")
            chosen.append(f"min(s.k{at})::{field.type}")
        for at, each in enumerate(self.result.aggregates):
            if each.has_values:
                continue
            columns.append(f"a{at}_total")
            chosen.append(f"coalesce(sum(s.a{at}_total), 0)::bigint")
            sums.append(f"a{at}_total = g.a{at}_total + excluded.a{at}_total")
            if each.kind != "count":
                columns.append(f"a{at}_sum")
                added, removed = (
                    f"coalesce(sum(s.a{at}_{sign}::numeric), 0)" for sign in ("added", "removed")
                )
                chosen.append(f"{added} - {removed}")
                sums.append(f"a{at}_sum = g.a{at}_sum + excluded.a{at}_sum")
        return sql.SQL(
            f"insert into {{groups}} as g ({', '.join(columns)}) select {', '.join(chosen)}"
            " from {rows} s group by s.id"
            f" on conflict (id) do update set {', '.join(sums)}"
        ).format(groups=self._groups, rows=rows)

    def _adding_values(self, at: int, each: Aggregate, rows: sql.Composable) -> sql.Composed:
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
            f" from (select s.id::uuid as id, s.value::{each.input} as value, s.n"
            " from {rows} s) d group by d.id, d.value having sum(d.n) <> 0"
            f" on conflict ({target}) do update set n = v.n + excluded.n"
            " returning v.id, v.xmax = 0 as is_new)"
            f"{count or ' select 1 where false'}"
        ).format(values=self._values(at), groups=self._groups, rows=rows)

    def _removing_values(self, at: int, rows: sql.Composable) -> sql.Composed:
        delete = (
            "delete from {values} where n <= 0 and n = 0"
            " and id in (select s.id::uuid from {rows} s)"
        )
        if self.result.aggregates[at].kind != "count_distinct":
            return sql.SQL(delete).format(values=self._values(at), rows=rows)
        return sql.SQL(
            f"with gone as ({delete} returning id)"
            f" update {{groups}} g set a{at}_total = g.a{at}_total - a.n"
            " from (select id, count(*) as n from gone group by id) a where g.id = a.id"
        ).format(values=self._values(at), groups=self._groups, rows=rows)

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
        shown = [_key(at) for at in range(len(self.result.key))]
        final = [self._final(at, each) for at, each in enumerate(self.result.aggregates)]
        values = sql.SQL(", ").join(
            [sql.SQL("g.id"), *(sql.SQL("g.{}").format(each) for each in shown), *final]
        )
        only = sql.SQL(" and g.id = any(%(ids)s::text[]::uuid[])" if some else "")
        among = sql.SQL("v.row_id = any(%(ids)s::text[]::uuid[]) and" if some else "")
        gone = sql.SQL(
            "delete from {shown} v where {among} not exists"
            " (select from {groups} g where g.id = v.row_id and g.rows > 0)"
        ).format(shown=self._shown.name, groups=self._groups, among=among)
        rows = sql.SQL("select {values} from {groups} g where g.rows > 0{only}").format(
            values=values, groups=self._groups, only=only
        )
        write = upsert(self._shown, [name for name, _ in self.result.columns], rows)
        empty = sql.SQL("delete from {groups} g where g.rows = 0{only}").format(
            groups=self._groups, only=only
        )
        return gone, write, empty

    def _final(self, at: int, each: Aggregate) -> sql.Composed:
        """The final value of an aggregate, of a group g."""
        total, added = f"g.a{at}_total", f"g.a{at}_sum"
        values = "from {values} v where v.id = g.id"
        if each.scale == UNSCALED:
            added = f"trim_scale({added})"
        match each.kind:
            case "count" | "count_distinct":
                text = total
            case "min" | "max":
                order = "desc" if each.kind == "max" else "asc"
                text = f"(select v.value {values} order by v.value {order} limit 1)"
                if each.scale == UNSCALED:
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

    def show(self, database: Database, relation: int | None, before: Result | None) -> int:
        """Write this generation to the table that users read; returns its oid. Only differences are
        written."""
        return self._shown.show(database, relation, before, self._showing(some=False))


def _key(at: int) -> sql.Composable:
    return sql.SQL(f"k{at}")
