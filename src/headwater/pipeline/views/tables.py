"""The PostgreSQL side of a view: what it shows, and what it needs to know to stay up to date.

    headwater.views           one row a view: its generation, and which batch is in
    headwater.view_7_2_groups a row for each group: how many rows, totals
    headwater.view_7_2_a3     for min, max, count distinct and floats: each value of a group, and
                              how often it is there
    revenue                   what everybody reads: the key and the final values

A group is known by a digest of its key, `row_id`: so NULL may be in a key, and a view that is built
anew has the same rows. A batch is one transaction with its number, and touches only the groups that
it changes; a row whose values are the same is not written, so that nobody hears of nothing. A new
generation is built beside the old one and takes its place in one transaction.
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
from headwater.pipeline.crashes import crash_point
from headwater.pipeline.offsets import Offset
from headwater.pipeline.views.definitions import ROW_ID, View
from headwater.pipeline.views.groups import Groups
from headwater.pipeline.views.results import Aggregate, Result

Database = psycopg.Connection[tuple[Any, ...]]

_LONG = ("text", "bytea")
"""Values of these may be too long for an index; they are told apart by a digest."""


class State(msgspec.Struct, frozen=True):
    """A row of headwater.views."""

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
    def columns(self) -> Result:
        return msgspec.json.decode(self.result or "", type=Result)

    @property
    def shapes(self) -> dict[str, Table]:
        """The tables by parameter."""
        return msgspec.json.decode(self.tables or "{}", type=dict[str, Table])


class Batch(msgspec.Struct, frozen=True):
    """Which batch something belongs to."""

    query_id: str
    number: int
    end: Offset

    @property
    def end_text(self) -> str:
        return offset_text(self.end)


def offset_text(offset: Offset) -> str:
    return msgspec.json.encode(offset.to_dict()).decode()


_STATE = ", ".join(name for name in State.__struct_fields__)


class Store:
    """One view in the database, over a connection of its own."""

    def __init__(self, url: str, view: View) -> None:
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
                f"view {self._view.name} lost a table: {error.diag.message_primary}",
                hint=f"Make it anew: headwater view rebuild {self._view.name}",
            ) from error
        except psycopg.Error as error:
            found = translate(error, self._url)
            named = type(found)(f"view {self._view.name}: {found}", hint=found.hint)
            raise named from error

    # -------------------------------------------------------------------- its row

    def state(self) -> State:
        """How the view is; a new one is noted down."""
        with self.transaction() as database:
            database.execute(_NEW, (self._view.name,))
            return _state(database, self._view.name)

    def fail(self, error: HeadwaterError | None) -> None:
        """Note why it does not go on, or that it does."""
        text = None if error is None else str(error)[: limits.PIPELINE_ERROR_CHARS_MAX]
        with self.transaction() as database:
            database.execute(_FAIL, {"name": self._view.name, "error": text})

    # -------------------------------------------------------------------- building

    def begin(self, state: State, result: Result) -> Tables:
        """Empty tables for the next generation."""
        tables = Tables(self._view, state.number, state.generation + 1, result)
        with self.transaction() as database:
            if _state(database, self._view.name).generation != state.generation:
                raise self._shared()
            self._check_free(database, state)
            tables.drop(database)
            tables.create(database)
        return tables

    def add(self, tables: Tables, changes: pa.Table) -> None:
        """Add rows to a generation that nobody sees yet."""
        with self.transaction() as database:
            for part in Groups.of(tables.result, changes):
                tables.add(database, part)

    def swap(
        self,
        tables: Tables,
        *,
        definition: str,
        shapes: dict[str, Table],
        built: Position,
        batch: Batch | None,
    ) -> State:
        """Let a generation take the place of the one before, for all to see at once."""
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
            values["relation"] = tables.show(database, before)
            database.execute(_SWAP, values)
            if before.generation:
                Tables(self._view, before.number, before.generation, before.columns).drop(database)
            return _state(database, name)

    def _shared(self) -> PipelineError:
        return PipelineError(
            f"view {self._view.name} is written by somebody else, too",
            hint="Two pipelines may keep the same view; let one of them do it.",
            retryable=True,
        )

    def _check_free(self, database: Database, state: State) -> None:
        name = sql.Identifier(self._view.schema, self._view.table).as_string(database)
        (found,) = _row(database.execute("select to_regclass(%s)::oid::bigint", (name,)))
        if found is not None and found != state.relation:
            raise PipelineError(
                f"view {self._view.name}: there is a table of that name, and it is not the view's",
                hint='Give the view another name: @hw.view(name="…"), or rename the table.',
            )

    # -------------------------------------------------------------------- batches

    def apply(
        self, tables: Tables, state: State, changes: Sequence[pa.Table], batch: Batch
    ) -> State:
        """Add what a batch changed, with its number, in one transaction."""
        with self.transaction() as database:
            now = _state(database, self._view.name)
            if _marker(now) != _marker(state):
                raise self._shared()
            touched: dict[str, None] = {}
            for each in changes:
                for part in Groups.of(tables.result, each):
                    tables.add(database, part)
                    touched |= dict.fromkeys(part.ids)
            # Only now: what a join takes away may come before what it adds.
            tables.refresh(database, list(touched))
            values = {
                "name": self._view.name,
                "query_id": batch.query_id,
                "batch": batch.number,
                "end": batch.end_text,
            }
            database.execute(_NOTE, values)
            crash_point("applying")
        return msgspec.structs.replace(
            now,
            query_id=batch.query_id,
            batch=batch.number,
            batch_end=batch.end_text,
            reached=batch.end_text,
        )


def _marker(state: State) -> tuple[object, ...]:
    return state.generation, state.query_id, state.batch, state.batch_end


def _connect(url: str) -> Database:
    return connect_blocking(
        url,
        purpose="pipeline",
        prepare_threshold=2,
        # Spark goes on once a batch is committed: it must be on disk then.
        options="-c jit=off -c synchronous_commit=on",
    )


def _state(database: Database, name: str) -> State:
    query = f"select {_STATE} from headwater.views where name = %s for update".encode()
    row = database.execute(query, (name,)).fetchone()
    if row is None:
        raise PipelineError(
            f"view {name} was dropped while the pipeline kept it",
            hint="Take its function out of the application, or start the pipeline again.",
        )
    return State(*row)


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


# ------------------------------------------------------------------------ a generation


class Tables:
    """The tables of one generation of a view, and the statements over them."""

    def __init__(self, view: View, number: int, generation: int, result: Result) -> None:
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
        told = "digest bytea not null, " if each.input in _LONG else ""
        key = "digest" if told else "value"
        database.execute(
            sql.SQL(
                f"create table {{}} (id uuid not null, {told}value {each.input} not null,"
                f" n bigint not null, primary key (id, {key}))"
            ).format(self._values(at))
        )
        # Those that are gone, for as long as it takes to remove them.
        database.execute(sql.SQL("create index on {} (id) where n <= 0").format(self._values(at)))

    def drop(self, database: Database) -> None:
        for table in (self._groups, *(self._values(at) for at, _ in self._with_values())):
            database.execute(sql.SQL("drop table if exists {}").format(table))

    # -------------------------------------------------------------------- adding

    def add(self, database: Database, part: Groups) -> None:
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
        """Add groups to those that are there."""
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
        # Without what stays as it was: a row that went and came again, the same.
        return sql.SQL(
            f"insert into {{}} as g ({', '.join(columns)}) select {', '.join(chosen)}"
            f" from unnest(%(ids)s::text[]::uuid[], %(rows)s::bigint[]{arrays})"
            f" d (id, rows{names})"
            f" on conflict (id) do update set {', '.join(sums)}"
        ).format(self._groups)

    def _adding_values(self, at: int, each: Aggregate) -> sql.Composed:
        """Add to the values of groups. A value that was not there is one more that is different."""
        digest = {"text": "sha256(convert_to(d.value, 'UTF8')), ", "bytea": "sha256(d.value), "}
        told = digest.get(each.input, "")
        columns, target = ("digest, ", "id, digest") if told else ("", "id, value")
        count = ""
        if each.kind == "count_distinct":
            count = (
                f" update {{groups}} g set a{at}_total = g.a{at}_total + a.n from"
                " (select id, count(*) as n from added where is_new group by id) a"
                " where g.id = a.id"
            )
        return sql.SQL(
            f"with added as (insert into {{values}} as v (id, {columns}value, n)"
            f" select d.id, {told}d.value, sum(d.n)"
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
        """Show groups as they are now; those without rows are gone."""
        for at in range(0, len(ids), limits.VIEW_GROUPS_AT_ONCE):
            some = {"ids": ids[at : at + limits.VIEW_GROUPS_AT_ONCE]}
            if database.execute(self._less_than_none, some).fetchone():
                raise PipelineError(
                    f"view {self._view.name} is told to remove what it does not have",
                    hint="Does its function give the same row the same result every time? Then "
                    f"build it anew: headwater view rebuild {self._view.name}",
                )
            for statement in self._refresh:
                database.execute(statement, some)

    def _negative(self) -> sql.Composed:
        """Finds a group or a value that is there less than not at all."""
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
            # The key, too: another key may have the same digest, under another name or type.
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

    def show(self, database: Database, before: State) -> int:
        """Make the table that everybody reads show this generation; returns its oid. Only what
        differs is written."""
        if before.relation is None or not _exists(database, before.relation):
            self._create_shown(database)
        elif before.columns.columns != self.result.columns:
            self._alter_shown(database, before.columns)
        for statement in self._showing(some=False):
            database.execute(statement)
        (oid,) = _row(database.execute("select %s::regclass::oid::bigint", (self._label,)))
        return int(oid)

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

    def _alter_shown(self, database: Database, before: Result) -> None:
        """Give the table the columns of this generation. An index goes with its column."""
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
"""The scale that a numeric without one is read with: what is beyond its digits is not meant."""


def _key(at: int) -> sql.Composable:
    return sql.SQL(f"k{at}")


def _exists(database: Database, relation: int) -> bool:
    found = database.execute("select from pg_class where oid = %s", (relation,))
    return found.fetchone() is not None
