"""A hub under random subscribers and writers: everything that it sends is true at its position.

Clients come, leave, return, slide, fall behind, change their rights and read slowly, while others
write, truncate, renumber rows and alter the table, and connections are cut. Afterwards the rows of
each client at each position are compared with the table at that position, computed from the log.
Feeds are compared with the log itself. `make sim SEED=… SECONDS=…` repeats a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import psycopg
import pytest

from headwater.database import Connection, connect
from headwater.errors import HeadwaterError
from headwater.hub.feeds.subscription import FeedSubscription
from headwater.hub.feeds.view import FeedQuery
from headwater.hub.hub import Hub
from headwater.hub.live_views.view import LiveSubscription
from headwater.hub.subscriptions.subscriber import Access
from headwater.live.filters.filter import Compare, c, conditions
from headwater.live.query import LiveQuery
from headwater.model import Position
from headwater.protocol import Changes, Frame
from tests.support.log_probe import enable, rows, run
from tests.support.subscribers import Recorder, TableHistory, live, logged

SEED = int(os.environ.get("SEED") or random.randrange(10_000))
SECONDS = float(os.environ.get("SECONDS") or 8)

ROLE = "hw_simulated"
COLUMNS = ("id", "region", "owner", "amount")
SETUP = (
    f"do $$ begin create role {ROLE} nologin; exception when duplicate_object then null; end $$",
    *(
        statement.format(table=table)
        for table in ("open", "guarded")
        for statement in (
            "create table {table} (id int primary key, region int, owner int, amount int)",
            "insert into {table} select i, i % 3, i % 2, i % 17 from generate_series(1, 60) i",
            f"grant select on {{table}} to {ROLE}",
        )
    ),
    "alter table guarded enable row level security",
    "create policy own on guarded for select using"
    " (owner = (current_setting('request.jwt.claims')::json ->> 'sub')::int)",
)

Sent = tuple[Position, LiveQuery, Access, list[dict[str, Any]]]


def owner_of(access: Access) -> int | None:
    owner: int | None = json.loads(access.claims).get("sub")
    return owner


class Client(Recorder):
    """One live query through all its connections. Records its rows at every position."""

    def __init__(self, query: LiveQuery, access: Access) -> None:
        super().__init__()
        self.query, self.access = query, access
        self.subscription: LiveSubscription | None = None
        self.sent: list[Sent] = []

    def deliver(self, frame: Frame) -> None:
        super().deliver(frame)
        if self.subscription is not None:
            self.query, self.access = self.subscription.query, self.subscription.access
        if not self._more:
            assert self.position is not None
            position = Position.parse(self.position)
            self.sent.append((position, self.query, self.access, self.rows))

    def _had_snapshot(self) -> bool:
        return False  # it may have one from every connection

    async def subscribe(self, hub: Hub) -> None:
        since = None if self._more else self.position
        self._more = False
        self.subscription = None
        self.subscription = await hub.live(self.query, self, access=self.access, since=since)

    def leave(self) -> None:
        if self.subscription is not None:
            self.subscription.close()
            self.subscription = None


class Follower(Recorder):
    """One change feed through all its connections."""

    def __init__(self, table: str) -> None:
        super().__init__()
        self.table = table
        self.subscription: FeedSubscription | None = None
        self.begun: Position | None = None
        self.seen: set[int] = set()
        self.seen_now: set[int] = set()

    def deliver(self, frame: Frame) -> None:
        super().deliver(frame)
        message = self.messages[-1]
        try:
            assert isinstance(message, Changes), message
            for transaction in message.transactions:
                for change in transaction.changes:
                    assert change["seq"] not in self.seen_now, "twice over one connection"
                    self.seen_now.add(change["seq"])
        except AssertionError as fault:
            self.fault = self.fault or fault

    async def subscribe(self, hub: Hub) -> None:
        since = None if self.position is None else Position.parse(self.position)
        self.subscription = await hub.feed(FeedQuery((self.table,), since=since), self)
        # The position that it receives may be earlier: that of the last commit on disk.
        self.begun = self.begun or hub.position

    def leave(self) -> None:
        if self.subscription is not None:
            self.subscription.close()
            self.subscription = None
        self.seen |= self.seen_now
        self.seen_now = set()


class Story(TableHistory):
    """What clients should see of a table, computed from the log."""

    def answer(self, position: Position, query: LiveQuery, access: Access) -> list[dict[str, Any]]:
        equal = (each for each in conditions(query.where) if isinstance(each, Compare))
        region = next((condition.value for condition in equal), None)
        found = [
            {name: row[name] for name in COLUMNS}
            for row in self.at(position)
            if region in (None, row["region"]) and owner_of(access) in (None, row["owner"])
        ]
        if query.mode == "streamed":
            return sorted(found, key=lambda row: int(row["id"]))
        found.sort(key=lambda row: (-row["amount"], row["id"]))
        if query.after is not None:
            amount, id = query.after
            found = [row for row in found if (-row["amount"], row["id"]) > (-amount, id)]
        return found[: query.limit]


class Simulation:
    def __init__(self, url: str, hub: Hub, seed: int) -> None:
        self.url, self.hub = url, hub
        self.chance = random.Random(seed)
        self.clients: list[Client] = []
        self.followers = [Follower("open"), Follower("open")]
        self.stopped = False
        self.steps = 0

    # -------------------------------------------------------------------- subscribers

    def access(self, table: str) -> Access:
        owner = self.chance.randint(0, 1)
        claims = json.dumps({"sub": owner})
        if table == "guarded":
            return Access(role=ROLE, claims=claims)
        return self.chance.choice([Access(), Access(claims=claims, where=c.owner == owner)])

    def new_client(self) -> Client:
        chance, table = self.chance, self.chance.choice(["open", "guarded"])
        query: dict[str, Any] = {"columns": list(COLUMNS)}
        if chance.random() < 0.7:
            query["where"] = [["region", "=", chance.randint(0, 2)]]
        if chance.random() < 0.3:
            query["mode"] = "streamed"
        else:
            query |= {"order": ["amount desc"], "limit": chance.choice([1, 3, 8, 100])}
        client = Client(live(table, **query), self.access(table))
        self.clients.append(client)
        return client

    async def subscriber(self) -> None:
        """One client after the other, each with random actions."""
        client = self.new_client()
        while not self.stopped:
            self.steps += 1
            await self.patiently(lambda client=client: self.step(client))  # type: ignore[misc]
            await asyncio.sleep(self.chance.random() * 0.03)
            if self.chance.random() < 0.05:
                client.leave()
                client = self.new_client()
        client.reads.set()

    async def step(self, client: Client) -> None:
        subscription, chance = client.subscription, self.chance
        if subscription is None or subscription.closed:
            await client.subscribe(self.hub)
            return
        maintained = client.query.mode == "maintained"
        match chance.randint(0, 7):
            case 0 | 1:
                client.leave()
            case 2 if maintained:
                cursor = chance.choice([None, [chance.randint(0, 17), chance.randint(0, 60)]])
                await subscription.reanchor(cursor)
            case 3:
                subscription.resync("overflow")
            case 4:
                await subscription.change_access(self.access(client.query.table))
            case 5 if maintained:
                await asyncio.gather(
                    subscription.change_access(self.access(client.query.table)),
                    subscription.reanchor(None),
                )
            case 6:
                client.reads.clear()
            case _:
                client.reads.set()

    async def follow(self, follower: Follower) -> None:
        chance = self.chance
        while not self.stopped:
            self.steps += 1
            if follower.subscription is None:
                await self.patiently(lambda: follower.subscribe(self.hub))
            elif follower.subscription.closed:
                follower.leave()
            else:
                match chance.randint(0, 5):
                    case 0:
                        follower.leave()
                    case 1 | 2:
                        follower.subscription.pause()
                    case _:
                        follower.subscription.resume()
            await asyncio.sleep(chance.random() * 0.03)

    async def patiently(self, act: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(20):
                await act()
        except HeadwaterError as error:
            if not error.retryable:
                raise

    # -------------------------------------------------------------------- writers

    async def writer(self, seed: int) -> None:
        connection, chance = (
            await connect(self.url, purpose="writer", application_path=True),
            random.Random(seed),
        )
        while not self.stopped:
            count = chance.choice([1, 1, 1, 2, 5, 30])
            statements = [random_write(chance) for _ in range(count)]
            ending = chance.choice(["commit", "commit", "commit", "rollback"])
            try:
                await run(connection, "begin", "set local lock_timeout = '2s'", *statements)
                await asyncio.sleep(chance.choice([0, 0, 0, 0.05]))
                await run(connection, ending)
            except psycopg.Error:
                await run(connection, "rollback")
            await asyncio.sleep(chance.random() * 0.02)
        await connection.close()

    async def nuisance(self) -> None:
        """Connections are cut, and the tables are altered."""
        connection, chance = (
            await connect(self.url, purpose="nuisance", application_path=True),
            self.chance,
        )
        while not self.stopped:
            await asyncio.sleep(0.2 + chance.random())
            table = chance.choice(["open", "guarded"])
            statement = chance.choice(
                [
                    f"alter table {table} add column if not exists extra int",
                    f"alter table {table} drop column if exists extra",
                    *(cut(purpose) for purpose in ("reader", "snapshot", "tables", "catch-up")),
                ]
            )
            with suppress(psycopg.Error):
                await run(connection, "set lock_timeout = '1s'", statement)
        await connection.close()

    async def run(self) -> None:
        doing = [
            *(self.subscriber() for _ in range(12)),
            *(self.follow(follower) for follower in self.followers),
            *(self.writer(self.chance.randrange(1_000_000)) for _ in range(3)),
            self.nuisance(),
        ]
        tasks = [asyncio.ensure_future(each) for each in doing]
        stopping = asyncio.get_running_loop().call_later(SECONDS, self.stop)
        try:
            await asyncio.gather(*tasks)
        finally:
            stopping.cancel()
            for task in tasks:
                task.cancel()

    def stop(self) -> None:
        self.stopped = True


def cut(purpose: str) -> str:
    return (
        "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
        f" and application_name = 'headwater {purpose}'"
    )


def random_write(chance: random.Random) -> str:
    table, key = chance.choice(["open", "guarded"]), chance.randint(1, 60)
    amount, region = chance.randint(0, 17), chance.randint(0, 2)
    return chance.choices(
        [
            f"insert into {table} (id, region, owner, amount)"
            f" values ({key}, {region}, {key % 2}, {amount})"
            f" on conflict (id) do update set amount = {amount}",
            f"update {table} set amount = {amount} where id = {key}",
            f"update {table} set owner = 1 - owner, region = {region} where id = {key}",
            f"update {table} set owner = 1 - owner where id % 5 = {key % 5}",
            f"update {table} set id = {100 + key} where id = {key}",
            f"update {table} set id = {key} where id = {100 + key}"
            f" and not exists (select from {table} where id = {key})",
            f"delete from {table} where id = {key}",
            f"delete from {table} where amount > {amount}",
            f"truncate {table}",
        ],
        [30, 20, 10, 3, 5, 5, 10, 1, 0.3],
    )[0]


def check_sent(story: dict[str, Story], client: Client) -> None:
    for position, query, access, held in client.sent:
        expected = story[query.table].answer(position, query, access)
        assert held == expected, f"at {position}: {query} as {access}"


async def stories(connection: Connection, initial: dict[str, Any]) -> dict[str, Story]:
    return {
        table: Story(initial[table], await logged(connection, table))
        for table in ("open", "guarded")
    }


@pytest.mark.timeout(60 + 3 * SECONDS)
async def test_everything_that_is_sent_is_true(url: str, connection: Connection) -> None:
    print(f"\nSEED={SEED} SECONDS={SECONDS}")
    await run(connection, *SETUP)
    await enable(connection, "open", "guarded")
    initial = {
        table: [
            msgspec.json.decode(text)
            for (text,) in await rows(connection, f"select row_to_json(t)::text from {table} t")
        ]
        for table in ("open", "guarded")
    }
    async with Hub(url, recheck=1.5) as hub:
        simulation = Simulation(url, hub, SEED)
        await simulation.run()
        await settled(connection, simulation)
        story = await stories(connection, initial)
        for client in simulation.clients:
            assert client.fault is None, client.fault
            check_sent(story, client)
        await all_was_followed(connection, simulation.followers)
    results = sum(len(client.sent) for client in simulation.clients)
    print(f"{simulation.steps} steps, {len(simulation.clients)} clients, {results} results checked")
    await run(connection, f"drop owned by {ROLE}")


async def settled(connection: Connection, simulation: Simulation) -> None:
    """When no transaction runs, every remaining client has the present rows."""
    for client in simulation.clients:
        if client.subscription is None or client.subscription.closed:
            continue
        query = client.subscription.query
        want = await present(connection, query, client.subscription.access)
        try:
            await client.until(lambda client=client, want=want: client.rows == want)  # type: ignore[misc]
        except TimeoutError as error:
            raise AssertionError(f"{query} has {client.rows} for {want}") from error


async def present(connection: Connection, query: LiveQuery, access: Access) -> list[dict[str, Any]]:
    found = await rows(
        connection,
        f"select row_to_json(t)::text from (select {', '.join(COLUMNS)} from {query.table}) t",
    )
    story = Story([msgspec.json.decode(text) for (text,) in found], [])
    return story.answer(Position("a", 1, 1), query, access)


async def all_was_followed(connection: Connection, followers: list[Follower]) -> None:
    for follower in followers:
        assert follower.fault is None, follower.fault
        if follower.subscription is None or follower.subscription.closed:
            continue
        follower.subscription.resume()
        assert follower.begun is not None
        logged = await rows(
            connection,
            "select l.seq, l.xid::text::bigint from headwater.log l"
            " where l.shape in (select id from headwater.shapes"
            f" where relid = '{follower.table}'::regclass) order by l.seq",
        )
        wanted = {seq for seq, xid in logged if not follower.begun.contains(xid)}
        try:
            await follower.until(
                lambda follower=follower, wanted=wanted: (
                    wanted  # type: ignore[misc]
                    <= follower.seen | follower.seen_now
                )
            )
        except TimeoutError as error:
            missing = wanted - follower.seen - follower.seen_now
            raise AssertionError(f"missed {len(missing)} changes") from error
