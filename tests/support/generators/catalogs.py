"""Generated catalogs: tables of one name in several schemas, functions of every kind that call each
other, types that hide things, and statements that write, alter and regrant all of it.

Nothing here checks results. `Catalog.statements` is what a test executes first, `Queries` writes
the queries that are followed, and `Writer` the changes: rows, values that differ only where an
image does not show it, and DDL.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

ROLES = ("followed_caller", "followed_owner", "followed_group")
CALLER, OWNER, GROUP = ROLES
SCHEMAS = ("public", "a", "b", CALLER, OWNER, "postgres")
FUNCTIONS = 7
PATHS = ("", 'set search_path = "$user", public', "set search_path = a, public",
         "set search_path = public, pg_temp", "set search_path = b, \"$user\", public")  # fmt: skip

COLUMNS = (
    "id int primary key, n int, s varchar(9), e mood, c comp, d dom, arr int[], f float8, js json,"
    " jb jsonb, r int4range, dj json_domain, cd comp_domain, ca comp[], z numeric, b boolean"
)
VALUES: dict[str, tuple[str, ...]] = {
    "n": ("0", "1", "2", "3", "null"),
    "s": ("'a'", "'b'", "'ab'", "''", "null"),
    "e": ("'glad'", "'sad'", "null"),
    "c": ("row(1, 'null', 0)", "row(1, null, 0)", "row(1, 'null', '-0')", "row(1, ' null', 0)",
          "row(2, '{\"a\":1}', 1)", "row(2, '{\"a\" : 1}', 1)", "row(null, null, null)", "null"),
    "d": ("1", "2", "null"),
    "arr": ("'{1,2}'", "'[0:1]={1,2}'", "'[2:3]={1,2}'", "'{}'", "'{{1,2}}'", "null"),
    "f": ("0", "'-0'", "1.5", "'nan'", "null"),
    "js": ("'{\"a\":1}'", "'{\"a\": 1}'", "'{\"a\":1,\"a\":1}'", "'null'", "null", "'1.0'",
           "'1.00'"),
    "jb": ("'{\"a\":1}'", "'{\"a\":1.0}'", "'{\"a\":1.00}'", "'null'", "null", "'true'", "'1'"),
    "r": ("'[1,2)'", "'[1,5)'", "'empty'", "null"),
    "dj": ("'[1]'", "'[ 1]'", "'null'", "null"),
    "cd": ("row(1, 'null', 0)", "row(1, null, '-0')", "row(1, null, 0)", "null"),
    "ca": ("array[row(1, 'null', 0)::comp]", "array[row(1, null, 0)::comp]",
           "'[0:0]={\"(1,null,0)\"}'", "null"),
    "z": ("1.0", "1.00", "2", "null"),
    "b": ("true", "false", "null"),
}  # fmt: skip
# Expressions over a column; most of them show every difference of its values.
EXPRESSIONS: dict[str, tuple[str, ...]] = {
    "n": ("{0}::text", "h({0})::text", "({0} === 1)::text", "abs({0})::text"),
    "s": ("{0}", "length({0})::text", "upper({0})", '({0} collate odd < \'b\')::text'),
    "e": ("{0}::text", "({0} > 'glad'::mood)::text", "({0}::int)::text", "to_json({0})::text"),
    "c": ("{0}::text", "({0}).j::text", "(({0}).j is null)::text", "({0}).f::text",
          "({0} is null)::text", "to_jsonb({0})::text"),
    "d": ("{0}::text",),
    "arr": ("{0}::text", "{0}[1]::text", "array_lower({0}, 1)::text", "array_ndims({0})::text",
            "({0} = '{{1,2}}')::text"),
    "f": ("{0}::text", "(1 / nullif({0}::numeric, 0))::text", "to_json({0})::text"),
    "js": ("{0}::text", "({0} is null)::text", "({0} -> 'a')::text"),
    "jb": ("{0}::text", "({0} is null)::text", "({0} -> 'a')::text"),
    "r": ("{0}::text", "upper({0})::text"),
    "dj": ("{0}::text", "({0} is null)::text"),
    "cd": ("{0}::text", "({0}).f::text"),
    "ca": ("{0}::text", "{0}[1]::text", "{0}[0]::text"),
    "z": ("{0}::text", "scale({0})::text"),
    "b": ("{0}::text", "(not {0})::text"),
}  # fmt: skip
CONDITIONS = (
    "{0}.n = 1", "{0}.n in (1, 2)", "{0}.n = any(array[0, 3])", "{0}.s = 'a'", "{0}.s like 'a%'",
    "{0}.e = 'glad'", "{0}.e is not null", "{0}.e = 'sad'::mood", "{0}.jb is not null",
    "{0}.jb is null", "{0}.c is not null", "{0}.arr is not null", "{0}.arr = '{{1,2}}'",
    "{0}.arr[1] = 1", "1 = any({0}.arr)", "{0}.f = 0", "{0}.f > -1", "{0}.b", "not {0}.b",
    "{0}.z = 1", "{0}.z >= 1.0", "{0}.r @> 1", "{0}.n === 1", "{0}.n = 1 and {0}.b is true",
    "({0}.s = 'a' or {0}.n = 2)", "{0}.d = 1", "{0}.id < 5", "({0}.c).x = 1", "true",
)  # fmt: skip


@dataclass
class Catalog:
    """The tables, functions, views and types that were made."""

    random: random.Random
    tables: list[str] = field(default_factory=list)

    def statements(self) -> list[str]:
        chance = self.random
        self.tables = ["public"] + [schema for schema in SCHEMAS[1:] if chance.random() < 0.4]
        return [
            *(f"create schema if not exists {schema}" for schema in SCHEMAS[1:5]),
            *(["create schema postgres"] if "postgres" in self.tables else []),
            *(f"grant usage on schema {schema} to public" for schema in SCHEMAS[1:5]),
            f"alter default privileges grant select on tables to {CALLER}, {OWNER}",
            "set check_function_bodies = off",
            "set search_path = public",
            "create type mood as enum ('glad', 'sad')",
            "create type comp as (x int, j json, f float8)",
            "create domain json_domain as json",
            "create domain comp_domain as comp",
            "create table allowed (id int primary key)",
            "insert into allowed values (100)",
            "create function permitted(i int) returns boolean language sql stable as"
            " 'select i < (select max(id) from public.allowed)'",
            "create domain dom as int check (permitted(value))",
            "create collation odd (provider = libc, locale = 'C')",
            self.helper(), self.twice(),
            "create function same(int, int) returns boolean language sql immutable as"
            " 'select $1 = $2'",
            "create operator === (leftarg = int, rightarg = int, function = same)",
            "create function rank(mood) returns int language sql stable as"
            " 'select case $1 when ''glad'' then 1 else 2 end'",
            "create cast (mood as int) with function rank(mood)",
            *(self.table(schema) for schema in self.tables),
            "create table u (id int primary key, t_id int, n int, s text)",
            "insert into u select i, i % 4, i % 3, chr(97 + i % 4) from generate_series(1, 8) i",
            *(f"insert into {schema}.t (id, n, s, e) select i, i % 4, chr(97 + i % 3), 'glad'"
              " from generate_series(1, 6) i" for schema in self.tables),
            self.view("v1"),
            *(each for number in range(FUNCTIONS) for each in self.function(number)),
            self.view("v2"),
            "create aggregate glue(text) (sfunc = glue_step, stype = text, initcond = '')",
            *(self.policy() if chance.random() < 0.5 else []),
        ]  # fmt: skip

    def table(self, schema: str) -> str:
        return f"create table {schema}.t ({COLUMNS})"

    def helper(self) -> str:
        return "create or replace function h2(int) returns int language sql immutable as" + (
            self.random.choice((" 'select $1 + 1'", " 'select $1 * 2'", " 'select 7'"))
        )

    def twice(self) -> str:
        return (
            "create function h(int) returns int language plpgsql immutable as"
            " 'begin return public.h2($1); end';"
            " create function glue_step(text, text) returns text language sql immutable as"
            " 'select $1 || coalesce($2, ''-'')'"
        )

    def view(self, name: str) -> str:
        body = {
            "v1": (
                "select id, n, s, e from public.t where n > 0",
                "select id, n, s, e from public.t where n is distinct from 2",
                "select id, n, s, e from public.t",
                "select u.id, u.n, u.s::varchar(9) as s, null::mood as e from public.u",
            ),
            "v2": (
                "select v.id, v.s, u.n from public.v1 v left join public.u on u.t_id = v.id",
                "select v.id, v.s, u.n from public.v1 v join public.u on u.t_id = v.id",
                "select id, s, n from public.v1 where f1(n) is not null",
            ),
        }[name]
        return f"create or replace view {name} as {self.random.choice(body)}"

    def policy(self) -> list[str]:
        condition = self.random.choice((
            f"pg_has_role(current_user, '{GROUP}', 'member')",
            "n in (select n from public.t where b)",
            "s <> 'a'",
            "f0(n) <> '0'",
        ))  # fmt: skip
        return [
            "alter table u enable row level security",
            "drop policy if exists hidden on u",
            f"create policy hidden on u using ({condition})",
        ]

    def function(self, number: int) -> list[str]:
        """One that reads a table by a name without a schema, or calls another one."""
        chance = self.random
        bodies = [
            "select count(*)::text || coalesce(max(s), '') from t where n >= k",
            "select coalesce(sum(n), 0)::text from t",
            "select string_agg(s, ',' order by id) from u where n <> k",
            "select count(*)::text from v1",
            "select coalesce(max(e)::text, '-') from t where id <> k",
        ]
        for other in range(number):
            bodies.append(f"select public.f{other}(k) || (select count(*) from u)")
            bodies.append(f"select coalesce(public.f{other}(k + 1), '') || '.'")
        body = chance.choice(bodies)
        language = chance.choice(("sql", "sql", "sql", "sql", "atomic", "plpgsql"))
        security = chance.choice(("", "security definer"))
        head = f"create or replace function f{number}(k int) returns text"
        head += f" stable {security} {chance.choice(PATHS)}"
        quoted = body.replace("'", "''")
        made = {
            "sql": f"{head} language sql as '{quoted}'",
            "atomic": f"{head} language sql begin atomic {body}; end",
            "plpgsql": f"{head} language plpgsql as 'begin return ({quoted}); end'",
        }[language]
        owner = chance.choice((OWNER, "postgres"))
        return [made, f"alter function f{number}(int) owner to {owner}"]


class Queries:
    """Writes statements as ORMs and people write them, with their values."""

    def __init__(self, chance: random.Random) -> None:
        self.random = chance

    def any(self) -> str:
        return self.random.choice(self._shapes)(self)

    def expression(self, alias: str, number: int = 0) -> str:
        column = self.random.choice(list(EXPRESSIONS))
        text = self.random.choice(EXPRESSIONS[column]).format(f"{alias}.{column}")
        return f"{text} as c{number}"

    def columns(self, alias: str) -> str:
        wanted = (self.expression(alias, n) for n in range(self.random.randint(1, 3)))
        return ", ".join(wanted)

    def where(self, alias: str) -> str:
        return self.random.choice(CONDITIONS).format(alias)

    def call(self, argument: str) -> str:
        return f"f{self.random.randrange(FUNCTIONS)}({argument})"

    def rows(self) -> str:
        return f"select t.id, {self.columns('t')} from t where {self.where('t')} order by t.id"

    def qualified(self) -> str:
        return f"select x.id, {self.columns('x')} from public.t x where {self.where('x')}"

    def join(self) -> str:
        kind = self.random.choice(("join", "left join"))
        return (
            f"select t.id, u.id as uid, u.s, {self.columns('t')} from t {kind} u on u.t_id = t.id"
            f" where {self.where('t')}"
        )

    def cte(self) -> str:
        return (
            f"with x as (select * from t where {self.where('t')}), y as (select count(*) from u)"
            f" select {self.columns('x')}, (select count from y) from x"
        )

    def exists(self) -> str:
        word = self.random.choice(("exists", "not exists"))
        return (
            f"select u.id, u.s from u where {word} (select from t where t.id = u.t_id"
            f" and {self.where('t')})"
        )

    def member(self) -> str:
        return f"select u.id from u where u.t_id in (select id from t where {self.where('t')})"

    def union(self) -> str:
        return (
            f"select s::text from t where {self.where('t')} union all select s from u"
            f" union all select {self.call('1')}"
        )

    def lateral(self) -> str:
        return (
            "select u.id, x.* from u, lateral (select t.id as tid,"
            f" {self.columns('t')} from t where t.n = u.n and {self.where('t')}"
            " order by t.id limit 1) x"
        )

    def aggregate(self) -> str:
        what = self.random.choice((
            "count(*)", "max(t.s)", "string_agg(t.arr::text, ' ' order by t.id)", "max(t.e)::text",
            "json_agg(t.js order by t.id)::text", "sum(t.n)::text", "glue(t.s order by t.id)",
            "count(t.c)", "array_agg(t.f::text order by t.id)::text",
        ))  # fmt: skip
        return f"select {what} as x from t where {self.where('t')}"

    def grouped(self) -> str:
        return (
            f"select t.e::text, count(*) from t where {self.where('t')} group by t.e order by t.e"
        )

    def window(self) -> str:
        return (
            "select t.id, rank() over (partition by t.n order by t.id) as k,"
            f" {self.expression('t')} from t"
        )

    def whole(self) -> str:
        what = self.random.choice(("t::text", "row_to_json(t)::text", "to_jsonb(t)::text"))
        return f"select {what} as x from t where {self.where('t')}"

    def function(self) -> str:
        return self.random.choice((
            f"select {self.call('1')} as x",
            f"select u.id, {self.call('u.n')} as x from u",
            f"select id from v2 where {self.call('id')} <> '1'",
        ))  # fmt: skip

    def view(self) -> str:
        return self.random.choice((
            "select id, s, e::text from v1", "select id, s, n from v2",
            "select count(*) from v1 join u on u.t_id = v1.id",
        ))  # fmt: skip

    def types(self) -> str:
        return self.random.choice((
            "select enum_range(null::mood)::text as x",
            "select (u.n::dom)::text as x from u",
            "select (row(u.n, null, 0)::comp)::text as x from u",
            "select to_json(row(u.n, null, 0)::comp)::text as x from u",
            "select count(*) from t where e = any(enum_range('glad'::mood, null))",
            "select u.id, (u.id === 3)::text as x from u",
            "select u.id, u.s collate odd as x from u order by u.s collate odd, u.id",
            "select h(u.n) as x from u",
            f"select pg_has_role('{CALLER}', '{GROUP}', 'member') as x, count(*) from u",
            "select has_table_privilege(current_user, 'public.t', 'select') as x, count(*) from u",
            "select count(*) from json_to_recordset('[{\"a\":1}]') as x(a dom)",
            "select length(t.s) as x from t", "select abs(u.n) as x from u",
        ))  # fmt: skip

    _shapes: tuple[Callable[[Queries], str], ...] = (
        rows, rows, rows, qualified, qualified, join, cte, exists, member, union, lateral,
        aggregate, aggregate, grouped, window, whole, function, function, function, view, view,
        types, types, types,
    )  # fmt: skip


class Writer:
    """Changes to the tables and to the catalog, one statement at a time."""

    def __init__(self, catalog: Catalog, database: str) -> None:
        self.catalog = catalog
        self.random = catalog.random
        self.database = database
        self._labels = ["glad", "sad"]
        self._number = 0

    def row(self) -> str:
        """A statement that writes rows."""
        chance = self.random
        table = f"{chance.choice(self.catalog.tables)}.t"
        id_ = chance.randint(1, 7)
        match chance.randrange(12):
            case 0:
                return f"delete from {table} where id = {id_}"
            case 1 | 2:
                columns = chance.sample(list(VALUES), 3)
                values = ", ".join(self._value(column) for column in columns)
                return (
                    f"insert into {table} (id, {', '.join(columns)}) values ({id_}, {values})"
                    " on conflict do nothing"
                )
            case 3:
                return f"update u set n = {chance.randint(0, 3)} where id = {id_}"
            case 4:
                return f"update u set s = '{chance.choice('abc')}', t_id = {id_} where id = {id_}"
            case 5:
                return (
                    f"insert into allowed values ({chance.randint(0, 200)}) on conflict do nothing"
                )
            case 6:
                return f"delete from allowed where id > {chance.randint(1, 150)}"
            case 7:
                return self._update(table, "true")
        return self._update(table, f"id = {id_}")

    def _update(self, table: str, where: str) -> str:
        columns = self.random.sample(list(VALUES), self.random.choice((1, 1, 1, 2)))
        sets = ", ".join(f"{column} = {self._value(column)}" for column in columns)
        return f"update {table} set {sets} where {where}"

    def _value(self, column: str) -> str:
        value = self.random.choice(VALUES[column])
        return f"'{self.random.choice(self._labels)}'" if column == "e" else value

    # ---- DDL

    def alteration(self) -> list[str]:
        """Statements of one transaction that alter the catalog."""
        return self.random.choice(self._alterations)(self)

    def rename_label(self) -> list[str]:
        self._number += 1
        old, new = self.random.choice(self._labels), f"mood{self._number}"
        self._labels = [new if label == old else label for label in self._labels]
        return [f"alter type mood rename value '{old}' to '{new}'"]

    def add_label(self) -> list[str]:
        self._number += 1
        new = f"mood{self._number}"
        place = self.random.choice(("", f" before '{self.random.choice(self._labels)}'"))
        self._labels.append(new)
        return [f"alter type mood add value '{new}'{place}"]

    def attribute(self) -> list[str]:
        self._number += 1
        return [self.random.choice((
            f"alter type comp add attribute a{self._number} int",
            f"alter type comp rename attribute f to f{self._number}",
            "alter type comp drop attribute if exists j",
        ))]  # fmt: skip

    def function(self) -> list[str]:
        return self.catalog.function(self.random.randrange(FUNCTIONS))

    def alter_function(self) -> list[str]:
        name = f"f{self.random.randrange(FUNCTIONS)}(int)"
        return [f"alter function {name} " + self.random.choice((
            "security definer", "security invoker", f"owner to {OWNER}", "owner to postgres",
            "set search_path = a, public", 'set search_path = "$user", public',
            "reset search_path", "reset all",
        ))]  # fmt: skip

    def recreate_function(self) -> list[str]:
        number = self.random.randrange(FUNCTIONS)
        return [f"drop function f{number}(int) cascade", *self.catalog.function(number)]

    def helper(self) -> list[str]:
        return [self.catalog.helper()]

    def operator(self) -> list[str]:
        name, sign = self.random.choice((("equal", "="), ("unequal", "<>"), ("above", ">")))
        return [
            "drop operator if exists === (int, int)",
            f"create or replace function {name}(int, int) returns boolean"
            f" language sql immutable as 'select $1 {sign} $2'",
            f"create operator === (leftarg = int, rightarg = int, function = {name})",
        ]

    def cast(self) -> list[str]:
        return self.random.choice((
            ["drop cast if exists (mood as int)",
             "create or replace function rank2(mood) returns int language sql stable as"
             " 'select count(*)::int from public.u where s < $1::text'",
             "create cast (mood as int) with function rank2(mood)"],
            ["create or replace function rank(mood) returns int language sql stable as"
             f" 'select {self.random.randint(1, 9)}'"],
            ["create or replace function mood_json(mood) returns json language sql stable as"
             " 'select to_json(count(*)) from public.u where n > 0'",
             "create cast (mood as json) with function mood_json(mood)"],
            ["drop cast if exists (mood as json)"],
        ))  # fmt: skip

    def rights(self) -> list[str]:
        schema = self.random.choice(("a", "b", "public", CALLER, OWNER))
        return [self.random.choice((
            f"revoke usage on schema {schema} from public, {CALLER}, {OWNER}",
            f"grant usage on schema {schema} to public",
            f"grant usage on schema {schema} to {CALLER}",
            f"revoke select on public.t from {CALLER}",
            f"grant select on public.t to {CALLER}",
            f"revoke select on u from {OWNER}", f"grant select on u to {OWNER}",
            f"grant {GROUP} to {CALLER}", f"revoke {GROUP} from {CALLER}",
            "revoke execute on function f1(int) from public",
            "grant execute on function f1(int) to public",
            f"alter role {CALLER} bypassrls", f"alter role {CALLER} nobypassrls",
        ))]  # fmt: skip

    def domain(self) -> list[str]:
        return self.random.choice((
            ["create or replace function permitted(i int) returns boolean language sql stable as"
             f" 'select i < {self.random.randint(0, 9)}'"],
            ["create or replace function permitted(i int) returns boolean language sql stable as"
             " 'select i < (select max(id) from public.allowed)'"],
            ["create or replace function permitted(i int) returns boolean language plpgsql as"
             " 'begin return exists (select from public.allowed where id > i); end'"],
            ["alter domain dom drop constraint if exists small",
             f"alter domain dom add constraint small check (value < {self.random.randint(1, 9)})"
             " not valid"],
            ["alter domain dom drop constraint if exists small"],
        ))  # fmt: skip

    def view(self) -> list[str]:
        return [self.catalog.view(self.random.choice(("v1", "v2")))]

    def view_owner(self) -> list[str]:
        return [f"alter view v1 owner to {self.random.choice((OWNER, 'postgres'))}"]

    def policy(self) -> list[str]:
        if self.random.random() < 0.3:
            return ["alter table u disable row level security"]
        return self.catalog.policy()

    def table(self) -> list[str]:
        """Another table of the name, in front of those that were found or behind them."""
        schema = self.random.choice(SCHEMAS[1:])
        if schema in self.catalog.tables:
            self.catalog.tables.remove(schema)
            return [f"drop table {schema}.t cascade"]
        self.catalog.tables.append(schema)
        return [
            f"create schema if not exists {schema}",
            f"grant usage on schema {schema} to public",
            self.catalog.table(schema),
            f"insert into {schema}.t (id, n, s) values (1, 1, '{schema[:2]}'), (2, 2, 'b')",
            f"select headwater.enable_reactivity('{schema}.t')",
        ]

    def overload(self) -> list[str]:
        """A function that fits better than the server's own."""
        return self.random.choice((
            ["create or replace function public.length(varchar) returns int language sql immutable"
             " as 'select -1'"],
            ["drop function if exists public.length(varchar)"],
            ["create or replace function public.upper(varchar) returns text language sql stable as"
             " 'select max(s) from public.u'"],
            ["drop function if exists public.upper(varchar)"],
        ))  # fmt: skip

    def collation(self) -> list[str]:
        if self.random.random() < 0.5:
            return [
                "alter collation odd rename to other",
                "create collation odd (provider = libc, locale = 'C.UTF-8')",
                "drop collation other",
            ]
        return ["alter collation odd refresh version"]

    def search_path(self) -> list[str]:
        whose = self.random.choice(
            (f"database {self.database}", f"role postgres in database {self.database}")
        )
        return [self.random.choice((
            f"alter {whose} set search_path = a, public", f"alter {whose} reset search_path",
            f'alter {whose} set search_path = "$user", b, public',
            f"alter {whose} set search_path = public",
        ))]  # fmt: skip

    def rename(self) -> list[str]:
        schema = self.random.choice(self.catalog.tables)
        return self.random.choice((
            [f"alter table {schema}.t rename column z to zz",
             f"alter table {schema}.t rename column b to z",
             f"alter table {schema}.t rename column zz to b"],
            [f"alter table {schema}.t alter column n set default 3"],
            ["analyze"],
        ))  # fmt: skip

    _alterations: tuple[Callable[[Writer], list[str]], ...] = (
        rename_label, add_label, attribute, function, function, alter_function, alter_function,
        recreate_function, helper, operator, cast, rights, rights, rights, domain, domain, view,
        view_owner, policy, table, table, overload, collation, search_path, rename,
    )  # fmt: skip
