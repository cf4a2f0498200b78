"""Runs a scripted source in a thread, as `headwater source run` does in a process. The test may run
commands and clients meanwhile."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headwater.capture.kinds import open_source
from headwater.capture.running.runner import OpenSource
from headwater.capture.running.supervisor import Supervisor
from headwater.capture.source import SourceDefinition
from tests.support.scripted_source import History, ScriptedSource


class ScriptedDatabase:
    """A history of which `commits` have happened, and the changes before `oldest` are forgotten.
    `open` gives a source that reads it."""

    def __init__(self, seed: int = 7, commits: int = 40) -> None:
        self.history = History(seed, commits, truncates=False)
        self.commits = 0
        self.oldest = 0
        self.opened: list[ScriptedSource] = []

    def open(self, definition: SourceDefinition) -> ScriptedSource:
        source = ScriptedSource(
            definition, self.history, lambda: self.commits, random.Random(len(self.opened)),
            oldest=self.oldest,
        )  # fmt: skip
        self.opened.append(source)
        return source


@contextmanager
def running(url: str, database: ScriptedDatabase) -> Iterator[None]:
    """The sources of the Headwater database at the URL run inside the block, and read the scripted
    database."""
    with supervised(url, database.open):
        yield


@contextmanager
def supervised(url: str, opens: OpenSource = open_source) -> Iterator[None]:
    """A supervisor in a thread."""
    supervisor = Supervisor(url, open_source=opens, poll_seconds=0.5, retry_seconds=0.1)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(supervisor.run()))
    thread.start()
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(supervisor.stop(), loop).result(30)
        thread.join(30)
        loop.close()
