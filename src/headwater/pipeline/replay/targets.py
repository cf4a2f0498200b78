"""The table that a replay writes to, and the progress of the replay, in the same transaction.

The table has the columns, types and key of the original. Values are images of rows, PostgreSQL's
own JSON, and PostgreSQL reads them: no value is converted to Python. A row of `headwater.replays`
has the progress. It changes in one transaction with the table, so that a replay that was
interrupted continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import msgspec
import psycopg
from psycopg import errors, sql
from psycopg.types.json import Jsonb

from headwater.database import connect_blocking, is_reserved, translated
from headwater.errors import ConfigError, PipelineError
from headwater.model import Actor, Table, with_operators
from headwater.pipeline.reading import state
from headwater.pipeline.reading.changes import StoredChange

Database = psycopg.Connection[tuple[Any, ...]]


class ReplayRun(msgspec.Struct, frozen=True):
    """A replay and its progress.

    `since` and `until` are as requested, `start` and `end` the settled moments.
    """

    source: str
    kind: Literal["rebuild", "emit"]
    since: str | None
    until: str | None
    start: str | None
    end: str
    shape: int = 0
    """The present shape of the target."""
    key: str | None = None
    """The key of the last row of the first state that is written."""
    seeded: bool = False
    """Whether the first state is completely written."""
    last: int = 0
    """The last change of the last transaction that was processed."""
    count: int = 0
    """Rows of a rebuild; changes of an emission."""
    done: bool = False

    def is_same(self, other: ReplayRun) -> bool:
        """Whether both have the same arguments."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("source", "kind", "since", "until")
        )

    def __str__(self) -> str:
        words = [f"{self.kind} of {self.source}"]
        words += [f"since {self.since}"] if self.since else []
        words += [f"until {self.until}"] if self.until else []
        return " ".join(words)


@contextmanager
def opened(url: str) -> Iterator[Database]:
    """A session that reads images as capture writes them."""
    options = " ".join(f"-c {name}={value}" for name, value in _FORMATS.items())
    with (
        translated(url),
        connect_blocking(url, purpose="replay", options=options) as database,
    ):
        yield database


_FORMATS = {
    "datestyle": "ISO",
    "intervalstyle": "iso_8601",
    "lc_monetary": "C",
}


class ReplayTarget:
    """A table by its name in the database, as people write it: `orders`, `sales."Order Lines"`."""

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self.name = name
        self._identifier = _identifier(database, name)
        self._qualified = self._identifier.as_string(database)
        self._chunk_is_there = False

    # -------------------------------------------------------------------- whose it is

    def take(self, asked: ReplayRun, *, restart: bool = False) -> ReplayRun | None:
        """The progress of the same replay in this table; None if the table does not exist.
        ConfigError if another replay, or no replay, made it."""
        relation = self._relation()
        if relation is None:
            return None
        row = self._one("select run from headwater.replays where relation = %s", relation)
        if row is None:
            raise ConfigError(
                f"table {self.name} exists, and no replay made it",
                hint="Name another table with --into, or drop this one.",
            )
        if restart:
            with self._database.transaction():
                self._execute("drop table {table}")
                self._forget(relation)
            return None
        run = msgspec.convert(row[0], ReplayRun)
        if not run.is_same(asked):
            raise ConfigError(
                f"table {self.name} is that of another replay, a {run}",
                hint="Give the same arguments to continue it, name another table with --into, or "
                "start again with --restart.",
            )
        return run

    def create(self, table: Table, run: ReplayRun) -> None:
        """Create the table, empty. All columns but the key may be NULL for now."""
        columns = [
            sql.SQL("{} {}").format(sql.Identifier(c.name), sql.SQL(c.declared))
            for c in table.columns
        ]
        if table.key:
            key = sql.SQL(", ").join(map(sql.Identifier, table.key))
            columns.append(sql.SQL("primary key ({})").format(key))
        with self._database.transaction():
            try:
                self._execute("create table {table} ({columns})", columns=_listed(columns))
            except errors.UndefinedObject as error:
                raise ConfigError(
                    f"{table.label} had a type that this database lacks: {error}".strip(),
                    hint="Create that type first.",
                ) from error
            relation = self._relation()
            # Tables that were dropped since have left their rows behind.
            self._database.execute(
                "delete from headwater.replays r where r.relation = %s"
                " or not exists (select from pg_class where oid = r.relation)",
                [relation],
            )
            self._database.execute(
                "insert into headwater.replays (relation, name, run) values (%s, %s, %s)",
                [relation, self.name, _json(run)],
            )

    @contextmanager
    def step(self, before: ReplayRun) -> Iterator[Callable[[ReplayRun], None]]:
        """A transaction that also saves the progress. PipelineError if the saved progress is not
        `before`: then another replay writes to the table."""
        with self._database.transaction():
            here = self._one(
                "select relation from headwater.replays"
                " where relation = to_regclass(%s) and run = %s for update",
                self._qualified,
                _json(before),
            )
            if here is None:
                raise PipelineError(
                    f"another replay writes to {self.name}, or its table was dropped meanwhile",
                    hint="Wait until the other replay ends, then run the command again.",
                )
            yield self._note

    def _note(self, run: ReplayRun) -> None:
        self._database.execute(
            "update headwater.replays set run = %s, updated_at = clock_timestamp()"
            " where relation = to_regclass(%s)",
            [_json(run), self._qualified],
        )

    # -------------------------------------------------------------------- rows

    def fill(self, images: Iterable[str]) -> None:
        """Add rows, in the transaction of a step."""
        if not self._chunk_is_there:
            self._database.execute(
                "create temporary table headwater_replay_chunk (image json) on commit delete rows"
            )
            self._chunk_is_there = True
        with self._database.cursor() as cursor:
            with cursor.copy("copy pg_temp.headwater_replay_chunk from stdin") as copy:
                for image in images:
                    copy.write_row((image,))
            cursor.execute(
                sql.SQL(
                    "insert into {table} select r.* from pg_temp.headwater_replay_chunk c"
                    " cross join lateral json_populate_record(null::{table}, c.image) r"
                ).format(table=self._identifier)
            )

    def demand_values(self, table: Table) -> None:
        """Declare the columns NOT NULL that are so in the original, if this database has it, and
        that have no NULL here: events do not have this."""
        found = self._database.execute(_NOT_NULL, {"relation": table.oid, "shape": table.id})
        for (column,) in found.fetchall():
            try:
                with self._database.transaction():
                    self._execute(
                        "alter table {table} alter column {column} set not null",
                        column=sql.Identifier(column),
                    )
            except errors.NotNullViolation:
                continue

    # -------------------------------------------------------------------- changes

    def act(self, actor: Actor) -> None:
        """Set the actor of the original change, until the end of the transaction."""
        self._database.execute(
            "select set_config('headwater.user_id', %s, true),"
            " set_config('headwater.function_name', %s, true),"
            " set_config('headwater.trace_id', %s, true)",
            [actor.user_id or "", actor.function_name or "", actor.trace_id or ""],
        )

    def apply(self, table: Table, op: str, events: list[StoredChange]) -> None:
        """Repeat changes of one kind. PipelineError where their rows are missing."""
        if op == "truncate":
            self._execute("truncate {table}")
            return
        images = [(event.before if op == "delete" else event.after,) for event in events]
        row = self._one("select headwater.operators(to_regclass(%s))", self._qualified)
        parts = _parts(table, {} if row is None else row[0])
        statement = _STATEMENTS[op].format(table=self._identifier, **parts)
        with self._database.cursor() as cursor:
            try:
                cursor.executemany(statement, images)
            except errors.UniqueViolation as error:
                raise self._differs(str(error)) from error
            if cursor.rowcount != len(images):
                raise self._differs(f"{op} of rows that do not exist")

    def adapt(self, before: Table, after: Table) -> None:
        """Alter the table as the original was altered. ResyncRequired where that may have changed
        values without events."""
        names = state.step(before, after)
        old = {column.name: column for column in before.columns}
        for name in old.keys() - names.values():
            self._execute("alter table {table} drop column {name}", name=sql.Identifier(name))
        for column in after.columns:
            earlier = old.get(names.get(column.name, ""))
            parts = {"name": sql.Identifier(column.name), "type": sql.SQL(column.declared)}
            if earlier is None:
                self._execute("alter table {table} add column {name} {type}", **parts)
                continue
            if earlier.name != column.name:
                was = sql.Identifier(earlier.name)
                self._execute("alter table {table} rename column {was} to {name}", was=was, **parts)
            if earlier.declared != column.declared:
                self._execute("alter table {table} alter column {name} type {type}", **parts)

    def _differs(self, what: str) -> PipelineError:
        return PipelineError(
            f"{self.name} is not as the replay left it: {what}".strip(),
            hint="Another program wrote to it. Start again with --restart.",
        )

    # -------------------------------------------------------------------- statements

    def _relation(self) -> int | None:
        row = self._one("select to_regclass(%s)::oid::bigint", self._qualified)
        found: int | None = row[0] if row is not None else None
        return found

    def _forget(self, relation: int) -> None:
        self._database.execute("delete from headwater.replays where relation = %s", [relation])

    def _execute(self, statement: str, **parts: sql.Composable) -> None:
        composed = sql.SQL(statement).format(table=self._identifier, **parts)
        self._database.execute(composed)

    def _one(self, statement: str, *values: object) -> tuple[Any, ...] | None:
        return self._database.execute(statement.encode(), values).fetchone()


def _identifier(database: Database, name: str) -> sql.Identifier:
    """The name with its schema: the one in which the application's sessions find the table, or
    would create it. Never a schema of Headwater or PostgreSQL."""
    try:
        row = database.execute("select parse_ident(%s)", [name]).fetchone()
    except errors.InvalidParameterValue as error:
        raise ConfigError(
            f"{name!r} is not the name of a table", hint="Write: --into NAME"
        ) from error
    assert row is not None
    *schemas, table = row[0]
    if len(schemas) > 1:
        raise ConfigError(f"--into {name} names another database", hint="Write: --into SCHEMA.NAME")
    schema = schemas[0] if schemas else _schema_for(database, table)
    if is_reserved(schema):
        whose = "Headwater" if schema == "headwater" else "PostgreSQL"
        raise ConfigError(
            f"--into {name}: the schema {schema} is {whose}'s own",
            hint=f"Use a schema of your own: --into public.{table}",
        )
    return sql.Identifier(schema, table)


def _schema_for(database: Database, table: str) -> str:
    row = database.execute(_SCHEMA, [table]).fetchone()
    if row is None:
        raise ConfigError(
            f"--into {table}: the search path of this role has no schema for it",
            hint=f"Name the schema: --into public.{table}",
        )
    schema: str = row[0]
    return schema


_SCHEMA = """
    select s::text
    from unnest(headwater.schemas_of(headwater.session_path())) with ordinality n (s, at)
    where s::text !~ '^(pg_.*|headwater|information_schema)$'
    order by to_regclass(format('%%I.%%I', s, %s::text)) is null, at limit 1
"""


def _json(run: ReplayRun) -> Jsonb:
    return Jsonb(msgspec.to_builtins(run))


def _listed(parts: Iterable[sql.Composable]) -> sql.Composed:
    return sql.SQL(", ").join(parts)


def _parts(table: Table, operators: dict[str, list[str]]) -> dict[str, sql.Composed]:
    names = [sql.Identifier(column.name) for column in table.columns]
    same = [
        sql.SQL("t.{0} {1} r.{0}").format(sql.Identifier(column.name), sql.SQL(equals))
        for column in table.columns
        if column.name in table.key
        for equals in [with_operators(column, operators).operator("=")]
    ]
    return {
        "names": _listed(names),
        "values": _listed(sql.SQL("r.{}").format(name) for name in names),
        "assignments": _listed(sql.SQL("{0} = r.{0}").format(name) for name in names),
        "key": sql.SQL(" and ").join(same),
    }


_STATEMENTS = {
    "insert": sql.SQL(
        "insert into {table} ({names})"
        " select {values} from json_populate_record(null::{table}, %s::json) r"
    ),
    "update": sql.SQL(
        "update {table} t set {assignments}"
        " from json_populate_record(null::{table}, %s::json) r where {key}"
    ),
    "delete": sql.SQL(
        "delete from {table} t using json_populate_record(null::{table}, %s::json) r where {key}"
    ),
}

# Only where the shape is known here: in another database the oid may be that of any table.
_NOT_NULL = """
    select a.attname from pg_attribute a
    where a.attrelid = %(relation)s and a.attnum > 0 and not a.attisdropped and a.attnotnull
      and exists (select from headwater.shapes s where s.id = %(shape)s and s.relid = a.attrelid)
      and exists (
        select from headwater.shapes s, jsonb_array_elements(s.columns) c
        where s.id = %(shape)s and c ->> 'name' = a.attname)
"""
