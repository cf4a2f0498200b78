"""A runner that is killed again and again, and a PostgreSQL that crashes under it.

The runner is a process of its own and is killed with SIGKILL while the source commits. The server
is stopped at once, twice. The source forgets what was acknowledged, so one that came too
early would lose its position. At the end the mirror equals the source, and the log has every change
once. `SEED=8123` repeats the history and the decisions of a run.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from headwater.capture.mirror import registry
from headwater.capture.postgres import schema
from headwater.capture.source import SourceDefinition
from headwater.database import connect
from headwater.embedded import EmbeddedPostgres
from headwater.errors import HeadwaterError
from tests.property import test_mirror_histories as mirrors
from tests.support.databases import passable_folder
from tests.support.scripted_source import History

SEED = int(os.environ.get("SEED") or random.randrange(10_000))
KILLS = 30
COMMITS = 1_500
SHOP = SourceDefinition("shop", "sqlite:///generated", "shop")


@contextmanager
def runner(url: str, folder: Path, chunk_rows: int) -> Iterator[subprocess.Popen[bytes]]:
    """The process, killed at the end of the block."""
    arguments = [url, str(folder), str(SEED), str(COMMITS), str(chunk_rows)]
    command = [sys.executable, "-m", "tests.support.scripted_source", *arguments]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.timeout(300)
async def test_killed_runners_and_servers_lose_and_repeat_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirrors, "COMMITS", COMMITS)
    history, chance = History(SEED, COMMITS), random.Random(SEED)
    with passable_folder() as folder, EmbeddedPostgres(folder / "data") as server:
        connection = await connect(server.url, purpose="test", application_path=True)
        await schema.install(connection)
        await registry.declare(connection, SHOP, "command")
        await connection.close()
        for kill in range(KILLS):
            with runner(server.url, tmp_path, chance.choice([2, 10, 100])):
                await advance(tmp_path, chance, COMMITS * (kill + 1) // KILLS)
                if kill in (KILLS // 3, KILLS * 2 // 3):
                    server.stop_now()
                    server.start()
        with runner(server.url, tmp_path, 100):
            await until_complete(server.url)
        connection = await connect(server.url, purpose="test")
        try:
            await mirrors.check_mirrors(connection, history, complete=True)
            await mirrors.check_log(connection, history)
            (state,) = await registry.sources(connection)
            assert state.state != "lost", f"seed {SEED}"
        finally:
            await connection.close()


async def advance(folder: Path, chance: random.Random, upto: int) -> None:
    """The source commits, at its own pace, whatever its reader does."""
    file = folder / "visible"
    visible = int(file.read_text()) if file.exists() else 0
    pause = chance.uniform(0.3, 1.5) / max(1, upto - visible)
    while visible < upto:
        visible += 1
        new = folder / "visible.new"
        new.write_text(str(visible))
        new.rename(file)
        await asyncio.sleep(pause)


async def until_complete(url: str) -> None:
    async with asyncio.timeout(120):
        while True:
            try:
                if await is_complete(url):
                    return
            except (psycopg.Error, HeadwaterError):
                pass  # the server is starting
            await asyncio.sleep(0.1)


async def is_complete(url: str) -> bool:
    async with await connect(url, purpose="test") as connection:
        cursor = await connection.execute(
            "select (select position from headwater.source_transactions order by xid desc limit 1)"
            " = %s and bool_and(state = 'live') from headwater.source_tables",
            (str(COMMITS),),
        )
        return await cursor.fetchone() == (True,)
