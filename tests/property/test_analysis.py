"""No change that alters a result goes unnoticed, for any statement.

Generated statements are executed before and after generated transactions. Where a result differs,
the analysis of the statement must say that the changes of the transaction concern it. It may say so
needlessly; how often is counted, because an analysis that always says yes would never be wrong.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from psycopg import AsyncRawCursor, errors
from psycopg.adapt import PyFormat, Transformer

from headwater.database import Connection
from headwater.queries.analysis.analyst import Analyst
from headwater.queries.analysis.statements import Executed, Read, Statement
from headwater.queries.analysis.watches import Watches, concerns
from tests.support.generators.sizes import first_seed, size
from tests.support.log_probe import LogProbe, enable, probing, run

HISTORIES = size("reads", 1, large=40)
FIRST = first_seed(0)
STATEMENTS = 60
TRANSACTIONS = 50

SCHEMA = (
    "create type mood as enum ('glad', 'sad', 'calm')",
    "create table customers (id int primary key, region int, name varchar(12), mood mood,"
    " born date, vip boolean, note text, code char(3))",
    "create table orders (id int primary key, customer int, region smallint, amount numeric(8,2),"
    " at timestamptz, status text, big bigint, paid boolean, f double precision, u uuid,"
    " twice numeric generated always as (amount * 2) stored)",
    'create table "Order Lines" (id int, "order" int, product text, quantity int, local timestamp,'
    ' data jsonb, primary key (id, "order")) partition by range ("order")',
    'create table lines_0 partition of "Order Lines" for values from (minvalue) to (2)',
    'create table lines_1 partition of "Order Lines" for values from (2) to (maxvalue)',
    'alter table "Order Lines" enable row level security',
    'create policy paid_only on "Order Lines" using'
    ' ("order" in (select id from orders where paid) and quantity is distinct from 3)',
    "create view open_orders as select id, customer, amount, region from orders"
    " where status = 'open'",
    "create view big_open as select * from open_orders where amount > 2",
    "create view by_region as select c.region, count(*) as n, sum(o.amount) as total"
    " from customers c left join orders o on o.customer = c.id group by c.region",
    "create view whole as select o as row_of_it, o.id from orders o",
    "create function total_of(c int) returns numeric language sql stable"
    " begin atomic select sum(amount) from orders where customer = c and paid; end",
    "create function lines_of(o int) returns bigint language sql stable as"
    """ 'select count(*) from "Order Lines" l where l."order" = o and quantity > 1;'""",
    "create function big_customers(minimum numeric) returns setof customers language sql stable"
    " begin atomic select c.* from customers c where (select sum(amount) from big_open"
    " where customer = c.id) >= minimum; end",
    "create function opaque(o int) returns text language plpgsql stable as"
    " $$ begin return (select status from orders where id = o); end $$",
    "create role reads_reader",
    "grant select on all tables in schema public to reads_reader",
)  # fmt: skip

WORDS = ("", "a", "ab", "b", "open", "held", "A", "a%", "a_b", "it's", "back\\slash")
# No two that are equal and print differently (0.0 and -0.0): which one DISTINCT shows is chance.
VALUES: dict[str, tuple[Any, ...]] = {
    "int": (0, 1, 2, 3, -1, None),
    "key": (0, 1, 2, 3),
    "jsonb": ('{"a": 1}', '{"a": true}', '{"a": 1.5}', "1", "true", "null", None),
    "smallint": (0, 1, 2, None),
    "bigint": (0, 1, 5_000_000_000, None),
    "varchar": (*WORDS, None),
    "text": (*WORDS, None),
    "char": ("a", "ab", "abc", None),
    "mood": ("glad", "sad", "calm", None),
    "date": (date(2026, 1, 1), date(2026, 1, 2), date(2026, 2, 1), None),
    "timestamptz": (
        datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 12, tzinfo=UTC), None,
    ),
    "timestamp": (datetime(2026, 1, 1), datetime(2026, 1, 1, 12), None),
    "boolean": (True, False, None),
    "numeric": (Decimal("0.00"), Decimal("1.50"), Decimal("2.5"), Decimal("10.00"), None),
    "double": (0.0, 1.5, -2.25, float("nan"), None),
    "uuid": (UUID(int=1), UUID(int=2), None),
}  # fmt: skip
COLUMNS: dict[str, dict[str, str]] = {
    "customers": {
        "id": "int", "region": "int", "name": "varchar", "mood": "mood", "born": "date",
        "vip": "boolean", "note": "text", "code": "char",
    },
    "orders": {
        "id": "int", "customer": "int", "region": "smallint", "amount": "numeric",
        "at": "timestamptz", "status": "text", "big": "bigint", "paid": "boolean", "f": "double",
        "u": "uuid",
    },
    '"Order Lines"': {
        "id": "int", '"order"': "key", "product": "text", "quantity": "int", "local": "timestamp",
        "data": "jsonb",
    },
    "lines_0": {"id": "int", "product": "text"},
    "open_orders": {"id": "int", "customer": "int", "amount": "numeric", "region": "smallint"},
    "big_open": {"id": "int", "customer": "int", "amount": "numeric", "region": "smallint"},
    "by_region": {"region": "int", "n": "bigint", "total": "numeric"},
}  # fmt: skip
TABLES = ("customers", "orders", '"Order Lines"')
RELATIONS = tuple(COLUMNS)
OPERATORS = ("=", "=", "=", "<>", "<", "<=", ">", ">=", "is distinct from")
PATTERNS = ("a%", "%b", "_", "%", "o%n", "A%", "a\\%", "a\\_%", "", "%k\\\\%")


@dataclass
class Written:
    """A statement that is being written, with the values of its parameters."""

    random: random.Random
    values: list[Any] = field(default_factory=list)
    simple: bool = False
    """Whether the database is asked for some rows of one table, by conditions we understand."""

    def value(self, type_: str, value: Any) -> str:
        """The value: a parameter, or written out."""
        if self.random.random() < 0.5:
            self.values.append(value)
            cast = f"::{CASTS[type_]}" if self.random.random() < 0.2 else ""
            return f"${len(self.values)}{cast}"
        if value is None:
            return "null"
        text = str(value).replace("'", "''")
        if type_ in ("int", "key", "smallint", "bigint", "boolean", "numeric"):
            return text
        return f"'{text}'"

    def any_value(self, type_: str) -> Any:
        value = self.random.choice(VALUES[type_])
        return self.any_value(type_) if value is None and self.random.random() < 0.7 else value

    def condition(self, alias: str, relation: str) -> str:
        name = self.random.choice(list(COLUMNS[relation]))
        type_ = COLUMNS[relation][name]
        column = f"{alias}.{name}"
        kinds: list[Callable[[], str]] = [
            lambda: self._compare(column, type_),
            lambda: self._compare(column, type_),
            lambda: self._in(column, type_),
            lambda: f"{column} is {self.random.choice(('', 'not '))}null",
            lambda: self._between(column, type_),
        ]
        if type_ in ("text", "varchar", "char"):
            kinds.append(lambda: self._like(column))
            kinds.append(lambda: f"lower({column}) = 'a'")
            kinds.append(lambda: f'{column} < {self.value(type_, "b")} collate "C"')
        if type_ == "boolean":
            kinds.append(lambda: column)
            kinds.append(lambda: f"{column} is {self.random.choice(('true', 'not false'))}")
        if type_ == "int":
            kinds.append(lambda: f"{column} + 1 = 2")
            kinds.append(lambda: f"{column} = 1.0")
        return self.random.choice(kinds)()

    def _compare(self, column: str, type_: str) -> str:
        operator = self.random.choice(OPERATORS)
        sides = [column, self.value(type_, self.any_value(type_))]
        if self.random.random() < 0.2:
            sides.reverse()
        return f" {operator} ".join(sides)

    def _in(self, column: str, type_: str) -> str:
        values = [self.any_value(type_) for _ in range(self.random.randint(1, 3))]
        word = self.random.choice(("in", "in", "not in"))
        if self.random.random() < 0.4 and type_ != "char":
            self.values.append(values)
            operator = "= any" if word == "in" else "<> all"
            return f"{column} {operator}(${len(self.values)}::{CASTS[type_]}[])"
        return f"{column} {word} ({', '.join(self.value(type_, value) for value in values)})"

    def _between(self, column: str, type_: str) -> str:
        low, high = (self.value(type_, self.any_value(type_)) for _ in range(2))
        return f"{column} between {low} and {high}"

    def _like(self, column: str) -> str:
        word = self.random.choice(("like", "ilike", "not like", "not ilike"))
        return f"{column} {word} {self.value('text', self.random.choice(PATTERNS))}"

    def where(self, alias: str, relation: str, depth: int = 2) -> str:
        chance = self.random.random()
        if depth == 0 or chance < 0.55:
            return self.condition(alias, relation)
        if chance < 0.65:
            return f"not ({self.where(alias, relation, depth - 1)})"
        word = " and " if chance < 0.85 else " or "
        parts = [self.where(alias, relation, depth - 1) for _ in range(2)]
        return f"({word.join(parts)})"

    def column(self, alias: str, relation: str) -> str:
        return f"{alias}.{self.random.choice(list(COLUMNS[relation]))}"

    def relation(self) -> str:
        return self.random.choice(RELATIONS)

    # ---- the shapes

    def rows(self) -> str:
        table = self.random.choice(TABLES)
        self.simple = table != TABLES[2]  # its policy reads another table
        wanted = ", ".join({self.column("t", table) for _ in range(self.random.randint(1, 3))})
        return f"select {wanted} from {table} t where {self.where('t', table)}"

    def one_region(self) -> str:
        self.simple = True
        return (
            f"select * from orders where region = {self.value('int', self.random.choice((0, 1)))}"
        )

    def aggregate(self) -> str:
        table = self.relation()
        what = self.random.choice(("count(*)", "count(distinct {})", "max({}::text)", "count({})"))
        column = what.format(self.column("t", table))
        return f"select {column} from {table} t where {self.where('t', table)}"

    def grouped(self) -> str:
        table = self.relation()
        column, other = self.column("t", table), self.column("t", table)
        return (
            f"select {column}, count(*) from {table} t where {self.where('t', table)}"
            f" group by 1 having count({other}) > 1"
        )

    def join(self) -> str:
        kind = self.random.choice(("join", "join", "left join", "right join", "full join"))
        on = "o.customer = c.id"
        if kind != "full join" and self.random.random() < 0.5:
            on += f" and {self.where('o', 'orders', 1)}"
        where = " and ".join((self.where("c", "customers", 1), self.where("o", "orders", 1)))
        wanted = f"{self.column('c', 'customers')}, {self.column('o', 'orders')}"
        return f"select {wanted} from customers c {kind} orders o on {on} where {where}"

    def three(self) -> str:
        return (
            'select c.id, l.quantity from customers c, orders o, "Order Lines" l'
            f' where o.customer = c.id and l."order" = o.id and {self.where("c", "customers")}'
            f" and {self.where('l', TABLES[2])}"
        )

    def themselves(self) -> str:
        return (
            f"select a.id, b.id from orders a join orders b on a.region = b.region"
            f" where {self.where('a', 'orders')} and {self.where('b', 'orders')}"
        )

    def exists(self) -> str:
        word = self.random.choice(("exists", "not exists"))
        return (
            f"select c.id from customers c where {self.where('c', 'customers', 1)} and {word}"
            f" (select from orders o where o.customer = c.id and {self.where('o', 'orders', 1)})"
        )

    def member(self) -> str:
        word = self.random.choice(("in", "not in"))
        return (
            f"select o.id from orders o where {self.where('o', 'orders', 1)} and o.id {word}"
            f' (select "order" from "Order Lines" l where {self.where("l", TABLES[2], 1)})'
        )

    def scalar(self) -> str:
        table = self.relation()
        return (
            f"select c.id, (select count(*) from {table} t where {self.where('t', table, 1)})"
            f" from customers c where {self.where('c', 'customers', 1)}"
        )

    def with_(self) -> str:
        table = self.relation()
        return (
            f"with x as (select * from {table} t where {self.where('t', table, 1)})"
            f" select count(*), max({self.column('x', table)}::text) from x"
        )

    def union(self) -> str:
        word = self.random.choice(("union", "union all", "except", "intersect"))
        return (
            f"select id from orders o where {self.where('o', 'orders', 1)} {word}"
            f" select id from customers c where {self.where('c', 'customers', 1)}"
        )

    def first(self) -> str:
        table = self.random.choice(TABLES)
        self.simple = table != TABLES[2]
        key = "t.id" if self.simple else 't.id, t."order"'
        return (
            f"select t.id, {self.column('t', table)} from {table} t where"
            f" {self.where('t', table)} order by {self.column('t', table)}, {key} limit 2"
        )

    def distinct(self) -> str:
        table = self.relation()
        return f"select distinct {self.column('t', table)} from {table} t"

    def whole_row(self) -> str:
        table = self.random.choice(TABLES)
        what = self.random.choice(("t::text", "row_to_json(t)", "count(t)"))
        return f"select {what} from {table} t where {self.where('t', table, 1)}"

    def whole_of_view(self) -> str:
        return "select row_of_it::text from whole"

    def generated(self) -> str:
        return f"select twice from orders o where {self.where('o', 'orders', 1)}"

    def function(self) -> str:
        match self.random.randrange(5):
            case 0:
                return "select id, total_of(id) from customers"
            case 1:
                return f"select lines_of({self.value('int', 1)})"
            case 2:
                where = self.where("o", "orders", 1)
                return f"select o.id, lines_of(o.id) from orders o where {where}"
            case 3:
                return f"select id, name from big_customers({self.value('numeric', Decimal(1))})"
        return f"select opaque(1), id from customers c where {self.where('c', 'customers', 1)}"

    def lateral(self) -> str:
        return (
            f"select c.id, x.* from customers c, lateral (select o.id, o.amount from orders o"
            f" where o.customer = c.id and {self.where('o', 'orders', 1)} order by o.amount, o.id"
            " limit 1) x"
        )

    def window(self) -> str:
        return (
            "select o.id, rank() over (partition by region order by amount) from orders o"
            f" where {self.where('o', 'orders', 1)}"
        )

    def partition(self) -> str:
        return f"select {self.column('t', 'lines_0')} from lines_0 t"

    def with_view(self) -> str:
        view = self.random.choice(("open_orders", "big_open"))
        return (
            f"select c.name, v.amount from customers c join {view} v on v.customer = c.id"
            f" where {self.where('c', 'customers', 1)} and {self.where('v', view, 1)}"
        )


CASTS = {
    "int": "int", "key": "int", "jsonb": "jsonb", "smallint": "smallint", "bigint": "bigint",
    "varchar": "varchar", "text": "text", "char": "bpchar", "mood": "mood", "date": "date",
    "timestamptz": "timestamptz", "timestamp": "timestamp", "boolean": "boolean",
    "numeric": "numeric", "double": "double precision", "uuid": "uuid",
}  # fmt: skip
SHAPES: tuple[Callable[[Written], str], ...] = (
    Written.rows, Written.rows, Written.rows, Written.one_region, Written.aggregate,
    Written.grouped, Written.join, Written.join, Written.three, Written.themselves, Written.exists,
    Written.member, Written.scalar, Written.with_, Written.union, Written.first, Written.distinct,
    Written.whole_row, Written.whole_of_view, Written.generated, Written.function, Written.lateral,
    Written.window, Written.with_view, Written.partition,
)  # fmt: skip


@dataclass
class Followed:
    """A statement and its result."""

    executed: Executed
    simple: bool
    role: str | None = None
    reads: tuple[Read, ...] = ()
    everything: bool = False
    result: Counter[str] = field(default_factory=Counter)


class Shop:
    """The tables, and a writer."""

    def __init__(self, connection: Connection, random: random.Random) -> None:
        self.connection = connection
        self.random = random
        self.written: list[str] = []

    async def fill(self) -> None:
        for table in TABLES:
            await run(self.connection, f"truncate {table}")
            for id_ in range(1, 9):
                await self._insert(table, id_)

    async def transact(self) -> None:
        self.written = []
        async with self.connection.transaction():
            for _ in range(self.random.choice((1, 1, 1, 2, 3))):
                with suppress(errors.UniqueViolation):
                    async with self.connection.transaction():
                        await self._step()

    async def _step(self) -> None:
        table = self.random.choice(TABLES)
        id_ = self.random.randint(1, 10)
        chance = self.random.random()
        if chance < 0.2:
            await self._say(f"delete from {table} where id = {id_}")
            await self._insert(table, id_)
        elif chance < 0.3:
            await self._say(f"delete from {table} where id = {id_}")
        elif chance < 0.36:
            other = self.random.randint(1, 10)
            await self._say(f"delete from {table} where id = {other} and id <> {id_}")
            await self._say(f"update {table} set id = {other} where id = {id_}")
        elif chance < 0.38:
            await self._say(f"truncate {table}")
            await self._insert(table, id_)
        elif chance < 0.45:
            await self._update(table, "true")
        else:
            await self._update(table, f"id = {id_}")

    async def _update(self, table: str, where: str) -> None:
        names = [name for name in COLUMNS[table] if name != "id"]
        chosen = self.random.sample(names, self.random.choice((1, 1, 2)))
        values = [self.random.choice(VALUES[COLUMNS[table][name]]) for name in chosen]
        sets = ", ".join(f"{name} = ${n}" for n, name in enumerate(chosen, 1))
        await self._say(f"update {table} set {sets} where {where}", *values)

    async def _insert(self, table: str, id_: int) -> None:
        values = [self.random.choice(VALUES[type_]) for type_ in COLUMNS[table].values()]
        values[0] = id_
        places = ", ".join(f"${n}" for n in range(1, len(values) + 1))
        names = ", ".join(COLUMNS[table])
        await self._say(
            f"insert into {table} ({names}) values ({places}) on conflict do nothing", *values
        )

    async def _say(self, sql: str, *values: Any) -> None:
        self.written.append(f"{sql}  {values}")
        await AsyncRawCursor(self.connection).execute(sql.encode(), values)


async def execute(connection: Connection, followed: Followed) -> Counter[str]:
    cursor = AsyncRawCursor(connection)
    if followed.role is not None:
        await connection.execute(f"set role {followed.role}".encode())
    await cursor.execute(followed.executed.statement.sql.encode(), followed.executed.values)
    result = Counter(map(repr, await cursor.fetchall()))
    if followed.role is not None:
        await connection.execute("set role none")
    return result


def as_sent(connection: Connection, sql: str, values: list[Any]) -> Executed:
    """The statement with the types that the driver names."""
    driver = Transformer(connection)
    driver.dump_sequence(values, [PyFormat.AUTO] * len(values))
    return Executed(Statement(sql, tuple(driver.types or ())), tuple(values))


async def write(random_: random.Random, connection: Connection, analyst: Analyst) -> Followed:
    """A statement that the database accepts."""
    while True:
        written = Written(random_)
        sql = random_.choice(SHAPES)(written)
        executed = as_sent(connection, sql, written.values)
        role = random_.choice((None, None, "reads_reader"))
        analysis = await analyst.analyse(executed.statement, role)
        if any(note.startswith("the database cannot analyse") for note in analysis.notes):
            continue  # the types of its values do not fit: it would fail
        assert analysis.everything == ("opaque" in sql), sql
        assert not analysis.uncaptured, sql
        assert analysis.everything or analysis.tables, sql
        reads = analysis.reads(executed)
        return Followed(executed, written.simple, role, reads, analysis.everything)


@pytest.fixture(params=["postgres_url", "icu_postgres_url"])
def server_url(request: pytest.FixtureRequest) -> str:
    """Two versions: each prints a statement and its tree in its own way."""
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture
async def shop(connection: Connection) -> AsyncIterator[Connection]:
    await run(connection, *SCHEMA)
    await enable(connection, *TABLES)
    yield connection
    await run(connection, "drop owned by reads_reader", "drop role reads_reader")


@pytest.fixture
async def analyst(url: str) -> AsyncIterator[Analyst]:
    analyst = Analyst(url)
    yield analyst
    await analyst.close()


@pytest.mark.timeout(0)
async def test_no_change_goes_unnoticed(shop: Connection, analyst: Analyst, url: str) -> None:
    said: Counter[str] = Counter()
    async with probing(url) as probe:
        for seed in range(FIRST, FIRST + HISTORIES):
            said += await history(seed, shop, analyst, probe)
    assert said["rightly"] > 0
    needless = said["simple needlessly"] / (said["simple needlessly"] + said["simple rightly no"])
    assert needless < 0.25, said


async def history(
    seed: int, connection: Connection, analyst: Analyst, probe: LogProbe
) -> Counter[str]:
    random_ = random.Random(seed)
    shop = Shop(connection, random_)
    await shop.fill()
    followed = [await write(random_, connection, analyst) for _ in range(STATEMENTS)]
    watches: Watches[int] = Watches()
    for number, each in enumerate(followed):
        watches.put(number, each.reads, everything=each.everything)
        each.result = await execute(connection, each)
    await probe.changes()
    said: Counter[str] = Counter()
    for _ in range(TRANSACTIONS):
        await shop.transact()
        changes = await probe.changes()
        touched = watches.touched(changes)
        for number, each in enumerate(followed):
            was, each.result = each.result, await execute(connection, each)
            yes = number in touched
            alone = (each.everything and bool(changes)) or concerns(each.reads, changes)
            assert yes == alone, (seed, each.executed, shop.written)
            if was != each.result:
                assert yes, f"missed: seed {seed}\n{each.executed}\n{each.reads}\n{shop.written}"
                said["rightly"] += 1
            elif changes:
                word = "needlessly" if yes else "rightly no"
                said[word] += 1
                said[f"simple {word}"] += each.simple
    return said
