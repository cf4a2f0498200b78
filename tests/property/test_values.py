"""Values of every type, at the ends of their ranges and at random: memory decodes, compares and
orders them as PostgreSQL does, or leaves it to PostgreSQL. The images are those of real capture.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import psycopg
import pytest

from headwater.database import Connection, connect
from headwater.errors import HeadwaterError, InvalidQuery
from headwater.hub.hub import Hub
from headwater.hub.reading.tables import FORMATS
from headwater.live import kinds
from headwater.live.filters.check import check
from headwater.live.filters.compile import compile_filter
from headwater.live.filters.filter import Filter, from_json
from headwater.live.filters.sql import filter_sql
from headwater.live.filters.terms import terms
from headwater.live.needs import Undecided
from headwater.live.order import OrderBy, Ordering, check_order
from headwater.live.query import BoundQuery
from headwater.live.router import Router
from headwater.live.statements import page
from headwater.log.reading.reader import LogReader
from headwater.model import Change, Row, Table
from headwater.protocol import Wire
from headwater.testing.values import MAKERS, prepare, types, values
from tests.support.databases import fresh_database
from tests.support.generators.sizes import first_seed, size
from tests.support.log_probe import enable, run
from tests.support.subscribers import Recorder, live

SEED = first_seed(15)
VALUES = size("values", 120, large=20_000)
"""At least this many in all."""

OPERATORS = ("=", "!=", "<", "<=", ">", ">=")
PATTERNS = ("a%", "%b", "_", "%", "", "a_%", r"50\%", "%B%", "A%", "É%")


@pytest.fixture(params=["embedded", "system"])
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    server = (
        request.getfixturevalue("postgres").url
        if request.param == "embedded"
        else request.getfixturevalue("system_postgres")
    )
    with fresh_database(server, installed=True) as url:
        yield url


@pytest.mark.timeout(120 + VALUES // 20)
async def test_memory_treats_every_value_as_the_database_does(database: str) -> None:
    async with (
        await connect(
            database, purpose="test", options=FORMATS, application_path=True
        ) as connection,
        await connect(database, purpose="reader", application_path=True) as reading,
    ):
        await prepare(connection)
        judge = _Judge(connection, await LogReader.open(reading))
        for name in await types(connection):
            await judge.type(name, _share(name))
    print(
        f"\nseed {SEED}: {judge.count:,} values of {judge.types} types, {judge.decided:,} answers"
    )
    assert judge.count >= VALUES
    assert judge.decided > judge.count
    assert judge.ordered >= {
        "smallint", "integer", "bigint", "numeric", "real", "double precision", "boolean", "date",
        "timestamp with time zone", "timestamp without time zone", "time without time zone",
        "uuid", "bytea",
    }  # fmt: skip


def _share(name: str) -> int:
    """How many values of a type: most of those types that have many."""
    share = VALUES // 20
    if name.endswith("[]"):
        return max(6, share // 10)
    return share if name in MAKERS else max(24, share // 10)


class _Judge:
    """Compares what memory and the database say about the values of a type."""

    def __init__(self, connection: Connection, reader: LogReader) -> None:
        self._connection = connection
        self._reader = reader
        self.count = self.types = self.decided = 0
        self.ordered: set[str] = set()

    async def type(self, name: str, share: int) -> None:
        chance = random.Random(zlib.crc32(name.encode()) + SEED)
        found = await values(self._connection, name, chance, share)
        if not found:
            return
        table, rows = await self._captured(name, found)
        self.count += len(found)
        self.types += 1
        await self._reads_back(table, name, rows)
        constants = found if len(found) < 12 else chance.sample(found, 12)
        for where in _conditions(table, chance, constants, rows):
            await self._filter(table, where, rows)
        await self._orders(table, chance, rows)

    async def _captured(self, name: str, found: list[str]) -> tuple[Table, dict[int, Row]]:
        """The rows as the log has them."""
        connection = self._connection
        await connection.execute("drop table if exists v")
        await connection.execute(f"create table v (id int primary key, v {name})".encode())
        await connection.execute("select headwater.enable_reactivity('v')")
        since = await self._reader.now(connection)
        texts = [*found, None]
        listed = ", ".join([f"(%s, %s::{name})"] * len(texts))
        numbered = [each for numbered in enumerate(texts, 1) for each in numbered]
        await connection.execute(f"insert into v values {listed}".encode(), numbered)
        batch = await self._reader.read(connection, since)
        changes: list[Change] = [change for each in batch.transactions for change in each.changes]
        rows = {change.key[0]: change.after for change in changes if change.after is not None}
        assert len(rows) == len(found) + 1
        return changes[0].table, rows

    async def _reads_back(self, table: Table, name: str, rows: dict[int, Row]) -> None:
        """A client is sent the value, as far as JSON can represent it."""
        wire, of_id = Wire(table), dict[int, str]()
        for id, row in rows.items():
            sent = msgspec.json.decode(msgspec.json.encode(wire.row(row)))["v"]
            if isinstance(sent, str | int | float) and not isinstance(sent, bool):
                of_id[id] = sent if isinstance(sent, str) else msgspec.json.encode(sent).decode()
        if name.removesuffix("[]") in ("json", "jsonb") or name.startswith("reg"):
            return  # a text of JSON is another value of JSON; the others read names
        cursor = await self._connection.execute(
            "select v.id, v.v::text, x.text from v join unnest(%s::int[], %s::text[]) x (id, text)"
            f" on x.id = v.id where v.v::text is distinct from (x.text::{name})::text".encode(),
            (list(of_id), list(of_id.values())),
        )
        assert await cursor.fetchall() == []

    async def _filter(self, table: Table, where: Filter, rows: dict[int, Row]) -> None:
        sql = filter_sql(where, table)
        try:
            cursor = await self._connection.execute(
                f"select id from v where {sql.text}".encode(), sql.values
            )
            true = {id for (id,) in await cursor.fetchall()}
        except psycopg.Error:
            return  # there is no such operator, and so no such view
        matches = compile_filter(where, table)
        router: Router[str] = Router()
        router.add("view", where, table)
        for id, row in rows.items():
            try:
                assert matches(row) == (id in true), (where, row["v"])
                self.decided += 1
            except Undecided:
                pass
            if id in true:
                change: Any = Change(0, 0, None, table, "insert", (id,), None, row)  # type: ignore[arg-type]
                assert router.candidates(change), (where, row["v"], terms(where, table))

    async def _orders(self, table: Table, chance: random.Random, rows: dict[int, Row]) -> None:
        for text in ("v", "v desc", "v nulls first", "v desc nulls last"):
            try:
                by = check_order((OrderBy.parse(text),), table)
            except InvalidQuery:
                return
            order = Ordering(by, table)
            if not order.exact:
                return
            cursor = await self._connection.execute(
                f"select id from v order by {order.sql().text}".encode()
            )
            true = [id for (id,) in await cursor.fetchall()]
            keys = {id: order.key(order.cursor(row)) for id, row in rows.items()}
            assert sorted(rows, key=keys.__getitem__) == true, text
            self.decided += len(rows)
            self.ordered.add(table.columns[1].type)
            await self._cursors(table, order, chance.sample(true, min(8, len(true))), rows, true)

    async def _cursors(
        self, table: Table, order: Ordering, ids: list[int], rows: dict[int, Row], true: list[int]
    ) -> None:
        """A cursor that a client sends back has the place of the row that it came from."""
        wire = Wire(table)
        for id in ids:
            row = wire.row(rows[id])
            sent = msgspec.json.decode(msgspec.json.encode([row["v"], row["id"]]))
            if len(str(sent[0])) > 5_000:
                continue  # longer than a constant may be
            after = order.read_cursor(sent)
            assert order.key(after) == order.key(order.cursor(rows[id])) or sent[0] == "NaN"
            sql = order.after_sql(after)
            cursor = await self._connection.execute(
                f"select id from v where {sql.text} order by {order.sql().text}".encode(),
                sql.values,
            )
            assert [id for (id,) in await cursor.fetchall()] == true[true.index(id) + 1 :]


def _conditions(
    table: Table, chance: random.Random, constants: list[str], rows: dict[int, Row]
) -> Iterator[Filter]:
    """Conditions on a column, with constants as a client may write them: as PostgreSQL's text, and
    as they were sent to it."""
    wire = Wire(table)
    sent = [wire.row(row)["v"] for row in chance.sample(list(rows.values()), min(6, len(rows)))]
    again = [msgspec.json.decode(msgspec.json.encode(value)) for value in sent]
    pool = [value for value in (*constants, *again) if isinstance(value, str | int | float)]
    written: list[Any] = [["v", operator, value] for operator in OPERATORS for value in pool]
    written += [["v", "in", chance.sample(pool, min(3, len(pool)))] for _ in range(3)]
    written += [["v", "not in", chance.sample(pool, min(3, len(pool)))] for _ in range(3)]
    written += [["v", "not in", [*pool[:1], None]], ["v", "in", []]]
    written += [["v", "is null"], ["v", "is not null"]]
    if kinds.kind_of(table.columns[1]).text:
        operators = ("like", "ilike", "not like", "not ilike")
        written += [["v", operator, text] for operator in operators for text in PATTERNS]
    for each in written:
        try:
            yield check(from_json(each), table)
            yield check(from_json({"not": each}), table)
        except InvalidQuery:
            continue


# ------------------------------------------------------------------------ through a hub

ROUNDS = max(2, VALUES // 400)


@pytest.mark.timeout(120 + VALUES // 20)
async def test_live_queries_over_every_value_equal_the_database(database: str) -> None:
    chance = random.Random(SEED)
    async with await connect(
        database, purpose="test", options=FORMATS, application_path=True
    ) as connection:
        await prepare(connection)
        await run(connection, "create table calm (id int primary key, n int)")
        await run(connection, "insert into calm values (1, 0)")
        pools = await _pools(connection, chance)
        columns = ", ".join(f"c{n} {name}" for n, name in enumerate(pools))
        await run(connection, f"create table wide (id int primary key, {columns})")
        await enable(connection, "wide", "calm")
        async with Hub(database) as hub:
            calm = Recorder()
            await hub.live(live("calm"), calm)
            followed = [
                each
                for n, pool in enumerate(pools.values())
                for each in await _follow(hub, f"c{n}", pool, chance)
            ]
            for number in range(1, ROUNDS + 1):
                for _ in range(6):
                    await _write(connection, pools, chance)
                await run(connection, f"update calm set n = {number}")
                await calm.until(lambda number=number: calm.rows == [{"id": 1, "n": number}])  # type: ignore[misc]
                for recorder, query in followed:
                    sql = page(query, None, query.limit).wrapped("select id from (", ") o")
                    cursor = await connection.execute(sql.text.encode(), sql.values)
                    true = [row[0] for row in await cursor.fetchall()]
                    await _until_ids(recorder, query, true)
            assert calm.kinds() == ["snapshot", *["deltas"] * ROUNDS]
    print(f"\nseed {SEED}: {len(followed)} live queries, {ROUNDS * 6} writes of {len(pools)} types")


async def _pools(connection: Connection, chance: random.Random) -> dict[str, list[str]]:
    """Values of the types that memory compares, and of some others."""
    names = [name for name in await types(connection) if not name.startswith("reg")]
    others = chance.sample([name for name in names if name not in MAKERS], 12)
    found = {name: await values(connection, name, chance, 30) for name in (*MAKERS, *others)}
    return {
        name: [text for text in texts if len(text) < 1000] for name, texts in found.items() if texts
    }


async def _follow(
    hub: Hub, column: str, pool: list[str], chance: random.Random
) -> list[tuple[Recorder, BoundQuery]]:
    """Live queries with an order and with a condition on a column, where there can be such."""
    direction = chance.choice(("", " desc", " nulls first"))
    condition = [column, chance.choice(OPERATORS), chance.choice(pool or [""])]
    wanted = (
        {"order": [column + direction], "limit": 3},
        {"where": [condition], "limit": 50},
        {"where": [[column, "is null"]], "limit": 50},
        {"where": [condition], "mode": "streamed"},
    )
    followed = []
    for each in wanted:
        recorder, query = Recorder(), live("wide", **each)
        try:
            await hub.live(query, recorder)
        except HeadwaterError:
            continue  # there is no such operator or order
        table = (await hub.tables.find("wide")).table
        followed.append((recorder, BoundQuery(query, table)))
    return followed


async def _write(
    connection: Connection, pools: dict[str, list[str]], chance: random.Random
) -> None:
    id = chance.randint(1, 12)
    if chance.random() < 0.15:
        await connection.execute("delete from wide where id = %s", (id,))
        return
    chosen = [
        chance.choice(pool) if pool and chance.random() < 0.8 else None for pool in pools.values()
    ]
    places = ", ".join(f"%s::{name}" for name in pools)
    names = ", ".join(f"c{n} = excluded.c{n}" for n in range(len(pools)))
    await connection.execute(
        f"insert into wide values (%s, {places}) on conflict (id) do update set {names}".encode(),
        (id, *chosen),
    )


async def _until_ids(recorder: Recorder, query: BoundQuery, true: list[int]) -> None:
    try:
        await recorder.until(lambda: [row["id"] for row in recorder.rows] == true, seconds=30)
    except TimeoutError as error:
        ids = [row["id"] for row in recorder.rows]
        error.add_note(f"{query.canonical!r}: has {ids}, not {true}; {recorder.error}")
        raise
