"""The rights that capture runs with, and the rights that remain after an upgrade. The schema
belongs to one role, tables to another, and a third has enabled them or reads the log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from headwater import Headwater
from headwater.admin.status import log_status
from headwater.capture.postgres import doctor, schema, triggers
from headwater.capture.postgres.functions import CLASSES
from headwater.database import Connection, connect
from headwater.errors import PermissionMissing
from headwater.hub.hub import Hub
from headwater.log.reading.reader import LogReader
from headwater.model import Origin
from tests.support.log_probe import rows, run
from tests.support.mirrors import mirror_sql, source_transaction
from tests.support.paths import ROOT
from tests.support.subscribers import Recorder, live

BEFORE_ORDER = 13
BEFORE_ACCESS = 18
BEFORE_SOURCES = 22
EVERYTHING = ("all tables", "all sequences", "all functions")
PARTED = (
    "create table parted (id int primary key, a int) partition by range (id)",
    "create table parted_1 partition of parted for values from (0) to (100)",
)
SYNC = "select headwater.sync_tables()"
RESETS = "select count(*) from headwater.log where op = 'R'"


@dataclass
class Roles:
    superuser: Connection
    owner: Connection
    """Of the schema headwater."""
    maker: Connection
    """Of tables."""
    reader: Connection

    @property
    def all(self) -> tuple[Connection, ...]:
        return (self.owner, self.maker, self.reader)


@pytest.fixture
async def roles(empty_url: str) -> AsyncIterator[Roles]:
    superuser = await connect(empty_url, purpose="test", application_path=True)
    database = superuser.info.dbname
    names = [f"{role}_{database}" for role in ("Owner", "maker", "reader")]
    await run(
        superuser,
        *(f'create role "{name}" login' for name in names),
        f'grant create on database {database} to "{names[0]}"',
        *(f'grant create, usage on schema public to "{name}"' for name in names),
    )
    urls = [empty_url.replace("postgres@", f"{name}@") for name in names]
    opened = [await connect(url, purpose="test", application_path=True) for url in urls]
    yield Roles(superuser, *opened)
    for connection in opened:
        await connection.close()
    for name in reversed(names):
        await run(superuser, f'drop owned by "{name}" cascade', f'drop role "{name}"')
    await superuser.close()


async def grant_the_log(roles: Roles, to: Connection, *, write: bool = False) -> None:
    user = to.info.user
    rights = {"all tables": "select, insert, update, delete" if write else "select"}
    rights |= {"all sequences": "select, usage", "all functions": "execute"}
    grants = [f"grant {rights[on]} on {on} in schema headwater to {user}" for on in EVERYTHING]
    await run(roles.owner, f"grant usage, create on schema headwater to {user}", *grants)


async def write_to(connection: Connection, table: str) -> None:
    await run(
        connection,
        f"insert into {table} values (2, 2), (3, 3)",
        f"update {table} set a = 4",
        f"with gone as (delete from {table} where id = 2 returning *) insert into {table}"
        " select id + 10, a from gone",
        f"delete from {table} where id = 3",
    )


async def test_an_upgrade_with_a_table_that_a_superuser_enabled(roles: Roles) -> None:
    await schema.install(roles.owner, upto=BEFORE_ORDER)
    await run(roles.superuser, *PARTED, "create table plain (id int primary key, a int)")
    for table in ("parted", "plain"):
        await run(roles.superuser, f"select headwater.enable_reactivity('{table}')")
    await schema.install(roles.owner)
    for table in ("parted", "plain"):
        await write_to(roles.superuser, table)
    await run(roles.superuser, SYNC)
    resets = await rows(roles.superuser, RESETS)
    for table in ("parted", "plain"):
        await run(roles.superuser, f"delete from {table}")
        await write_to(roles.superuser, table)
    assert await rows(roles.superuser, RESETS) == resets  # exact again, once its own role was here


async def test_an_upgrade_by_a_superuser(roles: Roles) -> None:
    """New objects belong to the owner of the schema, and roles that had enabled tables can
    write."""
    await schema.install(roles.owner, upto=BEFORE_ORDER)
    await grant_the_log(roles, roles.maker, write=True)
    await run(roles.maker, *PARTED, "create table plain (id int primary key, a int)")
    for table in ("parted", "plain"):
        await run(roles.maker, f"select headwater.enable_reactivity('{table}')")
    await schema.install(roles.superuser)
    for table in ("parted", "plain"):
        await write_to(roles.maker, table)
    owners = await rows(
        roles.superuser,
        "select distinct o::regrole::text from ("
        " select relowner from pg_class where relnamespace = 'headwater'::regnamespace"
        " union select proowner from pg_proc where pronamespace = 'headwater'::regnamespace"
        "   and proname !~ '^(capture|mark)_[0-9]') x (o)",
    )
    assert owners == [(f'"{roles.owner.info.user}"',)]


async def test_roles_that_enable_tables_still_do_after_an_upgrade(roles: Roles) -> None:
    await schema.install(roles.owner, upto=BEFORE_SOURCES)
    await grant_the_log(roles, roles.maker, write=True)
    await run(roles.maker, *PARTED, "create table plain (id int primary key, a int)")
    for table in ("parted", "plain"):
        await run(roles.maker, f"select headwater.enable_reactivity('{table}')")
    await schema.install(roles.owner)
    await run(
        roles.maker,
        "select headwater.disable_reactivity('plain')",
        "select headwater.enable_reactivity('plain')",
        "create table parted_2 partition of parted for values from (100) to (200)",
        SYNC,
        "drop table parted_2",
        SYNC,
    )
    await write_to(roles.maker, "plain")


async def test_readers_read_after_an_upgrade(roles: Roles) -> None:
    await schema.install(roles.owner, upto=BEFORE_ORDER)
    await grant_the_log(roles, roles.reader)
    await schema.install(roles.owner)
    reader = await LogReader.open(roles.reader)
    assert (await reader.now(roles.reader)).xmax > 0


@pytest.mark.parametrize("granted", ["before", "after"])
async def test_readers_see_origins_and_no_passwords(roles: Roles, granted: str) -> None:
    """Whether the log was granted before or after the release that has sources."""
    if granted == "before":
        await schema.install(roles.owner, upto=BEFORE_SOURCES)
        await grant_the_log(roles, roles.reader)
    await schema.install(roles.owner)
    if granted == "after":
        await grant_the_log(roles, roles.reader)
    await run(
        roles.owner,
        "insert into headwater.source_definitions (name, definition, declared_by)"
        " values ('shop', '{\"url\": \"mysql://root:secret@db/shop\"}', 'command')",
    )
    reader = await LogReader.open(roles.reader)
    since = await reader.now(roles.reader)
    await run(roles.superuser, "create table plain (id int primary key)", mirror_sql("plain"))
    await run(roles.superuser, "select headwater.enable_reactivity('plain')")
    async with source_transaction(roles.superuser, "0-1-4711"):
        await run(roles.superuser, "insert into plain values (1)")
    batch = await reader.read(roles.reader, since)
    assert batch.transactions[-1].changes[-1].origin == Origin("shop", "0-1-4711", None, "mysql")
    if granted == "after":
        assert await rows(roles.reader, "select * from headwater.source_definitions") == []


async def callable_by(roles: Roles, reader: Connection) -> set[str]:
    """The functions that a role may call, without those that every role may call."""
    found = await rows(
        roles.superuser,
        "select distinct proname from pg_proc where pronamespace = 'headwater'::regnamespace"
        f" and has_function_privilege('{reader.info.user}', oid, 'execute')",
    )
    return {name for (name,) in found} - CLASSES["public"]


async def test_an_upgrade_revokes_a_grant_on_all_functions(roles: Roles) -> None:
    """Readers and roles that enable tables retain what they need; no function acts for the
    gateway."""
    await schema.install(roles.owner, upto=BEFORE_ACCESS)
    await grant_the_log(roles, roles.reader)
    await grant_the_log(roles, roles.maker, write=True)
    assert "issue_ticket" in await callable_by(roles, roles.reader)
    await schema.install(roles.owner)
    assert await callable_by(roles, roles.reader) == CLASSES["reader"]
    assert await callable_by(roles, roles.maker) == CLASSES["reader"] | CLASSES["capture"]
    await run(roles.maker, *PARTED, "select headwater.enable_reactivity('parted')")
    await write_to(roles.maker, "parted")


async def test_an_upgrade_leaves_the_grants_of_the_question_role(roles: Roles) -> None:
    await schema.install(roles.owner, upto=BEFORE_ACCESS)
    user = roles.reader.info.user
    granted = "headwater.begin_request, headwater.store_request, headwater.log_id"
    await run(roles.owner, f"grant execute on function {granted} to {user}")
    await schema.install(roles.owner)
    assert await callable_by(roles, roles.reader) >= {"begin_request", "store_request", "log_id"}
    assert not await callable_by(roles, roles.reader) & CLASSES["gateway"]


async def test_every_function_is_in_one_class(roles: Roles) -> None:
    await schema.install(roles.owner)
    found = await rows(
        roles.owner,
        "select distinct proname from pg_proc where pronamespace = 'headwater'::regnamespace",
    )
    listed = [name for names in CLASSES.values() for name in names]
    assert sorted(listed) == sorted(name for (name,) in found)


def documented_grants() -> list[str]:
    page = ROOT / "docs" / "howto" / "existing-database.md"
    section = page.read_text().partition("## Let others read")[2]
    return section.partition("```sql\n")[2].partition("```")[0].split(";")[:-1]


async def test_a_reader_with_the_documented_grants(roles: Roles, empty_url: str) -> None:
    await schema.install(roles.owner)
    user = roles.reader.info.user
    for statement in documented_grants():
        await run(roles.owner, statement.replace("to reader", f"to {user}"))
    assert await callable_by(roles, roles.reader) == CLASSES["reader"]
    await run(roles.maker, "create table plain (id int primary key, a int)")
    await run(roles.maker, f'grant trigger on plain to "{roles.owner.info.user}"')
    await run(roles.owner, "select headwater.enable_reactivity('plain')")

    hw = Headwater(empty_url.replace("postgres@", f"{user}@"), log_retention=None)
    async with hw:
        feed = hw.changes("plain", cursor="billing", since=await hw.position())
        await run(roles.maker, "insert into plain values (1, 1)")
        assert [change.key for change in (await anext(feed)).changes] == [(1,)]
        await run(roles.maker, "insert into plain values (2, 2)")
        assert [change.key for change in (await anext(feed)).changes] == [(2,)]
        await feed.aclose()
    saved = await rows(roles.owner, "select name from headwater.cursors")
    assert saved == [("billing",)]
    assert [table.name for table in await triggers.list_tables(roles.reader)] == ["plain"]
    assert (await rows(roles.reader, "select count(*) from headwater.changes"))[0][0] >= 2
    assert (await log_status(roles.reader)).position
    assert not [found for found in await doctor.examine(roles.reader) if found.level == "fail"]


async def test_doctor_names_roles_that_act_for_the_gateway(roles: Roles) -> None:
    await schema.install(roles.owner)

    async def finding() -> doctor.Finding:
        found = await doctor.examine(roles.owner)
        return next(each for each in found if each.topic == "functions")

    assert (await finding()).level == "ok"
    user = roles.reader.info.user
    await run(roles.owner, f"grant execute on all functions in schema headwater to {user}")
    found = await finding()
    assert found.level == "warn"
    assert user in found.detail


async def test_the_functions_that_every_role_may_call(roles: Roles) -> None:
    """The rest are triggers that PostgreSQL gives to a new partition, with its owner's rights."""
    await schema.install(roles.owner)
    functions = "select proname from pg_proc where pronamespace = 'headwater'::regnamespace"
    found = await rows(roles.reader, f"{functions} and has_function_privilege(oid, 'execute')")
    assert {name for (name,) in found} == CLASSES["public"]
    await run(
        roles.reader,
        "create table own (id int primary key) partition by range (id)",
        *(
            f"create trigger {name} after insert on own for each row"
            f" execute function headwater.{name}()"
            for name in ("capture_row", "note_move", "pass_row")
        ),
        "create table own_1 partition of own for values from (0) to (10)",
        "insert into own values (1)",
    )
    assert await rows(roles.owner, "select count(*) from headwater.log") == [(0,)]


STEAL = (
    "create table loot (who text)",
    "grant insert on loot to public",
    "create function steal() returns int language plpgsql as $$ begin"
    " insert into public.loot values (current_user); return 1;"
    " exception when others then return 1; end $$",
    "create function f(int) returns int language plpgsql immutable"
    " as $$ begin perform public.steal(); return 1; end $$",
    "create table t (id int primary key, a int)",
    "create statistics s on (a + f(1)), id from t",
    "create function again() returns trigger language plpgsql as $$ begin"
    " if new.a = 2 then update t set a = 1 where id = new.id; end if; return null; end $$",
    "create trigger again after update on t for each row execute function again()",
)


async def test_capture_calls_nothing_of_the_tables_owner(roles: Roles) -> None:
    """The planner would, if the table were read: it computes what is immutable at once."""
    await schema.install(roles.owner)
    await run(roles.maker, *STEAL, f'grant select, trigger on t to "{roles.owner.info.user}"')
    await run(roles.owner, "select headwater.enable_reactivity('t')")
    await run(roles.maker, "insert into t values (1, 1)", "truncate loot")
    await run(
        roles.maker, "update t set a = 2"
    )  # and back: the log alone does not say in which order
    thieves = {who for (who,) in await rows(roles.maker, "select who from loot")}
    assert thieves <= {roles.maker.info.user}


async def test_a_new_partition_calls_nothing_of_its_owner(roles: Roles) -> None:
    await schema.install(roles.owner)
    await run(roles.superuser, f'grant {roles.maker.info.user} to "{roles.owner.info.user}"')
    await run(roles.maker, *STEAL, *PARTED)
    await run(roles.owner, "select headwater.enable_reactivity('parted')")
    await run(
        roles.maker,
        "create table parted_2 partition of parted for values from (100) to (200)",
        "create statistics s_2 on (a + f(1)), id from parted_2",
        "truncate loot",
    )
    await run(roles.owner, SYNC)
    assert await rows(roles.maker, "select who from loot") == []


async def test_truncating_a_partition_calls_nothing_of_its_owner(roles: Roles) -> None:
    """The planner would, if its rows were read to log them as deleted."""
    await schema.install(roles.owner)
    await run(roles.superuser, f'grant {roles.maker.info.user} to "{roles.owner.info.user}"')
    await run(roles.maker, *STEAL, *PARTED)
    await run(roles.owner, "select headwater.enable_reactivity('parted')")
    await run(
        roles.maker,
        "insert into parted values (1, 1)",
        "create index on parted_1 ((a + f(1)))",
        "truncate loot",
        "truncate parted_1",
    )
    thieves = {who for (who,) in await rows(roles.maker, "select who from loot")}
    assert thieves <= {roles.maker.info.user}
    assert await rows(roles.owner, "select op from headwater.log order by seq desc limit 1") == [
        ("R",)
    ]


async def test_truncating_a_table_with_children_calls_nothing_of_its_owner(roles: Roles) -> None:
    """Its owner has only granted SELECT and TRIGGER, and makes the child afterwards."""
    await schema.install(roles.owner)
    await run(roles.maker, *STEAL, f'grant select, trigger on t to "{roles.owner.info.user}"')
    await run(roles.owner, "select headwater.enable_reactivity('t')")
    await run(
        roles.maker,
        "insert into t values (1, 1)",
        "create table child () inherits (t)",
        "truncate loot",
        "truncate t",
    )
    thieves = {who for (who,) in await rows(roles.maker, "select who from loot")}
    assert thieves <= {roles.maker.info.user}


async def test_a_key_in_a_new_partition_calls_no_cast_of_its_owner(roles: Roles) -> None:
    await schema.install(roles.owner)
    await run(roles.superuser, f'grant {roles.maker.info.user} to "{roles.owner.info.user}"')
    await run(
        roles.maker,
        *STEAL,
        "create type mood as enum ('sad', 'glad')",
        "create function as_json(mood) returns json language plpgsql"
        " as $$ begin perform public.steal(); return '1'; end $$",
        "create cast (mood as json) with function as_json(mood)",
        "create table moods (mood mood, id int, primary key (mood, id)) partition by range (id)",
        "create table moods_1 partition of moods for values from (0) to (10)",
    )
    await run(roles.owner, "select headwater.enable_reactivity('moods')")
    await run(
        roles.maker,
        "create table moods_2 partition of moods for values from (10) to (20)",
        "insert into moods_2 values ('sad', 11)",
        "update moods_2 set mood = 'glad'",
        "delete from moods_2",
    )
    assert await rows(roles.maker, "select who from loot") == []
    logged = await rows(
        roles.owner,
        "select op::text, before ->> 'mood', after ->> 'mood' from headwater.log"
        " where op <> 'R' order by seq",
    )
    assert logged == [
        ("I", None, "sad"), ("D", "sad", None), ("I", None, "glad"), ("D", "glad", None),
    ]  # fmt: skip


async def test_a_trigger_that_is_not_ours_to_enable(roles: Roles) -> None:
    """As long as it is disabled the table must be read again at every maintenance."""
    await schema.install(roles.owner)
    await run(
        roles.maker,
        "create table t (id int primary key, a int)",
        f'grant trigger on t to "{roles.owner.info.user}"',
    )
    await run(roles.owner, "select headwater.enable_reactivity('t')")
    (before,) = await rows(roles.owner, RESETS)
    await run(roles.maker, "alter table t disable trigger headwater_insert")
    for round in (1, 2):
        await run(roles.maker, f"insert into t values ({round})")
        await run(roles.owner, SYNC)
        assert await rows(roles.owner, RESETS) == [(before[0] + round,)]
    await run(roles.maker, "alter table t enable trigger headwater_insert")
    await run(roles.owner, SYNC, SYNC, SYNC)
    assert await rows(roles.owner, RESETS) == [(before[0] + 3,)]


SERIALIZABLE = {
    "a trigger that writes again": "update {t} set a = a + 2",
    "merge": "merge into {t} using (values (1), (2), (3)) v (id) on {t}.id = v.id"
    " when matched and v.id = 1 then delete when matched then update set a = 0"
    " when not matched then insert values (v.id, 1)",
}


@pytest.mark.parametrize("name", SERIALIZABLE)
async def test_serializable_writers_of_other_tables_do_not_fail(
    name: str, roles: Roles, empty_url: str
) -> None:
    await schema.install(roles.superuser)
    for t in ("t", "u"):
        await run(
            roles.superuser,
            f"create table {t} (id int primary key, a int)",
            f"insert into {t} values (1, 1), (2, 2)",
            f"create function again_{t}() returns trigger language plpgsql as $$ begin"
            f" if new.a % 2 = 0 then update {t} set a = a + 1 where id = new.id; end if;"
            " return null; end $$",
            f"create trigger again after update on {t} for each row execute function again_{t}()",
            f"select headwater.enable_reactivity('{t}')",
        )
    other = await connect(empty_url, purpose="test", application_path=True)
    for _ in range(5):
        for connection in (roles.superuser, other):
            await run(connection, "begin isolation level serializable")
        for _ in range(2):
            await run(roles.superuser, SERIALIZABLE[name].format(t="t"))
            await run(other, SERIALIZABLE[name].format(t="u"))
        await run(roles.superuser, "commit")
        await run(other, "commit")
    await other.close()


async def test_a_table_that_headwater_itself_may_not_read_is_named(
    empty_url: str, roles: Roles
) -> None:
    """TRIGGER is enough to capture it, and not to show its rows. That is no fault of the query."""
    await schema.install(roles.owner)
    name = roles.owner.info.user
    await run(
        roles.maker,
        "create table orders (id int primary key)",
        f'grant trigger on orders to "{name}"',
    )
    await triggers.enable(roles.owner, "orders")
    async with Hub(empty_url.replace("postgres@", f"{name}@")) as hub:
        with pytest.raises(PermissionMissing, match="role may not read orders") as caught:
            await hub.live(live("orders"), Recorder())
    assert "grant select on orders" in (caught.value.hint or "")
