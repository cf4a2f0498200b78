"""Mutations: one transaction each, with its actor, and nothing left behind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from random import Random
from typing import Any

import msgspec
import psycopg
import pytest
from opentelemetry.sdk.trace import TracerProvider

from headwater import (
    DatabaseError,
    Forbidden,
    FunctionFailed,
    HeadwaterError,
    Identity,
    LimitExceeded,
    MutationContext,
    Position,
    Refused,
    ResultError,
    TimedOut,
    Unavailable,
)
from headwater.database import Connection
from headwater.identity import ANONYMOUS
from headwater.queries.execution.chunked_fetch import _PREPARE_AFTER
from headwater.queries.execution.mutations import MutationRunner
from headwater.queries.functions import Mutation
from headwater.settings import make_settings
from tests.support.log_probe import LogProbe, enable, probing, rows, run

ANN = Identity(user="ann", claims={"sub": "ann"})
BOB = Identity(user="bob")

Body = Callable[..., Awaitable[Any]]


class Bench:
    """Mutations over the tables `orders` and `pears`."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.mutations = MutationRunner(url, make_settings({"url": url, **settings}))

    async def run(self, body: Body, identity: Identity = ANONYMOUS, **options: Any) -> Any:
        value, _ = await self.full(body, identity, **options)
        return value

    async def full(
        self, body: Body, identity: Identity = ANONYMOUS, trace: str | None = None, **options: Any
    ) -> tuple[Any, Position]:
        mutation = Mutation(body.__name__, body, **options)
        return await self.mutations.run(mutation, mutation.bind({}), identity, trace_id=trace)


@pytest.fixture
async def tables(connection: Connection) -> Connection:
    await run(
        connection,
        "create table orders (id int primary key, amount int)",
        "create table pears (id int primary key)",
    )
    await enable(connection, "orders", "pears")
    return connection


@pytest.fixture
async def bench(url: str, tables: Connection) -> AsyncIterator[Bench]:
    bench = Bench(url, mutation_connections=1)
    yield bench
    await bench.mutations.close()


@pytest.fixture
async def probe(url: str, tables: Connection) -> AsyncIterator[LogProbe]:
    async with probing(url) as probe:
        yield probe


async def add(ctx: MutationContext) -> int:
    return await ctx.execute("insert into orders select 1 + coalesce(max(id), 0) from orders")


# The actor ----------------------------------------------------------------------------------------


async def test_every_mutation_has_its_actor_in_the_log(bench: Bench, probe: LogProbe) -> None:
    async def both(ctx: MutationContext) -> None:
        await add(ctx)
        await ctx.connection.execute("insert into pears values (1)")

    async def anonymous(ctx: MutationContext) -> None:
        await add(ctx)

    await bench.run(both, ANN, trace="t1")
    await bench.run(add, BOB, trace="t2")
    await bench.run(anonymous, trace="t3")
    actors = [c.actor for c in await probe.changes()]
    assert [(a.user_id, a.function_name, a.trace_id) for a in actors] == [
        ("ann", "both", "t1"),
        ("ann", "both", "t1"),
        ("bob", "add", "t2"),
        (None, "anonymous", "t3"),
    ]


async def test_the_log_shows_it_in_sql(bench: Bench, tables: Connection) -> None:
    await bench.run(add, ANN, trace="t1")
    sql = "select user_id, function_name, trace_id from headwater.changes where op = 'insert'"
    found = await rows(tables, sql)
    assert found == [("ann", "add", "t1")]


async def test_the_trace_is_the_current_spans(bench: Bench, probe: LogProbe) -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("request") as span:
        await bench.run(add)
    (change,) = await probe.changes()
    assert change.actor.trace_id == f"{span.get_span_context().trace_id:032x}"
    await bench.run(add)
    (change,) = await probe.changes()
    assert len(change.actor.trace_id or "") == 32


LEFT_BEHIND = """
    select current_user::text, current_setting('headwater.user_id', true),
           current_setting('request.jwt.claims', true), current_setting('statement_timeout'),
           current_setting('work_mem'), current_setting('timezone'),
           (select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()),
           (select count(*) from pg_class where relpersistence = 't' and relname = 'mine'),
           (select count(*) from pg_listening_channels())
"""


async def test_nothing_of_one_user_stays_for_the_next(
    bench: Bench, tables: Connection, probe: LogProbe
) -> None:
    async def looks(ctx: MutationContext) -> Any:
        return [await ctx.fetch_value("select pg_backend_pid()"), await ctx.fetch(LEFT_BEHIND)]

    async def litters(ctx: MutationContext) -> None:
        for statement in (
            "set headwater.user_id = 'mallory'", "set role headwater_litter", "reset role",
            "set request.jwt.claims = '{}'", "set work_mem = '77MB'", "set timezone = 'Asia/Tokyo'",
            "select pg_advisory_lock(5)", "create temp table mine (id int)", "listen pears",
            "set session role headwater_litter",
        ):  # fmt: skip
            await ctx.execute(statement)

    with role(tables, "headwater_litter"):
        await run(tables, "create role headwater_litter")
        clean = await bench.run(looks)
        await bench.run(litters, ANN)
        assert await bench.run(looks) == clean
        with pytest.raises(Refused):
            await bench.run(_failing(litters), ANN)
        assert await bench.run(looks) == clean
        async with bench.mutations._pool.begun(_nothing, wait=20) as connection:
            await run(connection, "insert into pears values (7)")
    (change,) = await probe.changes()
    assert change.actor.user_id is None


async def test_actors_among_many_who_fail_and_leave(url: str, probe: LogProbe) -> None:
    """Each row has the name of its writer, and the log must have the same."""
    bench, random = Bench(url, mutation_connections=4), Random(8123)
    numbers = itertools.count(1)

    async def write(ctx: MutationContext, fate: str) -> None:
        for _ in range(2):
            await ctx.execute("insert into orders values (%s, %s)", next(numbers), int(ctx.user))  # type: ignore[arg-type]
        match fate:
            case "refuses":
                raise Refused("no")
            case "dies":
                await ctx.fetch("select pg_terminate_backend(pg_backend_pid())")
            case "dawdles":
                await ctx.fetch("select pg_sleep(600)")

    async def call(user: int, fate: str) -> None:
        mutation = Mutation("write", write, timeout=20)
        arguments = mutation.bind({"fate": fate})
        seconds = 0.2 if fate == "dawdles" else 60
        with suppress(TimeoutError, Refused, Unavailable):
            async with asyncio.timeout(seconds):
                await bench.mutations.run(mutation, arguments, Identity(user=str(user)))

    fates = random.choices(["succeeds", "refuses", "dies", "dawdles"], [8, 3, 1, 1], k=200)
    await asyncio.gather(*(call(user, fate) for user, fate in enumerate(fates)))
    await bench.mutations.close()
    changes = await probe.changes()
    assert len(changes) == 2 * fates.count("succeeds")
    assert all(c.actor.user_id == str(c.after and c.after["amount"]) for c in changes)


@contextmanager
def role(connection: Connection, name: str) -> Iterator[None]:
    try:
        yield
    finally:
        with psycopg.connect(connection.info.dsn, autocommit=True) as other:
            for statement in (f"drop owned by {name}", f"drop role {name}"):
                other.execute(statement.encode())


async def _nothing(connection: Connection) -> None:
    pass


def _failing(body: Body) -> Body:
    async def fails(ctx: MutationContext) -> None:
        await body(ctx)
        raise Refused("no")

    return fails


# All or nothing -----------------------------------------------------------------------------------


async def test_a_position_contains_what_was_written(bench: Bench, probe: LogProbe) -> None:
    before = probe.position
    _, position = await bench.full(add)
    (transaction,) = await probe.transactions()
    assert position.contains(transaction.xid)
    assert not before.contains(transaction.xid)
    assert position.log == before.log
    assert probe.position.covers(position)


async def test_a_failure_leaves_nothing(bench: Bench, tables: Connection, probe: LogProbe) -> None:
    with pytest.raises(Refused):
        await bench.run(_failing(add))
    assert await rows(tables, "select * from orders") == []
    assert await probe.changes() == []


class Total(msgspec.Struct):
    total: int


async def test_a_result_that_does_not_fit_leaves_nothing(bench: Bench, tables: Connection) -> None:
    async def wrong(ctx: MutationContext) -> Total:
        await add(ctx)
        return {"total": "many"}  # type: ignore[return-value]

    with pytest.raises(ResultError, match=r"\$\.total: expected int, got str"):
        await bench.run(wrong)
    assert await rows(tables, "select * from orders") == []


async def test_an_answer_that_cannot_be_sent_leaves_nothing(
    bench: Bench, tables: Connection
) -> None:
    async def opaque(ctx: MutationContext):  # type: ignore[no-untyped-def]
        await add(ctx)
        return object()

    mutation = Mutation("opaque", opaque)
    with pytest.raises(ResultError, match="cannot be sent"):
        await bench.mutations.answer(mutation, mutation.bind({}), ANN)
    assert await rows(tables, "select * from orders") == []


async def test_an_answer_is_json(bench: Bench) -> None:
    mutation = Mutation("add", add)
    value, position = await bench.mutations.answer(mutation, mutation.bind({}), ANN)
    assert bytes(value) == b"1"
    assert isinstance(position, Position)


async def test_a_function_that_continues_after_a_failed_statement(
    bench: Bench, tables: Connection
) -> None:
    async def careless(ctx: MutationContext) -> None:
        await add(ctx)
        with suppress(psycopg.errors.UniqueViolation):
            await ctx.execute("insert into orders values (1)")

    async def careful(ctx: MutationContext) -> None:
        await add(ctx)
        with suppress(psycopg.errors.UniqueViolation):
            async with ctx.connection.transaction():
                await ctx.execute("insert into orders values (1)")

    with pytest.raises(FunctionFailed) as caught:
        await bench.run(careless)
    assert "a statement failed and the function continued" in str(caught.value.__cause__)
    assert await rows(tables, "select id from orders") == []
    await bench.run(careful)
    assert await rows(tables, "select id from orders") == [(1,)]


async def test_a_function_that_commits_itself(bench: Bench) -> None:
    async def commits(ctx: MutationContext) -> None:
        await add(ctx)
        await ctx.execute("commit")

    with pytest.raises(FunctionFailed) as caught:
        await bench.run(commits)
    assert "ended its transaction itself" in str(caught.value.__cause__)


async def test_a_constraint_that_fails_at_commit(bench: Bench, tables: Connection) -> None:
    await run(
        tables,
        "create table lines (order_id int references orders deferrable initially deferred)",
    )

    async def orphan(ctx: MutationContext) -> None:
        await ctx.execute("insert into lines values (99)")

    with pytest.raises(FunctionFailed) as caught:
        await bench.run(orphan)
    assert isinstance(caught.value.__cause__, psycopg.errors.ForeignKeyViolation)
    assert await bench.run(add) == 1


# Roles --------------------------------------------------------------------------------------------


async def test_roles(bench: Bench, tables: Connection, probe: LogProbe) -> None:
    clerk = Identity(user="ann", role="headwater_clerk", claims={"limit": 10})
    ghost = Identity(role="headwater_ghost")

    async def small(ctx: MutationContext) -> Any:
        await ctx.execute("insert into orders values (1, 5)")
        return await ctx.fetch_value("select current_user")

    async def large(ctx: MutationContext) -> Any:
        await ctx.execute("insert into orders values (2, 50)")
        return await ctx.fetch_value("select current_user")

    with role(tables, "headwater_clerk"):
        await run(
            tables,
            "create role headwater_clerk",
            "grant select, insert on orders to headwater_clerk",
            "alter table orders enable row level security",
            "create policy small on orders using (true) with check"
            " (amount < (current_setting('request.jwt.claims')::json ->> 'limit')::int)",
        )
        assert await bench.run(small, clerk) == "headwater_clerk"
        with pytest.raises(Forbidden, match='policy for table "orders"'):
            await bench.run(large, clerk)
        assert await bench.run(large, clerk, trusted=True) != "headwater_clerk"
        with pytest.raises(Forbidden, match="there is no database role headwater_ghost"):
            await bench.run(small, ghost)
        actors = {(c.actor.user_id, c.key) for c in await probe.changes()}
        assert actors == {("ann", (1,)), ("ann", (2,))}


# Time, conflicts, lost connections ----------------------------------------------------------------


async def test_too_slow(bench: Bench, tables: Connection) -> None:
    async def sleeps(ctx: MutationContext) -> None:
        await add(ctx)
        await ctx.fetch("select pg_sleep(600)")

    async def dawdles(ctx: MutationContext) -> None:
        await add(ctx)
        await asyncio.sleep(600)

    for body in (sleeps, dawdles):
        with pytest.raises(TimedOut, match=f"mutation {body.__name__}"):
            await bench.run(body, timeout=0.2)
    assert await rows(tables, "select * from orders") == []


async def test_all_connections_busy(url: str, bench: Bench) -> None:
    began, go = asyncio.Event(), asyncio.Event()

    async def holds(ctx: MutationContext) -> None:
        began.set()
        await go.wait()

    holder = asyncio.create_task(bench.run(holds))
    await began.wait()
    with pytest.raises(LimitExceeded) as caught:
        await bench.run(add, timeout=0.05)
    assert caught.value.code == "mutations_busy"
    go.set()
    await holder
    assert await bench.run(add) == 1


async def test_one_users_slow_mutations_leave_places_for_others(
    url: str, tables: Connection
) -> None:
    bench = Bench(url, mutation_connections=4)
    began, go = 0, asyncio.Event()

    async def holds(ctx: MutationContext) -> None:
        nonlocal began
        began += 1
        await go.wait()

    async def answer(body: Body, user: str, **options: Any) -> Any:
        mutation, identity = Mutation(body.__name__, body, **options), Identity(user=user)
        owner = ("user", user)
        return await bench.mutations.answer(mutation, mutation.bind({}), identity, owner=owner)

    held = [asyncio.create_task(answer(holds, "ann")) for _ in range(10)]
    for user in ("bob", "eve") * 5:  # they run before what waits, and release their places
        await answer(add, user, timeout=10)
    assert began == 2
    with pytest.raises(LimitExceeded, match="this user has 2 running mutations") as caught:
        await answer(add, "ann", timeout=0.05)
    assert (caught.value.code, caught.value.retryable) == ("user_mutations_busy", True)
    assert not any(task.done() for task in held)
    go.set()
    await asyncio.gather(*held)
    assert began == 10
    await answer(add, "ann")
    await bench.mutations.close()
    assert await rows(tables, "select count(*) from orders") == [(11,)]


async def test_conflicts_can_be_tried_again(bench: Bench, tables: Connection, url: str) -> None:
    await run(tables, "insert into orders values (1, 1)")

    async def locks(ctx: MutationContext) -> None:
        await ctx.execute("set local lock_timeout = '10ms'")
        await ctx.execute("update orders set amount = 2")

    async with tables.transaction():
        await run(tables, "update orders set amount = 3")
        with pytest.raises(DatabaseError) as caught:
            await bench.run(locks)
    assert caught.value.code == "conflict"
    assert caught.value.retryable


async def test_a_connection_lost_before_the_commit(bench: Bench, tables: Connection) -> None:
    async def dies(ctx: MutationContext) -> None:
        await add(ctx)
        await ctx.fetch("select pg_terminate_backend(pg_backend_pid())")

    with pytest.raises(Unavailable) as caught:
        await bench.run(dies)
    assert caught.value.retryable
    assert await rows(tables, "select * from orders") == []
    assert await bench.run(add) == 1


async def test_a_connection_lost_while_idle_is_replaced(bench: Bench, tables: Connection) -> None:
    await bench.run(add)
    await bench.run(add)  # the one before has been cleaned by now
    await run(
        tables,
        "select pg_terminate_backend(pid, 20000) from pg_stat_activity"
        " where application_name = 'headwater mutation'",
    )
    assert await bench.run(add) == 1


async def test_a_connection_lost_while_committing(bench: Bench, tables: Connection) -> None:
    await run(
        tables,
        "create function die() returns trigger language plpgsql as"
        " $$ begin perform pg_terminate_backend(pg_backend_pid()); return null; end $$",
        "create constraint trigger die after insert on orders deferrable initially deferred"
        " for each row execute function die()",
    )
    with pytest.raises(Unavailable) as caught:
        await bench.run(add)
    assert caught.value.code == "outcome_unknown"
    assert not caught.value.retryable


async def test_a_caller_that_leaves_does_not_stop_a_commit(
    bench: Bench, tables: Connection
) -> None:
    await run(
        tables,
        "create function wait() returns trigger language plpgsql as"
        " $$ begin perform pg_advisory_xact_lock(5); return null; end $$",
        "create constraint trigger wait after insert on orders deferrable initially deferred"
        " for each row execute function wait()",
        "select pg_advisory_lock(5)",
    )
    call = asyncio.create_task(bench.run(add))
    async with asyncio.timeout(20):
        while not await rows(tables, "select 1 from pg_locks where not granted"):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    call.cancel()
    await run(tables, "select pg_advisory_unlock(5)")
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await rows(tables, "select id from orders") == [(1,)]


async def test_an_unreachable_database_is_not_described_to_clients(url: str) -> None:
    bench = Bench("postgresql://ann:secret@127.0.0.1:1/shop")
    with pytest.raises(HeadwaterError) as caught:
        await bench.run(add)
    assert isinstance(caught.value, Unavailable)
    assert "127.0.0.1" not in f"{caught.value} {caught.value.hint}"


async def test_prepared_statements_outlive_the_drivers(bench: Bench) -> None:
    """The driver removes all of a connection at a rollback, if it has prepared any of its own: as
    it would have while mutations ran that send no statement."""

    async def nothing(ctx: MutationContext) -> None:
        pass

    async def fetch(ctx: MutationContext) -> None:
        for _ in range(_PREPARE_AFTER):
            await ctx.fetch("select amount from orders where id = %s", 1)

    async def refuse(ctx: MutationContext) -> None:
        raise Refused("sold out")

    for _ in range(10):
        await bench.run(nothing)
    await bench.run(fetch)
    with pytest.raises(Refused):
        await bench.run(refuse)
    await bench.run(fetch)
