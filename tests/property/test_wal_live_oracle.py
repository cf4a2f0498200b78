"""The histories of `test_live_oracle` over real capture: the changes come from the log, by triggers
and from the WAL, and after every transaction the window and the replica equal the database."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import psycopg
import pytest
from hypothesis import given

from headwater import database
from headwater.capture.postgres.wal.append import WalCapture
from headwater.embedded import EmbeddedPostgres
from headwater.log.reading.reader import LogReader
from headwater.model import Change, Position
from headwater.testing.oracle import SAMPLES, Connection, History, Player, connect, play
from tests.property.test_live_oracle import fuzz, histories
from tests.support.databases import fresh_database
from tests.support.generators.sizes import size

HISTORIES = size("wal_live_histories", 10, large=2_000)
T = TypeVar("T")


class Log:
    """Reads the log, and captures from the WAL, in a thread: the oracle blocks."""

    def __init__(self, url: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._capture = WalCapture(url)
        self._running = asyncio.run_coroutine_threadsafe(self._capture.run(), self._loop)
        self._connection = self._do(database.connect(url, purpose="reader"))
        self._reader = self._do(LogReader.open(self._connection))
        self._position: Position = self._do(self._reader.now(self._connection))

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def changes(self) -> list[list[Change]]:
        """Of each transaction since the last call."""
        batch = self._do(self._reader.read(self._connection, self._position))
        assert not batch.backlog
        self._position = batch.position
        return [list(transaction.changes) for transaction in batch.transactions]

    def close(self) -> None:
        self._do(self._connection.close())
        self._loop.call_soon_threadsafe(self._capture.stop)
        self._running.result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class CapturedPlayer(Player):
    """Plays on a table that is captured, and takes the changes from the log."""

    schema = "public"
    capture: str
    log: Log

    def _create(self) -> None:
        columns = ", ".join(f'"{c.name}" {c.declared}' for c in self.table.columns)
        self._connection.execute("drop table if exists public.t")
        self._connection.execute(
            f"create table public.t ({columns}, primary key ({', '.join(self.table.key)}))".encode()
        )
        self._connection.execute("select headwater.enable_reactivity('t', %s)", (self.capture,))
        self.log.changes()

    def play(self, transactions: Sequence[Sequence[int]]) -> list[list[Change]]:
        super().play(transactions)  # it remembers which keys there are
        return [
            [msgspec.structs.replace(change, table=self.table) for change in changes]
            for changes in self.log.changes()
        ]


@pytest.fixture(scope="module", params=["trigger", "wal"])
def captured(
    request: pytest.FixtureRequest, postgres: EmbeddedPostgres
) -> Iterator[tuple[Connection, type[CapturedPlayer]]]:
    with fresh_database(postgres.url, installed=True) as url:
        log = Log(url)
        player = type("CapturedPlayer", (CapturedPlayer,), {"capture": request.param, "log": log})
        try:
            with connect(url) as connection:
                assert isinstance(connection, psycopg.Connection)
                yield connection, player
        finally:
            log.close()


@pytest.mark.timeout(600 + HISTORIES)
@fuzz(HISTORIES)
@given(history=histories(among=tuple(SAMPLES)))
def test_every_history_equals_the_database_with_changes_from_the_log(
    captured: tuple[Connection, type[CapturedPlayer]], history: History
) -> None:
    connection, player = captured
    play(connection, history, player)
