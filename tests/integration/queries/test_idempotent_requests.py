"""Mutations with an idempotency key: each runs once for its user, however often it is repeated."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import msgspec
import psycopg
import pytest

from headwater import (
    DatabaseError,
    HeadwaterError,
    Identity,
    InvalidQuery,
    MutationContext,
    Position,
    Refused,
    ResultError,
    Unavailable,
)
from headwater.channels.bus import Bus, _once, _QueuedMessage
from headwater.database import Connection, connect
from headwater.idempotency import Request, check_key, new_key
from headwater.identity import ANONYMOUS
from headwater.log import maintenance
from headwater.queries.execution import idempotent_requests as requests_module
from headwater.queries.execution.mutations import MutationRunner
from headwater.queries.functions import Mutation
from headwater.settings.groups import MutationSettings, Settings
from headwater.testing.proxies import Cutter
from tests.support.databases import passable_folder
from tests.support.generators.sizes import size
from tests.support.log_probe import enable, rows, run

ANN = Identity(user="ann", tenant="acme", claims={"sub": "ann"})
RACES = size("races", 25, large=300)
LOSSES = size("losses", 60, large=600)

Body = Callable[..., Awaitable[Any]]


@pytest.fixture(params=["postgres", "system_postgres"])
def server_url(request: pytest.FixtureRequest) -> str:
    """All of this on two releases of PostgreSQL."""
    server = request.getfixturevalue(request.param)
    return server if isinstance(server, str) else str(server.url)


class Site:
    """The mutations of two gateways over one table."""

    def __init__(self, url: str) -> None:
        settings = Settings(url=url, mutation=MutationSettings(connections=8))
        self.runners = [MutationRunner(url, settings), MutationRunner(url, settings)]

    async def call(
        self,
        body: Body,
        key: str | None,
        args: dict[str, Any] | None = None,
        identity: Identity = ANN,
        gateway: int = 0,
        **options: Any,
    ) -> tuple[Any, Position]:
        mutation = Mutation(body.__name__, body, **options)
        args = args or {}
        request = None if key is None else Request.of(identity, key, mutation.name, args)
        value, position = await self.runners[gateway].answer(
            mutation, mutation.bind(args), identity, request=request
        )
        return msgspec.json.decode(value), position


@pytest.fixture
async def site(url: str, connection: Connection) -> AsyncIterator[Site]:
    await run(
        connection,
        "create table orders (id int generated always as identity primary key, amount int)",
    )
    await enable(connection, "orders")
    site = Site(url)
    yield site
    for runner in site.runners:
        await runner.close()


async def place(ctx: MutationContext, amount: int = 0) -> int:
    sql = "insert into orders (amount) values (%s) returning id"
    return int(await ctx.fetch_value(sql, amount))


async def count(connection: Connection) -> int:
    ((found,),) = await rows(connection, "select count(*) from orders")
    return int(found)


# ------------------------------------------------------------------------ one after the other


async def test_a_repetition_gets_the_stored_answer(site: Site, connection: Connection) -> None:
    first, position = await site.call(place, "k1", {"amount": 7})
    ((xid,),) = await rows(connection, "select xid::text::bigint from headwater.log where op = 'I'")
    for gateway in (0, 1, 0):
        again, later = await site.call(place, "k1", {"amount": 7}, gateway=gateway)
        assert again == first
        assert position.contains(xid)
        assert later.contains(xid)
    assert await count(connection) == 1
    await site.call(place, "k2", {"amount": 7})
    await site.call(place, None, {"amount": 7})
    assert await count(connection) == 3


async def test_a_key_stands_for_one_request(site: Site, connection: Connection) -> None:
    async def other(ctx: MutationContext, amount: int = 0) -> int:
        return await place(ctx, amount)

    await site.call(place, "k", {"amount": 7})
    for body, args in ((place, {"amount": 8}), (other, {"amount": 7})):
        with pytest.raises(InvalidQuery) as caught:
            await site.call(body, "k", args)
        assert caught.value.code == "idempotency_key_reused"
        assert not caught.value.retryable
    assert await count(connection) == 1


OTHERS = [
    Identity(user="bob", tenant="acme"),
    Identity(user="ann", tenant="other"),
    Identity(user="ann"),
    Identity(user=None, tenant="acme"),
    ANONYMOUS,
]


async def test_a_key_of_another_user_means_nothing(site: Site, connection: Connection) -> None:
    first, _ = await site.call(place, "k")
    for number, identity in enumerate(OTHERS, 2):
        value, _ = await site.call(place, "k", {"amount": number}, identity)
        assert value != first
    assert await count(connection) == 1 + len(OTHERS)


def test_the_scope_is_the_whole_identity() -> None:
    clerk = Identity(user="ann", tenant="acme", role="clerk")
    everyone = [ANN, clerk, *OTHERS, Identity(user='"acme","ann"'), Identity(tenant="ann")]
    assert len({Request.of(each, "k", "f", {}).scope for each in everyone}) == len(everyone)
    renewed = msgspec.structs.replace(ANN, claims={"sub": "ann", "exp": 7})
    assert Request.of(renewed, "k", "f", {}) == Request.of(ANN, "k", "f", {})


async def test_a_refused_mutation_runs_again(site: Site, connection: Connection) -> None:
    fails = True

    async def moody(ctx: MutationContext) -> int:
        found = await place(ctx)
        if fails:
            raise Refused("not today", code="closed")
        return found

    for _ in range(2):
        with pytest.raises(Refused, match="not today"):
            await site.call(moody, "k")
    assert await rows(connection, "select * from headwater.requests") == []
    fails = False
    value, _ = await site.call(moody, "k")
    fails = True
    assert (await site.call(moody, "k"))[0] == value
    assert await count(connection) == 1


async def test_a_result_that_is_too_large(
    site: Site, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wordy(ctx: MutationContext) -> str:
        await place(ctx)
        return "x" * 1000

    monkeypatch.setattr(requests_module, "REQUEST_RESULT_BYTES_MAX", 1001)
    assert (await site.call(wordy, "k"))[0] == "x" * 1000
    with pytest.raises(ResultError, match="ran before under this idempotency key") as caught:
        await site.call(wordy, "k")
    assert caught.value.code == "result_not_stored"
    assert await count(connection) == 1
    monkeypatch.setattr(requests_module, "REQUEST_RESULT_BYTES_MAX", 1002)
    assert await site.call(wordy, "k2")
    assert (await site.call(wordy, "k2"))[0] == "x" * 1000


async def test_any_result_comes_back_as_it_was(site: Site) -> None:
    values = [None, True, 0, -1.5, "", "ä\u0000😀", [1, [2]], {"a": None, "": {"b": "\\x00"}}]
    for number, value in enumerate(values):

        async def same(ctx: MutationContext, value: Any = value) -> Any:
            return value

        for _ in range(2):
            assert (await site.call(same, f"k{number}"))[0] == value


KEYS = ["", "a b", "ä", "x" * 129, "a\n", "\u0000", "tab\t"]


@pytest.mark.parametrize("key", KEYS)
def test_keys_that_are_refused(key: str) -> None:
    with pytest.raises(InvalidQuery, match="idempotency_key: expected 1 to 128"):
        check_key(key)


def test_keys_that_are_taken() -> None:
    for key in ("x", "x" * 128, '"8e03978e-40d5-43dd-bc93-6894a57f9324"', "~!", new_key()):
        assert check_key(key) == key
    assert len({new_key() for _ in range(1000)}) == 1000


# ------------------------------------------------------------------------ at the same time

ISOLATIONS = ["read committed", "repeatable read", "serializable"]


async def isolate(connection: Connection, isolation: str) -> None:
    ((name,),) = await rows(connection, "select current_database()")
    await run(
        connection, f"alter database {name} set default_transaction_isolation = '{isolation}'"
    )


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_a_repetition_waits_for_the_first(
    site: Site, connection: Connection, isolation: str
) -> None:
    """Also if its snapshot is from before the first has committed."""
    await isolate(connection, isolation)
    began, go, fail = asyncio.Event(), asyncio.Event(), False

    async def gated(ctx: MutationContext) -> int:
        began.set()
        await go.wait()
        if fail:
            raise Refused("no")
        return await place(ctx)

    for fail in (False, True):
        began.clear()
        go.clear()
        key = f"k{fail}"
        first = asyncio.create_task(site.call(gated, key))
        await began.wait()
        second = asyncio.create_task(site.call(gated, key, gateway=1))
        await _blocked(connection)
        assert not second.done()
        go.set()
        results = await asyncio.gather(first, second, return_exceptions=True)
        if fail:
            assert all(isinstance(each, Refused) for each in results)
        else:
            assert [each[0] for each in results if isinstance(each, tuple)] == [1, 1]
    assert await count(connection) == 1


async def _blocked(connection: Connection) -> None:
    waiting = "select 1 from pg_locks where not granted"
    async with asyncio.timeout(20):
        while not await rows(connection, waiting):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_first_that_takes_too_long(site: Site, connection: Connection) -> None:
    began, go = asyncio.Event(), asyncio.Event()

    async def gated(ctx: MutationContext) -> int:
        began.set()
        await go.wait()
        return await place(ctx)

    first = asyncio.create_task(site.call(gated, "k"))
    await began.wait()
    with pytest.raises(DatabaseError, match="still runs under this idempotency key") as caught:
        await site.call(gated, "k", gateway=1, timeout=0.1)
    assert caught.value.code == "still_running"
    assert caught.value.retryable
    go.set()
    value, _ = await first
    assert (await site.call(gated, "k", gateway=1))[0] == value


@pytest.mark.parametrize("isolation", ISOLATIONS)
async def test_races_over_two_gateways(site: Site, connection: Connection, isolation: str) -> None:
    """Many requests at once with the same key, of which some fail at first: each key runs once, and
    all that succeed have the same answer."""
    await isolate(connection, isolation)
    chance = Random(15)

    async def unsure(ctx: MutationContext, amount: int) -> int:
        found = await place(ctx, amount)
        await asyncio.sleep(Random(found).random() * 0.005)
        if Random(found).random() < 0.3:
            raise Refused("no")
        return found

    async def insistent(key: str, args: dict[str, Any], gateway: int) -> int:
        while True:
            try:
                return int((await site.call(unsure, key, args, gateway=gateway))[0])
            except HeadwaterError as error:
                if not (isinstance(error, Refused) or error.retryable):
                    raise

    for race in range(RACES):
        args = {"amount": race}
        callers = [insistent(f"k{race}", args, chance.randrange(2)) for _ in range(6)]
        assert len(set(await asyncio.gather(*callers))) == 1
    amounts = Counter(amount for (amount,) in await rows(connection, "select amount from orders"))
    assert amounts == Counter(range(RACES))


# ------------------------------------------------------------------------ rights


@pytest.fixture
async def clerk(site: Site, connection: Connection) -> AsyncIterator[Identity]:
    await run(
        connection,
        "create role request_clerk",
        "grant all on orders to request_clerk",
        "grant all on all tables in schema headwater to request_clerk",
    )
    yield Identity(user="ann", role="request_clerk")
    await run(connection, "drop owned by request_clerk cascade", "drop role request_clerk")


async def test_a_role_neither_reads_nor_forges_requests(
    site: Site, connection: Connection, clerk: Identity
) -> None:
    async def snoops(ctx: MutationContext) -> Any:
        return await ctx.fetch("select * from headwater.requests")

    async def forges(ctx: MutationContext) -> Any:
        await ctx.execute(
            "insert into headwater.requests values ('a', 'b', 'c', 'd', now() + interval '1 h')"
        )

    async def calls(ctx: MutationContext) -> Any:
        await ctx.execute("select headwater.store_request('a', 'b', 'c', 'd', '1 hour')")

    await site.call(place, "k", identity=clerk)
    assert (await site.call(snoops, "k2", identity=clerk))[0] == []
    for body in (forges, calls):
        with pytest.raises(HeadwaterError) as caught:
            await site.call(body, f"k3{body.__name__}", identity=clerk)
        assert caught.value.code == "forbidden"
    assert len(await rows(connection, "select * from headwater.requests")) == 2


async def test_session_state_left_by_a_function_does_not_matter(
    site: Site, connection: Connection, clerk: Identity
) -> None:
    """It may have any role, search path or timeouts when it returns."""
    await run(
        connection,
        "create schema evil authorization request_clerk",
        "create domain evil.bytea as text check (false)",
        "create function evil.store_request(bytea, text, bytea, bytea, interval) returns void"
        " language sql as $$ select 1 / 0 $$",
    )

    async def untidy(ctx: MutationContext) -> Any:
        found = await place(ctx)
        await ctx.execute("set local search_path = evil, pg_catalog")
        await ctx.execute("set local role none")
        await ctx.execute("set session authorization request_clerk")
        await ctx.execute("set local lock_timeout = '1ms'")
        return found

    value, _ = await site.call(untidy, "k")
    assert (await site.call(untidy, "k"))[0] == value
    assert await count(connection) == 1


AT_COMMIT = {
    "a deferred trigger": [
        "create constraint trigger late after insert on orders deferrable initially deferred"
        " for each row execute function note()",
    ],
    "a cursor that outlives the transaction": [
        "create function late() returns trigger language plpgsql as $$ begin"
        " execute 'declare late cursor with hold for select public.noted()'; return null; end $$",
        "create trigger late after insert on orders for each row execute function late()",
    ],
    "a deferred trigger of a deferred trigger": [
        "create table others (id int)",
        "grant insert on others to public",
        "create constraint trigger late after insert on others deferrable initially deferred"
        " for each row execute function note()",
        "create function late() returns trigger language plpgsql as $$ begin"
        " set constraints all deferred; insert into public.others values (1); return null; end $$",
        "create constraint trigger late after insert on orders deferrable initially deferred"
        " for each row execute function late()",
    ],
}


@pytest.mark.parametrize("what", AT_COMMIT)
async def test_triggers_at_the_commit_have_the_rights_of_the_user(
    site: Site, connection: Connection, clerk: Identity, what: str
) -> None:
    await run(
        connection,
        "create table ran_as (name text)",
        "grant insert on ran_as to public",
        "create function noted() returns int language sql as"
        " $$ insert into public.ran_as values (current_user) returning 1 $$",
        "create function note() returns trigger language plpgsql as"
        " $$ begin perform public.noted(); return null; end $$",
        *AT_COMMIT[what],
    )

    async def lowers(ctx: MutationContext) -> int:
        await ctx.execute("set local role request_clerk")
        return await place(ctx)

    async def becomes(ctx: MutationContext) -> int:
        await ctx.execute("set local session authorization request_clerk")
        return await place(ctx)

    for key in ("k", None):
        await site.call(place, key, identity=clerk)
        await site.call(lowers, key)
        await site.call(becomes, key and "k2")
    found = await rows(connection, "select name, count(*)::int from ran_as group by name")
    assert found == [("request_clerk", 6)]


async def test_a_search_path_that_stays_behind_is_not_used(
    site: Site, connection: Connection, clerk: Identity
) -> None:
    """The position is read with Headwater's rights, after the commit."""
    await run(
        connection,
        "create table ran_as (name text)",
        "grant insert on ran_as to public",
        "create schema evil",
        "grant usage on schema evil to public",
        "create table evil.text (id int)",
        "create function evil.pg_current_snapshot() returns text language sql as"
        " $$ insert into public.ran_as values (current_user);"
        " select pg_catalog.pg_current_snapshot()::text $$",
        "create function late() returns trigger language plpgsql as $$ begin"
        " perform set_config('search_path', 'evil, pg_catalog', false); return null; end $$",
        "create trigger late after insert on orders for each row execute function late()",
    )
    for key in ("k", "k", None):
        await site.call(place, key, identity=clerk)
    assert await rows(connection, "select name from ran_as") == []
    assert await count(connection) == 2


async def test_a_deferred_constraint_that_fails_writes_nothing(
    site: Site, connection: Connection
) -> None:
    await run(
        connection,
        "create function no() returns trigger language plpgsql as"
        " $$ begin raise exception 'no' using errcode = 'serialization_failure'; end $$",
        "create constraint trigger no after insert on orders deferrable initially deferred"
        " for each row execute function no()",
    )
    with pytest.raises(DatabaseError) as caught:
        await site.call(place, "k")
    assert caught.value.code == "conflict"
    assert await rows(connection, "select * from headwater.requests") == []
    await run(connection, "drop trigger no on orders")
    await site.call(place, "k")
    assert await count(connection) == 1


async def test_deferred_triggers_may_take_longer_than_the_mutation(
    site: Site, connection: Connection
) -> None:
    """With a key as without one: only the commit itself is bounded."""
    await run(
        connection,
        "create function slow() returns trigger language plpgsql as"
        " $$ begin perform pg_sleep(2.5); return null; end $$",
        "create constraint trigger slow after insert on orders deferrable initially deferred"
        " for each row execute function slow()",
    )
    await asyncio.gather(*(site.call(place, key, timeout=2) for key in ("k", None)))
    assert await count(connection) == 2


FORBIDDEN = [
    "select * from headwater.requests",
    "select * from headwater.published",
    "select headwater.begin_request('a', 'b', 'c')",
    "select headwater.store_request('a', 'b', 'c', 'd', '1 hour')",
    "select headwater.publish_once('{}', '{}', '{}', '1 hour', '{}', '{}')",
    "select headwater.trim_requests()",
    "select headwater.trim_user_requests('a', 0, '0', 10)",
]


async def test_ordinary_roles_may_do_nothing(connection: Connection) -> None:
    await run(connection, "create role request_stranger")
    try:
        for statement in FORBIDDEN:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                async with connection.transaction():
                    await run(connection, "set local role request_stranger", statement)
    finally:
        await run(connection, "drop role request_stranger")


# ------------------------------------------------------------------------ lost while committing


async def test_the_database_knows_what_was_not_committed(
    site: Site, connection: Connection
) -> None:
    await run(
        connection,
        "create function die() returns trigger language plpgsql as"
        " $$ begin perform pg_terminate_backend(pg_backend_pid()); return null; end $$",
        "create constraint trigger die after insert on orders deferrable initially deferred"
        " for each row execute function die()",
    )
    with pytest.raises(Unavailable, match="lost while committing") as caught:
        await site.call(place, "k")
    assert caught.value.code == "unavailable"
    assert caught.value.retryable
    assert await count(connection) == 0
    await run(connection, "drop trigger die on orders")
    await site.call(place, "k")
    assert await count(connection) == 1


class DatabaseLink(Cutter):
    """A link to the database that is cut at random, or once where a commit was passed on."""

    def __init__(self, path: str, chance: Random, share: float) -> None:
        super().__init__("", chance=chance, share=share)
        self._path = path
        self.at_commit = False

    def _last(self, data: bytes) -> bytes | None:
        if self.at_commit and b"commit\0" in data:
            self.at_commit = False
            return data
        return super()._last(data)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self._path)


@asynccontextmanager
async def linked(url: str, folder: Path, share: float) -> AsyncIterator[tuple[str, DatabaseLink]]:
    parts = urlsplit(url)
    (host,) = parse_qs(parts.query)["host"]
    name = f".s.PGSQL.{parts.port or 5432}"
    link = DatabaseLink(f"{host}/{name}", Random(15), share)
    async with await asyncio.start_unix_server(link.accept, f"{folder}/{name}"):
        yield urlunsplit(parts._replace(query=urlencode({"host": str(folder)}))), link
        link.share = 0.0
        await link.close()


async def test_the_database_knows_what_was_committed(
    url: str, site: Site, connection: Connection
) -> None:
    """The commit arrives, and its answer does not."""
    with passable_folder() as folder:
        async with linked(url, folder, 0.0) as (cut_url, link):
            gateway, link.at_commit = Site(cut_url), True
            value, position = await gateway.call(place, "k", {"amount": 7})
            for runner in gateway.runners:
                await runner.close()
    assert not link.at_commit
    ((id, xid),) = await rows(connection, "select id, xmin::text::bigint from orders")
    assert value == id
    assert position.contains(xid)


async def test_the_database_is_lost_at_any_byte(
    url: str, site: Site, connection: Connection
) -> None:
    """Callers repeat what may be repeated, and a mutation that succeeds has happened once."""
    answered: dict[int, int] = {}
    found: Counter[str] = Counter()
    with passable_folder() as folder:
        async with linked(url, folder, 0.04) as (cut_url, link):
            gateway = Site(cut_url)
            numbers = iter(range(LOSSES))

            async def caller() -> None:
                for number in numbers:
                    while number not in answered:
                        try:
                            value, _ = await gateway.call(place, f"k{number}", {"amount": number})
                            answered[number] = value
                        except HeadwaterError as error:
                            found[error.code] += 1
                            if not error.retryable:
                                raise

            async with asyncio.timeout(60 + LOSSES), asyncio.TaskGroup() as tasks:
                for _ in range(4):
                    tasks.create_task(caller())
            for runner in gateway.runners:
                await runner.close()
            print(f"{LOSSES} mutations, {link.cuts} cuts, {dict(found)}")
    assert link.cuts
    placed = await rows(connection, "select amount, id from orders order by amount, id")
    assert placed == sorted(answered.items())


# ------------------------------------------------------------------------ bounds


async def test_requests_are_forgotten_after_their_time(
    site: Site, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maintenance, "REQUESTS_TRIM_BATCH", 10_000)
    await site.call(place, "k")
    await run(
        connection,
        "insert into headwater.requests select 'old', i::text, 'x', 'x', now() - interval '1 s'"
        " from generate_series(1, 25000) i",
        "insert into headwater.published select 'old', i::text, 'x', now() - interval '1 s'"
        " from generate_series(1, 10) i",
    )
    await maintenance.once(connection)
    left = "select scope <> 'old'::bytea, expires_at - now() from headwater.requests"
    ((mine, remaining),) = await rows(connection, left)
    assert mine
    assert timedelta(hours=23) < remaining <= timedelta(hours=24)
    assert await rows(connection, "select * from headwater.published") == []


async def test_the_oldest_requests_of_a_user_give_way(
    site: Site, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But only those that no client repeats any more."""
    monkeypatch.setattr(requests_module, "_REQUESTS_TRIM_EVERY", 5)
    monkeypatch.setattr(requests_module, "REQUESTS_PER_USER_MAX", 3)
    monkeypatch.setattr(requests_module, "REQUESTS_TRIM_BATCH", 1)
    await site.call(place, "of-another", identity=ANONYMOUS)
    stored = "select key from headwater.requests order by stored_at"
    for number in range(5):
        await site.call(place, f"k{number}")
    await asyncio.gather(*site.runners[0]._tasks)
    all_keys = ["of-another", "k0", "k1", "k2", "k3", "k4"]
    assert [key for (key,) in await rows(connection, stored)] == all_keys
    await run(
        connection, "update headwater.requests set stored_at = stored_at - interval '3 hours'"
    )
    for number in range(5, 10):
        await site.call(place, f"k{number}")
    await asyncio.gather(*site.runners[0]._tasks)
    left = ["of-another", "k5", "k6", "k7", "k8", "k9"]
    assert [key for (key,) in await rows(connection, stored)] == left


async def test_trimming_locks_only_what_it_removes(connection: Connection) -> None:
    await run(
        connection,
        "insert into headwater.requests (scope, key, digest, expires_at, stored_at)"
        " select 'a', i::text, 'x', now(), now() - interval '1 day' + i * interval '1 s'"
        " from generate_series(1, 100) i",
    )
    for keep, most, removed in ((100, 10, 0), (95, 3, 3), (95, 3, 2), (95, 3, 0)):
        trim = f"select headwater.trim_user_requests('a', {keep}, '1 hour', {most})"
        assert await rows(connection, trim) == [(removed,)]
    left = "select min(key::int), count(*)::int, count(*) filter (where xmax <> '0')::int"
    assert await rows(connection, f"{left} from headwater.requests") == [(6, 95, 0)]


# ------------------------------------------------------------------------ messages


def _asked(scope: bytes, key: str | None, digest: bytes, *texts: str) -> _QueuedMessage:
    request = None if key is None else Request(scope, key, digest)
    return _QueuedMessage(list(texts), 0, asyncio.get_running_loop().create_future(), request)


async def test_messages_with_a_key_are_sent_once(connection: Connection, url: str) -> None:
    listening = await connect(url, purpose="test", application_path=True)
    await run(listening, 'listen "headwater:bus"')
    async with Bus(url) as bus:
        batch = [
            _asked(b"s", "k", b"1", "1a", "1b"),
            _asked(b"s", None, b"", "2"),
            _asked(b"s", "k", b"1", "3"),  # a repetition beside the first
            _asked(b"s", "k", b"2", "4"),  # the key stands for the first
            _asked(b"t", "k", b"2", "5"),  # of another user
        ]
        assert _once(batch)[4] == [1, 1, 2, 3, 4, 5]
        assert await bus._execute(batch) == [True, True, True, False, True]
        assert await bus._execute(batch) == [True, True, True, False, True]
    notices = listening.notifies(timeout=20, stop_after=5)
    payloads = [notice.payload async for notice in notices]
    assert [payload.split(" ")[-1] for payload in payloads] == ["1a", "1b", "2", "5", "2"]
    await listening.close()


async def test_gateways_that_send_the_same_keys_at_once(connection: Connection, url: str) -> None:
    """In any order, and never in a circle."""
    chance = Random(3)
    listening = await connect(url, purpose="test", application_path=True)
    await run(listening, 'listen "headwater:bus"')
    keys = [f"k{number}" for number in range(20)]
    rounds = max(1, RACES // 5)
    async with Bus(url) as one, Bus(url) as other:
        for number in range(rounds):
            scope = str(number).encode()
            batches = [
                [_asked(scope, key, b"1", f"{number} {key}") for key in chance.sample(keys, 20)]
                for _ in range(2)
            ]
            sent = await asyncio.gather(one._execute(batches[0]), other._execute(batches[1]))
            assert all(map(all, sent))
    notices = listening.notifies(timeout=20, stop_after=rounds * 20)
    assert len({notice.payload async for notice in notices}) == rounds * 20
    await listening.close()
