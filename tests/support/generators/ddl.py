"""DDL on a captured table, and a follower of its log that must end with the table's rows.

`statements(rng, table, version)` is a list of what may be altered while programs write; `Follower`
does what every reader of the log does: it applies changes, and reads the table again where the log
has a `reset` or another shape.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from headwater.database import Connection, connect

TYPES = (
    "create type mood as enum ('sad', 'glad')",
    "create type pair as (x int, m mood)",
    "create domain feeling as mood",
)

COLUMNS = (
    "id int, a int, b int, s text, m mood, l mood[], f feeling, p pair,"
    " doubled int generated always as (a * 2) stored"
)

VALUES = "a, b, s, m, l, f, p"
"""The columns that writers give values to."""


def schema(rng: random.Random, table: str) -> list[str]:
    """Statements that make a table: plain, partitioned, or with an inheritance child."""
    kind = rng.choice(["plain", "plain", "partitioned", "inherited"])
    made = f"create table {table} ({COLUMNS}, primary key (id))"
    if kind == "partitioned":
        return [
            f"{made} partition by range (id)",
            f"create table {table}_1 partition of {table} for values from (minvalue) to (10)",
            f"create table {table}_2 partition of {table} for values from (10) to (maxvalue)",
        ]
    if kind == "inherited":
        return [made, f"create table {table}_1 (own int, primary key (id)) inherits ({table})"]
    return [made]


def statements(rng: random.Random, table: str, version: int) -> str:
    """One alteration of a table made by `schema`, or of its types; may be several statements, or
    one that fails."""
    number = rng.randint(2, 9)
    label = f"l{rng.randint(0, 10**9)}"
    choices = [
        f"alter table {table} alter column b type int using (b * {number}) % 10007",
        f"alter table {table} alter column s type text using s || '{number}'",
        f"alter table {table} alter column b type text using b::text || '0'",
        f"alter table {table} alter column b type int using left(b::text, 4)::int",
        f"alter table {table} alter column s type varchar({number + 100})",
        f"alter type mood rename value 'glad' to '{label}';"
        f" alter type mood rename value '{label}' to 'glad'",
        f"alter type mood rename value 'sad' to '{label}';"
        f" alter type mood rename value 'glad' to 'sad'; alter type mood rename value '{label}'"
        " to 'glad'",
        f"alter type mood add value if not exists 'more{number}'",
        f"alter type pair add attribute y{number} int",
        f"alter type pair drop attribute if exists y{number}",
        "alter type pair rename attribute x to z; alter type pair rename attribute z to x",
        f"alter type pair rename attribute m to m{number};"
        f" alter type pair rename attribute m{number} to m",
        f"alter table {table} add column c{number} int default {number}",
        f"alter table {table} add column d{number} double precision default random()",
        f"alter table {table} add column e{number} text",
        f"alter table {table} drop column if exists c{number}",
        f"alter table {table} drop column if exists d{number}",
        f"alter table {table} rename column e{number} to e{number + 1}",
        f"create type t{label} as enum ('a', 'b');"
        f" alter table {table} add column k{label} t{label};"
        f" update {table} set k{label} = 'a'; alter type t{label} rename value 'a' to 'c'",
        f"create type t{label} as (x int); alter table {table} add column k{label} t{label};"
        f" {rng.choice(['begin isolation level repeatable read', 'begin'])};"
        f" update {table} set k{label} = '(1)'; commit;"
        f" alter type t{label} rename attribute x to z",
        f"alter table {table} alter column s set default 'x{number}'",
        f"alter table {table} alter column a set statistics {number}",
        f"alter table {table} disable trigger all; update {table} set s = 'bypassed{number}'"
        f" where id % 3 = 1; alter table {table} enable trigger all",
        f"begin; alter table {table} disable trigger user; delete from {table} where id % 7 = 3;"
        f" alter table {table} enable trigger user; commit",
        f"alter table {table} disable trigger headwater_insert",
        f"drop trigger headwater_update on {table}; update {table} set s = 'dropped{number}'",
        f"set session_replication_role = replica; update {table} set s = 'replica{number}'"
        " where id % 5 = 2; set session_replication_role = origin",
        f"truncate {table}",
        f"begin; truncate {table}; rollback",
        f"begin; alter table {table} alter column b type int using (b * 7) % 10007; rollback",
        f"begin; alter table {table} alter column b type int using (b * 3) % 10007;"
        f" update {table} set s = 'within'; alter table {table} alter column b type int"
        " using (b * 5) % 10007; commit",
        f"begin; alter table {table} alter column b type int using (b * 3) % 10007;"
        " select headwater.sync_tables(); alter table {table} alter column b type int"
        " using (b * 5) % 10007; commit".replace("{table}", table),
        f"vacuum full {table}",
        f"analyze {table}",
        f"select headwater.disable_reactivity('{table}'); update {table} set s = 'unseen{number}';"
        f" select headwater.enable_reactivity('{table}')",
    ]
    if version >= 170_000:
        choices += [
            f"alter table {table} alter column doubled set expression as (a * {number})",
            f"alter table {table} alter column doubled set expression as (a + {number})",
        ]
    if version >= 180_000:
        choices += [
            f"alter table {table} add column v{number} int generated always as (10 / a)",
            f"alter table {table} drop column if exists v{number}",
        ]
    return rng.choice(choices)


def write(rng: random.Random, table: str) -> str:
    """A statement that writes to the table."""
    first, count = rng.randint(1, 20), rng.randint(1, 4)
    mood = rng.choice(["sad", "glad"])
    pair = f'jsonb_populate_record(null::pair, \'{{"x": {count}, "m": "{mood}"}}\')'
    values = f"{first % 5}, {first}, 's{count}', '{mood}', '{{{mood}}}', '{mood}', {pair}"
    row = f"insert into {table} (id, {VALUES}) select i, {values} from generate_series({first},"
    row += f" {first + count}) i on conflict (id) do "
    return rng.choice(
        [
            row + "nothing",
            row + "update set a = excluded.a + 1, s = excluded.s || 'again'",
            f"update {table} set a = a + 1 where id between {first} and {first + count}",
            f"update {table} set m = '{mood}', p = {pair} where id % 4 = {count % 4}",
            f"update {table} set id = id + 20 where id = {first}",
            f"delete from {table} where id = {first}",
        ]
    )


class LogFollower:
    """The rows of a table by key, according to the log."""

    def __init__(self, connection: Connection, table: str) -> None:
        self._connection = connection
        self._table = table
        self._snapshot = ""
        self._shape = 0
        self.rows: dict[str, str] = {}
        self.resets = 0

    @classmethod
    async def begin(cls, url: str, table: str) -> LogFollower:
        follower = cls(await connect(url, purpose="follower", application_path=True), table)
        for setting in ("datestyle = 'ISO'", "timezone = 'UTC'"):
            await follower._connection.execute(f"set {setting}".encode())
        await follower._connection.execute("begin isolation level repeatable read")
        follower.rows = await follower.table_rows()
        await follower._connection.execute("commit")
        return follower

    async def close(self) -> None:
        await self._connection.close()

    async def catch_up(self) -> None:
        """Apply the changes since the position, in one snapshot of the database."""
        await self._ask("begin isolation level repeatable read")
        known = self._snapshot
        ((snapshot,),) = await self._ask("select pg_current_snapshot()::text")
        changes = await self._ask(
            "select op::text, shape, before::text, after::text from headwater.log"
            f" where not pg_visible_in_snapshot(xid, '{known}'::pg_snapshot)"
            " and shape in (select id from headwater.shapes where relid ="
            f" '{self._table}'::regclass) order by seq"
        )
        resets = sum(op == "R" for op, *_ in changes)
        self.resets += resets
        if resets or any(shape != self._shape for _, shape, *_ in changes):
            self.rows = await self.table_rows()
        else:
            for op, _, before, after in changes:
                self._apply(op, before, after)
            self._snapshot = snapshot
        await self._ask("commit")

    def _apply(self, op: str, before: str | None, after: str | None) -> None:
        if op == "T":
            self.rows.clear()
        if before is not None:
            self.rows.pop(_key(before), None)
        if after is not None:
            self.rows[_key(after)] = after

    async def table_rows(self) -> dict[str, str]:
        """The table's own rows, as capture would write them."""
        ((image, self._shape, self._snapshot),) = await self._ask(
            f"select headwater.image('o', c.oid, c.oid), headwater.shape_id(c.oid),"
            f" pg_current_snapshot()::text from pg_class c where oid = '{self._table}'::regclass"
        )
        found = await self._ask(f"select ({image})::text from {self._table} o")
        return {_key(text): text for (text,) in found}

    async def current_shape(self) -> int:
        ((shape,),) = await self._ask(f"select headwater.shape_id('{self._table}'::regclass)")
        return int(shape)

    async def expect_the_tables_rows(self, story: str) -> None:
        """What is known is what the table has; of another shape, it says so itself."""
        await self.catch_up()
        if await self.current_shape() != self._shape:
            return
        known = dict(self.rows)
        assert known == await self.table_rows(), story

    async def _ask(self, statement: str) -> list[tuple[Any, ...]]:
        cursor = await self._connection.execute(statement.encode())
        return await cursor.fetchall() if cursor.description else []


def _key(image: str) -> str:
    return str(msgspec.json.decode(image)["id"])
