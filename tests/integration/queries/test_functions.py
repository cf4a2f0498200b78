"""Queries and mutations as a program registers and calls them, and the context that they get."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import msgspec
import psycopg
import pytest

from headwater import (
    BlockingContext,
    ConfigError,
    Context,
    ErrorEvent,
    Forbidden,
    FunctionFailed,
    Headwater,
    Identity,
    InvalidQuery,
    MutationContext,
    QueryEvent,
    Refused,
    ResultError,
    TimedOut,
    Unavailable,
)
from headwater.database import Connection, connect
from headwater.identity import ANONYMOUS
from headwater.queries.analysis.statements import Executed, Statement
from tests.support.log_probe import rows, run


class Order(msgspec.Struct):
    id: int
    region: int
    amount: Decimal


@pytest.fixture
async def shop(connection: Connection) -> Connection:
    await run(
        connection,
        "create table orders (id int primary key, region int, amount numeric)",
        "insert into orders values (1, 5, 2.50), (2, 5, 7), (3, 6, 1)",
    )
    return connection


@asynccontextmanager
async def context(
    connection: Connection, make: type[Context] = Context, **options: Any
) -> AsyncIterator[Any]:
    """In a transaction that is rolled back."""
    async with connection.transaction(force_rollback=True):
        made = make(connection, ANONYMOUS, function="test", **options)
        yield made
        made.close()


# The context -------------------------------------------------------------------------------------


async def test_fetch(shop: Connection) -> None:
    async with context(shop) as ctx:
        found = await ctx.fetch("select id, amount from orders where region = %s order by id", 5)
        assert found == [{"id": 1, "amount": Decimal("2.50")}, {"id": 2, "amount": Decimal(7)}]
        assert await ctx.fetch("select id from orders where region = %(r)s", r=7) == []
        row = {"a": "ä%", "b": "50 %"}
        assert await ctx.fetch("select 'ä%%' as a, %s::text as b", "50 %") == [row]


async def test_fetch_one_and_value(shop: Connection) -> None:
    async with context(shop) as ctx:
        assert await ctx.fetch_one("select id from orders where id = %s", 1) == {"id": 1}
        assert await ctx.fetch_one("select id from orders where id = %s", 9) is None
        assert await ctx.fetch_value("select count(*) from orders") == 3
        assert await ctx.fetch_value("select id from orders where id = 9") is None
        with pytest.raises(ResultError) as caught:
            await ctx.fetch_one("select id from orders")
    assert caught.value.code == "several_rows"


async def test_statements_are_observed_as_the_server_gets_them(shop: Connection) -> None:
    seen: list[Executed] = []
    async with context(shop, observe=seen.append) as ctx:
        await ctx.fetch("select %(b)s::int4, %(a)s::text, %(b)s", a="x", b=70000)
        await ctx.fetch("select 1")
        with pytest.raises(psycopg.errors.DivisionByZero):
            await ctx.fetch("select 1 / %s", 0)
    assert seen == [
        Executed(Statement("select $1::int4, $2::text, $1", (23, 0)), (70000, "x")),
        Executed(Statement("select 1")),
        Executed(Statement("select 1 / $1", (21,)), (0,)),
    ]


async def test_too_many_rows_are_not_read(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.limits.QUERY_ROWS_MAX", 2_500)
    async with context(connection) as ctx:
        assert len(await ctx.fetch("select generate_series(1, 2500)")) == 2_500
        with pytest.raises(ResultError) as caught:
            await ctx.fetch("select generate_series(1, 2000000000)")
        assert caught.value.code == "too_many_rows"
    async with context(connection) as ctx:
        assert await ctx.fetch_value("select 1") == 1


async def test_too_many_bytes_are_not_read(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.limits.FETCH_BYTES_MAX", 10_000_000)
    sql = "select repeat('a', 10000), generate_series(1, %s)"
    async with context(connection) as ctx:
        assert len(await ctx.fetch(sql, 900)) == 900
        with pytest.raises(ResultError) as caught:
            await ctx.fetch(sql, 2_000_000_000)
    assert caught.value.code == "result_too_large"


async def test_statements_one_at_a_time(shop: Connection) -> None:
    async with context(shop) as ctx:
        found = await asyncio.gather(*(ctx.fetch_value("select %s::int", i) for i in range(20)))
    assert found == list(range(20))


async def test_a_statement_that_comes_often_is_prepared(shop: Connection) -> None:
    async with context(shop) as ctx:
        for id in (1, 2, 3, 1, 2, 3):
            assert await ctx.fetch_value("select id from orders where id = %s", id) == id
        (prepared,) = await ctx.fetch("select statement from pg_prepared_statements")
    assert prepared == {"statement": "select id from orders where id = $1"}


async def test_prepared_statements_outlive_the_drivers(shop: Connection) -> None:
    """The driver removes all of them when a transaction is rolled back, if it has any of its
    own."""
    for _ in range(3):
        async with context(shop) as ctx:
            for _ in range(10):
                await shop.execute("select 5")
                await ctx.fetch("select id from orders where id = %s", 1)


async def test_a_prepared_statement_that_was_deallocated(shop: Connection) -> None:
    async with context(shop) as ctx:
        for _ in range(5):
            await ctx.fetch("select id from orders where id = %s", 1)
    await run(shop, "deallocate all")
    with pytest.raises(psycopg.errors.InvalidSqlStatementName):
        async with context(shop) as ctx:
            await ctx.fetch("select id from orders where id = %s", 1)
    for _ in range(5):
        async with context(shop) as ctx:
            assert await ctx.fetch_value("select id from orders where id = %s", 1) == 1


async def test_prepared_statements_are_bounded(
    shop: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.queries.execution.chunked_fetch._PREPARED_STATEMENTS_MAX", 5)
    monkeypatch.setattr("headwater.queries.execution.chunked_fetch._PREPARE_AFTER", 1)
    async with context(shop) as ctx:
        for i in [*range(20), *range(20)]:
            assert await ctx.fetch_value(f"select {i}") == i
        assert await ctx.fetch_value("select count(*) from pg_prepared_statements") == 5


async def test_a_prepared_statement_outlives_an_altered_table(shop: Connection) -> None:
    sql = "select * from orders where id = %s"
    for _ in range(4):
        async with context(shop) as ctx:
            await ctx.fetch(sql, 1)
    await run(shop, "alter table orders add note text")
    with pytest.raises(psycopg.errors.FeatureNotSupported):
        async with context(shop) as ctx:
            await ctx.fetch(sql, 1)
    async with context(shop) as ctx:
        assert await ctx.fetch_one(sql, 1) == {
            "id": 1, "region": 5, "amount": Decimal("2.50"), "note": None,
        }  # fmt: skip
    for _ in range(4):
        async with context(shop) as ctx:
            await ctx.fetch(sql, 1)
            prepared = await rows(shop, "select statement from pg_prepared_statements")
            assert len(prepared) <= 1


@pytest.mark.parametrize(
    "sql", ["copy (select 1) to stdout", "copy orders from stdin"], ids=["out", "in"]
)
async def test_copy_is_refused(url: str, shop: Connection, sql: str) -> None:
    connection = await connect(url, purpose="test", application_path=True)
    ctx = Context(connection, ANONYMOUS, function="test")
    with pytest.raises(ConfigError, match="COPY is not for"):
        await ctx.fetch(sql)
    assert connection.closed


async def test_a_context_is_good_for_one_call(shop: Connection) -> None:
    async with context(shop) as ctx:
        pass
    with pytest.raises(ConfigError, match="used its context after it had ended"):
        await ctx.fetch("select 1")


async def test_closing_cancels_running_calls(shop: Connection) -> None:
    async with context(shop) as ctx:
        work = asyncio.create_task(ctx.fetch("select pg_sleep(600)"))
        assert await becomes(lambda: shop.info.transaction_status.name == "ACTIVE")
        ctx.close()
        with pytest.raises(asyncio.CancelledError):
            await work
    assert await rows(shop, "select 1") == [(1,)]


async def becomes(condition: Callable[[], bool]) -> bool:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return True


# An application ----------------------------------------------------------------------------------


class Shop:
    """A program with functions; `received` has the events that its handlers got."""

    def __init__(self, url: str) -> None:
        self.hw = Headwater(url, query_timeout="5 seconds")
        self.received: list[Any] = []
        self.hw.table("orders")
        self.hw.on("query", self.received.append)
        self.hw.on("error", self.received.append)

    def events(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.received if isinstance(event, kind)]


@pytest.fixture
def app(url: str, shop: Connection) -> Shop:
    return Shop(url)


async def orders_of(ctx: Context, region: int) -> list[Order]:
    return await ctx.fetch("select * from orders where region = %s order by id", region)


async def test_a_query_called_from_python(app: Shop) -> None:
    query = app.hw.query(orders_of)
    async with app.hw:
        assert await query(region=6) == [Order(3, 6, Decimal(1))]
        assert await query(6) == [Order(3, 6, Decimal(1))]
        assert await query.call(Identity(user="ann"), region=7) == []
        with pytest.raises(InvalidQuery, match=r"args\.region: expected int, got str"):
            await query(region="6")
    with pytest.raises(ConfigError, match="not running"):
        await query(region=6)


async def test_a_query_of_sql(app: Shop) -> None:
    sql = "select id from orders where region = %(region)s order by 1"
    query = app.hw.query("of", sql=sql)
    whole = app.hw.query("whole", sql="select count(*) from orders where 5 %% 3 = 2")
    typed = app.hw.query("typed", sql="select * from orders where id = 3", returns=list[Order])
    async with app.hw:
        assert await query(region=5) == [{"id": 1}, {"id": 2}]
        assert await whole() == [{"count": 3}]
        assert await typed() == [Order(3, 6, Decimal(1))]
        with pytest.raises(InvalidQuery, match="invalid input syntax for type integer"):
            await query(region="x")


async def test_a_text_that_postgresql_cannot_hold(app: Shop) -> None:
    @app.hw.query
    async def echo(ctx: Context, text: str) -> str:
        found: str = await ctx.fetch_value("select %s", text)
        return found

    async with app.hw:
        assert await echo(text="ä\n") == "ä\n"
        with pytest.raises(InvalidQuery, match="NUL"):
            await echo(text="a\0b")


async def test_registering_after_the_start(app: Shop) -> None:
    async with app.hw:
        with pytest.raises(ConfigError, match="query orders_of is registered too late"):
            app.hw.query(orders_of)


async def test_queries_do_not_write(app: Shop) -> None:
    @app.hw.query
    async def writes(ctx: Context) -> Any:
        return await ctx.fetch("insert into orders values (9) returning id")

    async with app.hw:
        with pytest.raises(FunctionFailed) as caught:
            await writes()
    assert isinstance(caught.value.__cause__, psycopg.errors.ReadOnlySqlTransaction)


async def test_the_identity_of_the_caller(app: Shop) -> None:
    @app.hw.query
    async def whoami(ctx: Context) -> Any:
        return [ctx.user, ctx.tenant, ctx.claims, len(ctx.trace_id), ctx.function]

    ann = Identity(user="ann", tenant="acme", claims={"sub": "ann"})
    async with app.hw:
        assert await whoami.call(ann) == ["ann", "acme", {"sub": "ann"}, 32, "whoami"]
        assert (await whoami())[:3] == [None, None, {}]


async def test_rows_by_role(app: Shop, shop: Connection, server_url: str) -> None:
    query = app.hw.query(orders_of)
    trusted = app.hw.query("trusted", trusted=True)(orders_of)
    clerk, ghost = (Identity(user="ann", role=role, claims={"region": 5}) for role in ROLES)
    await run(
        shop,
        f"create role {ROLES[0]}",
        f"grant select on orders to {ROLES[0]}",
        "alter table orders enable row level security",
        "create policy own on orders using"
        " (region = (current_setting('request.jwt.claims')::json ->> 'region')::int)",
    )
    try:
        async with app.hw:
            assert len(await query.call(clerk, region=5)) == 2
            assert await query.call(clerk, region=6) == []
            assert len(await trusted.call(clerk, region=6)) == 1
            assert len(await query(region=6)) == 1
            with pytest.raises(Forbidden, match="there is no database role"):
                await query.call(ghost, region=5)
            await run(shop, f"revoke select on orders from {ROLES[0]}")
            with pytest.raises(Forbidden, match="permission denied for table orders"):
                await query.call(clerk, region=5)
    finally:
        await run(shop, f"drop owned by {ROLES[0]}", f"drop role {ROLES[0]}")


ROLES = ("test_functions_clerk", "test_functions_ghost")


# Functions that are not async --------------------------------------------------------------------


async def test_functions_in_threads(app: Shop) -> None:
    @app.hw.query
    def count(ctx: BlockingContext, region: int) -> int:
        assert threading.current_thread() is not threading.main_thread()
        assert ctx.fetch_one("select 1 as a") == {"a": 1}
        assert len(ctx.fetch("select * from orders")) >= 3
        found: int = ctx.fetch_value("select count(*) from orders where region = %s", region)
        return found

    @app.hw.mutation
    def add(ctx: BlockingContext) -> int:
        return ctx.execute("insert into orders values (4, 5, 1)")

    async with app.hw:
        assert await count(region=5) == 2
        assert await add() == 1
        assert await count(region=5) == 3


async def test_a_query_in_a_thread_cannot_write(app: Shop) -> None:
    @app.hw.query
    def writes(ctx: BlockingContext) -> int:
        return ctx.execute("delete from orders")

    async with app.hw:
        with pytest.raises(FunctionFailed) as caught:
            await writes()
    assert "query writes tries to write" in str(caught.value.__cause__)


async def test_a_thread_that_takes_too_long_loses_its_context(app: Shop) -> None:
    began, go, raised = threading.Event(), threading.Event(), asyncio.Queue[Exception]()
    loop = asyncio.get_running_loop()

    @app.hw.query(timeout=0.05)
    def slow(ctx: BlockingContext) -> None:
        began.set()
        go.wait(60)
        try:
            ctx.fetch("select 1")
        except Exception as error:
            loop.call_soon_threadsafe(raised.put_nowait, error)

    @app.hw.query(timeout=0.05)
    def asleep(ctx: BlockingContext) -> None:
        try:
            ctx.fetch("select pg_sleep(600)")
        except Exception as error:
            loop.call_soon_threadsafe(raised.put_nowait, error)

    async with app.hw:
        with pytest.raises(TimedOut, match=r"query slow took longer than 0\.05 seconds"):
            await slow()
        go.set()
        assert isinstance(await asyncio.wait_for(raised.get(), 20), ConfigError)
        with pytest.raises(TimedOut):
            await asleep()
        await asyncio.wait_for(raised.get(), 20)


class Counter:
    async def __call__(self, ctx: Context, region: int) -> int:
        return len(await orders_of(ctx, region))


async def test_wrapped_functions(app: Shop) -> None:
    @functools.wraps(orders_of)
    def logged(*args: Any, **named: Any) -> Any:
        return orders_of(*args, **named)

    wrapped = app.hw.query("wrapped")(logged)
    bound = app.hw.query("bound")(functools.partial(orders_of, region=6))
    called = app.hw.query("called")(Counter())
    async with app.hw:
        assert await wrapped(region=6) == [Order(3, 6, Decimal(1))]
        assert await bound() == [Order(3, 6, Decimal(1))]
        assert await called(region=5) == 2
        for query in (wrapped, called):
            with pytest.raises(InvalidQuery, match=r"args\.region: expected int"):
                await query(region="6")


# Functions that call functions -------------------------------------------------------------------


async def test_composition(app: Shop) -> None:
    query = app.hw.query(orders_of)

    @app.hw.query
    def in_thread(ctx: Any, region: int) -> int:
        return len(query(ctx, region))

    @app.hw.query
    def in_same_thread(ctx: Any, region: int) -> int:
        return int(in_thread(ctx, region=region))

    @app.hw.query
    async def total(ctx: Context) -> list[int]:
        orders = await query(ctx, 5)
        assert isinstance(orders[0], Order)
        return [len(orders), await in_same_thread(ctx, region=6)]

    @app.hw.mutation
    async def move(ctx: MutationContext) -> list[int]:
        await ctx.execute("update orders set region = 5")
        found: list[int] = await total(ctx)
        return found

    async with app.hw:
        assert await total() == [2, 1]
        assert await move() == [3, 0]


async def test_a_query_calls_no_mutation(app: Shop) -> None:
    @app.hw.mutation
    async def writes(ctx: MutationContext) -> None: ...

    @app.hw.query
    async def reads(ctx: Context) -> None:
        await writes(ctx)

    async with app.hw:
        with pytest.raises(FunctionFailed) as caught:
            await reads()
    assert "query reads calls mutation writes: queries do not write" in str(caught.value.__cause__)


# What goes wrong ---------------------------------------------------------------------------------


def raising(error: Exception) -> Callable[[Context], Any]:
    async def fails(ctx: Context) -> None:
        raise error

    return fails


async def test_errors_of_the_application_reach_the_caller(app: Shop) -> None:
    refused = Refused("sold out", code="sold_out", hint="Come back tomorrow.")
    query = app.hw.query("q")(raising(refused))
    async with app.hw:
        with pytest.raises(Refused) as caught:
            await query()
    assert caught.value is refused
    (event,) = app.events(ErrorEvent)
    assert (event.function, event.kind, event.code, event.error_id) == (
        "q",
        "query",
        "sold_out",
        None,
    )


async def test_unforeseen_errors_are_written_to_the_log_only(
    app: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    query = app.hw.query("q")(raising(ValueError("the password is 1234")))
    async with app.hw:
        with pytest.raises(FunctionFailed) as caught:
            await query()
    (event,) = app.events(ErrorEvent)
    assert event.error_id
    assert str(caught.value) == f"query q failed; the gateway's log has it under {event.error_id}"
    assert "1234" not in f"{caught.value} {caught.value.hint}"
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert event.error_id in record.getMessage()
    assert record.exc_info
    assert "1234" in str(record.exc_info[1])


async def test_a_functions_own_timeout_is_not_ours(app: Shop) -> None:
    query = app.hw.query("q")(raising(TimeoutError()))
    async with app.hw:
        with pytest.raises(FunctionFailed):
            await query()


@pytest.mark.parametrize("python", [True, False])
async def test_too_slow(app: Shop, python: bool) -> None:
    @app.hw.query(timeout=0.05)
    async def slow(ctx: Context) -> None:
        await (asyncio.sleep(600) if python else ctx.fetch("select pg_sleep(600)"))

    async with app.hw:
        with pytest.raises(TimedOut) as caught:
            await slow()
    assert caught.value.retryable


async def test_a_value_that_python_cannot_hold(app: Shop) -> None:
    query = app.hw.query("q", sql="select 'infinity'::timestamptz as until")
    async with app.hw:
        with pytest.raises(ResultError, match="'infinity'"):
            await query()


async def test_a_lost_connection_is_unavailable_and_the_next_call_works(
    app: Shop, shop: Connection
) -> None:
    query = app.hw.query(orders_of)

    @app.hw.query
    async def kills(ctx: Context) -> None:
        await ctx.fetch("select pg_terminate_backend(pg_backend_pid())")

    async with app.hw:
        with pytest.raises(Unavailable):
            await kills()
        await asyncio.gather(*(query(5) for _ in range(3)))
        await run(
            shop,
            "select pg_terminate_backend(pid, 20000) from pg_stat_activity"
            " where application_name = 'headwater query'",
        )
        assert len(await query(5)) == 2


# Events ------------------------------------------------------------------------------------------


async def test_query_events_have_no_values(app: Shop) -> None:
    whole: list[QueryEvent] = []
    query = app.hw.query(orders_of)
    app.hw.on("query", parameters=True)(whole.append)

    @app.hw.mutation
    async def add(ctx: MutationContext) -> None:
        await ctx.execute("insert into orders values (%s, 1, 1), (%s, 1, 1)", 10, 11)
        await ctx.execute("with x as (select 1) delete from orders where id = %s", 10)

    async with app.hw:
        await query.call(Identity(user="ann"), region=5)
        await add()
    statements = [
        (e.function, e.kind, e.operation, e.rows, e.parameters, e.user_id, e.error)
        for e in app.events(QueryEvent)
    ]
    assert statements == [
        ("orders_of", "query", "select", 2, ("int",), "ann", None),
        ("add", "mutation", "insert", 2, ("int", "int"), None, None),
        ("add", "mutation", "delete", 1, ("int",), None, None),
    ]
    assert [event.parameters for event in whole] == [(5,), (10, 11), (10,)]
    assert whole[0].sql == "select * from orders where region = $1 order by id"
    assert len({event.trace_id for event in whole}) == 2


async def test_a_failing_statement_emits_an_event(app: Shop) -> None:
    query = app.hw.query("q", sql="select 1 / %(n)s", args={"n": int})
    async with app.hw:
        with pytest.raises(InvalidQuery, match="division by zero"):
            await query(n=0)
    (event,) = app.events(QueryEvent)
    assert (event.operation, event.rows, event.error) == ("select", 0, "22012")
