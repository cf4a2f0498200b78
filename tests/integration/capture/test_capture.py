"""What the triggers write: every kind of statement, every kind of table, every kind of value."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from psycopg import errors

from headwater.database import Connection
from headwater.model import Actor
from tests.support.log_probe import LogProbe, enable, probing, rows, run


@pytest.fixture(params=["postgres", "system_postgres"])
def server_url(request: pytest.FixtureRequest) -> str:
    """All of this on two releases of PostgreSQL."""
    server = request.getfixturevalue(request.param)
    return server if isinstance(server, str) else str(server.url)


@pytest.fixture
async def probe(url: str) -> AsyncIterator[LogProbe]:
    async with probing(url) as found:
        yield found


@pytest.fixture
async def orders(connection: Connection, probe: LogProbe) -> Connection:
    await run(connection, "create table orders (id int primary key, status text, amount numeric)")
    await enable(connection, "orders")
    assert await probe.story() == [("reset",)]
    return connection


Step = tuple[str, list[tuple[Any, ...]]]

STATEMENTS: dict[str, list[Step]] = {
    "insert": [
        ("insert into orders values (1, 'new', 5), (2, 'new', 6)", [("insert", 1), ("insert", 2)])
    ],
    "update": [
        ("insert into orders values (1, 'new', 5)", [("insert", 1)]),
        ("update orders set status = 'paid'", [("update", 1)]),
    ],
    "an update that changes nothing is no change": [
        ("insert into orders values (1, 'new', 5.0)", [("insert", 1)]),
        ("update orders set status = status", []),
        ("update orders set amount = 5.00", [("update", 1)]),
    ],
    "a changed key is a delete and an insert": [
        ("insert into orders values (1, 'new', 5)", [("insert", 1)]),
        ("update orders set id = 9", [("delete", 1), ("insert", 9)]),
    ],
    "keys handed on in a row": [
        ("insert into orders values (1, 'a', 1), (2, 'b', 2)", [("insert", 1), ("insert", 2)]),
        (
            "delete from orders where id = 2; update orders set id = 2 where id = 1",
            [("delete", 2), ("delete", 1), ("insert", 2)],
        ),
    ],
    "delete": [
        ("insert into orders values (1, 'new', 5)", [("insert", 1)]),
        ("delete from orders", [("delete", 1)]),
        ("delete from orders", []),
    ],
    "truncate": [
        ("insert into orders values (1, 'new', 5)", [("insert", 1)]),
        ("truncate orders", [("truncate",)]),
    ],
    "upsert": [
        ("insert into orders values (1, 'new', 5)", [("insert", 1)]),
        (
            "insert into orders values (1, 'x', 5), (2, 'x', 6)"
            " on conflict (id) do update set status = 'again'",
            [("update", 1), ("insert", 2)],
        ),
    ],
    "merge": [
        ("insert into orders values (1, 'a', 1), (2, 'b', 2)", [("insert", 1), ("insert", 2)]),
        (
            "merge into orders o using (values (1), (2), (3)) v (id) on o.id = v.id"
            " when matched and v.id = 1 then delete"
            " when matched then update set status = 'merged'"
            " when not matched then insert values (v.id, 'c', 3)",
            [("delete", 1), ("insert", 3), ("update", 2)],
        ),
    ],
    "a data-modifying with": [
        ("insert into orders values (1, 'a', 1)", [("insert", 1)]),
        (
            "with gone as (delete from orders returning *)"
            " insert into orders select id + 1, status, amount from gone",
            [("delete", 1), ("insert", 2)],
        ),
    ],
    "copy": [
        (
            "insert into orders select i, 'bulk', i from generate_series(1, 3) i",
            [("insert", 1), ("insert", 2), ("insert", 3)],
        ),
    ],
}


@pytest.mark.parametrize("name", STATEMENTS)
async def test_statements(name: str, orders: Connection, probe: LogProbe) -> None:
    for statement, story in STATEMENTS[name]:
        await run(orders, statement)
        assert sorted(await probe.story()) == sorted(story)


async def test_swapped_keys_are_updates_of_both_rows(orders: Connection, probe: LogProbe) -> None:
    await run(
        orders,
        "alter table orders drop constraint orders_pkey",
        "alter table orders add primary key (id) deferrable initially deferred",
        "insert into orders values (1, 'a', 1), (2, 'b', 2)",
    )
    await probe.changes()
    await run(orders, "update orders set id = 3 - id")
    changes = await probe.changes()
    assert {(c.op, c.key, c.after["status"]) for c in changes if c.after} == {
        ("update", (1,), "b"),
        ("update", (2,), "a"),
    }


async def test_copy_from_stdin(orders: Connection, probe: LogProbe) -> None:
    async with orders.cursor().copy("copy orders from stdin") as copy:
        await copy.write(b"1\tnew\t5\n2\tnew\t6\n")
    assert await probe.story() == [("insert", 1), ("insert", 2)]


async def test_images_and_changed_columns(orders: Connection, probe: LogProbe) -> None:
    await run(
        orders,
        "insert into orders values (1, 'new', 5)",
        "update orders set status = null, amount = 5.50",
    )
    insert, update = await probe.changes()
    assert (insert.before, insert.after) == (None, {"id": 1, "status": "new", "amount": Decimal(5)})
    assert update.before == insert.after
    assert update.after == {"id": 1, "status": None, "amount": Decimal("5.50")}
    assert update.changed == ("status", "amount")
    assert insert.changed == ("id", "status", "amount")


async def test_the_log_as_people_read_it(orders: Connection) -> None:
    await run(
        orders,
        "insert into orders values (1, 'new', 5)",
        "update orders set amount = 6",
        "truncate orders",
    )
    found = await rows(
        orders, "select table_name, op, key::text, changed from headwater.changes order by seq"
    )
    assert found == [
        ("orders", "reset", None, None),
        ("orders", "insert", '{ "id" : 1 }', None),
        ("orders", "update", '{ "id" : 1 }', ["amount"]),
        ("orders", "truncate", None, None),
    ]


VALUES: list[tuple[str, str, Any]] = [
    ("smallint", "-32768", -32768),
    ("bigint", "9223372036854775807", 9223372036854775807),
    (
        "numeric",
        "12345678901234567890.12345678901234567890",
        Decimal("12345678901234567890.12345678901234567890"),
    ),
    ("numeric(8,3)", "1.5", Decimal("1.500")),
    ("numeric", "'Infinity'", Decimal("Infinity")),
    ("double precision", "0.1::float8 + 0.2::float8", 0.1 + 0.2),
    ("double precision", "'-Infinity'", -math.inf),
    ("real", "1.1", 1.1),
    ("boolean", "false", False),
    ("text", "E'a\\n\"b\"\\\\ \\u00e9 😀'", 'a\n"b"\\ é 😀'),
    ("character(4)", "'ab'", "ab  "),
    (
        "timestamptz",
        "'2026-11-15 12:00:00.123456+02'",
        datetime(2026, 11, 15, 10, 0, 0, 123456, UTC),
    ),
    ("timestamptz", "'infinity'", "infinity"),
    ("timestamptz", "'-infinity'", "-infinity"),
    ("timestamptz", "'0044-03-15 00:00:00+00 BC'", "0044-03-15T00:00:00+00:00 BC"),
    ("timestamp", "'2026-11-15 12:00:00.000001'", datetime(2026, 11, 15, 12, 0, 0, 1)),
    ("date", "'2026-02-28'", date(2026, 2, 28)),
    ("time", "'23:59:59.999999'", time(23, 59, 59, 999999)),
    ("interval", "'1 year 2 mons 3 days 04:05:06.789'", "P1Y2M3DT4H5M6.789S"),
    (
        "uuid",
        "'7d444840-9dc0-11d1-b245-5ffdce74fad2'",
        UUID("7d444840-9dc0-11d1-b245-5ffdce74fad2"),
    ),
    ("bytea", "'\\x00ff10'", b"\x00\xff\x10"),
    (
        "jsonb",
        """'{"a": [1, null, "x"], "b": {"c": 1.5}}'""",
        {"a": [1, None, "x"], "b": {"c": 1.5}},
    ),
    ("json", "'[1,2]'", [1, 2]),
    ("integer[]", "'{1,null,3}'", [1, None, 3]),
    ("integer[]", "'{{1,2},{3,4}}'", [[1, 2], [3, 4]]),
    ("text[]", """'{"a,b",null}'""", ["a,b", None]),
    ("timestamptz[]", "'{2026-11-15 12:00:00+00}'", [datetime(2026, 11, 15, 12, 0, 0, 0, UTC)]),
    ("mood", "'sad'", "sad"),
    ("price", "12.50", Decimal("12.50")),
    ("int4range", "'[1,5)'", "[1,5)"),
    ("tstzrange", "'[2026-11-15 12:00:00+02,)'", '["2026-11-15 10:00:00+00",)'),
    ("point", "'(1.5,2)'", "(1.5,2)"),
    ("inet", "'10.0.0.1/8'", "10.0.0.1/8"),
    ("money", "12.5", "$12.50"),
    ("address", "row('Main St', 5)", {"street": "Main St", "number": 5}),
]


@pytest.mark.parametrize("hostile", [False, True], ids=["plain", "odd session settings"])
async def test_every_value_is_exact(connection: Connection, probe: LogProbe, hostile: bool) -> None:
    """For any format settings of the writer's session."""
    await run(
        connection,
        "create type mood as enum ('sad', 'happy')",
        "create domain price as numeric check (value >= 0)",
        "create type address as (street text, number int)",
    )
    columns = ", ".join(f"c{i} {type_}" for i, (type_, _, _) in enumerate(VALUES))
    await run(connection, f"create table things (id int primary key, {columns})")
    await enable(connection, "things")
    if hostile:
        await run(
            connection,
            "set timezone = 'Asia/Kolkata'",
            "set datestyle = 'German'",
            "set intervalstyle = 'postgres_verbose'",
            "set bytea_output = 'escape'",
            "set extra_float_digits = -15",
        )
    else:
        await run(connection, "set timezone = 'UTC'")
    await probe.changes()
    values = ", ".join(text for _, text, _ in VALUES)
    await run(
        connection, f"insert into things values (1, {values})", "insert into things (id) values (2)"
    )
    exact, empty = await probe.changes()
    assert exact.after is not None
    assert empty.after is not None
    for i, (type_, text, value) in enumerate(VALUES):
        found = exact.after[f"c{i}"]
        assert (found, type(found)) == (value, type(value)), f"{type_} {text}"
        assert empty.after[f"c{i}"] is None


async def test_not_a_number(connection: Connection, probe: LogProbe) -> None:
    await run(connection, "create table n (id int primary key, f float8, d numeric)")
    await enable(connection, "n")
    await probe.changes()
    await run(connection, "insert into n values (1, 'NaN', 'NaN')", "update n set f = f")
    (change,) = await probe.changes()
    assert change.after is not None
    assert math.isnan(change.after["f"])
    assert change.after["d"].is_nan()


async def test_generated_columns(connection: Connection, probe: LogProbe) -> None:
    await run(
        connection,
        "create table g (id int generated always as identity primary key,"
        " a int, doubled int generated always as (a * 2) stored)",
    )
    await enable(connection, "g")
    await probe.changes()
    await run(connection, "insert into g (a) values (4)")
    (change,) = await probe.changes()
    assert change.after == {"id": 1, "a": 4, "doubled": 8}


async def test_virtual_columns(connection: Connection, probe: LogProbe) -> None:
    """They are computed when they are read, which can fail: they are left out."""
    if connection.info.server_version < 180_000:
        pytest.skip("virtual columns came with PostgreSQL 18")
    await run(
        connection,
        'create table v (id int primary key, a int, "tenth %" int generated always as (10 / a),'
        " place oid generated always as (tableoid))",
    )
    await enable(connection, "v")
    await probe.changes()
    await run(connection, "insert into v values (1, 0)", "update v set a = 5", "delete from v")
    images = [(c.before, c.after) for c in await probe.changes()]
    zero, five = {"id": 1, "a": 0}, {"id": 1, "a": 5}
    assert images == [(None, zero), (zero, five), (five, None)]


async def test_a_value_of_a_megabyte(orders: Connection, probe: LogProbe) -> None:
    await run(
        orders,
        "insert into orders values (1, repeat('é', 500000), 1)",
        "update orders set amount = 2",
    )
    changes = await probe.changes()
    assert [len(c.after["status"]) for c in changes if c.after] == [500_000, 500_000]
    assert changes[1].changed == ("amount",)


async def test_composite_keys(connection: Connection, probe: LogProbe) -> None:
    await run(
        connection,
        "create table lines (item text, order_id int, amount int, primary key (order_id, item))",
    )
    await enable(connection, "lines")
    await probe.changes()
    await run(
        connection,
        "insert into lines values ('a', 1, 5), ('b', 1, 6)",
        "update lines set amount = 7 where item = 'a'",
        "update lines set item = 'z' where item = 'b'",
    )
    assert await probe.story() == [
        ("insert", 1, "a"),
        ("insert", 1, "b"),
        ("update", 1, "a"),
        ("delete", 1, "b"),
        ("insert", 1, "z"),
    ]


async def test_a_key_that_changes_only_in_case(connection: Connection, probe: LogProbe) -> None:
    try:
        await run(
            connection,
            "create collation blind"
            " (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
        )
    except errors.FeatureNotSupported:
        pytest.skip("the embedded PostgreSQL is built without ICU; the system's is not")
    await run(
        connection,
        "create table words (word text collate blind primary key)",
    )
    await enable(connection, "words")
    await probe.changes()
    await run(connection, "insert into words values ('a')", "update words set word = 'A'")
    assert await probe.story() == [("insert", "a"), ("delete", "a"), ("insert", "A")]


async def test_the_plan_made_for_one_row_serves_many(orders: Connection, probe: LogProbe) -> None:
    """A nested loop over the transition tables would take minutes here."""
    await run(orders, "insert into orders values (0, 'x', 0)")
    for _ in range(7):
        await run(orders, "update orders set amount = amount + 1 where id = 0")
    await run(
        orders,
        "insert into orders select i, 'x', i from generate_series(1, 20000) i",
        "update orders set amount = amount + 1",
    )
    assert len(await probe.changes()) == 1 + 7 + 20000 + 20001


async def test_actor_context(orders: Connection, probe: LogProbe) -> None:
    async with orders.transaction():
        await run(
            orders,
            "select set_config('headwater.user_id', 'ann', true),"
            " set_config('headwater.function_name', 'place_order', true),"
            " set_config('headwater.trace_id', '4bf9', true)",
            "insert into orders values (1, 'new', 5)",
            "truncate orders",
        )
    await run(orders, "insert into orders values (2, 'new', 5)")
    insert, truncate, anonymous = await probe.changes()
    assert insert.actor == truncate.actor == Actor("ann", "place_order", "4bf9")
    assert anonymous.actor == Actor()


class TestAlteredTables:
    """DDL after enabling, without touching the triggers, seen by sessions with cached plans."""

    async def test_columns_come_and_go(
        self, orders: Connection, other: Connection, probe: LogProbe
    ) -> None:
        for first, writer in ((100, orders), (200, other)):
            for key in range(first, first + 7):
                await run(writer, f"insert into orders values ({key}, 'x', 1)")
        await run(orders, "truncate orders", "alter table orders add column note text default 'hi'")
        await run(other, "insert into orders values (1, 'x', 1, 'a note')")
        await run(orders, "alter table orders rename column status to state")
        await run(other, "update orders set state = 'y'")
        await run(orders, "alter table orders drop column amount")
        await run(other, "delete from orders")
        changes = (await probe.changes())[-3:]
        assert [c.after or c.before for c in changes] == [
            {"id": 1, "status": "x", "amount": Decimal(1), "note": "a note"},
            {"id": 1, "state": "y", "amount": Decimal(1), "note": "a note"},
            {"id": 1, "state": "y", "note": "a note"},
        ]
        assert len({c.table.id for c in changes}) == 3

    async def test_the_key_is_renamed_and_retyped(
        self, orders: Connection, probe: LogProbe
    ) -> None:
        await run(
            orders,
            "alter table orders rename column id to number",
            "insert into orders values (1, 'x', 1)",
            "alter table orders alter column number type text",
            "insert into orders values ('two', 'x', 1)",
            "update orders set number = number || '!'",
        )
        first, reset, *others = await probe.changes()
        assert reset.op == "reset"  # the column was rewritten
        assert sorted((c.op, str(c.key[0]), c.table.key) for c in (first, *others)) == [
            ("delete", "1", ("number",)),
            ("delete", "two", ("number",)),
            ("insert", "1", ("number",)),
            ("insert", "1!", ("number",)),
            ("insert", "two", ("number",)),
            ("insert", "two!", ("number",)),
        ]

    async def test_the_table_is_renamed_and_moved(
        self, orders: Connection, probe: LogProbe
    ) -> None:
        await run(
            orders,
            "alter table orders rename to purchases",
            "insert into purchases values (1, 'x', 1)",
            "create schema sales",
            "alter table purchases set schema sales",
            "insert into sales.purchases values (2, 'x', 1)",
        )
        assert [c.table.label for c in await probe.changes()] == ["purchases", "sales.purchases"]

    async def test_a_table_without_its_key_can_still_be_written(
        self, orders: Connection, probe: LogProbe
    ) -> None:
        await run(
            orders,
            "alter table orders drop constraint orders_pkey",
            "insert into orders values (1, 'x', 1)",
        )
        assert await probe.story() == [("reset",)]
        await run(
            orders,
            "alter table orders add primary key (id)",
            "insert into orders values (2, 'x', 1)",
        )
        assert await probe.story() == [("insert", 2)]

    async def test_maintenance_makes_a_new_function(
        self, orders: Connection, probe: LogProbe
    ) -> None:
        await run(orders, "alter table orders add column note text")
        assert await rows(orders, "select headwater.sync_tables()") == [(1,)]
        assert await rows(orders, "select headwater.sync_tables()") == [(0,)]
        await run(orders, "insert into orders values (1, 'x', 1, 'y')")
        (change,) = await probe.changes()
        assert change.after is not None
        assert change.after["note"] == "y"

    async def test_a_dropped_table(self, orders: Connection, probe: LogProbe) -> None:
        await run(orders, "drop table orders", "select headwater.sync_tables()")
        assert await rows(orders, "select enabled from headwater.tables") == [(False,)]
        await run(
            orders, "create table orders (id int primary key)", "insert into orders values (1)"
        )
        assert await probe.story() == [("reset",)]


class TestRowTriggers:
    """Row triggers write to the same table before the statement's own changes are logged."""

    async def test_the_log_has_changes_in_the_order_they_happened(
        self, orders: Connection, probe: LogProbe
    ) -> None:
        await run(
            orders,
            """
            create function approve() returns trigger language plpgsql as $$
            begin
              update orders set status = status || '+' where id = new.id;
              return null;
            end $$""",
            "create trigger approve after insert on orders for each row execute function approve()",
        )
        await enable(orders, "orders")
        await run(orders, "insert into orders values (1, 'a', 1), (2, 'b', 2)")
        changes = await probe.changes()
        assert [(c.op, c.key) for c in changes] == [
            ("insert", (1,)),
            ("insert", (2,)),
            ("update", (1,)),
            ("update", (2,)),
        ]
        assert [c.after["status"] for c in changes if c.after] == ["a", "b", "a+", "b+"]

    async def test_nested_three_deep(self, orders: Connection, probe: LogProbe) -> None:
        await run(
            orders,
            """
            create function step() returns trigger language plpgsql as $$
            begin
              if new.amount < 3 then
                update orders set amount = amount + 1 where id = new.id;
              end if;
              return null;
            end $$""",
            "create trigger step after insert or update on orders"
            " for each row execute function step()",
        )
        await enable(orders, "orders")
        await run(orders, "insert into orders values (1, 'a', 0)")
        changes = await probe.changes()
        assert [c.after["amount"] for c in changes if c.after] == [0, 1, 2, 3]


class TestPartitions:
    @pytest.fixture
    async def parts(self, connection: Connection, probe: LogProbe) -> Connection:
        await run(
            connection,
            "create table parts (id int, region text, amount int, primary key (id, region))"
            " partition by list (region)",
            "create table parts_a partition of parts for values in ('a')",
            "create table parts_b (amount int, region text not null, id int not null)",
            "alter table parts attach partition parts_b for values in ('b')",
        )
        await enable(connection, "parts")
        await probe.changes()
        return connection

    async def test_through_the_table(self, parts: Connection, probe: LogProbe) -> None:
        await run(
            parts,
            "insert into parts values (1, 'a', 5), (2, 'b', 6)",
            "update parts set amount = 7",
            "update parts set region = 'b' where id = 1",
            "delete from parts where id = 2",
            "truncate parts",
        )
        assert await probe.story() == [
            ("insert", 1, "a"),
            ("insert", 2, "b"),
            ("update", 1, "a"),
            ("update", 2, "b"),
            ("delete", 1, "a"),
            ("insert", 1, "b"),
            ("delete", 2, "b"),
            ("truncate",),
        ]

    async def test_a_partition_written_directly(self, parts: Connection, probe: LogProbe) -> None:
        await run(
            parts,
            "insert into parts_b (id, region, amount) values (1, 'b', 5)",
            "update parts_b set amount = 6",
            "delete from parts_b",
        )
        changes = await probe.changes()
        assert [(c.table.label, c.op, c.key) for c in changes] == [
            ("parts", "insert", (1, "b")),
            ("parts", "update", (1, "b")),
            ("parts", "delete", (1, "b")),
        ]
        assert changes[1].after == {"id": 1, "region": "b", "amount": 6}

    async def test_one_partition_truncated(self, parts: Connection, probe: LogProbe) -> None:
        await run(parts, "insert into parts values (1, 'a', 5), (2, 'b', 6)", "truncate parts_b")
        assert (await probe.story())[2:] == [("delete", 2, "b")]

    @pytest.mark.parametrize("synced", [False, True])
    async def test_a_partition_attached_later(
        self, parts: Connection, probe: LogProbe, synced: bool
    ) -> None:
        await run(parts, "create table parts_c partition of parts for values in ('c')")
        if synced:
            assert await rows(parts, "select headwater.sync_tables()") == [(1,)]
        await run(
            parts,
            "insert into parts values (1, 'c', 5)",
            "insert into parts_c values (2, 'c', 6)",
            "update parts set amount = 7",
            "update parts_c set id = 3 where id = 2",
            "update parts set region = 'a' where id = 1",
            "delete from parts_c",
        )
        assert await probe.story() == [
            ("insert", 1, "c"),
            ("insert", 2, "c"),
            ("update", 1, "c"),
            ("update", 2, "c"),
            ("delete", 2, "c"),
            ("insert", 3, "c"),
            ("delete", 1, "c"),
            ("insert", 1, "a"),
            ("delete", 3, "c"),
        ]

    async def test_rows_that_come_and_go_with_their_partition_are_a_reset(
        self, parts: Connection, probe: LogProbe
    ) -> None:
        await run(
            parts,
            "create table parts_c (id int not null, region text not null, amount int)",
            "insert into parts_c values (1, 'c', 1)",
            "alter table parts attach partition parts_c for values in ('c')",
            "select headwater.sync_tables()",
        )
        assert await probe.story() == [("reset",)]
        await run(
            parts,
            "alter table parts detach partition parts_c",
            "insert into parts_c values (2, 'c', 1)",
        )
        assert await probe.story() == []
        await run(parts, "select headwater.sync_tables()", "insert into parts_c values (3, 'c', 1)")
        assert await probe.story() == [("reset",)]
        await run(parts, "drop table parts_b", "select headwater.sync_tables()")
        assert await probe.story() == [("reset",)]

    async def test_partitions_of_partitions(self, connection: Connection, probe: LogProbe) -> None:
        await run(
            connection,
            "create table deep (id int, a int, b int, primary key (id, a, b))"
            " partition by list (a)",
            "create table deep_1 partition of deep for values in (1) partition by list (b)",
            "create table deep_1_1 partition of deep_1 for values in (1)",
        )
        await enable(connection, "deep")
        await probe.changes()
        await run(
            connection,
            "create table deep_1_2 partition of deep_1 for values in (2)",
            "insert into deep values (1, 1, 1)",
            "insert into deep_1 values (2, 1, 2)",
            "insert into deep_1_2 values (3, 1, 2)",
            "insert into deep_1_1 values (4, 1, 1)",
        )
        assert [key[1] for key in await probe.story()] == [1, 2, 3, 4]


class TestInheritance:
    @pytest.fixture
    async def cities(self, connection: Connection, probe: LogProbe) -> Connection:
        await run(
            connection,
            "create table cities (name text primary key, people int)",
            "create table capitals (state text, primary key (name)) inherits (cities)",
        )
        await enable(connection, "cities")
        await probe.changes()
        return connection

    async def test_children_are_captured_as_the_parent(
        self, cities: Connection, probe: LogProbe
    ) -> None:
        await run(
            cities,
            "insert into cities values ('Ulm', 1)",
            "insert into capitals values ('Bern', 2, 'CH')",
            "update cities set people = people + 1",
            "update only cities set people = 0",
            "delete from capitals",
        )
        changes = await probe.changes()
        assert {c.table.label for c in changes} == {"cities"}
        story = [(c.op, *c.key) for c in changes]
        assert story[:2] == [("insert", "Ulm"), ("insert", "Bern")]
        assert sorted(story[2:4]) == [("update", "Bern"), ("update", "Ulm")]
        assert story[4:] == [("update", "Ulm"), ("delete", "Bern")]
        assert changes[1].after == {"name": "Bern", "people": 2}

    async def test_truncate_only_touches_the_named_tables(
        self, cities: Connection, probe: LogProbe
    ) -> None:
        await run(
            cities,
            "insert into cities values ('Ulm', 1)",
            "insert into capitals values ('Bern', 2, 'CH')",
        )
        await probe.changes()
        await run(cities, "truncate only cities")
        assert await probe.story() == [("delete", "Ulm")]
        await run(cities, "truncate cities")
        assert await probe.story() == [("delete", "Bern")]


async def test_foreign_key_cascades(orders: Connection, probe: LogProbe) -> None:
    await run(
        orders,
        "create table items (id int primary key, order_id int references orders on delete cascade)",
    )
    await enable(orders, "items")
    await run(orders, "insert into orders values (1, 'a', 1)", "insert into items values (7, 1)")
    await probe.changes()
    await run(orders, "delete from orders")
    assert sorted(await probe.story()) == [("delete", 1), ("delete", 7)]


@pytest.mark.parametrize("escape", [r"\u0000", r"\ud800"], ids=["nul", "half a pair"])
async def test_escapes_inside_json(connection: Connection, probe: LogProbe, escape: str) -> None:
    """PostgreSQL stores them in json and cannot take the value out again: no write may fail."""
    await run(connection, "create table notes (id int primary key, data json)")
    await enable(connection, "notes")
    await probe.story()
    for statement in (
        f"""insert into notes values (1, '{{"a": "{escape}"}}')""",
        f"""update notes set data = '{{"a": "b{escape}"}}'""",
        "delete from notes",
    ):
        await run(connection, statement)
    assert await probe.story() == [("insert", 1), ("update", 1), ("delete", 1)]


async def test_escapes_inside_json_in_a_new_partition(
    connection: Connection, probe: LogProbe
) -> None:
    """Its rows are logged one by one until it has functions of its own; no write may fail."""
    await run(
        connection,
        "create table notes (id int primary key, data json) partition by range (id)",
        "create table notes_1 partition of notes for values from (0) to (10)",
    )
    await enable(connection, "notes")
    await run(
        connection,
        "create table notes_2 partition of notes for values from (10) to (20)",
        r"""insert into notes_2 values (11, '{"a": "\ud800"}')""",
        r"""update notes_2 set data = '{"a": "\u0000"}'""",
        "update notes_2 set id = 12",
        "delete from notes_2",
    )
    changes = [change for change in await probe.story() if change != ("reset",)]
    moved = [("delete", 11), ("insert", 12)]
    assert changes == [("insert", 11), ("update", 11), *moved, ("delete", 12)]


async def test_the_log_with_escapes_inside_json_can_be_read(connection: Connection) -> None:
    await run(connection, "create table notes (id int primary key, data json)")
    await enable(connection, "notes")
    await run(
        connection,
        r"""insert into notes values (1, '{"a": "\ud800"}'), (2, '{"a": 1}')""",
        "update notes set data = '[]'",
    )
    found = await connection.execute(
        "select op, key, changed from headwater.changes where op <> 'reset' order by seq"
    )
    assert await found.fetchall() == [
        ("insert", None, None),
        ("insert", {"id": 2}, None),
        ("update", {"id": 1}, None),
        ("update", {"id": 2}, ["data"]),
    ]


async def test_escapes_inside_json_where_changes_are_ordered(
    connection: Connection, probe: LogProbe
) -> None:
    """Their keys cannot be read in SQL, so the table is read again."""
    await run(connection, "create table notes (id int primary key, data json)")
    await enable(connection, "notes")
    await run(connection, r"""insert into notes values (1, '{"a": "\ud800"}')""")
    await probe.story()
    again = "with gone as (delete from notes returning *) insert into notes select * from gone"
    await run(connection, again)
    assert (await probe.story())[-1] == ("reset",)
