"""Mirrors equal their source at every position, whatever is interrupted.

Each history is generated from a seed, with its own sizes of chunks and parts. While it runs, the
source fails, the connection that applies is terminated, and the supervisor is cancelled and started
again. At many moments one snapshot is read: every live mirror must equal the source after as many
commits as the saved position says. At the end the log must contain each change of the source once.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from headwater.capture.mirror import registry
from headwater.capture.mirror.runs import merge
from headwater.capture.running.supervisor import Supervisor
from headwater.capture.source import SourceDefinition, SourceRow
from headwater.database import Connection, connect
from tests.support.databases import fresh_database
from tests.support.generators.sizes import first_seed, size
from tests.support.scripted_source import History, ScriptedSource

HISTORIES = size("mirrored", 12, large=400)
FIRST = first_seed(0)
COMMITS = 60
DEADLINE = 60.0

DEFINITION = SourceDefinition("shop", "sqlite:///generated", "shop")


class Stage:
    """One history, one database, and a supervisor that is started again and again."""

    def __init__(self, url: str, history: History, seed: int, definition: SourceDefinition) -> None:
        self.url = url
        self.history = history
        self.random = random.Random(seed)
        self.visible = 0
        self.definition = definition
        self.chunk_rows = self.random.choice([1, 3, 7, 50])
        self.failures = self.random.choice([0.0, 0.0, 0.01])
        self._supervisor: Supervisor | None = None
        self._task: asyncio.Task[None] | None = None

    def open_source(self, definition: SourceDefinition) -> ScriptedSource:
        rng = random.Random(self.random.random())
        return ScriptedSource(
            definition, self.history, lambda: self.visible, rng, failures=self.failures
        )

    async def start(self) -> None:
        self._supervisor = Supervisor(
            self.url, open_source=self.open_source, chunk_rows=self.chunk_rows,
            retry_seconds=0.01, poll_seconds=0.5,
        )  # fmt: skip
        self._task = asyncio.create_task(self._supervisor.run())

    async def stop(self) -> None:
        """In order, or in the middle of something."""
        if self._supervisor is None or self._task is None:
            return
        if self.random.random() < 0.5:
            await self._supervisor.stop()
        else:
            self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._task = None

    async def interrupt(self, connection: Connection) -> None:
        if self.random.random() < 0.5:
            await connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where application_name = 'headwater source shop'"
                " and datname = current_database()"
            )
        else:
            await self.stop()
            await self.start()


@pytest.mark.parametrize("seed", range(FIRST, FIRST + HISTORIES))
async def test_mirrors_equal_the_source_at_every_position(server_url: str, seed: int) -> None:
    history = History(seed, COMMITS)
    await _run(server_url, history, seed, DEFINITION, log=True)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + HISTORIES))
async def test_mirrors_follow_changes_of_columns(server_url: str, seed: int) -> None:
    history = History(seed, COMMITS, schema_changes=True)
    await _run(server_url, history, seed, DEFINITION, log=False)


async def _run(
    server_url: str, history: History, seed: int, definition: SourceDefinition, *, log: bool
) -> None:
    with fresh_database(server_url, installed=True) as url:
        connection = await connect(url, purpose="test")
        await registry.declare(connection, definition, "command")
        stage = Stage(url, history, seed, definition)
        await stage.start()
        try:
            while stage.visible < COMMITS:
                await _step(stage, connection)
            await _until_complete(stage, connection)
            await stage.stop()
            await check_mirrors(connection, history, complete=True)
            if log:
                await check_log(connection, history)
        finally:
            await stage.stop()
            await connection.close()


async def _step(stage: Stage, connection: Connection) -> None:
    stage.visible = min(COMMITS, stage.visible + stage.random.choice([1, 1, 2, 10]))
    await asyncio.sleep(stage.random.choice([0, 0.01, 0.05]))
    if stage.random.random() < 0.25:
        await stage.interrupt(connection)
    await check_mirrors(connection, stage.history)


async def _until_complete(stage: Stage, connection: Connection) -> None:
    async with asyncio.timeout(DEADLINE):
        while True:
            cursor = await connection.execute(
                "select (select position from headwater.source_transactions order by xid desc"
                " limit 1) = %s and count(*) > 0 and bool_and(state = 'live')"
                " from headwater.source_tables",
                (str(COMMITS),),
            )
            if await cursor.fetchone() == (True,):
                return
            await check_mirrors(connection, stage.history)
            await asyncio.sleep(0.02)


async def check_mirrors(connection: Connection, history: History, complete: bool = False) -> None:
    """In one snapshot: every live mirror has the rows of the source at the saved position. The
    tables are locked before the snapshot is taken, because snapshots do not protect from DDL."""
    async with connection.transaction():
        await connection.execute("set transaction isolation level repeatable read, read only")
        try:
            for name in history.first:
                await connection.execute(f"lock table shop.{name} in access share mode".encode())
        except (
            psycopg.errors.InvalidSchemaName,
            psycopg.errors.UndefinedTable,
            psycopg.errors.DeadlockDetected,
        ):
            assert not complete
            raise psycopg.Rollback from None  # the next look will see it
        cursor = await connection.execute(
            "select position from headwater.source_transactions order by xid desc limit 1"
        )
        row = await cursor.fetchone()
        if row is None:
            assert not complete
            return
        position = int(row[0])
        cursor = await connection.execute(
            "select name from headwater.source_tables where state = 'live' order by name"
        )
        live = [name for (name,) in await cursor.fetchall()]
        assert live == sorted(history.first) or not complete
        for name in live:
            await _check_mirror(connection, history, position, name)


async def _check_mirror(connection: Connection, history: History, position: int, name: str) -> None:
    # A mirror may have columns of the source's present already.
    cursor = await connection.execute(
        "select attname::text from pg_attribute where attrelid = %s::regclass and attnum > 0"
        " and not attisdropped",
        (f"shop.{name}",),
    )
    present = {column for (column,) in await cursor.fetchall()}
    shape = [c.name for c in history.tables(position)[name].columns]
    places = [i for i, column in enumerate(shape) if column in present]
    columns = ", ".join(f't."{shape[i]}"::text' for i in places)
    cursor = await connection.execute(f"select {columns} from shop.{name} t order by t.id".encode())
    state = history.state(position)[name]
    wanted = [tuple(state[key][i] for i in places) for key in sorted(state, key=int)]
    assert await cursor.fetchall() == wanted, f"{name} at {position}"


async def check_log(connection: Connection, history: History) -> None:
    """Every commit after a table became live is in the log once, with exactly its changes; for each
    key in order."""
    for name in history.first:
        cursor = await connection.execute(
            "select l.op::text, t.position, l.before, l.after from headwater.log l"
            " left join headwater.source_transactions t on t.xid = l.xid"
            " where l.shape in (select id from headwater.shapes where relid = %s::regclass)"
            " order by l.xid, l.seq",
            (f"shop.{name}",),
        )
        rows = await cursor.fetchall()
        assert rows[0][0] == "R"
        assert [row for row in rows[1:] if row[0] == "R"] == []
        logged = defaultdict[int, list[tuple[str, Any, Any]]](list)
        for op, position, before, after in rows[1:]:
            logged[int(position)].append((op, _image(before), _image(after)))
        first = await _live_since(connection, name)
        expected = {
            at: found
            for at in range(first + 1, COMMITS + 1)
            if (found := _expected(history, at, name))
        }
        assert {at: _by_key(found) for at, found in logged.items()} == {
            at: _by_key(found) for at, found in expected.items()
        }


async def _live_since(connection: Connection, name: str) -> int:
    """The commit after which the table was first live."""
    cursor = await connection.execute(
        "select max(t.xid), (array_agg(t.position order by t.xid desc))[1]"
        " from headwater.source_transactions t where t.xid < ("
        "  select min(l.xid) from headwater.log l where l.op = 'R' and l.shape in"
        "  (select id from headwater.shapes where relid = %s::regclass))",
        (f"shop.{name}",),
    )
    row = await cursor.fetchone()
    assert row is not None
    return int(row[1])


def _image(image: dict[str, Any] | None) -> SourceRow | None:
    if image is None:
        return None
    amount = image["amount"]
    return str(image["id"]), image["name"], f"{float(amount):.2f}", image["note"]


def _by_key(found: list[tuple[str, Any, Any]]) -> dict[Any, list[tuple[str, Any, Any]]]:
    keys = defaultdict[Any, list[tuple[str, Any, Any]]](list)
    for op, before, after in found:
        keys[(after or before or ("",))[0]].append((op, before, after))
    return dict(keys)


def _expected(history: History, at: int, name: str) -> list[tuple[str, Any, Any]]:
    """What the log must say of one commit: a changed key is a delete and an insert, and an update
    that changes nothing is not a change."""
    rows = dict(history.state(at - 1)[name])
    found: list[tuple[str, Any, Any]] = []
    for change in history.commits[at - 1].changes:
        if change.table != name:
            continue
        if change.op == "truncate":
            rows.clear()
            found.append(("T", None, None))
        for row in change.after if change.op == "insert" else ():
            rows[str(row[0])] = row
            found.append(("I", None, row))
        for gone in change.before if change.op == "delete" else ():
            assert gone is not None
            found.append(("D", rows.pop(str(gone[0])), None))
        if change.op == "update":
            before = change.before or [None] * len(change.after)
            for old, new in zip(before, change.after, strict=True):
                key = str(new[0] if old is None else old[0])
                was = rows.pop(key)
                now = merge(was, new)
                rows[str(now[0])] = now
                if was[0] != now[0]:
                    found += [("D", was, None), ("I", None, now)]
                elif was != now:
                    found.append(("U", was, now))
    assert rows == history.state(at)[name]
    return found
