"""The shop's database: its tables, its people, and what each of them may see.

Row-level security of PostgreSQL decides what a person may see. Headwater passes the database role
and the claims of the token to the database.
"""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from headwater.capture.postgres import schema, triggers
from headwater.database import Connection, connect

REGIONS = ("north", "east", "south", "west")
STATUSES = ("new", "paid", "packed", "shipped")
PRICES = {
    "Teapot": 38, "Kettle": 64, "Milk jug": 19, "Tea towel": 12, "Breadboard": 29, "Mortar": 47,
    "Butter dish": 24, "Egg cups": 16, "Coffee mill": 89, "Iron pan": 112, "Linen apron": 54,
    "Salad bowl": 41, "Carafe": 33, "Pepper mill": 45, "Cake tin": 22, "Oven glove": 18,
}  # fmt: skip
CUSTOMERS = (
    "Ada Brandt", "Ben Okafor", "Cho Lin", "Dara Quinn", "Eli Novak", "Fay Larsen", "Gus Weber",
    "Hana Mori", "Ines Costa", "Jon Aalto", "Kim Duarte", "Lea Moreau", "Max Petrov", "Noa Levi",
)  # fmt: skip

ORDERS_AT_FIRST = 80


class Person(msgspec.Struct, frozen=True):
    """A user of the shop. `role` is a database role; policies read the `claims`. The manager may
    also use the console and Headwater's own tables."""

    name: str
    role: str
    claims: dict[str, Any] = {}

    @property
    def token_claims(self) -> dict[str, Any]:
        """All claims of the token, which the policies of the database read."""
        return {"sub": self.name, "role": self.role} | self.claims


PEOPLE = {
    "manager": Person("Mira", "shop_manager", {"headwater_admin": True}),
    "clerk": Person("Nils", "shop_clerk", {"region": "north"}),
}


class NewOrder(msgspec.Struct, frozen=True):
    """An order that is about to be inserted."""

    item: str
    customer: str
    region: str
    amount: Decimal
    status: str = STATUSES[0]

    @classmethod
    def any(cls, chance: random.Random, region: str | None = None) -> NewOrder:
        item = chance.choice(list(PRICES))
        cents = chance.choice((0, 50, 90))
        amount = Decimal(PRICES[item] * chance.choice((1, 1, 1, 2, 2, 4))) + Decimal(cents) / 100
        return cls(item, chance.choice(CUSTOMERS), region or chance.choice(REGIONS), amount)


PLACE = """
    insert into orders (item, customer, region, amount, status)
    values (%(item)s, %(customer)s, %(region)s, %(amount)s, %(status)s)
"""
ADVANCE = """
    update orders set
      status = case status when 'new' then 'paid' when 'paid' then 'packed' else 'shipped' end,
      updated_at = clock_timestamp()
    where id = (
      select id from orders where status <> 'shipped'
      order by random() limit 1 for update skip locked
    )
"""
CLEAR = """
    delete from orders where (select count(*) from orders) > %(orders_max)s and id = (
      select id from orders where status = 'shipped' order by id limit 1 for update skip locked
    )
"""


async def build(url: str) -> None:
    """Create what is missing. Orders of an earlier run stay."""
    connection = await connect(url, purpose="demo", application_path=True)
    try:
        await schema.install(connection)
        for statements in (_TABLES, _PEOPLE, _POLICIES, _AFTER_A_CRASH):
            await connection.execute(statements)
        for name in ("orders", "messages", "headwater.pipeline"):
            await triggers.enable(connection, name)
        await _add_orders(connection)
    finally:
        await connection.close()


async def _add_orders(connection: Connection) -> None:
    """Insert orders and a greeting into an empty shop."""
    cursor = await connection.execute("select exists (select from orders)")
    if await cursor.fetchone() == (False,):
        chance = random.Random(7)
        for _ in range(ORDERS_AT_FIRST):
            order = replace(NewOrder.any(chance), status=chance.choice(STATUSES))
            await connection.execute(PLACE, asdict(order))
        for person in PEOPLE.values():
            await connection.execute(_GREETING, (person.name,))


_GREETING = """
    insert into messages (room, author, content)
    values (%s, 'assistant', 'Hello! Ask me how many orders there are, or how this works.')
"""

_TABLES = """
    create table if not exists orders (
      id bigint generated always as identity primary key,
      item text not null,
      customer text not null,
      region text not null,
      status text not null,
      amount numeric(12, 2) not null,
      updated_at timestamptz not null default now()
    );
    create index if not exists orders_status on orders (status, id);
    create table if not exists messages (
      id bigint generated always as identity primary key,
      room text not null,
      author text not null,
      content text not null default '',
      state text not null default 'done',
      written_at timestamptz not null default now()
    );
"""

_PEOPLE = """
    do $$ begin
      if to_regrole('shop_manager') is null then create role shop_manager; end if;
      if to_regrole('shop_clerk') is null then create role shop_clerk; end if;
    end $$;
    alter role shop_manager nologin bypassrls;
    alter role shop_clerk nologin;
    grant shop_manager, shop_clerk to current_user;
    grant select, insert, update, delete on orders to shop_manager, shop_clerk;
    grant select, insert on messages to shop_manager, shop_clerk;
    -- The pipeline makes the table of the view, some seconds from now.
    alter default privileges in schema public grant select on tables to shop_manager;
"""

_POLICIES = """
    alter table orders enable row level security;
    drop policy if exists own_region on orders;
    create policy own_region on orders to shop_clerk
      using (region = current_setting('request.jwt.claims', true)::json ->> 'region');
    -- A room has the name of its user.
    alter table messages enable row level security;
    drop policy if exists own_room on messages;
    create policy own_room on messages to shop_clerk
      using (room = current_setting('request.jwt.claims', true)::json ->> 'sub');
"""

_AFTER_A_CRASH = """
    -- A killed demo leaves these states behind.
    update headwater.pipeline set state = 'stopped' where state <> 'stopped';
    update messages set state = 'cancelled' where state = 'streaming';
"""
