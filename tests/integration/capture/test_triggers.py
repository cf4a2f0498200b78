"""Enabling and disabling: any name, any kind of relation, any role, while writers are at work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest

from headwater.capture.postgres import triggers
from headwater.database import Connection, connect
from headwater.errors import CaptureError, HeadwaterError, PermissionMissing
from tests.support.log_probe import LogProbe, probing, rows, run


@pytest.fixture
async def probe(url: str) -> AsyncIterator[LogProbe]:
    async with probing(url) as found:
        yield found


LONG = "n" * 63

NAMES = [
    # (what it is called in SQL, what the user types, how it is printed)
    ('"Order Lines"', '"Order Lines"', "Order Lines"),
    ('"Order Lines"', "Order Lines", "Order Lines"),
    ('"Orders"', "Orders", "Orders"),
    ("bestellungen_größe", "bestellungen_größe", "bestellungen_größe"),
    ('"订单 😀"', '"订单 😀"', "订单 😀"),
    ("sales.orders", "sales.orders", "sales.orders"),
    ('"My Schema"."My Table"', '"My Schema"."My Table"', "My Schema.My Table"),
    (LONG, LONG, LONG),
    ('"it\'s; drop table x --"', '"it\'s; drop table x --"', "it's; drop table x --"),
    ('"a""b"', '"a""b"', 'a"b'),
    ('"%I %s $function$"', '"%I %s $function$"', "%I %s $function$"),
]


@pytest.mark.parametrize(("sql", "typed", "label"), NAMES, ids=[n[2] for n in NAMES])
async def test_names(
    sql: str, typed: str, label: str, connection: Connection, probe: LogProbe
) -> None:
    await run(connection, "create schema sales", 'create schema "My Schema"')
    # The key stands in the text of a function: its name must not be able to end it.
    key = """\"Id %s $function$ ' $body$\""""
    await run(connection, f'create table {sql} ({key} int primary key, "$1" text)')
    assert await triggers.enable(connection, typed) == label
    assert await triggers.enable(connection, typed) == label, "twice in a row"
    await probe.changes()
    await run(connection, f"insert into {sql} values (1, 'a'), (2, 'b')")
    await run(connection, f"update {sql} set \"$1\" = 'c' where {key} = 1", f"delete from {sql}")
    changes = await probe.changes()
    assert [(c.table.label, c.op) for c in changes] == [
        (label, "insert"),
        (label, "insert"),
        (label, "update"),
        (label, "delete"),
        (label, "delete"),
    ]
    assert await triggers.disable(connection, typed) == label
    assert await rows(connection, "select tgname from pg_trigger where not tgisinternal") == []


REFUSED = [
    ("", "nowhere", "there is no table nowhere", "spelling"),
    ("", "", "there is no table", "spelling"),
    ("", "4711", "there is no table 4711", "spelling"),
    ("create view v as select 1 as id", "v", "is a view", "tables it reads from"),
    (
        "create materialized view mv as select 1 as id",
        "mv",
        "is a materialized view",
        "tables it reads from",
    ),
    ("create table heap (a int)", "heap", "has no primary key", "add primary key"),
    ("create temporary table t (id int primary key)", "t", "temporary", "other sessions"),
    ("", "pg_catalog.pg_class", "system table", None),
    ("", "headwater.log", "system table", None),
    ("", "headwater.log_3", "system table", None),
    ("create sequence s", "s", "is not a table", None),
    (
        "create table p (id int primary key) partition by range (id);"
        "create table p1 partition of p for values from (0) to (9)",
        "p1",
        "is a partition of",
        "Enable public.p",
    ),
    (
        "create foreign data wrapper w; create server s foreign data wrapper w;"
        "create foreign table f (id int) server s",
        "f",
        "is a foreign table",
        "database that holds it",
    ),
    (
        "create foreign data wrapper w; create server s foreign data wrapper w;"
        "create table p (id int) partition by range (id);"
        "create foreign table f partition of p for values from (0) to (9) server s",
        "p",
        "has no primary key",
        "add primary key",
    ),
]


@pytest.mark.parametrize(("prepare", "name", "message", "hint"), REFUSED)
async def test_tables_that_cannot_be_enabled(
    prepare: str, name: str, message: str, hint: str | None, connection: Connection
) -> None:
    if prepare:
        await run(connection, prepare)
    with pytest.raises(CaptureError, match=message) as caught:
        await triggers.enable(connection, name)
    assert hint is None or hint in (caught.value.hint or "")
    assert await triggers.list_tables(connection) == []


async def test_disable_and_enable_again(connection: Connection, probe: LogProbe) -> None:
    await run(connection, "create table orders (id int primary key)")
    await triggers.enable(connection, "orders")
    await triggers.disable(connection, "orders")
    await triggers.disable(connection, "orders")
    await run(connection, "insert into orders values (1)")
    (table,) = await triggers.list_tables(connection)
    assert (table.enabled, table.members) == (False, 0)
    # One for enabling, one for the first disabling: readers receive both at once.
    assert await probe.story() == [("reset",), ("reset",)]
    await triggers.enable(connection, "orders")
    await run(connection, "insert into orders values (2)")
    # A reader cannot know row 1; the reset says so.
    assert await probe.story() == [("reset",), ("insert", 2)]


async def test_disabling_drops_the_sequence_of_the_table(connection: Connection) -> None:
    await run(connection, "create table orders (id int primary key, n int)")
    await triggers.enable(connection, "orders")
    sequences = (
        "select from pg_class where relnamespace = 'headwater'::regnamespace"
        " and relkind = 'S' and relname like 'mark\\_%'"
    )
    assert len(await rows(connection, sequences)) == 1
    await triggers.disable(connection, "orders")
    assert await rows(connection, sequences) == []


async def test_disabling_an_unknown_table(connection: Connection) -> None:
    with pytest.raises(CaptureError, match="there is no table nowhere"):
        await triggers.disable(connection, "nowhere")


async def test_while_writers_are_at_work(url: str, connection: Connection) -> None:
    """From the moment it is enabled nothing is missed: rows logged and rows there add up."""
    await run(connection, "create table orders (id serial primary key, writer int)")
    stop = asyncio.Event()

    async def write(number: int) -> None:
        async with await connect(url, purpose="writer", application_path=True) as writer:
            while not stop.is_set():
                async with writer.transaction():
                    await run(writer, f"insert into orders (writer) values ({number})")

    writers = [asyncio.create_task(write(number)) for number in range(4)]
    for _ in range(5):
        await triggers.enable(connection, "orders")
        await run(connection, "select headwater.sync_tables()")
    first = None
    while first is None:  # a writer may not have come to write yet
        ((first,),) = await rows(
            connection,
            "select min((after ->> 'id')::int) from headwater.changes where op = 'insert'",
        )
    stop.set()
    await asyncio.gather(*writers)
    # A writer may have drawn its id before it had to wait for the triggers.
    ((missed,),) = await rows(
        connection,
        "select count(*) from orders where id not in"
        " (select (after ->> 'id')::int from headwater.changes where op = 'insert')"
        f" and id > {first} + 4",
    )
    assert missed == 0


class TestRoles:
    """Headwater owned by a role without superuser rights, tables used by others."""

    @pytest.fixture
    async def roles(self, url: str, connection: Connection) -> AsyncIterator[dict[str, Connection]]:
        names = {role: f"{role}_{connection.info.dbname}" for role in ("owner", "writer", "reader")}
        for name in names.values():
            await run(connection, f"create role {name} login")
        await run(
            connection,
            "drop schema headwater cascade",
            f"grant create on database {connection.info.dbname} to {names['owner']}",
            f"grant create on schema public to {names['owner']}",
            f"grant usage on schema public to {names['writer']}, {names['reader']}",
        )
        opened = {
            role: await connect(
                url.replace("postgres@", f"{name}@"), purpose="test", application_path=True
            )
            for role, name in names.items()
        }
        yield opened
        for each in opened.values():
            await each.close()
        for name in names.values():
            await run(connection, f"drop owned by {name} cascade", f"drop role {name}")

    @pytest.fixture
    async def shared(self, roles: dict[str, Connection]) -> dict[str, Connection]:
        from headwater.capture.postgres import schema

        owner = roles["owner"]
        await schema.install(owner)
        writer, reader = (roles[role].info.user for role in ("writer", "reader"))
        await run(
            owner,
            "create table orders (id int primary key, amount int)",
            f"grant select, insert, update, delete on orders to {writer}",
            f"grant select on orders to {reader}",
        )
        await triggers.enable(owner, "orders")
        return roles

    async def test_a_writer_needs_no_right_on_headwater(
        self, url: str, shared: dict[str, Connection]
    ) -> None:
        writer = shared["writer"]
        async with probing(url) as probe:
            await run(writer, "insert into orders values (1, 1)", "update orders set amount = 2")
            assert await probe.story() == [("insert", 1), ("update", 1)]
        for forbidden in (
            "select * from headwater.log",
            "insert into headwater.log (op, shape) values ('R', 0)",
            "select headwater.enable_reactivity('orders')",
            "select headwater.trim_log()",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                await run(writer, forbidden)

    async def test_a_select_only_user_is_not_affected(self, shared: dict[str, Connection]) -> None:
        reader = shared["reader"]
        assert await rows(reader, "select count(*) from orders") == [(0,)]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            await run(reader, "insert into orders values (1, 1)")

    async def test_enabling_a_table_of_another_role(
        self, connection: Connection, shared: dict[str, Connection]
    ) -> None:
        await run(connection, "create table secrets (id int primary key)")
        with pytest.raises(PermissionMissing, match="secrets"):
            await triggers.enable(shared["owner"], "secrets")

    async def test_a_hostile_search_path(
        self, url: str, connection: Connection, shared: dict[str, Connection]
    ) -> None:
        """A writer that shadows operators and functions: the owner must not run its code."""
        writer, owner = shared["writer"], shared["owner"]
        await run(
            connection,
            f"create schema evil authorization {writer.info.user}",
            "create table evil.loot (who text)",
        )
        await run(connection, f"grant all on evil.loot to {writer.info.user}, {owner.info.user}")
        shadows = """
            create function evil.row_to_json(record) returns json language plpgsql as
              $$ begin insert into evil.loot values (current_user); return '{}'; end $$;
            create function evil.current_setting(text, boolean) returns text language plpgsql as
              $$ begin insert into evil.loot values (current_user); return 'evil'; end $$;
            create function evil.same(oid, oid) returns boolean language plpgsql as
              $$ begin insert into evil.loot values (current_user); return false; end $$;
            create operator evil.= (leftarg = oid, rightarg = oid, function = evil.same);
            create function evil.nextval(regclass) returns bigint language sql as 'select 1::int8';
            create function evil.clock_timestamp() returns timestamptz language sql as
              $$ select 'epoch'::timestamptz $$;
        """
        await run(writer, "grant usage on schema evil to public", shadows)
        await run(writer, "set search_path = evil, pg_catalog, public")
        async with probing(url) as probe:
            await run(
                writer,
                "insert into public.orders values (1, 1)",
                "update public.orders set amount = 2",
                "delete from public.orders",
            )
            assert [c.actor.user_id for c in await probe.changes()] == [None] * 3
        assert await rows(connection, "select * from evil.loot") == []

    async def test_a_type_of_another_role_does_not_get_our_rights(
        self, url: str, connection: Connection, shared: dict[str, Connection]
    ) -> None:
        """to_json calls a type's cast to json, which the type's owner can make at any time."""
        writer, owner = shared["writer"], shared["owner"]
        await run(
            connection,
            f"create schema theirs authorization {writer.info.user}",
            "create table public.loot (who text)",
            f"grant insert on loot to {writer.info.user}, {owner.info.user}",
        )
        await run(
            writer,
            "create type theirs.mood as enum ('sad')",
            "create type theirs.pair as (a int, m theirs.mood)",
            "create table theirs.t (id int primary key, m theirs.mood, p theirs.pair,"
            " l theirs.mood[], a int)",
            f"grant trigger, insert on theirs.t to {owner.info.user}",
            f"grant usage on schema theirs to {owner.info.user}",
        )
        await triggers.enable(owner, "theirs.t")
        for type_ in ("mood", "pair"):
            await run(
                writer,
                f"create function theirs.spy(theirs.{type_}) returns json language plpgsql as"
                " $$ begin insert into public.loot values (current_user); return '1'; end $$",
                f"create cast (theirs.{type_} as json) with function theirs.spy(theirs.{type_})",
            )
        async with probing(url) as probe:
            await run(writer, "insert into theirs.t values (1, 'sad', (1, 'sad'), '{sad}', 7)")
            await run(writer, "alter table theirs.t add column m2 theirs.mood default 'sad'")
            await run(writer, "update theirs.t set a = 8")
            insert, _reset, update = await probe.changes()
        assert await rows(connection, "select * from loot") == []
        assert insert.after == {"id": 1, "m": "sad", "p": "(1,sad)", "l": "{sad}", "a": 7}
        assert update.after == {**insert.after, "a": 8, "m2": "sad"}
        assert update.changed == ("a",)

    async def test_transaction_pooling(self, url: str, shared: dict[str, Connection]) -> None:
        """Each transaction of a writer on another server session, as behind PgBouncer."""
        user = shared["writer"].info.user
        sessions = [
            await connect(
                url.replace("postgres@", f"{user}@"), purpose="pool", application_path=True
            )
            for _ in range(3)
        ]
        async with probing(url) as probe:
            for i in range(12):
                session = sessions[i % 3]
                async with session.transaction():
                    actor = f"user {i}" if i % 2 else ""
                    await session.execute(
                        "select set_config('headwater.user_id', %s, true)", (actor,)
                    )
                    await run(session, f"insert into orders values ({i}, {i})")
                await run(session, "discard all")
            changes = await probe.changes()
        assert [c.actor.user_id for c in changes] == [
            f"user {i}" if i % 2 else None for i in range(12)
        ]
        for session in sessions:
            await session.close()


async def test_invalid_names_are_refused(connection: Connection) -> None:
    for name in ("x'; drop schema headwater cascade; --", "a.b.c.d", '"unclosed', "\n", "%s"):
        with pytest.raises(HeadwaterError, match=r"no table|name syntax|improper"):
            await triggers.enable(connection, name)
    assert await rows(connection, "select count(*) > 0 from headwater.migrations") == [(True,)]
