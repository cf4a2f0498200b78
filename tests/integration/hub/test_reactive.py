"""Reactive queries over a real database: which are executed when, and what subscribers are sent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headwater import limits
from headwater.database import Connection
from headwater.errors import (
    CaptureError,
    Forbidden,
    FunctionFailed,
    InvalidQuery,
    LimitExceeded,
    Refused,
    ResultError,
    ResyncRequired,
    TimedOut,
)
from headwater.hub.hub import Hub
from headwater.hub.reactive.group import Seen
from headwater.hub.reactive.registry import Answered
from headwater.identity import ANONYMOUS, Identity
from headwater.model import Position
from headwater.protocol import Deltas, Failed, ResetMessage, Result, Snapshot
from headwater.queries.context import Context
from headwater.queries.functions import Query
from headwater.settings.groups import LimitSettings, QuerySettings, Settings
from tests.support.log_probe import enable, run, unseen
from tests.support.subscribers import Recorder, answer

ORDERS = "create table orders (id int primary key, region int, amount int, note text)"


@pytest.fixture
async def orders(connection: Connection) -> Connection:
    await run(
        connection,
        ORDERS,
        "insert into orders select i, i % 5, i % 37, 'n' || i from generate_series(1, 50) i",
        "create table other (id int primary key, n int)",
        "insert into other values (1, 0)",
    )
    await enable(connection, "orders")
    await enable(connection, "other")
    return connection


async def in_region(ctx: Context, region: int) -> Any:
    return await ctx.fetch("select * from orders where region = %s order by id", region)


def query(body: Callable[..., Awaitable[Any]], **options: Any) -> Query:
    return Query(body.__name__, body, **options)


IN_REGION = query(in_region, key="id")
ANN = Identity("ann", "acme", claims={"sub": "ann"})
BOB = Identity("bob", "acme", claims={"sub": "bob"})


class Follower(Recorder):
    """A recorder that is subscribed."""

    def __init__(self) -> None:
        super().__init__()
        self.handle: Any = None

    async def follow(
        self, hub: Hub, query: Query, identity: Identity = ANONYMOUS, **options: Any
    ) -> Follower:
        args = options.pop("args", {})
        self.handle = await hub.reactive.subscribe(
            query, query.bind(args), identity, self, **options
        )
        return self

    async def until_value(self, value: Any) -> None:
        await self.until(lambda: self.failure is None and self.value == value)


def executions(hub: Hub) -> int:
    """How often a query was executed so far. Not by the sweep, which never rests."""
    (metric,) = hub.metrics.query_executions.collect()
    counted = (each for each in metric.samples if each.name.endswith("_total"))
    return int(sum(each.value for each in counted if each.labels["reason"] != "sweep"))


async def settle(hub: Hub) -> None:
    """Wait until no execution is requested or running."""
    async with asyncio.timeout(30):
        await hub.flushes.next_flush()
        while any(group.state != "idle" for group in hub.reactive):
            await hub.flushes.next_flush()


async def rows(connection: Connection, region: int) -> list[dict[str, Any]]:
    return await answer(connection, f"select * from orders where region = {region} order by id")


def decoded(answered: Answered) -> Any:
    import msgspec

    return msgspec.json.decode(answered.value)


# ------------------------------------------------------------------------ results


async def test_a_subscriber_gets_the_result_and_every_later_one(
    url: str, orders: Connection
) -> None:
    async with Hub(url) as hub:
        follower = await Follower().follow(hub, IN_REGION, args={"region": 2})
        assert follower.value == await rows(orders, 2)
        for change in (
            "insert into orders values (100, 2, 5, 'new')",
            "update orders set note = 'x' where id = 100",
            "update orders set region = 3 where id = 100",
            "delete from orders where id = 2",
            "truncate orders",
        ):
            await run(orders, change)
            await follower.until_value(await rows(orders, 2))
        assert all(isinstance(each, Result) for each in follower.messages)
        position = Position.parse(follower.messages[-1].position)
        assert hub.position is not None
        assert hub.position.covers(position)


async def test_a_result_that_did_not_change_is_not_sent_again(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        follower = await Follower().follow(hub, IN_REGION, args={"region": 2})
        await run(orders, "update orders set id = 1007 where id = 7")
        await follower.until_value(await rows(orders, 2))
        await run(orders, "begin", "update orders set id = 7 where id = 1007", "commit")
        await follower.until_value(await rows(orders, 2))
        sent = len(follower.messages)
        await run(
            orders,
            "begin",
            "delete from orders where id = 7",
            "insert into orders values (7, 2, 7, 'n7')",
            "commit",
        )
        await settle(hub)
        assert len(follower.messages) == sent


async def test_rows_are_sent_as_deltas_if_requested(url: str, orders: Connection) -> None:
    chance = random.Random(3)
    async with Hub(url) as hub:
        by_row = await Follower().follow(hub, IN_REGION, args={"region": 2}, delta=True)
        whole = await Follower().follow(hub, IN_REGION, args={"region": 2})
        assert isinstance(by_row.messages[0], Snapshot)
        for i in range(40):
            key = chance.randint(1, 60)
            await run(
                orders,
                chance.choice(
                    [
                        f"insert into orders values ({200 + i}, 2, 1, 'new')",
                        f"update orders set region = {chance.choice([1, 2])} where id = {key}",
                        f"update orders set note = 'u{i}' where id = {key}",
                        f"delete from orders where id = {key}",
                        f"update orders set id = {300 + i} where id = {key}",
                    ]
                ),
            )
            await by_row.until_rows(await rows(orders, 2))
            await whole.until_value(await rows(orders, 2))
        assert {type(each) for each in by_row.messages} == {Snapshot, Deltas}
        await run(
            orders, "insert into orders select i, 2, 0, 'm' from generate_series(1000, 3000) i"
        )
        await by_row.until_rows(await rows(orders, 2))
        assert isinstance(by_row.messages[-1], ResetMessage)


async def test_rows_without_a_unique_key_cannot_be_sent_as_deltas(
    url: str, orders: Connection
) -> None:
    async def regions(ctx: Context) -> Any:
        return await ctx.fetch("select region from orders order by id")

    async with Hub(url) as hub:
        with pytest.raises(InvalidQuery, match="has no key"):
            await Follower().follow(hub, query(regions), delta=True)
        with pytest.raises(ResultError, match="two rows have the key"):
            await Follower().follow(hub, query(regions, key="region"), delta=True)
        whole = await Follower().follow(hub, query(regions, key="region"))
        assert len(whole.value) == 50


# ------------------------------------------------------------------------ sharing


async def test_fifty_clients_share_one_execution_a_flush(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        followers = [await Follower().follow(hub, IN_REGION, args={"region": 2}) for _ in range(50)]
        await settle(hub)
        before = executions(hub)
        await run(orders, "update orders set note = 'once' where id = 2")
        for follower in followers:
            await follower.until_value(await rows(orders, 2))
        await settle(hub)
        assert executions(hub) - before == 1
        assert len({id(follower.frames[-1]) for follower in followers}) == 1


async def test_a_change_executes_only_the_queries_it_may_concern(
    url: str, orders: Connection
) -> None:
    async def amounts(ctx: Context, region: int) -> Any:
        return await ctx.fetch("select id, amount from orders where region = %s", region)

    async def executed_by(*statements: str) -> int:
        before = executions(hub)
        await run(orders, *statements)
        await settle(hub)
        return executions(hub) - before

    async with Hub(url) as hub:
        regional = query(amounts)
        followers = await asyncio.gather(
            *(Follower().follow(hub, regional, args={"region": region}) for region in range(1000))
        )
        await settle(hub)
        assert await executed_by("update orders set amount = 1000 where id = 2") == 1
        assert await executed_by("update orders set region = 999 where id = 2") == 2
        assert await executed_by("insert into orders values (2000, 700, 1, '')") == 1
        assert await executed_by("insert into orders values (2001, 5000, 1, '')") == 0
        assert await executed_by("update orders set note = 'unused' where region < 3") == 0
        assert await executed_by("update other set n = 100") == 0
        assert followers[999].value == [{"id": 2, "amount": 1000}]
        assert followers[700].value == [{"id": 2000, "amount": 1}]


async def test_two_users_never_share_a_group(url: str, orders: Connection) -> None:
    async def mine(ctx: Context) -> Any:
        return [ctx.user, ctx.tenant, await ctx.fetch_value("select count(*) from orders")]

    async with Hub(url) as hub:
        ann, bob, anonymous = [
            [await Follower().follow(hub, query(mine), who) for _ in range(2)]
            for who in (ANN, BOB, ANONYMOUS)
        ]
        await run(orders, "delete from orders where id = 1")
        for followers, user, tenant in (
            (ann, "ann", "acme"),
            (bob, "bob", "acme"),
            (anonymous, None, None),
        ):
            for follower in followers:
                await follower.until_value([user, tenant, 49])
        assert len(list(hub.reactive)) == 3


async def test_a_shared_query_does_not_see_its_caller(url: str, orders: Connection) -> None:
    async def ours(ctx: Context) -> Any:
        return [ctx.user, ctx.tenant, ctx.claims]

    async with Hub(url) as hub:
        shared = query(ours, share="tenant")
        for who in (ANN, BOB):
            assert (await Follower().follow(hub, shared, who)).value == [None, "acme", {}]
        assert len(list(hub.reactive)) == 1


async def test_arguments_that_differ_only_in_type_do_not_collide(
    url: str, orders: Connection
) -> None:
    async def echo(ctx: Context, value: Any) -> Any:
        return [type(value).__name__, value]

    async with Hub(url) as hub:
        for value in (1, 1.0, True, "1", None, [1], {"a": 1}, {"a": 1.0}):
            answered = await hub.reactive.call(
                query(echo), query(echo).bind({"value": value}), ANONYMOUS
            )
            assert decoded(answered) == [type(value).__name__, value]
            assert type(decoded(answered)[1]) is type(value)


# ------------------------------------------------------------------------ calls


async def test_a_call_is_served_from_memory_until_a_change_concerns_it(
    url: str, orders: Connection
) -> None:
    async def call() -> Any:
        arguments = IN_REGION.bind({"region": 2})
        return decoded(await hub.reactive.call(IN_REGION, arguments, ANONYMOUS))

    async with Hub(url) as hub:
        await call()
        assert await call() == await rows(orders, 2)
        await settle(hub)
        before = executions(hub)
        assert await call() == await rows(orders, 2)
        assert executions(hub) == before
        await run(orders, "delete from orders where id = 2")
        await hub.flushes.next_flush()
        assert await call() == await rows(orders, 2)
        assert executions(hub) > before


async def test_a_call_after_a_position_contains_it(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        arguments = IN_REGION.bind({"region": 2})
        for i in range(20):
            await run(orders, f"update orders set amount = {1000 + i} where id = 2")
            cursor = await orders.execute(
                "select headwater.log_id() || '-' || pg_current_snapshot()"
            )
            ((text,),) = await cursor.fetchall()
            answered = await hub.reactive.call(
                IN_REGION, arguments, ANONYMOUS, after=Position.parse(text)
            )
            assert decoded(answered)[0]["amount"] == 1000 + i
            assert Position.parse(answered.position).log == hub.position.log  # type: ignore[union-attr]
        with pytest.raises(ResyncRequired, match="ahead of it"):
            await hub.reactive.call(
                IN_REGION, arguments, ANONYMOUS, after=Position.parse("aaaaaaaa-1:99999999:")
            )


async def test_results_are_forgotten_when_there_are_too_many(url: str, orders: Connection) -> None:
    settings = Settings(query=QuerySettings(cache_bytes=2_000, cache_entry_bytes=1_500))
    async with Hub(url, settings=settings) as hub:
        for region in (*range(5), *range(5)):
            arguments = IN_REGION.bind({"region": region})
            answered = await hub.reactive.call(IN_REGION, arguments, ANONYMOUS)
            assert decoded(answered) == await rows(orders, region)
        await settle(hub)
        assert sum(group.size for group in hub.reactive) <= 2_000
        follower = await Follower().follow(hub, IN_REGION, args={"region": 1})
        late = await Follower().follow(hub, IN_REGION, args={"region": 1})
        await run(orders, "delete from orders where id = 1")
        for each in (follower, late):
            await each.until_value(await rows(orders, 1))


# ------------------------------------------------------------------------ failures


async def test_a_failure_is_sent_and_the_query_recovers(url: str, orders: Connection) -> None:
    async def share(ctx: Context) -> Any:
        return await ctx.fetch_value("select 100 / n from other")

    async with Hub(url) as hub:
        bystander = await Follower().follow(hub, IN_REGION, args={"region": 2})
        with pytest.raises(FunctionFailed, match="the gateway's log has it under"):
            await Follower().follow(hub, query(share))
        await run(orders, "update other set n = 5")
        await settle(hub)
        follower = await Follower().follow(hub, query(share))
        assert follower.value == 20
        await run(orders, "update other set n = 0")
        await follower.until(lambda: follower.failure is not None)
        assert follower.failure is not None
        assert follower.failure.code == "function_failed"
        assert "division" not in follower.failure.message
        await run(orders, "update other set n = 5")
        await follower.until_value(20)
        await run(orders, "delete from orders where id = 2")
        await bystander.until_value(await rows(orders, 2))
        assert bystander.kinds() == ["result", "result"]


async def test_a_query_that_fails_outside_the_database_is_tried_again(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    weather = {"fine": True}

    async def forecast(ctx: Context) -> Any:
        n = await ctx.fetch_value("select n from other")
        if not weather["fine"]:
            raise RuntimeError("storm")
        return n

    monkeypatch.setattr("headwater.hub.reactive.group._RETRY_FIRST", 0.01)
    async with Hub(url) as hub:
        follower = await Follower().follow(hub, query(forecast))
        weather["fine"] = False
        await run(orders, "update other set n = 1")
        await follower.until(lambda: follower.failure is not None)
        weather["fine"] = True
        await follower.until_value(1)
        assert [type(each) for each in follower.messages] == [Result, Failed, Result]


async def test_an_error_of_the_application_reaches_the_subscriber_unchanged(
    url: str, orders: Connection
) -> None:
    async def guarded(ctx: Context) -> Any:
        if await ctx.fetch_value("select n from other"):
            raise Refused("closed for today", code="closed", hint="Come back tomorrow.")
        return "open"

    async with Hub(url) as hub:
        follower = await Follower().follow(hub, query(guarded))
        await run(orders, "update other set n = 1")
        await follower.until(lambda: follower.failure is not None)
        assert follower.failure is not None
        failure = (follower.failure.code, follower.failure.message, follower.failure.hint)
        assert failure == ("closed", "closed for today", "Come back tomorrow.")
        with pytest.raises(Refused, match="closed for today"):
            await Follower().follow(hub, query(guarded))


async def test_a_query_that_takes_too_long_delays_no_other(url: str, orders: Connection) -> None:
    async def slow(ctx: Context) -> Any:
        n = await ctx.fetch_value("select n from other")
        await ctx.fetch("select pg_sleep(%s)", 60 if n else 0)
        return n

    async with Hub(url) as hub:
        sleeper = await Follower().follow(hub, query(slow, timeout=0.5))
        follower = await Follower().follow(hub, IN_REGION, args={"region": 2})
        await settle(hub)
        await run(orders, "update other set n = 1")
        await hub.flushes.next_flush()
        for i in range(5):
            await run(orders, f"update orders set note = 'n{i}' where id = 2")
            await follower.until_value(await rows(orders, 2))
        await sleeper.until(lambda: sleeper.failure is not None)
        assert sleeper.failure is not None
        assert (sleeper.failure.code, sleeper.failure.retryable) == ("timed_out", True)
        await run(orders, "update other set n = 0")
        await sleeper.until(lambda: sleeper.failure is None)
        await run(orders, "update other set n = 1")
        await hub.flushes.next_flush()
        arguments = query(slow).bind({})
        with pytest.raises(TimedOut, match=r"query slow took longer than 0.5 seconds"):
            await hub.reactive.call(query(slow, timeout=0.5), arguments, ANN)


async def test_a_result_that_is_too_large_or_cannot_be_encoded(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def padded(ctx: Context) -> Any:
        n = await ctx.fetch_value("select n from other")
        return ["x" * 1_000_000] * n

    async def odd(ctx: Context) -> Any:
        n = await ctx.fetch_value("select n from other")
        return object() if n else "fine"

    async with Hub(url) as hub:
        large = await Follower().follow(hub, query(padded))
        strange = await Follower().follow(hub, query(odd))
        await run(orders, "update other set n = 50")
        for follower, code in ((large, "result_too_large"), (strange, "result")):
            await follower.until(lambda follower=follower: follower.failure is not None)  # type: ignore[misc]
            assert follower.failure is not None
            assert follower.failure.code == code
        await run(orders, "update other set n = 0")
        await large.until_value([])
        await strange.until_value("fine")


async def test_a_query_over_tables_without_capture_can_only_be_called(
    url: str, orders: Connection
) -> None:
    async def plain(ctx: Context) -> Any:
        return await ctx.fetch("select * from uncaptured")

    await run(orders, "create table uncaptured (id int primary key)")
    async with Hub(url) as hub:
        with pytest.raises(CaptureError, match=r"reads uncaptured, whose changes are not captured"):
            await Follower().follow(hub, query(plain))
        arguments = query(plain).bind({})
        assert decoded(await hub.reactive.call(query(plain), arguments, ANONYMOUS)) == []
        await run(orders, "insert into uncaptured values (1)")
        assert decoded(await hub.reactive.call(query(plain), arguments, ANONYMOUS)) == [{"id": 1}]
        await enable(orders, "uncaptured")
        await hub.reactive.recheck()
        follower = await Follower().follow(hub, query(plain))
        await run(orders, "insert into uncaptured values (2)")
        await follower.until_value([{"id": 1}, {"id": 2}])
        await run(orders, "select headwater.disable_reactivity('uncaptured')")
        await hub.reactive.recheck()
        await follower.until(lambda: follower.failure is not None)
        before = len(follower.messages)
        follower.handle.resync("overflow")
        assert [type(each) for each in follower.messages[before:]] == [Failed]
        await run(orders, "insert into uncaptured values (3)")
        await enable(orders, "uncaptured")
        await hub.reactive.recheck()
        await follower.until_value([{"id": 1}, {"id": 2}, {"id": 3}])


# ------------------------------------------------------------------------ places


async def test_one_users_slow_queries_leave_connections_for_others(
    url: str, orders: Connection
) -> None:
    began, go = list[int](), asyncio.Event()

    async def holds(ctx: Context, number: int) -> Any:
        began.append(number)
        await go.wait()
        return await ctx.fetch_value("select count(*) from orders where region = %s", number)

    slow, settings = query(holds), Settings(url=url, query=QuerySettings(concurrency=8))
    async with Hub(url, settings=settings) as hub:

        async def ask(who: Identity, what: Query, **args: Any) -> Any:
            owner = ("user", who.account)
            return decoded(await hub.reactive.call(what, what.bind(args), who, owner=owner))

        held = [asyncio.create_task(ask(ANN, slow, number=number)) for number in range(12)]
        for region in range(5):
            found = await ask(BOB, IN_REGION, region=region)
            assert found == await rows(orders, region)
        recorder = Follower()
        await recorder.follow(hub, IN_REGION, BOB, args={"region": 1}, owner=("user", "bob"))
        await run(orders, "delete from orders where region = 1")
        await recorder.until_value([])
        assert len(began) == 2
        assert not any(task.done() for task in held)
        go.set()
        await asyncio.gather(*held)
        assert sorted(began) == list(range(12))


# ------------------------------------------------------------------------ roles


async def test_a_query_runs_as_the_callers_role_and_leaves_nothing_behind(
    url: str, orders: Connection
) -> None:
    role = f"reader_{random.randrange(10**9)}"
    await run(
        orders,
        f"create role {role}",
        f"grant select on orders to {role}",
        "alter table orders enable row level security",
        "create policy p on orders using"
        " (region = (current_setting('request.jwt.claims')::json->>'region')::int)",
    )

    async def who(ctx: Context) -> Any:
        return [
            await ctx.fetch_value("select current_user::text"),
            await ctx.fetch_value("select count(*) from orders"),
            await ctx.fetch_value(
                "select coalesce(current_setting('request.jwt.claims', true), '')"
            ),
        ]

    try:
        async with Hub(url) as hub:
            guest = Identity("g", role=role, claims={"region": 2})
            assert (await Follower().follow(hub, query(who), guest)).value[:2] == [role, 10]
            trusted = await Follower().follow(hub, query(who, trusted=True), guest)
            assert trusted.value[1:] == [50, ""]

            async def others(ctx: Context) -> Any:
                return await ctx.fetch("select * from other")

            with pytest.raises(Forbidden, match="permission denied"):
                await Follower().follow(hub, query(others), guest)
            with pytest.raises(Forbidden, match="there is no database role"):
                await Follower().follow(hub, query(others), Identity("x", role="unknown_role"))
            assert (await Follower().follow(hub, query(others))).value == [{"id": 1, "n": 0}]
    finally:
        await run(orders, f"drop owned by {role}", f"drop role {role}")


async def test_a_new_identity_moves_a_subscription_to_another_group(
    url: str, orders: Connection
) -> None:
    async def mine(ctx: Context) -> Any:
        return [ctx.claims.get("plan"), await ctx.fetch_value("select n from other")]

    async with Hub(url) as hub:
        follower = await Follower().follow(hub, query(mine), ANN)
        await follower.handle.change_identity(ANN)
        assert len(follower.messages) == 1
        better = Identity("ann", "acme", claims={"sub": "ann", "plan": "gold"})
        await follower.handle.change_identity(better)
        await follower.until_value(["gold", 0])
        await run(orders, "update other set n = 3")
        await follower.until_value(["gold", 3])
        assert len(set(follower.views)) == 2


# ------------------------------------------------------------------------ resuming, waiting


async def test_a_returning_subscriber_is_not_sent_the_same_result(
    url: str, orders: Connection
) -> None:
    async with Hub(url) as hub:
        first = await Follower().follow(hub, IN_REGION, args={"region": 2})
        await settle(hub)
        since = first.position
        again = await Follower().follow(hub, IN_REGION, args={"region": 2}, since=since)
        assert (again.resumed, again.messages) == ([True], [])
        await run(orders, "delete from orders where id = 2")
        await again.until_value(await rows(orders, 2))
        behind = await Follower().follow(hub, IN_REGION, args={"region": 2}, since=since)
        assert (behind.resumed, behind.value) == ([False], await rows(orders, 2))


async def test_reached_means_that_results_were_sent(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        follower = await Follower().follow(hub, IN_REGION, args={"region": 2})
        for i in range(20):
            await run(orders, f"update orders set amount = {i + 1000} where id = 2")
            cursor = await orders.execute(
                "select headwater.log_id() || '-' || pg_current_snapshot()"
            )
            ((text,),) = await cursor.fetchall()
            await hub.reached(Position.parse(text), [follower.handle])
            assert follower.value[0]["amount"] == i + 1000


async def test_a_client_that_fell_behind_gets_the_present_result(
    url: str, orders: Connection
) -> None:
    async with Hub(url, settings=Settings(query=QuerySettings(cache_entry_bytes=10))) as hub:
        follower = await Follower().follow(hub, IN_REGION, args={"region": 2})
        by_row = await Follower().follow(hub, IN_REGION, args={"region": 2}, delta=True)
        for each in (follower, by_row):
            sent = len(each.messages)
            each.handle.resync("overflow")
            await each.until(lambda each=each, sent=sent: len(each.messages) > sent)  # type: ignore[misc]
        assert follower.value == by_row.rows == await rows(orders, 2)
        assert by_row.messages[-1].reason == "overflow"


# ------------------------------------------------------------------------ the safety net


@pytest.mark.drifts
async def test_the_sweep_finds_changes_that_are_not_in_the_log(
    url: str, orders: Connection
) -> None:
    async with Hub(url, settings=Settings(query=QuerySettings(sweep="1 second"))) as hub:
        follower = await Follower().follow(hub, IN_REGION, args={"region": 2})
        await settle(hub)
        await unseen(orders, "update orders set note = 'unseen' where id = 2")
        await follower.until_value(await rows(orders, 2))
        (metric,) = hub.metrics.reconcile_drift.labels("query").collect()
        assert metric.samples[0].value == 1


async def test_a_group_ends_with_its_last_subscriber(url: str, orders: Connection) -> None:
    async with Hub(url) as hub:
        followers = [await Follower().follow(hub, IN_REGION, args={"region": 2}) for _ in range(2)]
        await settle(hub)
        for follower in followers:
            follower.handle.close()
        await run(orders, "delete from orders where id = 2")
        await hub.flushes.next_flush()
        assert list(hub.reactive) == []
        assert all(len(follower.messages) == 1 for follower in followers)


async def test_the_number_of_groups_is_bounded(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GROUPS_MAX", 2)
    async with Hub(url) as hub:
        for region in range(2):
            await Follower().follow(hub, IN_REGION, args={"region": region})
        with pytest.raises(Exception, match="more than 2 different queries"):
            await Follower().follow(hub, IN_REGION, args={"region": 2})


async def test_a_snapshot_older_than_what_a_replica_has_shown_is_not_used(
    url: str, orders: Connection
) -> None:
    async with Hub(url) as hub:
        follower = await Follower().follow(hub, IN_REGION, args={"region": 2})
        await settle(hub)
        assert hub.position is not None
        ahead = hub.position.xmax + 3
        (group,) = hub.reactive
        group.seen = Seen(Position(hub.position.log, ahead, ahead), 0)
        await run(orders, "delete from orders where id = 2")
        for _ in range(3):
            await hub.flushes.next_flush()
        assert (group.state, len(follower.messages)) == ("wanted", 1)
        for key in (7, 12, 17):
            await run(orders, f"delete from orders where id = {key}")
        await follower.until_value(await rows(orders, 2))


async def test_idle_connections_are_closed(
    url: str, orders: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(ctx: Context, n: int) -> Any:
        return await ctx.fetch_value("select pg_sleep(0.3)::text")

    async def connections() -> int:
        cursor = await orders.execute(
            "select count(*) from pg_stat_activity"
            " where application_name = 'headwater queries' and datname = current_database()"
        )
        ((count,),) = await cursor.fetchall()
        return int(count)

    async with Hub(url) as hub:
        calls = (hub.reactive.call(query(slow), query(slow).bind({"n": n}), ANN) for n in range(4))
        await asyncio.gather(*calls)
        await settle(hub)
        assert await connections() > 1
        monkeypatch.setattr("headwater.hub.reading.snapshot_pool._IDLE_SECONDS", 0)
        async with asyncio.timeout(30):
            while await connections() > 1:
                await hub.reactive.recheck()  # one that is being opened is closed by the next
                await hub.flushes.next_flush()


# ------------------------------------------------------------------------ memory


async def large(ctx: Context, size: int) -> Any:
    count = await ctx.fetch_value("select count(*) from orders")
    return [{"id": number, "text": "x" * size} for number in range(count)]


async def test_results_count_for_their_subscribers(url: str, orders: Connection) -> None:
    settings = Settings(limits=LimitSettings(bytes_per_user=1024 * 1024))
    one = query(large, key="id", share="everyone")
    async with Hub(url, settings=settings) as hub:
        ann = await Follower().follow(hub, one, ANN, args={"size": 1_000}, owner="ann")
        bob = await Follower().follow(hub, one, BOB, args={"size": 1_000}, owner="bob")
        assert 50_000 < hub.memory.of("ann") == hub.memory.of("bob") == hub.memory.total < 70_000
        # If rows are sent as deltas, the rows are in memory, too.
        rows = await Follower().follow(hub, one, ANN, args={"size": 1_001}, owner="ann", delta=True)
        assert hub.memory.of("ann") > 500_000
        with pytest.raises(LimitExceeded) as caught:
            await Follower().follow(hub, one, ANN, args={"size": 3_000}, owner="ann", delta=True)
        assert caught.value.code == "bytes_per_user"
        # One that grew ends.
        await run(orders, "insert into orders select i, 1, 1, '' from generate_series(100, 199) i")
        await rows.until(lambda: rows.error is not None)
        assert rows.error is not None
        assert rows.error.code == "bytes_per_user"
        await ann.until(lambda: len(ann.value) == 150)
        await bob.until(lambda: len(bob.value) == 150)
        assert (ann.error, bob.error) == (None, None)
        for follower in (ann, bob):
            follower.handle.close()
        await settle(hub)
        assert hub.memory.total == 0
        assert dict(hub.memory.owners) == {}
