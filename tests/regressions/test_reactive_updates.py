"""Updates that subscribers of reactive queries never saw, each as the shortest test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headwater.database import Connection
from headwater.hub.hub import Hub
from headwater.hub.reactive.group import QueryGroup
from headwater.hub.reactive.registry import ReactiveQueries
from headwater.identity import Identity
from headwater.queries.context import Context
from headwater.queries.functions import Query
from tests.integration.hub.test_reactive import Follower, settle
from tests.support.log_probe import enable, run

CALLER, OWNER = "story_caller", "story_owner"


@pytest.fixture
def server_url(request: pytest.FixtureRequest) -> str:
    """Only one of the servers has a collation that differs."""
    name = "icu_postgres_url" if "collation" in request.node.name else "postgres_url"
    url: str = request.getfixturevalue(name)
    return url


@pytest.fixture
async def db(connection: Connection) -> AsyncIterator[Connection]:
    await run(
        connection,
        f"create role {CALLER}",
        f"create role {OWNER}",
        f"alter default privileges grant select on tables to {CALLER}, {OWNER}",
        "set check_function_bodies = off",
    )
    yield connection
    for role in (CALLER, OWNER):
        await run(connection, f"reassign owned by {role} to postgres", f"drop owned by {role}")
        await run(connection, f"drop role {role}")


def asking(sql: str) -> Query:
    async def body(ctx: Context) -> Any:
        return await ctx.fetch_value(sql)

    return Query("asking", body)


async def tables(db: Connection, *schemas: str) -> None:
    """Tables of one name, each with one row that says where it is."""
    for schema in schemas:
        await run(
            db,
            f"create schema if not exists {schema}",
            f"grant usage on schema {schema} to public",
            f"create table {schema}.t (id int primary key, s text)",
            f"insert into {schema}.t values (1, '{schema}')",
        )
        await enable(db, f"{schema}.t")


# ------------------------------------------------------------------------ search paths

READS = "select max(s) from t"
WAYS = [
    # The path is the caller's, and "$user" in it the owner.
    (OWNER, [f"create function f() returns text stable security definer language sql as '{READS}'",
             f"alter function f() owner to {OWNER}"]),
    # It has a path of its own, in which "$user" is the caller.
    (CALLER, ["create function f() returns text stable language sql"
              f""" set search_path = "$user", public as '{READS}'"""]),
    (OWNER, ["create function f() returns text stable security definer language sql"
             f""" set search_path = "$user", public as '{READS}'""",
             f"alter function f() owner to {OWNER}"]),
    # Functions that it calls use the same path.
    (OWNER, [f"create function g() returns text stable language sql as '{READS}'",
             "create function f() returns text stable security definer language sql as"
             " 'select public.g()'",
             f"alter function f() owner to {OWNER}"]),
    ("public", [f"create function g() returns text stable language sql as '{READS}'",
                "create function f() returns text stable language sql set search_path = public"
                " begin atomic select public.g(); end"]),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "functions"), WAYS)
async def test_a_function_reads_the_table_that_it_finds(
    url: str, db: Connection, schema: str, functions: list[str]
) -> None:
    await tables(db, "public", CALLER, OWNER)
    await run(db, *functions)
    async with Hub(url) as hub:
        follower = await Follower().follow(hub, asking("select public.f()"), Identity(role=CALLER))
        assert follower.value == schema
        await settle(hub)
        await run(db, f"update {schema}.t set s = 'new'")
        await follower.until_value("new")


@pytest.mark.parametrize("whose", ["database {}", "role postgres in database {}"])
async def test_another_search_path_while_running(url: str, db: Connection, whose: str) -> None:
    await tables(db, "public", "a")
    async with Hub(url) as hub:
        follower = await Follower().follow(hub, asking("select s from t"))
        assert follower.value == "public"
        await settle(hub)
        of = whose.format(db.info.dbname)
        await run(db, f"alter {of} set search_path = a, public")
        await hub.reactive.recheck()
        await follower.until_value("a")
        await run(db, "update a.t set s = 'new'")
        await follower.until_value("new")


# ------------------------------------------------------------------------ equal images

HIDDEN = [
    ("int[]", "array_lower(x, 1)", "'{1}'", "'[0:0]={1}'"),
    ("float8[]", "x::text", "'{0}'", "'{-0}'"),
    ("float8", "x::text", "0", "'-0'"),
    ("comp", "(x).f::text", "row(null, 0)", "row(null, '-0')"),
    ("comp", "(x).j is null", "row(null, 0)", "row('null', 0)"),
    ("comp", "(x).j::text", "row('[1]', 0)", "row('[ 1]', 0)"),
    ("comp_domain", "(x).j::text", "row('[1]', 0)", "row('[ 1]', 0)"),
    ("comp[]", "x[1]::text", "array[row('[1]', 0)::comp]", "array[row('[ 1]', 0)::comp]"),
    ("json_domain", "x::text", "'[1]'", "'[ 1]'"),
    ("json", "x::text", '\'{"a":1,"a":1}\'', "'{\"a\":1}'"),
    ("jsonb", "x is null", "null", "'null'"),
    ("numeric", "x::text", "1.0", "1.00"),
]


@pytest.mark.parametrize(("type_", "shown", "before", "after"), HIDDEN)
async def test_a_value_that_its_image_does_not_show(
    url: str, db: Connection, type_: str, shown: str, before: str, after: str
) -> None:
    await run(
        db,
        "create type comp as (j json, f float8)",
        "create domain comp_domain as comp",
        "create domain json_domain as json",
        f"create table h (id int primary key, x {type_}, other int)",
        f"insert into h values (1, {before}, 0)",
    )
    await enable(db, "h")
    async with Hub(url) as hub:
        follower = await Follower().follow(hub, asking(f"select {shown} from h"))
        was = follower.value
        await settle(hub)
        # Beside it another column is altered, which alone would not concern the query.
        await run(db, f"update h set x = {after}, other = 1")
        await follower.until(lambda: follower.value != was)


async def test_an_image_that_a_cast_makes(url: str, db: Connection) -> None:
    await run(
        db,
        "create type mood as enum ('glad', 'sad')",
        "create function mood_json(mood) returns json immutable language sql as"
        " $$ select '0'::json $$",
        "create cast (mood as json) with function mood_json(mood)",
        "create table h (id int primary key, e mood, other int)",
        "insert into h values (1, 'glad', 0)",
    )
    await enable(db, "h")
    async with Hub(url) as hub:
        follower = await Follower().follow(hub, asking("select count(*) from h where e = 'sad'"))
        await settle(hub)
        await run(db, "update h set e = 'sad', other = 1")
        await follower.until_value(1)


# ------------------------------------------------------------------------ the catalog

RANK = "create or replace function rank(mood) returns int immutable language sql as 'select {}'"
STORIES: list[tuple[str, str, list[str], Any]] = [
    ("a label", "select e::text from h", ["alter type mood rename value 'glad' to 'merry'"],
     "merry"),
    ("labels", "select enum_range(null::mood)::text", ["alter type mood add value 'calm'"],
     "{glad,sad,calm}"),
    ("an attribute", "select to_jsonb(c)::text from h", ["alter type comp add attribute z int"],
     '{"x": 1, "z": null}'),
    ("an operator", "select (1 === 2)::text",
     ["drop operator === (int, int)",
      "create operator === (leftarg = int, rightarg = int, function = int4ne)"], "true"),
    ("its function", "select (1 === 2)::text",
     ["create or replace function same(int, int) returns boolean immutable language sql as"
      " 'select true'"], "true"),
    ("a function", "select rank(e) from h",
     ["drop function rank(mood) cascade", RANK.format(7)], 7),
    ("a function that another calls", "select outer_of(1)",
     ["create or replace function inner_of(int) returns int immutable language sql as 'select 7'"],
     7),
    ("a cast", "select e::int from h",
     ["drop cast (mood as int)",
      "create function other(mood) returns int immutable language sql as 'select 7'",
      "create cast (mood as int) with function other(mood)"], 7),
    ("a function of a cast", "select e::int from h", [RANK.format(7)], 7),
    ("a function that fits better", "select length(v) from h",
     ["create function length(varchar) returns int immutable language sql as 'select 7'"], 7),
    ("a collation", "select ('a' < 'B' collate odd)::text",
     ["drop collation odd", "create collation odd (provider = icu, locale = 'en')"], "true"),
    ("a view", "select x from v", ["create or replace view v as select 7 as x from h"], 7),
    ("a policy", "select count(*) from secret", ["create policy p on secret using (true)"], 1),
    ("a membership", f"select pg_has_role('{CALLER}', '{OWNER}', 'member')::text",
     [f"grant {OWNER} to {CALLER}"], "true"),
    ("a right", "select has_table_privilege(current_user, 'closed', 'select')::text",
     [f"grant select on closed to {CALLER}"], "true"),
    ("policies of a role", "select count(*) from of_role", [f"grant {OWNER} to {CALLER}"], 1),
    ("a role", "select count(*) from secret", [f"alter role {CALLER} bypassrls"], 1),
]  # fmt: skip


@pytest.fixture
async def catalog(db: Connection) -> Connection:
    await run(
        db,
        "create type mood as enum ('glad', 'sad')",
        "create type comp as (x int)",
        "create domain small as int check (value < 5)",
        "create collation odd (provider = libc, locale = 'C')",
        "create table h (id int primary key, e mood, c comp, v varchar)",
        "insert into h values (1, 'glad', row(1), 'v')",
        "create table secret (id int primary key)",
        "insert into secret values (1)",
        "alter table secret enable row level security",
        "create table of_role (id int primary key)",
        "insert into of_role values (1)",
        "alter table of_role enable row level security",
        f"create policy p on of_role to {OWNER} using (true)",
        "create table closed (id int primary key)",
        f"revoke select on closed from {CALLER}",
        "create view v as select id as x from h",
        RANK.format(1),
        "create cast (mood as int) with function rank(mood)",
        "create function same(int, int) returns boolean immutable language sql as 'select $1 = $2'",
        "create operator === (leftarg = int, rightarg = int, function = same)",
        "create function inner_of(int) returns int immutable language sql as 'select $1'",
        "create function outer_of(int) returns int immutable language plpgsql as"
        " 'begin return inner_of($1); end'",
    )
    await enable(db, "h", "secret", "of_role", "closed")
    return db


@pytest.mark.parametrize(("what", "sql", "ddl", "value"), STORIES, ids=[s[0] for s in STORIES])
async def test_another_meaning_is_noticed_at_the_next_recheck(
    url: str, catalog: Connection, what: str, sql: str, ddl: list[str], value: Any
) -> None:
    async with Hub(url) as hub:
        follower = await Follower().follow(hub, asking(sql), Identity(role=CALLER))
        assert follower.value != value
        await settle(hub)
        # Often enough that the session has a cached plan for it.
        for number in range(3):
            await run(catalog, f"update h set id = {number + 2}")
            await settle(hub)
        await run(catalog, *ddl)
        await hub.reactive.recheck()
        await follower.until_value(value)


ENDS = [
    ("select count(*) from s.t", [f"revoke usage on schema s from public, {CALLER}"]),
    ("select count(*) from s.t", [f"revoke select on s.t from {CALLER}"]),
    ("select 3::small", ["alter domain small add constraint smaller check (value < 2)"]),
    ("select 3::guarded", ["create or replace function permitted(int) returns boolean immutable"
                           " language sql as 'select false'"]),
]  # fmt: skip


@pytest.mark.parametrize(("sql", "ddl"), ENDS)
async def test_a_query_that_is_no_longer_permitted_ends(
    url: str, catalog: Connection, sql: str, ddl: list[str]
) -> None:
    await tables(catalog, "s")
    await run(
        catalog,
        "create function permitted(int) returns boolean immutable language sql as 'select true'",
        "create domain guarded as int check (permitted(value))",
    )
    async with Hub(url) as hub:
        follower = await Follower().follow(hub, asking(sql), Identity(role=CALLER))
        await settle(hub)
        await run(catalog, *ddl)
        await hub.reactive.recheck()
        await follower.until(lambda: follower.failure is not None)


async def test_a_table_that_the_condition_of_a_domain_reads(url: str, catalog: Connection) -> None:
    await run(
        catalog,
        "create table permitted (id int primary key)",
        "create function is_permitted(int) returns boolean stable language sql as"
        " 'select exists (select from public.permitted where id = $1)'",
        "create domain guarded as int check (is_permitted(value))",
        "insert into permitted values (3)",
    )
    await enable(catalog, "permitted")
    async with Hub(url) as hub:
        follower = await Follower().follow(hub, asking("select 3::guarded"))
        await settle(hub)
        await run(catalog, "delete from permitted")
        await follower.until(lambda: follower.failure is not None)


# ------------------------------------------------------------------------ faults that meet


async def test_a_result_that_was_not_handed_out_when_the_database_is_lost(
    db: Connection, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query is to be executed again, and what is to be executed is forgotten right then."""
    await tables(db, "public")
    hand_out, failed = ReactiveQueries._hand_out, list[QueryGroup]()

    def fails_once(queries: ReactiveQueries, group: QueryGroup, recovered: bool) -> None:
        if failed:
            hand_out(queries, group, recovered)
            return
        failed.append(group)
        asyncio.get_running_loop().call_soon(queries.lost)
        raise RuntimeError("not handed out")

    async with Hub(url) as hub:
        follower = await Follower().follow(hub, asking("select s from t"))
        await follower.until(lambda: follower.value == "public")
        monkeypatch.setattr(ReactiveQueries, "_hand_out", fails_once)
        await run(db, "update t set s = 'changed'")
        await follower.until(lambda: follower.value == "changed")
    assert failed
