"""Work for a session's database role logs in as the question role, which may do nothing itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
import pytest

from headwater import Context, Headwater, Identity, MutationContext
from headwater.capture.postgres import doctor
from headwater.database import Connection
from headwater.errors import ConfigError, PermissionMissing
from headwater.hub.hub import Hub
from headwater.hub.subscriptions.subscriber import Access
from headwater.idempotency import Request
from headwater.identity import ANONYMOUS
from headwater.queries.execution.idempotent_requests import REQUIRED_FUNCTIONS
from headwater.queries.execution.mutations import MutationRunner
from headwater.queries.execution.runner import QueryRunner
from headwater.queries.functions import Mutation, Query
from headwater.settings import Settings
from tests.support.log_probe import enable, rows, run
from tests.support.subscribers import Recorder, live


class Roles(NamedTuple):
    user: str
    questions: str
    settings: Settings

    @property
    def identity(self) -> Identity:
        return Identity(user="ann", role=self.user, claims={"sub": "ann"})


@pytest.fixture
async def roles(url: str, connection: Connection) -> AsyncIterator[Roles]:
    """A user's role, and the question role as the documentation makes it. The policy of `orders`
    lets those who read first results see a row only if they logged in as the question role."""
    user, questions = (f"{name}_{uuid4().hex}" for name in ("reader", "questions"))
    await run(
        connection,
        f"create role {user}",
        f"create role {questions} login noinherit",
        f"grant {user} to {questions}",
        f"grant execute on function {', '.join(REQUIRED_FUNCTIONS)} to {questions}",
        "create table orders (id int primary key, note text)",
        "insert into orders values (1, 'one')",
        "alter table orders enable row level security",
        f"create policy p on orders using (session_user = '{questions}'"
        " or current_setting('application_name') <> 'headwater snapshot')",
        f"grant select, insert on orders to {user}",
    )
    await enable(connection, "orders")
    question_url = url.replace("postgres@", f"{questions}@")
    assert question_url != url
    yield Roles(user, questions, Settings(url=url, question_url=question_url))
    await run(
        connection,
        "drop table orders cascade",
        *(f"drop owned by {role}" for role in (user, questions)),
        *(f"drop role {role}" for role in (user, questions)),
    )


@pytest.mark.parametrize("mode", ["maintained", "streamed"])
async def test_first_results(url: str, connection: Connection, roles: Roles, mode: str) -> None:
    async with Hub(url, settings=roles.settings) as hub:
        recorder = Recorder()
        await hub.live(live("orders", mode=mode), recorder, access=Access(role=roles.user))
        assert recorder.rows == [{"id": 1, "note": "one"}]
        logged_in = await rows(
            connection,
            "select distinct usename from pg_stat_activity where datname = current_database()"
            " and application_name = 'headwater snapshot'",
        )
        assert logged_in == [(roles.questions,)]


async def test_a_policy_that_leaves_its_role_reads_nothing_and_leaves_nothing(
    url: str, connection: Connection, roles: Roles
) -> None:
    """It becomes the question role, and what it sets is gone when the next user's result is read on
    the same connection."""
    await run(
        connection,
        """create function leave() returns boolean language plpgsql as $$
        declare before text := coalesce(current_setting('test.left', true), '');
        begin
          perform set_config('role', 'none', false), set_config('test.left', 'something', false);
          perform pg_advisory_lock(4711);
          if before <> '' then return false; end if;
          begin perform count(*) from headwater.log; return false;
          exception when insufficient_privilege then return true; end;
        end $$""",
        "create table secrets (id int primary key)",
        "insert into secrets values (1)",
        "alter table secrets enable row level security",
        "create policy leaving on secrets using (leave())",
        f"grant select on secrets to {roles.user}",
    )
    await enable(connection, "secrets")
    async with Hub(url, settings=roles.settings) as hub:
        for i in range(3):
            recorder, access = Recorder(), Access(role=roles.user, claims=f'{{"i": {i}}}')
            handle = await hub.live(live("secrets", mode="streamed"), recorder, access=access)
            assert recorder.rows == [{"id": 1}]
            handle.close()
            await hub.flushes.next_flush()
        held = "select count(*) from pg_locks where locktype = 'advisory' and objid = 4711"
        assert await rows(connection, held) == [(0,)]


async def test_queries(url: str, connection: Connection, roles: Roles) -> None:
    async def who(ctx: Context) -> Any:
        return await ctx.fetch_value("select session_user || ' as ' || current_user")

    owner = connection.info.user
    seen = {
        "user": (Query("who", who), roles.identity),
        "trusted": (Query("trusted", who, trusted=True), roles.identity),
        "no role": (Query("other", who), ANONYMOUS),
    }
    expected = {
        "user": f"{roles.questions} as {roles.user}",
        "trusted": f"{owner} as {owner}",
        "no role": f"{owner} as {owner}",
    }
    direct = QueryRunner(url, roles.settings)
    async with Hub(url, settings=roles.settings) as hub:
        for name, (query, identity) in seen.items():
            for _ in range(2):
                found = await hub.reactive.call(query, query.bind({}), identity)
                assert msgspec.json.decode(found.value) == expected[name]
                assert await direct.run(query, query.bind({}), identity) == expected[name]
    await direct.close()


async def test_a_subscribed_query_follows_changes(
    url: str, connection: Connection, roles: Roles
) -> None:
    async def notes(ctx: Context) -> Any:
        return [row["note"] for row in await ctx.fetch("select note from orders order by id")]

    query = Query("notes", notes)
    async with Hub(url, settings=roles.settings) as hub:
        recorder = Recorder()
        await hub.reactive.subscribe(query, query.bind({}), roles.identity, recorder)
        assert recorder.value == ["one"]
        await run(connection, "insert into orders values (2, 'two')")
        await recorder.until(lambda: recorder.value == ["one", "two"])


@pytest.fixture
async def mutations(url: str, roles: Roles) -> AsyncIterator[MutationRunner]:
    found = MutationRunner(url, roles.settings)
    yield found
    await found.close()


async def add(ctx: MutationContext, id: int) -> str:
    await ctx.execute("insert into orders values (%s, 'new')", id)
    found: str = await ctx.fetch_value("select session_user || ' as ' || current_user")
    return found


async def test_mutations_with_a_key(
    connection: Connection, roles: Roles, mutations: MutationRunner
) -> None:
    mutation = Mutation("add", add)
    for id, identity in ((2, roles.identity), (3, ANONYMOUS)):
        request = Request.of(identity, f"key-{id}", "add", {"id": id})
        answers = [
            await mutations.answer(mutation, mutation.bind({"id": id}), identity, request=request)
            for _ in range(2)
        ]
        who = f"{roles.questions} as {roles.user}" if identity.role else "postgres as postgres"
        assert [msgspec.json.decode(value) for value, _ in answers] == [who] * 2
        value, position = await mutations.run(mutation, mutation.bind({"id": id + 10}), identity)
        assert (value, position.covers(answers[0][1])) == (who, True)
    stored = await rows(connection, "select id from orders order by id")
    assert stored == [(1,), (2,), (3,), (12,), (13,)]


async def test_a_mutation_leaves_nothing_behind(roles: Roles, mutations: MutationRunner) -> None:
    async def leaves(ctx: MutationContext) -> Any:
        before = await ctx.fetch_one(
            "select current_user::text, coalesce(current_setting('test.left', true), '') as left,"
            " (select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'advisory'"
            " and objid = 4712) as held"
        )
        await ctx.execute("select set_config('role', 'none', false)")
        await ctx.execute("select set_config('test.left', 'something', false)")
        await ctx.execute("select pg_advisory_lock(4712)")
        return before

    mutation = Mutation("leaves", leaves)
    for _ in range(3):
        value, _ = await mutations.run(mutation, mutation.bind({}), roles.identity)
        assert value == {"current_user": roles.user, "left": "", "held": 0}


@pytest.mark.parametrize("function", REQUIRED_FUNCTIONS)
async def test_a_right_that_is_missing_is_named(
    connection: Connection, roles: Roles, mutations: MutationRunner, function: str
) -> None:
    await run(connection, f"revoke execute on function {function} from {roles.questions}")
    mutation = Mutation("add", add)
    request = Request.of(roles.identity, "key", "add", {"id": 2})
    with pytest.raises(PermissionMissing) as caught:
        await mutations.answer(mutation, mutation.bind({"id": 2}), roles.identity, request=request)
    assert function in str(caught.value)
    assert f'to "{roles.questions}"' in (caught.value.hint or "")
    await mutations.run(mutation, mutation.bind({"id": 3}), ANONYMOUS)
    assert await rows(connection, "select id from orders order by id") == [(1,), (3,)]


async def test_a_question_url_that_cannot_be_used_is_named_at_the_start(
    url: str, connection: Connection, roles: Roles
) -> None:
    """Of another database, statements of users would be executed there."""
    right = roles.settings.question_url or ""
    for wrong, said in (
        (right.replace(f"/{connection.info.dbname}", "/postgres"), "is another database than url"),
        (right.replace(f"{roles.questions}@", "hw_unknown@"), "cannot reach the database"),
    ):
        hw = Headwater(url, question_url=wrong)
        hw.asgi()
        with pytest.raises(ConfigError, match=f"^question_url: .*{said}"):
            async with hw:
                pass
        finding = await doctor.of_questions(connection, wrong)
        assert (finding.level, "question_url" in finding.detail) == ("fail", True)
    hw = Headwater(url, question_url=right)
    hw.asgi()
    async with hw:
        assert hw.gateway is not None
