"""The role that flushes ask as: a policy is code of the table's owner, and must gain no rights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from headwater import Context, Identity
from headwater.capture.postgres import doctor
from headwater.database import PINNED_PATH, Connection, connect
from headwater.errors import Forbidden
from headwater.hub.hub import Hub
from headwater.hub.subscriptions.subscriber import Access
from headwater.queries.execution.runner import QueryRunner
from headwater.queries.functions import Query
from headwater.settings import Settings
from headwater.topics.definitions import TopicDefinition
from tests.support.databases import fresh_database
from tests.support.log_probe import enable, rows, run
from tests.support.subscribers import Recorder, answer, live

OWNER, READER, BYPASSING, QUESTIONS, STRANGER = ROLES = (
    "hw_ask_owner", "hw_ask_reader", "hw_ask_auditor", "hw_ask_questions", "hw_ask_stranger",
)  # fmt: skip

# Resets the role of the question, and reads the log. Its rows are hidden if that works.
SPY = """
    create function spy() returns boolean language plpgsql as $$ begin
      perform set_config('role', 'none', true);
      perform count(*) from headwater.log;
      return false;
    exception when insufficient_privilege then
      return true;
    end $$
"""

# Leaves every kind of session state behind, and looks for state of another user.
LITTER = """
    create function litter(person text) returns boolean language plpgsql as $$
    declare found text := coalesce(current_setting('app.person', true), '');
    begin
      if found not in ('', person) then return false; end if;
      perform set_config('app.person', person, false);
      perform set_config('search_path', 'nowhere', false);
      perform set_config('statement_timeout', '1h', false);
      perform pg_advisory_lock_shared(77);
      begin execute 'prepare plan as select ' || quote_literal(person);
      exception when duplicate_prepared_statement then null; end;
      return true;
    end $$
"""


@pytest.fixture(params=["embedded", "system"])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    server = (
        request.getfixturevalue("postgres").url
        if request.param == "embedded"
        else request.getfixturevalue("system_postgres")
    )
    with fresh_database(server, installed=True) as url:
        yield url


@pytest.fixture
async def notes(database: str) -> AsyncIterator[Connection]:
    """A table of another owner than Headwater."""
    options = {BYPASSING: "nologin bypassrls", QUESTIONS: "login noinherit", OWNER: "login"}
    async with await connect(database, purpose="test", application_path=True) as connection:
        await run(
            connection,
            *(
                f"do $$ begin create role {role} {options.get(role, 'nologin')};"
                " exception when duplicate_object then null; end $$"
                for role in ROLES
            ),
            f"grant {READER}, {BYPASSING} to {QUESTIONS}",
            f"grant create on schema public to {OWNER}",
            f"set role {OWNER}",
            "create table notes (id int primary key, owner int, rank int)",
            "insert into notes select i, i % 4, i from generate_series(1, 40) i",
            f"grant select on notes to {READER}, {BYPASSING}, {STRANGER}",
            "alter table notes enable row level security",
            "create policy own on notes for select using"
            " (owner = (current_setting('request.jwt.claims')::json ->> 'sub')::int)",
            SPY,
            LITTER,
            "reset role",
        )
        await enable(connection, "notes")
        try:
            yield connection
        finally:
            await run(connection, f"drop owned by {', '.join(ROLES)} cascade")


def user(number: int, role: str = READER) -> Access:
    return Access(role=role, claims=json.dumps({"sub": number}))


def asking(url: str, role: str = QUESTIONS) -> Settings:
    return Settings(question_url=url.replace("postgres@", f"{role}@"))


async def test_a_policy_that_leaves_its_role_reads_nothing(
    database: str, notes: Connection
) -> None:
    """In a first result, what a flush asks, a refill, a comparison and a recheck."""
    await run(notes, "create policy spying on notes as restrictive using (spy())")
    async with Hub(database, settings=asking(database), recheck=0.2) as hub:
        recorders = {mode: Recorder() for mode in ("maintained", "streamed")}
        for mode, recorder in recorders.items():
            query = {} if mode == "streamed" else {"limit": 3, "order": ["rank"]}
            await hub.live(live("notes", mode=mode, **query), recorder, access=user(1))
            assert recorder.rows
        for statement in (
            "update notes set rank = rank + 1",
            "delete from notes where id < 20",
            "insert into notes values (100, 1, 0)",
        ):
            await run(notes, statement)
            own = "select * from notes where owner = 1 order by"
            await recorders["maintained"].until_rows(await answer(notes, f"{own} rank, id limit 3"))
            await recorders["streamed"].until_rows(await answer(notes, f"{own} id"))
        await hub.flushes.next_flush()


async def test_state_left_by_a_policy_reaches_no_other_user(
    database: str, notes: Connection
) -> None:
    """The questions of many users are sent together, over the same connections."""
    await run(
        notes,
        "create policy littering on notes as restrictive using"
        " (litter(current_setting('request.jwt.claims')::json ->> 'sub'))",
    )
    async with Hub(database, settings=asking(database)) as hub:
        recorders = [Recorder() for _ in range(4)]
        handles = await asyncio.gather(
            *(
                hub.live(live("notes"), recorder, access=user(number))
                for number, recorder in enumerate(recorders)
            )
        )
        for turn in range(4):
            await run(notes, f"update notes set rank = {100 + turn}, owner = (owner + 1) % 4")
            for number, recorder in enumerate(recorders):
                own = f"select * from notes where owner = {number} order by id"
                await recorder.until_rows(await answer(notes, own))
        assert [handle.closed for handle in handles] == [False] * 4
        held = (
            "select count(*) from pg_locks join pg_stat_activity using (pid)"
            " where locktype = 'advisory' and objid = 77 and application_name ~ 'questions'"
        )
        async with asyncio.timeout(60):
            while await rows(notes, held) != [(0,)]:
                await hub.flushes.next_flush()


async def test_guarded_tables_of_other_owners_need_the_question_role(
    database: str, notes: Connection
) -> None:
    async with Hub(database) as hub:
        with pytest.raises(Forbidden, match="question_url is not set") as caught:
            await hub.live(live("notes"), Recorder(), access=user(1))
        assert OWNER in str(caught.value)
        # No policy is executed for it.
        await hub.live(live("notes"), Recorder(), access=user(1, BYPASSING))
        await run(notes, "alter table notes owner to current_user")
        await hub.live(live("notes"), Recorder(), access=user(1))
    await run(notes, f"alter table notes owner to {OWNER}")
    async with Hub(database, settings=asking(database)) as hub:
        await hub.live(live("notes"), Recorder(), access=user(1))
        with pytest.raises(Forbidden, match=f"question role {QUESTIONS} may not act as {STRANGER}"):
            await hub.live(live("notes"), Recorder(), access=user(1, STRANGER))


@pytest.mark.parametrize("apart", [False, True], ids=["one role", "question role"])
async def test_first_results_are_read_with_our_search_path(
    database: str, notes: Connection, apart: bool
) -> None:
    """Also after one that was read as a user's role, when what was set in the session is undone."""
    await run(notes, "alter table notes owner to current_user")
    async with Hub(database, settings=asking(database) if apart else Settings()) as hub:
        await hub.live(live("notes"), Recorder(), access=user(1))
        readers = hub.live_views.snapshots._as_roles
        async with asyncio.timeout(60):
            while not readers._pool.idle:
                await hub.flushes.next_flush()
        for connection, _ in readers._pool._idle:
            assert await rows(connection, "show search_path") == [(PINNED_PATH,)]


# Leaves a trace that survives a rollback, if it can read the log.
TRACE = (
    "create sequence trace minvalue 0 start 0",
    "grant all on sequence trace to public",
    """create function look(text) returns boolean language plpgsql as $$ begin
      perform count(*) from headwater.log;
      perform setval('public.trace', 1);
      return true;
    exception when insufficient_privilege or read_only_sql_transaction then return true;
    end $$""",
    "create domain planted as text check (look(value))",
)


@pytest.mark.parametrize("how", ["text of a function", "array in a column"])
async def test_analysis_runs_no_code_of_other_roles(
    database: str, notes: Connection, how: str
) -> None:
    """To read a constant of an array, PostgreSQL calls the conditions of its elements' domain."""
    where = "true"
    await run(notes, f"set role {OWNER}", *TRACE)
    if how == "text of a function":
        await run(
            notes,
            "create function mine() returns boolean language sql stable as"
            " $$ select '{a}'::planted[] is not null $$",
            "create policy planted on notes as restrictive using (mine())",
        )
    else:
        await run(notes, "alter table notes add column tags planted[]")
        where = "tags is null or tags <> '{a}'"
    await run(notes, "reset role")

    async def ids(ctx: Context) -> Any:
        found = await ctx.fetch(f"select id from notes where {where} order by id limit 2")
        return [row["id"] for row in found]

    query = Query("ids", ids)
    identity = Identity(user="1", role=READER, claims={"sub": 1})
    async with Hub(database, settings=asking(database)) as hub:
        recorder = Recorder()
        await hub.reactive.subscribe(query, query.bind({}), identity, recorder)
        assert recorder.value == [1, 5]
        await run(notes, "delete from notes where id = 1")
        await recorder.until(lambda: recorder.value == [5, 9])
    assert await rows(notes, "select last_value, is_called from trace") == [(0, False)]


async def test_queries_over_guarded_tables_of_other_owners_need_the_question_role(
    database: str, notes: Connection
) -> None:
    await run(notes, "create policy spying on notes as restrictive using (spy())")

    async def ids(ctx: Context) -> Any:
        return [row["id"] for row in await ctx.fetch("select id from notes order by id limit 2")]

    query = Query("ids", ids)
    identity = Identity(user="1", role=READER, claims={"sub": 1})
    direct = QueryRunner(database, Settings())
    async with Hub(database) as hub:
        with pytest.raises(Forbidden, match="row-level security"):
            await hub.reactive.call(query, query.bind({}), identity)
        with pytest.raises(Forbidden, match="row-level security"):
            await direct.run(query, query.bind({}), identity)
        await run(notes, "alter table notes owner to current_user")
        assert (
            json.loads(bytes((await hub.reactive.call(query, query.bind({}), identity)).value))
            == []
        )
        assert await direct.run(query, query.bind({}), identity) == []
    await direct.close()
    await run(notes, f"alter table notes owner to {OWNER}")
    async with Hub(database, settings=asking(database)) as hub:
        found = await hub.reactive.call(query, query.bind({}), identity)
        assert json.loads(bytes(found.value)) == [1, 5]


async def test_a_policy_does_not_replace_the_statements_of_others(
    database: str, notes: Connection
) -> None:
    """Frequent statements are prepared, and stay prepared between the queries of several users."""
    await run(
        notes,
        "create table accounts (id int primary key, amount int)",
        "insert into accounts values (1, 100)",
        f"grant select on accounts to {READER}",
        f"set role {OWNER}",
        """create function replace() returns boolean language plpgsql as $$
        declare found record;
        begin
          for found in
            select * from pg_prepared_statements where statement ~ 'accounts' and not from_sql
          loop
            execute 'deallocate ' || found.name;
            execute format('prepare %I (%s) as select -1 as amount', found.name,
                           array_to_string(found.parameter_types::text[], ','));
          end loop;
          return true;
        end $$""",
        "create policy replacing on notes as restrictive using (replace())",
        "reset role",
    )
    await enable(notes, "accounts")

    async def amount(ctx: Context, id: int) -> Any:
        return await ctx.fetch_value("select amount from accounts where id = %s", id)

    async def ids(ctx: Context) -> Any:
        return [row["id"] for row in await ctx.fetch("select id from notes order by id limit 2")]

    queries = Query("amount", amount), Query("ids", ids)
    seen = []
    async with Hub(database, settings=asking(database)) as hub:
        for i in range(30):
            victim = Identity(user=f"victim {i}", role=READER, claims={"sub": 3, "i": i})
            found = await hub.reactive.call(queries[0], queries[0].bind({"id": 1}), victim)
            seen.append(json.loads(bytes(found.value)))
            other = Identity(user=f"other {i}", role=READER, claims={"sub": 1, "i": i})
            await hub.reactive.call(queries[1], queries[1].bind({}), other)
    assert set(seen) == {100}, seen


async def test_doctor_notices_a_question_role_that_can_become_more(
    database: str, notes: Connection
) -> None:
    await run(
        notes,
        f"alter role {STRANGER} nologin",
        f"grant usage on schema headwater to {STRANGER}",
        f"grant select on headwater.log to {STRANGER}",
        f"grant {STRANGER} to {QUESTIONS}",
    )
    try:
        found = await doctor.of_questions(notes, asking(database).question_url)
        assert (found.level, STRANGER in found.detail) == ("warn", True), found
    finally:
        await run(notes, f"revoke {STRANGER} from {QUESTIONS}")


async def test_headwater_itself_executes_no_policy(database: str, notes: Connection) -> None:
    """A trusted topic reads rows as Headwater's role, here one that policies apply to."""
    await run(
        notes,
        f"grant all on all tables in schema headwater to {STRANGER}",
        f"grant usage on schema headwater to {STRANGER}",
        f"grant execute on all functions in schema headwater to {STRANGER}",
        f"grant usage, select on all sequences in schema headwater to {STRANGER}",
        f"alter role {STRANGER} login",
    )
    topic = TopicDefinition("note:{id}", table="notes", trusted=True)
    async with Hub(database.replace("postgres@", f"{STRANGER}@")) as hub:
        assert hub.ready
        with pytest.raises(Forbidden, match="applies to Headwater's own role"):
            await hub.topics.subscribe("note:1", topic, Recorder())


async def test_doctor_checks_the_question_role(database: str, notes: Connection) -> None:
    async def found(settings: Settings) -> doctor.Finding:
        return await doctor.of_questions(notes, settings.question_url)

    missing = await found(Settings())
    assert (missing.level, "may not read notes" in missing.detail) == ("warn", True)
    assert "create role headwater_questions login noinherit" in (missing.hint or "")
    fine = await found(asking(database))
    assert (fine.level, "owns nothing" in fine.detail) == ("ok", True), fine
    await run(notes, f"alter role {QUESTIONS} set search_path = evil")
    try:
        altered = await found(asking(database))
    finally:
        await run(notes, f"alter role {QUESTIONS} reset all")
    assert (altered.level, "settings of its own: search_path" in altered.detail) == ("warn", True)
    for role, what in (
        ("postgres", "is a superuser"),
        (OWNER, "owns something, may read notes"),
    ):
        powerful = await found(asking(database, role))
        assert (powerful.level, what in powerful.detail) == ("warn", True), powerful
    away = await found(asking(database, "hw_ask_unknown"))
    assert away.level == "fail"
