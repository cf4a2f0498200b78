"""Lagging live queries under faults: the rows of each client at each position are those of the log.

Windows and streamed results follow a table with a policy and one without, while random transactions
change and truncate both. Questions and first results wait until further transactions have
committed; questions are cancelled, lose their connections or fail; connections are cut; clients
leave, resume or start again, and fall behind. Then the faults end: every client has the rows of its
table, and nothing is left in memory, pools and queues once all have left.
`SEED=…` repeats a run.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from headwater import limits
from headwater.database import Connection
from headwater.errors import HeadwaterError
from headwater.hub.hub import Hub
from headwater.hub.live_views import background as side_jobs_module
from headwater.hub.live_views import visibility as visibility_module
from headwater.hub.live_views.initial_snapshots import InitialSnapshots
from headwater.hub.live_views.view import InitialSnapshot
from headwater.hub.subscriptions.costs import Cost
from headwater.hub.subscriptions.subscriber import Access
from headwater.live.query import LiveQuery
from headwater.model import Position
from tests.simulation.test_hub import cut
from tests.support.generators.sizes import first_seed, size
from tests.support.log_probe import enable, rows, run
from tests.support.row_policies import QUESTIONS, READERS, ROLE, asking, random_write, user
from tests.support.subscribers import (
    Historian,
    Resubscriber,
    TableHistory,
    answer,
    live,
    logged,
    present_position,
)

SEED = first_seed(1)
ROUNDS = size("lagging_rounds", 6, large=100)
"""After each, every client is compared with the log."""

TRANSACTIONS = 30
"""Of a round."""

TABLES = ("notes", "plain")
NOTES = ("éa", "Éb", "eb", "x")
PATTERN = "É%"
"""Whether a note matches it, ignoring case, only the database knows."""

LIMITS = {
    "limits.FLUSH_BUDGET_SECONDS": 0.01,
    "limits.QUESTION_CONNECTIONS": 4,
    "limits.LAG_CHANGES_MAX": 100,
    "limits.RECONNECT_SECONDS": (0.01, 0.05),
    "log.reconnect.RECONNECT_SECONDS": (0.01, 0.05),
    "hub.live_views.background._QUESTION_QUICK_SECONDS": 0.03,
    "hub.live_views.view._OPENING_CHANGES_MAX": 40,
}


@dataclass(frozen=True)
class Followed:
    """A live query of a table: a window of `limit` rows, or all rows as a stream."""

    table: str
    owner: int | None = None
    limit: int | None = None
    has_pattern: bool = False

    @property
    def access(self) -> Access:
        return Access() if self.owner is None else user(self.owner)

    @property
    def query(self) -> LiveQuery:
        where = [["note", "ilike", PATTERN]] if self.has_pattern else []
        if self.limit is None:
            return live(self.table, where=where, mode="streamed")
        return live(self.table, where=where, order=["rank"], limit=self.limit)

    def answer(self, table: list[dict[str, Any]], matching: set[str]) -> list[dict[str, Any]]:
        """The result for rows in the order of their keys, with the notes that match the pattern."""
        found = [
            row
            for row in table
            if self.owner in (None, row["owner"])
            and (not self.has_pattern or row["note"] in matching)
        ]
        if self.limit is None:
            return found
        return sorted(found, key=lambda row: int(row["rank"]))[: self.limit]


FOLLOWED = (
    *(Followed("notes", owner, limit) for owner in range(4) for limit in (4, None)),
    *(Followed("notes", owner, 4, has_pattern=True) for owner in range(2)),
    *(Followed("plain", limit=limit) for limit in (3, 4, 5, None)),
    *(Followed("plain", limit=limit, has_pattern=True) for limit in (2, 3, 4, None)),
)
SHARED = (
    *(Followed("notes", owner, limit) for owner in range(2) for limit in (4, None)),
    Followed("plain", limit=3),
    Followed("plain", has_pattern=True),
)
"""Those that a second client follows, too."""


class Client(Resubscriber, Historian):
    """One live query through all its subscriptions."""

    def __init__(self, hub: Hub, followed: Followed) -> None:
        super().__init__(Client._follow)
        self._hub = hub
        self._since: str | None = None
        self.followed = followed

    async def subscribe(self, *, resume: bool = False) -> None:
        self._since = self.position if resume and not self._more else None
        await super().subscribe()

    async def _follow(self) -> Any:
        followed = self.followed
        return await self._hub.live(
            followed.query, self, access=followed.access, since=self._since, verify=True
        )


class Disturbance:
    """Faults of questions and first results while it lasts, chosen by the seed."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._lasts = False
        self._commits = 0
        self._notified = asyncio.Event()
        self.happened = Counter[str]()

    def begin(self) -> None:
        self._lasts = True

    def end(self) -> None:
        self._lasts = False
        self._notified.set()

    def committed(self) -> None:
        self._commits += 1
        self._notified.set()

    def comes(self, kind: str, share: float) -> bool:
        happens = self._lasts and self._chance.random() < share
        self.happened[kind] += happens
        return happens

    async def delay(self, share: float) -> None:
        """Wait until a number of further transactions have committed."""
        if self.comes("delayed", share):
            until = self._commits + self._chance.choice((1, 2, 5, 12))
            while self._lasts and self._commits < until:
                self._notified.clear()
                await self._notified.wait()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (side_jobs_module, visibility_module):
            monkeypatch.setattr(module, "ask_in_flush", self._around(module.ask_in_flush))
        read = InitialSnapshots._read

        async def late(
            openings: InitialSnapshots, connection: Connection, opening: InitialSnapshot
        ) -> None:
            await self.delay(0.4)
            await read(openings, connection, opening)

        monkeypatch.setattr(InitialSnapshots, "_read", late)

    def _around(self, original: Any) -> Any:
        async def ask(connection: Connection, questions: Any, **options: Any) -> Any:
            await self.delay(0.5)
            if self.comes("lost", 0.04):
                own = connection.info.backend_pid
                await connection.execute("select pg_terminate_backend(%s)", (own,))
            answers = await original(connection, questions, **options)
            await self.delay(0.2)
            if self.comes("cancelled", 0.07):
                return [psycopg.errors.QueryCanceled("by the test")] * len(answers)
            if self.comes("failed", 0.01):
                raise RuntimeError("by the test")
            return answers

        return ask


class Storm:
    """A hub, its clients, and the tables that they follow."""

    def __init__(
        self, hub: Hub, connection: Connection, disturbance: Disturbance, chance: random.Random
    ) -> None:
        self.hub, self.connection = hub, connection
        self.disturbance, self.chance = disturbance, chance
        self.clients = [Client(hub, followed) for followed in (*FOLLOWED, *SHARED)]
        self.lagged = self.compared = 0
        self._joining: dict[Client, asyncio.Task[None]] = {}
        self._matching: set[str] = set()
        self._before: dict[str, list[dict[str, Any]]] = {}
        self._read = dict.fromkeys(TABLES, 0)

    async def begin(self) -> None:
        for table in TABLES:
            self._before[table] = await answer(self.connection, _all(table))
        values = ", ".join(f"('{note}')" for note in NOTES)
        matching = f"select note from (values {values}) n (note) where note ilike '{PATTERN}'"
        self._matching = {note for (note,) in await rows(self.connection, matching)}

    # -------------------------------------------------------------------- disturbed

    async def rage(self) -> None:
        """Write, while clients come and go and questions fail."""
        self.disturbance.begin()
        try:
            for _ in range(TRANSACTIONS):
                await self._write()
                self.lagged += len(self.hub.live_views.lagging)
                for client in self.chance.sample(self.clients, 2):
                    self._act(client)
                if self.disturbance.comes("cut", 0.02):
                    purpose = self.chance.choice(("reader", "snapshot", "questions", "tables"))
                    await run(self.connection, cut(purpose))
        finally:
            self.disturbance.end()

    async def _write(self) -> None:
        count = self.chance.choice((1, 1, 2, 5))
        writes = [write_to_any(self.chance) for _ in range(count)]
        await run(self.connection, "begin", *writes, "commit")
        self.disturbance.committed()
        if self.chance.random() < 0.5:
            # Bounded, because a flush that asks by itself may wait for the next transaction.
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await self.hub.flushes.next_flush()

    def _act(self, client: Client) -> None:
        if client in self._joining and not self._joining[client].done():
            return
        what = self.chance.random()
        if not client.follows:
            if what < 0.8:
                coming = client.subscribe(resume=self.chance.random() < 0.6)
                self._joining[client] = asyncio.create_task(coming)
        elif what < 0.15:
            client.handle.resync("overflow")
        elif what < 0.25:
            client.leave()

    # -------------------------------------------------------------------- undisturbed

    async def settle(self) -> Position:
        """Every client follows, and has everything up to the position."""
        async with asyncio.timeout(60):
            await asyncio.gather(*self._joining.values())
            position = await present_position(self.connection)
            while not await self._has_settled(position):
                await self.hub.flushes.until_ready()
                for client in self.clients:
                    if not client.follows:
                        await client.subscribe()
        return position

    async def _has_settled(self, position: Position) -> bool:
        if all(client.follows for client in self.clients):
            with suppress(HeadwaterError):  # its connection was cut a moment ago
                await self.hub.reached(position, [client.handle for client in self.clients])
                return all(client.follows for client in self.clients)
        return False

    async def compare(self, position: Position) -> None:
        """Each client with its table now, and with the log at every position of the round."""
        for table in TABLES:
            log = await logged(self.connection, table)
            history = TableHistory(self._before[table], log[self._read[table] :])
            present = history.at(position)
            assert present == await answer(self.connection, _all(table)), "the log"
            for client in self.clients:
                if client.followed.table == table:
                    self._compare(client, history, position)
            self._before[table], self._read[table] = present, len(log)

    def _compare(self, client: Client, history: TableHistory, position: Position) -> None:
        assert client.fault is None, client.fault
        assert [error for error in client.endings if not error.retryable] == []
        for at, held in [*client.history, (position, client.rows)]:
            wanted = client.followed.answer(history.at(at), self._matching)
            assert held == wanted, f"{client.followed} at {at}"
            self.compared += 1
        client.history.clear()

    async def end(self) -> None:
        """All clients leave: after a while nothing of them is left in memory."""
        for client in self.clients:
            client.leave()
        try:
            async with asyncio.timeout(60):
                while leftovers(self.hub):
                    self.hub.live_views.sweep()
                    await self.hub.flushes.next_flush()
        except TimeoutError as error:
            raise AssertionError(f"left: {leftovers(self.hub)}") from error


def leftovers(hub: Hub) -> dict[str, int]:
    """All counters that are not zero."""
    lives, jobs = hub.live_views, hub.live_part.background
    counts = {
        "views": len(lives.views),
        "lagging": len(lives.lagging),
        "arrived results": len(lives.snapshots.arrived),
        "jobs": len(jobs._jobs),
        "bytes": hub.memory.total,
        "owners": len(list(hub.memory.owners)),
    }
    for name, pool in (("own", jobs._own), ("scoped", jobs._scoped)):
        counts[f"{name} question connections in use"] = pool.in_use
    for number, readers in enumerate(lives.snapshots._all):
        counts[f"reading connections in use {number}"] = readers._pool.in_use
        counts[f"results being read {number}"] = readers._queue.running
        counts[f"results waiting {number}"] = len(readers._queue)
    return {name: count for name, count in counts.items() if count}


def _all(table: str) -> str:
    return f"select * from {table} order by id"


def write_to_any(chance: random.Random) -> str:
    table, note = chance.choice(TABLES), chance.choice(NOTES)
    if chance.random() < 0.5:
        return random_write(chance, table)
    key, rank = chance.randint(1, 45), chance.randint(0, 30)
    return chance.choices(
        [
            f"update {table} set rank = {rank}, note = '{note}' where id = {key}",
            f"delete from {table} where id between {key} and {key + 8}",
            f"insert into {table} select i, i % 4, i % 30, '{note}'"
            f" from generate_series({key}, {key + 9}) i"
            " on conflict (id) do update set note = excluded.note",
            f"truncate {table}",
        ],
        [20, 5, 15, 1.5],
    )[0]


async def create_tables(connection: Connection) -> None:
    await run(connection, *READERS)
    for table in TABLES:
        await run(
            connection,
            f"create table {table} (id int primary key, owner int, rank int, note text)",
            f"insert into {table} select i, i % 4, i, 'x' from generate_series(1, 40) i",
        )
    await run(
        connection,
        "alter table notes enable row level security",
        "create policy own on notes for select using (owner = me())",
        f"grant select on notes to {ROLE}",
    )
    await enable(connection, *TABLES)


@pytest.mark.timeout(120 + 10 * ROUNDS)
@pytest.mark.parametrize("puts_off", [False, True])
async def test_lagging_views_are_exact_after_any_fault(
    url: str, connection: Connection, puts_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `puts_off`, flushes also postpone views that would take long in memory."""
    chance = random.Random(f"{SEED} {puts_off}")
    for name, value in LIMITS.items():
        monkeypatch.setattr(f"headwater.{name}", value)
    if puts_off:
        monkeypatch.setattr(limits, "APPLY_QUICK_SECONDS", -1.0)
        monkeypatch.setattr("headwater.hub.live_views.part._FLUSH_APPLY_SECONDS", 0.0)
        monkeypatch.setattr(Cost, "is_slow", lambda _, **__: chance.random() < 0.6)
    disturbance = Disturbance(chance)
    disturbance.install(monkeypatch)
    await create_tables(connection)
    async with Hub(url, settings=asking(url), recheck=1.0) as hub:
        storm = Storm(hub, connection, disturbance, chance)
        await storm.begin()
        for number in range(ROUNDS):
            try:
                await storm.rage()
                await storm.compare(await storm.settle())
            except BaseException as error:
                error.add_note(f"SEED={SEED}, round {number}: {dict(disturbance.happened)}")
                raise
        monkeypatch.setattr("headwater.hub.live_views.registry._VIEW_LINGER_SECONDS", -1.0)
        await storm.end()
    await run(connection, f"drop owned by {ROLE}, {QUESTIONS}")
    assert storm.lagged
    print(f"\nseed {SEED}: {storm.compared} results compared, {dict(disturbance.happened)}")
