"""Writers that overlap and roll back, a consumer that is killed, a server that crashes.

`make sim SEED=8123 SECONDS=60` repeats a run's decisions, or makes it longer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headwater.capture.postgres import schema, triggers
from headwater.database import Connection, connect
from headwater.embedded import EmbeddedPostgres
from headwater.errors import DatabaseError
from headwater.log.reading.reader import LogReader
from tests.support.databases import passable_folder
from tests.support.log_probe import rows, run

SEED = int(os.environ.get("SEED") or random.randrange(10_000))
SECONDS = float(os.environ.get("SECONDS") or 12)
TABLES = ("apples", "pears")
WRITERS = 8


async def write(url: str, chance: random.Random, stop: asyncio.Event) -> int:
    """Random transactions until stopped; continues when the server is back."""
    committed = 0
    while not stop.is_set():
        try:
            connection = await connect(url, purpose="writer", application_path=True)
            try:
                while not stop.is_set():
                    committed += await one_transaction(connection, chance)
            finally:
                await connection.close()
        except (psycopg.OperationalError, psycopg.Rollback, DatabaseError):
            await asyncio.sleep(0.05)  # a Rollback: the connection was lost while rolling back
    return committed


async def one_transaction(connection: Connection, chance: random.Random) -> int:
    try:
        async with connection.transaction():
            for _ in range(chance.randint(1, 5)):
                await one_statement(connection, chance)
                await asyncio.sleep(chance.random() * 0.01)
            if chance.random() < 0.15:
                raise psycopg.Rollback
    except (psycopg.errors.DeadlockDetected, psycopg.errors.UniqueViolation):
        return 0
    return 1


async def one_statement(connection: Connection, chance: random.Random) -> None:
    table, key = chance.choice(TABLES), chance.randint(1, 60)
    kind = chance.choices(["upsert", "update", "move", "delete", "bulk", "truncate"],
                          [30, 30, 8, 20, 6, 1])[0]  # fmt: skip
    match kind:
        case "upsert":
            await run(
                connection,
                f"insert into {table} values ({key}, {chance.randint(0, 999)})"
                f" on conflict (id) do update set amount = {table}.amount + 1",
            )
        case "update":
            await run(connection, f"update {table} set amount = amount + 1 where id = {key}")
        case "move":
            await run(connection, f"update {table} set id = id + 100 where id = {key}")
        case "delete":
            await run(connection, f"delete from {table} where id in ({key}, {key} + 100)")
        case "bulk":
            await run(
                connection, f"update {table} set amount = amount + 1 where id % 7 = {key % 7}"
            )
        case "truncate":
            await run(connection, f"truncate {table}")


class Consumer:
    """The process of `tests.support.consumer`, killed and started again."""

    def __init__(self, url: str, path: Path) -> None:
        self._command = [sys.executable, "-m", "tests.support.consumer", url, "sim", str(path)]
        self.kills = 0
        self._process = subprocess.Popen(self._command)

    def kill(self) -> None:
        self._kill_runner()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        self.kills += 1
        self.revive()

    def _kill_runner(self) -> None:
        """The process that captures from the WAL, if it has started one."""
        own = self._process.pid
        children = Path(f"/proc/{own}/task/{own}/children")
        for child in children.read_text().split() if children.exists() else ():
            with suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)

    def revive(self) -> bool:
        """Start it again if it has ended: it gives up when the server is down at its start."""
        if self._process.poll() is not None:
            self._process = subprocess.Popen(self._command)
        return True

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.mark.timeout(60 + 3 * SECONDS)
@pytest.mark.parametrize("capture", ["trigger", "wal"])
async def test_nothing_is_lost(tmp_path: Path, capture: triggers.Capture) -> None:
    """With capture from the WAL, its runner belongs to the consumer and is killed, too."""
    print(f"SEED={SEED} SECONDS={SECONDS}")
    chance = random.Random(SEED)
    effects = tmp_path / "effects"
    with passable_folder() as folder, EmbeddedPostgres(folder / "data") as server:
        setup = await connect(server.url, purpose="test", application_path=True)
        await schema.install(setup)
        for table in TABLES:
            await run(setup, f"create table {table} (id int primary key, amount int)")
            await triggers.enable(setup, table, capture)
        await setup.close()
        consumer = Consumer(server.url, effects)
        try:
            await until(lambda: effects.exists())
            await until_cursor_exists(server.url)
            committed = await storm(server, consumer, chance)
            connection = await connect(server.url, purpose="test", application_path=True)
            await until_complete(connection, consumer)
            truth = {
                table: dict(await rows(connection, f"select * from {table}")) for table in TABLES
            }
            logged = {seq for (seq,) in await rows(
                connection, "select seq from headwater.changes where op <> 'reset'")}  # fmt: skip
            await connection.close()
            await until(
                lambda: consumer.revive() and logged <= {c["seq"] for c in delivered(effects)}
            )
        finally:
            consumer.end()
    assert committed > 50
    assert consumer.kills >= 3
    everything = delivered(effects)
    assert {change["seq"] for change in everything if change["op"] != "reset"} == logged
    assert replay(everything) == truth
    assert_order_in_every_run(effects)


async def storm(server: EmbeddedPostgres, consumer: Consumer, chance: random.Random) -> int:
    stop = asyncio.Event()
    writers = [
        asyncio.create_task(write(server.url, random.Random(chance.random()), stop))
        for _ in range(WRITERS)
    ]
    loop = asyncio.get_running_loop()
    end, crash_at = loop.time() + SECONDS, loop.time() + SECONDS * chance.uniform(0.3, 0.6)
    while loop.time() < end:
        await asyncio.sleep(chance.uniform(0.5, 2.0))
        consumer.kill()
        if crash_at and loop.time() >= crash_at:
            crash_at = 0
            await asyncio.to_thread(server.restart, "immediate")
    stop.set()
    return sum(await asyncio.gather(*writers))


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - another process makes it true
            await asyncio.sleep(0.1)


async def until_complete(connection: Connection, consumer: Consumer) -> None:
    """Wait until the log has everything that was committed."""
    reader = await LogReader.open(connection)
    async with asyncio.timeout(60):
        while True:
            try:
                await reader.now(connection)
                return
            except DatabaseError:
                consumer.revive()


async def until_cursor_exists(url: str) -> None:
    connection = await connect(url, purpose="test", application_path=True)
    async with asyncio.timeout(30):
        while not await rows(connection, "select 1 from headwater.cursors"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await connection.close()


def runs(path: Path) -> list[list[dict[str, Any]]]:
    """What each start of the consumer appended, without a line that a kill cut short."""
    found: list[list[dict[str, Any]]] = []
    for line in path.read_text().splitlines():
        if line == "start" or not found:
            found.append([])
        elif line.startswith("{") and line.endswith("}"):
            found[-1].append(json.loads(line))
    return found


def delivered(path: Path) -> list[dict[str, Any]]:
    return [change for each in runs(path) for change in each]


def replay(changes: list[dict[str, Any]]) -> dict[str, dict[int, int]]:
    """The tables computed from the changes, each applied once, in the order of the log."""
    state: dict[str, dict[int, int]] = {table: {} for table in TABLES}
    for change in sorted({c["seq"]: c for c in changes}.values(), key=lambda c: c["seq"]):
        table = state[change["table"]]
        match change["op"]:
            case "insert" | "update":
                table[change["key"]["id"]] = change["after"]["amount"]
            case "delete":
                assert table.pop(change["key"]["id"]) == change["before"]["amount"]
            case "truncate":
                table.clear()
    return state


def assert_order_in_every_run(path: Path) -> None:
    for each in runs(path):
        last: dict[tuple[str, int], int] = defaultdict(int)
        for change in each:
            if change["key"]:
                row = (change["table"], change["key"]["id"])
                assert change["seq"] > last[row], f"{row} went back"
                last[row] = change["seq"]
