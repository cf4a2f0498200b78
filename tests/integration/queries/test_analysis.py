"""What a statement reads, according to the database: tables, columns, predicates, and doubts."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psycopg
import pytest

from headwater import limits
from headwater.database import Connection
from headwater.embedded import EmbeddedPostgres
from headwater.errors import NotInstalled, Unavailable
from headwater.live.filters.filter import EVERYTHING, to_json
from headwater.queries.analysis.analyst import Analysis, Analyst
from headwater.queries.analysis.statements import Executed, Statement
from tests.support.databases import fresh_database
from tests.support.log_probe import enable, rows, run

SCHEMA = (
    "create type mood as enum ('glad', 'sad')",
    "create table orders (id int primary key, region int, status text, amount numeric(12,2),"
    " name varchar(20), placed date, at timestamptz, paid boolean, mood mood, code char(3),"
    " big bigint, small smallint, doubled numeric generated always as (amount * 2) stored)",
    "create table lines (id int primary key, order_id int, product text, quantity int)",
    'create table "Order Notes" ("Id" int primary key, "order" int, "A Text" text)',
    "create table audit (id int primary key, what text)",
    "create view open_orders as select id, region, amount from orders where status = 'open'",
    "create view big_open_orders as select * from open_orders where amount > 100",
    "create view order_rows as select o from orders o",
    "create function total(r int) returns numeric language sql stable"
    " begin atomic select sum(amount) from orders where region = r; end",
    "create function line_count(order_id_ int, out n bigint) language sql stable as"
    " 'select count(*) from lines where order_id = order_id_; -- all of them'",
    "create function opaque() returns bigint language plpgsql stable as"
    " $$ begin return (select count(*) from lines); end $$",
    "create function pure(x int) returns int language plpgsql immutable as"
    " $$ begin return x + 1; end $$",
    "create function same(a text, b text) returns boolean language sql stable"
    " begin atomic select a = b and exists (select from audit where what = a); end",
    "create operator === (leftarg = text, rightarg = text, function = same)",
    "create function add_quantity(state bigint, next int) returns bigint language sql stable"
    " begin atomic select state + next + (select count(*) from lines); end",
    "create aggregate quantities (int) (sfunc = add_quantity, stype = bigint, initcond = '0')",
    "create sequence ids",
    "create materialized view totals as select sum(amount) from orders",
)
TABLES = ("orders", "lines", '"Order Notes"')


@pytest.fixture(scope="module")
def shop_url(postgres: EmbeddedPostgres) -> Iterator[str]:
    """A database for tests that alter nothing in it."""
    with (
        fresh_database(postgres.url, installed=True) as url,
        psycopg.connect(url, autocommit=True) as connection,
    ):
        for statement in SCHEMA:
            connection.execute(statement.encode())
        for table in TABLES:
            connection.execute("select headwater.enable_reactivity(%s)", (table,))
        yield url


@pytest.fixture
async def shop(shop_url: str) -> AsyncIterator[Analyst]:
    """An analyst of that database."""
    analyst = Analyst(shop_url)
    yield analyst
    await analyst.close()


@pytest.fixture
async def db(connection: Connection) -> Connection:
    await run(connection, *SCHEMA)
    await enable(connection, *TABLES)
    return connection


@pytest.fixture
async def analyst(url: str) -> AsyncIterator[Analyst]:
    analyst = Analyst(url)
    yield analyst
    await analyst.close()


def columns(analysis: Analysis) -> dict[str, Any]:
    """The tables with their columns, `*` for any."""
    return {
        read.table.label: "*" if read.columns is None else " ".join(sorted(read.columns))
        for read in analysis.tables
    }


def predicates(analysis: Analysis, *values: Any) -> dict[str, Any]:
    return {
        read.table.label: to_json(read.where)
        for read in analysis.reads(Executed(analysis.statement, values))
        if read.where != EVERYTHING
    }


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("select id, status from orders", {"orders": "id status"}),
        ("select count(*) from orders", {"orders": ""}),
        ("select o.id from orders o join lines l on l.order_id = o.id where l.quantity > 3",
         {"orders": "id", "lines": "order_id quantity"}),
        ("select o.id, l.product from orders o left join lines l using (id)",
         {"orders": "id", "lines": "id product"}),
        ("select * from open_orders", {"orders": "amount id region status"}),
        ("select id from big_open_orders", {"orders": "amount id region status"}),
        ("with x as (select region from orders) select count(*) from x", {"orders": "region"}),
        ("with recursive t (id) as (select id from orders union select l.id from t"
         " join lines l on l.order_id = t.id) select * from t",
         {"orders": "id", "lines": "id order_id"}),
        ("select (select max(quantity) from lines) from orders where exists"
         ' (select from "Order Notes" n where n."order" = orders.id)',
         {"orders": "id", "lines": "quantity", "Order Notes": "order"}),
        ("select region, sum(amount) from orders group by region having count(status) > 1",
         {"orders": "amount region status"}),
        ("select id from orders union all select id from lines order by 1 limit 3",
         {"orders": "id", "lines": "id"}),
        ("select total(1)", {"orders": "amount region"}),
        ("select line_count(1)", {"lines": "order_id"}),
        ("select pure(region) from orders", {"orders": "region"}),
        ("select orders from orders", {"orders": "*"}),
        ("select row_to_json(o) from orders o", {"orders": "*"}),
        ("select count(order_rows) from order_rows", {"orders": "*"}),
        ("select ctid from lines", {"lines": "*"}),
        ("select doubled from orders", {"orders": "*"}),
        ('select "A Text" from "Order Notes"', {"Order Notes": "A Text"}),
        ("select quantities(1)", {"lines": ""}),
        ("select id from orders where status in (select product from lines)",
         {"orders": "id status", "lines": "product"}),
        ("select l.id from orders o, lateral (select * from lines where order_id = o.id) l",
         {"orders": "id", "lines": "id order_id product quantity"}),
        ("select rank() over (partition by region order by amount) from orders",
         {"orders": "amount region"}),
        ("select id from orders for update", {"orders": "id"}),
        ("select 1", {}),
        ("values (1), (2)", {}),
        ("select id from orders; ", {"orders": "id"}),
        ("select id from orders -- all", {"orders": "id"}),
    ],
)  # fmt: skip
async def test_tables_and_columns(shop: Analyst, sql: str, expected: dict[str, str]) -> None:
    analysis = await shop.analyse(Statement(sql))
    assert not analysis.everything, analysis.notes
    assert not analysis.uncaptured
    assert columns(analysis) == expected


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("select opaque()", "opaque() is written in plpgsql"),
        ("select query_to_xml('select * from audit', true, true, '')", "query_to_xml()"),
        ("select set_config('search_path', 'x', true), id from orders", "set_config()"),
        ("show search_path", "cannot analyse"),
        ("explain select * from orders", "cannot analyse"),
        ("select * from nowhere", "cannot analyse"),
        ("select", "reads nothing"),
        ("sel", "cannot analyse"),
        ("select 1; end; drop table audit", "cannot analyse"),
        ("select 1 /*", "cannot analyse"),
        ("select '\0'", "cannot analyse"),
        ("select '\ud800'", "cannot analyse"),
        ("insert into audit values (1, 'x')", "it writes"),
        ("with x as (delete from lines returning id) select * from x", "it writes"),
        ("select $1", "reads nothing"),
    ],
)
async def test_unclear_statements_read_everything(shop: Analyst, sql: str, reason: str) -> None:
    analysis = await shop.analyse(Statement(sql))
    if reason == "reads nothing":
        assert not analysis.everything
        assert not analysis.tables
    else:
        assert analysis.everything
        assert reason in " ".join(analysis.notes)
    assert (await shop.analyse(Statement("select * from audit"))).uncaptured == ("audit",)


async def test_analysis_leaves_nothing_behind(shop_url: str, shop: Analyst) -> None:
    for sql in ("select total($1)", "select line_count(1)", "sel"):
        await shop.analyse(Statement(sql))
    with psycopg.connect(shop_url) as connection:
        found = connection.execute("select proname from pg_proc where proname ~ 'probe'")
        assert found.fetchall() == []


@pytest.mark.parametrize(
    ("sql", "uncaptured", "way_out"),
    [
        ("select * from audit", ("audit",), "headwater enable audit"),
        ("select * from orders where status === 'x'", ("audit",), "not enabled"),
        ("select relname from pg_class", ("pg_catalog.pg_class",), "is a system table"),
        ("select * from information_schema.tables", ("information_schema.tables",), ""),
        ("select last_value from ids", ("ids",), "a sequence"),
        ("select * from totals", ("totals",), "materialized view"),
        ("select * from orders, audit", ("audit",), "not enabled"),
    ],
)
async def test_tables_without_capture_are_named(
    shop: Analyst, sql: str, uncaptured: tuple[str, ...], way_out: str
) -> None:
    analysis = await shop.analyse(Statement(sql))
    assert not analysis.everything
    assert analysis.uncaptured == uncaptured
    assert way_out in " ".join(analysis.notes)


@pytest.mark.parametrize(
    ("sql", "values", "expected"),
    [
        ("select * from orders where region = 7", (), {"orders": ["region", "=", 7]}),
        ("select * from orders where region = $1", (7,), {"orders": ["region", "=", 7]}),
        ("select * from orders where region = $1", ("7",), {"orders": ["region", "=", 7]}),
        ("select * from orders where region = $1", (None,), {"orders": ["region", "in", [None]]}),
        ("select * from orders where region = $1", (object(),), {}),
        ("select * from orders where 7 > region", (), {"orders": ["region", "<", 7]}),
        ("select * from orders where big = $1::int and small <= 4", (5,),
         {"orders": {"and": [["big", "=", 5], ["small", "<=", 4]]}}),
        ("select * from orders where region = any($1)", ([1, None],),
         {"orders": ["region", "in", [1, None]]}),
        ("select * from orders where region = any($1)", (None,),
         {"orders": ["region", "in", [None]]}),
        ("select * from orders where region in (1, $1)", (2,),
         {"orders": ["region", "in", [1, 2]]}),
        ("select * from orders where status not in ('a', 'it''s')", (),
         {"orders": ["status", "not in", ["a", "it's"]]}),
        ("select * from orders where name in ('a', 'b')", (),
         {"orders": ["name", "in", ["a", "b"]]}),
        ("select * from orders where name = 'x' and name like 'x%'", (),
         {"orders": {"and": [["name", "=", "x"], ["name", "like", "x%"]]}}),
        ("select * from orders where status ilike $1", ("O%",),
         {"orders": ["status", "ilike", "O%"]}),
        ("select * from orders where status not like 'a_'", (),
         {"orders": ["status", "not like", "a_"]}),
        ("select * from orders where status like 'a' escape '!'", (), {}),
        ("select * from orders where paid", (), {"orders": ["paid", "=", True]}),
        ("select * from orders where not paid", (), {"orders": {"not": ["paid", "=", True]}}),
        ("select * from orders where paid is not null", (), {"orders": ["paid", "is not null"]}),
        ("select * from orders where mood = 'glad'", (), {"orders": ["mood", "=", "glad"]}),
        ("select * from orders where mood = any($1)", (["sad"],),
         {"orders": ["mood", "in", ["sad"]]}),
        ("select id from orders where region = 1 or status = 'x' and paid", (),
         {"orders": {"or": [["region", "=", 1],
                            {"and": [["status", "=", "x"], ["paid", "=", True]]}]}}),
        ("select id from orders where region = 1 or length(status) = 2", (), {}),
        ("select id from orders where region = 1 or status = 'x' and length(status) = 2", (),
         {"orders": {"or": [["region", "=", 1], {"and": [["status", "=", "x"]]}]}}),
        ("select id from orders where not (region = 1 and length(status) = 2)", (), {}),
        ("select id from orders where region = 1 and length(status) = 2", (),
         {"orders": ["region", "=", 1]}),
        ("select id from orders where code = 'abc' and lower(status) = 'x'", (), {}),
        ("select id from orders where status = 'x' collate \"C\"", (), {}),
        ("select id from orders where region::text = '7'", (), {}),
        ("select id from orders where region is distinct from 7", (), {}),
        ("select id from orders where region = small", (), {}),
        ("select id from orders where region = $1 + 1", (7,), {}),
        ("select id from orders where placed = 'today'", (), {}),
        ("select id from orders where placed > current_date", (), {}),
        ("select count(*) from orders o join lines l on l.order_id = o.id and l.quantity > 2"
         " where o.region = 7 and l.product = 'x' and o.amount > l.quantity", (),
         {"orders": ["region", "=", 7],
          "lines": {"and": [["quantity", ">", 2], ["product", "=", "x"]]}}),
        ("select 1 from orders o cross join lines where o.region = 7", (),
         {"orders": ["region", "=", 7]}),
        ('select 1 from orders o join lines l on l.order_id = o.id join "Order Notes" n'
         ' on n."order" = o.id, audit where o.region = 7 and n."Id" = $1', (3,),
         {"orders": ["region", "=", 7], "Order Notes": ["Id", "=", 3]}),
        ("select o.id from orders o join lines l using (id) where o.region = 7", (),
         {"orders": ["region", "=", 7]}),
        ("select distinct on (region) region, id from orders where region > 7 group by id"
         " having count(*) > 0 order by region, id limit 3 offset 1", (),
         {"orders": ["region", ">", 7]}),
        ("select * from orders o left join lines l using (id) where o.region = 7", (), {}),
        ("select * from orders a, orders b where a.region = 7", (), {}),
        ("select * from orders where region = 7 and exists (select from lines)", (), {}),
        ("select * from orders where region = 7 union all select * from orders", (), {}),
        ("with x as (select 1) select * from orders where region = 7", (), {}),
        ("select * from open_orders where region = 7", (), {}),
        ("select o.id from orders o, open_orders v where o.region = 7", (), {}),
        ("select o.id, total(1) from orders o where o.region = 7", (), {}),
        ("select o.id, line_count(1) from orders o where o.region = 7", (),
         {"orders": ["region", "=", 7]}),
        ("select l.id from lines l, open_orders o where l.id = 7", (), {"lines": ["id", "=", 7]}),
        ("select * from orders as o(region, id) where o.region = 7", (), {}),
        ('select * from "Order Notes" where "A Text" = $1 and "order" = 3', ("it's",),
         {"Order Notes": {"and": [["A Text", "=", "it's"], ["order", "=", 3]]}}),
    ],
)  # fmt: skip
async def test_predicates(
    shop: Analyst, sql: str, values: tuple[Any, ...], expected: dict[str, Any]
) -> None:
    analysis = await shop.analyse(Statement(sql))
    assert not analysis.everything, analysis.notes
    assert predicates(analysis, *values) == expected


async def test_types_that_the_driver_names(shop: Analyst) -> None:
    """7 as smallint, 2.5 as double precision (which the numeric column is cast to), a text without
    a type."""
    sql = "select * from orders where region = $1 and amount > $2 and status = $3"
    analysis = await shop.analyse(Statement(sql, (21, 701, 0)))
    assert predicates(analysis, 7, 2.5, "x") == {
        "orders": {"and": [["region", "=", 7], ["status", "=", "x"]]}
    }


async def test_times_count_only_as_the_driver_sends_them(shop: Analyst) -> None:
    analysis = await shop.analyse(Statement("select * from orders where at > $1 and placed < $2"))
    noon = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
    day = noon.date()
    assert predicates(analysis, noon, day) == {
        "orders": {"and": [["at", ">", noon], ["placed", "<", day]]}
    }
    for at, placed in ((noon.replace(tzinfo=None), noon), ("2026-01-31T12:00:00", "2026-01-31")):
        assert predicates(analysis, at, placed) == {}
    written = await shop.analyse(
        Statement("select * from orders where at > '2026-01-31 12:00+00' and placed < '2026-01-31'")
    )
    assert predicates(written) == predicates(analysis, noon, day)


async def test_a_query_that_depends_on_the_time_gets_a_note(shop: Analyst) -> None:
    for sql in ("select * from orders where at > now()", "select current_date, id from orders"):
        (note,) = (await shop.analyse(Statement(sql))).notes
        assert "without a change in a table" in note


async def test_through(shop: Analyst) -> None:
    (read,) = (await shop.analyse(Statement("select * from big_open_orders, total(1)"))).tables
    assert set(read.through) == {"big_open_orders", "open_orders", "total()"}


# ------------------------------------------------------------------------ partitions, children


async def test_partitions_count_as_the_enabled_table(db: Connection, analyst: Analyst) -> None:
    await run(
        db,
        "create table events (id int, day int, what text, primary key (id, day))"
        " partition by range (day)",
        "create table events_1 partition of events for values from (0) to (10)",
        "create table events_2 partition of events for values from (10) to (20)",
    )
    await enable(db, "events")
    one = await analyst.analyse(Statement("select what from events_1 where day = 3"))
    assert columns(one) == {"events": "day what"}
    assert predicates(one) == {"events": ["day", "=", 3]}
    two = await analyst.analyse(
        Statement("select 1 from events_1 a, events_2 b where a.day = 3 and b.day = 12")
    )
    assert columns(two) == {"events": "day"}
    assert predicates(two) == {}
    assert not one.uncaptured
    assert not two.uncaptured


async def test_inheritance(db: Connection, analyst: Analyst) -> None:
    await run(
        db,
        "create table people (id int primary key, name text)",
        "create table staff (badge int, primary key (id)) inherits (people)",
    )
    await enable(db, "people")
    assert columns(await analyst.analyse(Statement("select name from people"))) == {
        "people": "name"
    }
    child = await analyst.analyse(Statement("select name from staff where id = 1"))
    assert columns(child) == {"people": "id name"}
    assert predicates(child) == {"people": ["id", "=", 1]}
    assert not child.uncaptured
    badge = await analyst.analyse(Statement("select badge from staff"))
    assert badge.uncaptured == ("staff",)
    assert "badge of staff is not captured" in " ".join(badge.notes)


# ------------------------------------------------------------------------ roles and policies


async def test_policies_are_read_too(db: Connection, analyst: Analyst) -> None:
    await run(
        db,
        "create table members (id int primary key, who text, region int)",
        "alter table orders enable row level security",
        "create policy own on orders using (status <> 'hidden' and region in"
        " (select region from members where who = current_user))",
        "alter table lines enable row level security",
        "create policy seen on lines using (product <> 'secret')",
    )
    await enable(db, "members")
    analysis = await analyst.analyse(Statement("select id from orders where region = 7"))
    assert columns(analysis) == {"orders": "id region status", "members": "region who"}
    assert predicates(analysis) == {}
    simple = await analyst.analyse(Statement("select id from lines where quantity = 7"))
    assert columns(simple) == {"lines": "id product quantity"}
    assert predicates(simple) == {"lines": ["quantity", "=", 7]}


@pytest.fixture
async def role(db: Connection) -> AsyncIterator[str]:
    await run(db, "create role reader_of_shop", "grant select on all tables in schema public"
              " to reader_of_shop")  # fmt: skip
    yield "reader_of_shop"
    await run(db, "drop owned by reader_of_shop", "drop role reader_of_shop")


async def test_a_role_has_its_own_search_path(db: Connection, analyst: Analyst, role: str) -> None:
    statement = Statement("select id from orders")
    assert columns(await analyst.analyse(statement, role)) == {"orders": "id"}
    await run(
        db,
        f"create schema {role}",
        f"create table {role}.orders (id int primary key)",
    )
    await enable(db, f"{role}.orders")
    assert await analyst.recheck() == {statement}
    # It may not use the schema, so that for it the schema is not there.
    assert columns(await analyst.analyse(statement, role)) == {"orders": "id"}
    await run(db, f"grant usage on schema {role} to {role}")
    assert await analyst.recheck() == {statement}
    assert columns(await analyst.analyse(statement, role)) == {f"{role}.orders": "id"}
    assert columns(await analyst.analyse(statement)) == {"orders": "id"}
    assert (await analyst.analyse(statement, "unknown role")).everything


async def test_functions_with_a_search_path(db: Connection, analyst: Analyst) -> None:
    await run(
        db,
        "set check_function_bodies = off",
        "create schema other",
        "create table other.things (id int primary key)",
        "create function inner_count() returns bigint language sql stable as"
        " 'select count(*) from things'",
        "create function things_count() returns bigint language sql stable set search_path = other,"
        " public as 'select count(*) + inner_count() from things'",
        "create function owned() returns bigint language sql stable security definer as"
        " 'select count(*) from orders'",
        "create function poly(x anyelement) returns bigint language sql stable as"
        " 'select count(*) from orders'",
    )  # fmt: skip
    await enable(db, "other.things")
    assert columns(await analyst.analyse(Statement("select things_count() from orders"))) == {
        "orders": "",
        "other.things": "",
    }
    assert columns(await analyst.analyse(Statement("select owned()"))) == {"orders": ""}
    assert (await analyst.analyse(Statement("select poly(1)"))).everything


async def test_functions_that_call_themselves(db: Connection, analyst: Analyst) -> None:
    await run(
        db,
        "set check_function_bodies = off",
        "create function up(n int) returns bigint language sql stable as"
        " 'select case when n > 0 then up(n - 1) else (select count(*) from lines) end'",
        "create function ping(n int) returns bigint language sql stable as 'select pong(n)'",
        "create function pong(n int) returns bigint language sql stable as"
        " 'select ping(n) + (select sum(quantity) from lines)'",
    )
    assert columns(await analyst.analyse(Statement("select up(3)"))) == {"lines": ""}
    assert columns(await analyst.analyse(Statement("select ping(3)"))) == {"lines": "quantity"}


# ------------------------------------------------------------------------ the cache


CHANGES = [
    ("select * from open_orders",
     "create or replace view open_orders as select id, region, amount from orders"
     " where status = 'o'"),
    ("select id from big_open_orders",
     "create or replace view open_orders as select id, region, amount from orders"
     " where status = 'o'"),
    ("select total(1)",
     "create or replace function total(r int) returns numeric language sql stable"
     " begin atomic select 1.0 + count(*) from lines; end"),
    ("select line_count(1)",
     "create or replace function line_count(order_id_ int, out n bigint) language sql as"
     " 'select 1'"),
    ("select opaque()",
     "create or replace function opaque() returns bigint language sql as 'select 1'"),
    ("select id from orders", "alter table orders add column extra int"),
    ("select id from orders", "alter table orders rename column id to number"),
    ("select id from orders", "alter table orders rename to purchases"),
    ("select id from orders", "drop table orders cascade"),
    ("select id from orders", "alter table orders enable row level security"),
    ("select id from orders", "create policy p on orders using (region = 1)"),
    ("select id from orders", "select headwater.disable_reactivity('orders')"),
    ("select id from audit", "select headwater.enable_reactivity('audit')"),
    ("select id from orders", "grant select on orders to pg_monitor"),
    ("select id from orders", "create schema elsewhere create table orders (id int)"),
]  # fmt: skip


@pytest.mark.parametrize(("sql", "change"), CHANGES)
async def test_recheck_finds_outdated_analyses(
    db: Connection, analyst: Analyst, sql: str, change: str
) -> None:
    statement, other = Statement(sql), Statement('select * from "Order Notes"')
    await analyst.analyse(statement)
    cached = await analyst.analyse(other)
    assert await analyst.recheck() == set()
    assert analyst.known(statement) is not None
    await run(db, change)
    assert await analyst.recheck() == {statement}
    assert analyst.known(statement) is None
    assert analyst.known(other) is cached
    assert await analyst.recheck() == set()


async def test_refused_statements_are_analysed_again_after_a_recheck(
    db: Connection, analyst: Analyst
) -> None:
    statement = Statement("select * from later")
    assert (await analyst.analyse(statement)).everything
    await run(db, "create table later (id int primary key)")
    assert await analyst.recheck() == {statement}
    assert (await analyst.analyse(statement)).uncaptured == ("later",)


async def test_forget(db: Connection, analyst: Analyst) -> None:
    orders, lines = Statement("select id from big_open_orders"), Statement("select id from lines")
    (read,) = (await analyst.analyse(orders)).tables
    await analyst.analyse(lines)
    assert analyst.forget([read.table.oid]) == {orders}
    assert analyst.known(orders) is None
    assert analyst.known(lines) is not None


async def test_the_same_question_at_once_is_asked_once(shop: Analyst) -> None:
    statement = Statement("select id from orders")
    found = await asyncio.gather(*(shop.analyse(statement) for _ in range(20)))
    assert all(each is found[0] for each in found)
    assert shop.known(statement) is found[0]


async def until_waiting(db: Connection) -> None:
    """Until an analyst waits for a lock."""
    waiting = (
        "select from pg_stat_activity where application_name = 'headwater analysis'"
        " and datname = current_database() and wait_event_type = 'Lock'"
    )
    while not await rows(db, waiting):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_one_caller_leaves_and_another_stays(
    db: Connection, other: Connection, analyst: Analyst
) -> None:
    statement = Statement("select id from orders")
    async with db.transaction():
        await db.execute("lock table orders in access exclusive mode")
        leaving, staying = (asyncio.create_task(analyst.analyse(statement)) for _ in range(2))
        await until_waiting(other)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
    assert columns(await staying) == {"orders": "id"}


async def test_an_analysis_forgotten_meanwhile_is_not_cached(
    db: Connection, other: Connection, analyst: Analyst
) -> None:
    statement = Statement("select id from orders")
    async with db.transaction():
        await db.execute("lock table orders in access exclusive mode")
        asking = asyncio.create_task(analyst.analyse(statement))
        await until_waiting(other)
        analyst.forget([1])
    assert columns(await asking) == {"orders": "id"}
    assert analyst.known(statement) is None


async def test_closing_fails_waiting_callers(
    db: Connection, other: Connection, analyst: Analyst
) -> None:
    async with db.transaction():
        await db.execute("lock table orders in access exclusive mode")
        asking = asyncio.create_task(analyst.analyse(Statement("select id from orders")))
        await until_waiting(other)
        await analyst.close()
        with pytest.raises(Unavailable):
            await asking


async def test_the_cache_is_bounded(shop: Analyst, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.queries.analysis.analyst._ANALYSES_MAX", 2)
    statements = [Statement(f"select {n} from orders") for n in range(3)]
    for statement in statements[:2]:
        await shop.analyse(statement)
    shop.known(statements[0])
    await shop.analyse(statements[2])
    assert [shop.known(each) is not None for each in statements] == [True, False, True]


async def test_a_lost_connection_is_opened_again(db: Connection, analyst: Analyst) -> None:
    await analyst.analyse(Statement("select 1"))
    await run(
        db,
        "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
        " where application_name = 'headwater analysis' and datname = current_database()",
    )
    assert columns(await analyst.analyse(Statement("select id from orders"))) == {"orders": "id"}


async def test_without_a_database_or_a_schema(empty_url: str) -> None:
    analyst = Analyst("postgresql://127.0.0.1:1/nothing")
    with pytest.raises(Unavailable):
        await analyst.analyse(Statement("select 1"))
    await analyst.close()
    analyst = Analyst(empty_url)
    with pytest.raises(NotInstalled):
        await analyst.analyse(Statement("select 1"))
    await analyst.close()


async def test_a_lock_that_does_not_end(
    db: Connection, analyst: Analyst, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOOKUP_SECONDS", 0.2)
    async with db.transaction():
        await db.execute("lock table orders in access exclusive mode")
        with pytest.raises(Unavailable, match="took too long"):
            await analyst.analyse(Statement("select id from orders"))
    monkeypatch.undo()
    assert not (await analyst.analyse(Statement("select id from orders"))).everything
