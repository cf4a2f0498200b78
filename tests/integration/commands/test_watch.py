"""`headwater watch` as it is used: in a pipe, as JSON, in a terminal, through a gateway."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.commands.test_cli import HEADWATER, environment, headwater, psql
from tests.support.fake_gateway import fake_gateway

WAIT_SECONDS = 30.0
ORDERS = (
    "create table orders (id int primary key, status text, amount numeric)",
    "insert into orders values (1, 'new', 12.50), (2, 'new', 200)",
    "select headwater.enable_reactivity('orders')",
)
EXPENSIVE = ("watch", "orders", "--where", "amount > 100", "--order", "amount desc")


@pytest.fixture
def database(url: str) -> str:
    psql(url, *ORDERS)
    return url


class Watch:
    """`headwater watch` in another terminal, or in a pipe."""

    def __init__(self, *arguments: str, terminal: int | None = None) -> None:
        self.process = subprocess.Popen(
            [*HEADWATER, *arguments],
            stdout=subprocess.PIPE if terminal is None else terminal,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(TERM="xterm-256color"),
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def end(self, signal_: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(signal_)
        self.process.communicate(timeout=30)
        return self.process.returncode


@pytest.fixture
def watches() -> Iterator[list[Watch]]:
    opened: list[Watch] = []
    yield opened
    for watch in opened:
        watch.process.kill()
        watch.process.communicate()


def test_in_a_pipe(database: str, watches: list[Watch]) -> None:
    watch = Watch(*EXPENSIVE, "--columns", "amount", "--url", database)
    watches.append(watch)
    assert [watch.line(), watch.line()] == ["reset", "enter   2  id=2 amount=200"]
    psql(database, "insert into orders values (3, 'new', 300)")
    assert watch.line() == "enter   3  id=3 amount=300"
    psql(database, "update orders set amount = 50 where id = 2")
    assert watch.line() == "leave   2"
    assert watch.end() == 130


def test_as_json(database: str, watches: list[Watch]) -> None:
    watch = Watch(*EXPENSIVE, "--json", "--url", database)
    watches.append(watch)
    ((reset,), second) = json.loads(watch.line())["deltas"], {"id": 2, "status": "new"}
    assert (reset["delta"], [row["key"] for row in reset["rows"]]) == ("reset", [[2]])
    assert reset["rows"][0]["row"] == {**second, "amount": "200"}
    psql(database, "delete from orders where id = 2; insert into orders values (4, 'x', 400)")
    batch: dict[str, Any] = json.loads(watch.line())
    assert [delta["delta"] for delta in batch["deltas"]] == ["leave", "enter"]
    assert set(batch) == {"deltas", "position", "at"}
    assert watch.end(signal.SIGTERM) == 0


class Terminal:
    """A terminal of 80 by 24 that shows what is written to it."""

    def __init__(self) -> None:
        self.reading, self.writing = pty.openpty()
        fcntl.ioctl(self.writing, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.set_blocking(self.reading, False)
        self.seen = ""

    def shows(self, text: str) -> bool:
        deadline = time.monotonic() + WAIT_SECONDS
        while text not in self.seen and time.monotonic() < deadline:
            try:
                self.seen += os.read(self.reading, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.02)
        return text in self.seen

    def close(self) -> None:
        os.close(self.reading)
        os.close(self.writing)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


GREEN, YELLOW = "\x1b[32m", "\x1b[33m"


def test_in_a_terminal(database: str, watches: list[Watch], terminal: Terminal) -> None:
    watch = Watch(*EXPENSIVE, "--url", database, terminal=terminal.writing)
    watches.append(watch)
    assert terminal.shows("1 row")
    assert GREEN not in terminal.seen
    psql(database, "insert into orders values (3, 'new', 300)")
    assert terminal.shows("2 rows")
    assert terminal.shows(GREEN)
    psql(database, "update orders set status = 'paid' where id = 2")
    assert terminal.shows("paid")
    assert terminal.shows(YELLOW)
    assert watch.end() == 130


async def test_through_a_gateway(watches: list[Watch]) -> None:
    """The gateway is a fake; tests/gateway has the real one."""
    async with fake_gateway() as fake:
        fake.put(1, 10)
        watch = Watch("watch", "orders", "--gateway", fake.url, "--token", "t", "--json")
        watches.append(watch)
        first = json.loads(await asyncio.to_thread(watch.line))
        assert [row["key"] for row in first["deltas"][0]["rows"]] == [[1]]
        fake.cut()
        fake.put(2, 20)
        second = json.loads(await asyncio.to_thread(watch.line))
        assert [delta["key"] for delta in second["deltas"]] == [[2]]
        assert fake.tokens == ["t", "t"]
        assert await asyncio.to_thread(watch.end) == 130


ERRORS = [
    (["nowhere", "--url", "{url}"], 1, "capture", "table nowhere is not enabled"),
    (["orders", "--where", "colour = 1", "--url", "{url}"], 2, "invalid_query", "colour"),
    (["orders", "--where", "colour", "--url", "{url}"], 2, "invalid_query", "condition"),
    (["orders", "--limit", "0", "--url", "{url}"], 2, "invalid_query", "limit"),
    (["orders", "--gateway", "x", "--url", "{url}"], 2, "config", "contradict"),
    (["orders", "--gateway", "localhost:8484"], 2, "config", "not the URL of a gateway"),
    (["orders"], 2, "config", "no database is given"),
]


@pytest.mark.parametrize(("arguments", "code", "name", "message"), ERRORS)
def test_errors(arguments: list[str], code: int, name: str, message: str, database: str) -> None:
    arguments = [argument.format(url=database) for argument in arguments]
    done = headwater("watch", *arguments, "--json")
    assert done.returncode == code, done.stderr
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert error["code"] == name
    assert message in error["message"]
