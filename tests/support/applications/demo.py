"""`headwater demo` as a person runs it: a process, a page, and a database that others can reach."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, LiteralString

import httpx
import psycopg

from headwater.embedded import EmbeddedPostgres


class Demo:
    """A demo that is running."""

    def __init__(self, folder: Path, *options: str, port: int | None = 0) -> None:
        self.data = folder / "shop"
        self.lake = Path(f"{self.data}-lake")
        self._options = options
        self.said: list[str] = []
        self.open(port)

    def open(self, port: int | None) -> None:
        """Start it, and wait for the page."""
        command = [sys.executable, "-m", "headwater", "demo", "--data-dir", str(self.data)]
        place = [] if port is None else ["--port", str(port)]
        # Under nohup it would inherit that SIGHUP is ignored, and tests send it.
        ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        try:
            self.process = subprocess.Popen(
                [*command, "--no-browser", *place, *self._options],
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                env={k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_")},
            )
        finally:
            signal.signal(signal.SIGHUP, ignored)
        self.page = self.wait_for(r"^ *page +(\S+)")
        self.home = self.page.removesuffix("/demo/")
        self.port = int(self.home.rpartition(":")[2])

    def wait_for(self, pattern: str) -> str:
        """The text at that place of the page, once it is there."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.rstrip())
            if found := re.search(pattern, line):
                return found[1] if found.groups() else found[0]
        raise AssertionError(f"it never said {pattern}: {self.said}")

    @property
    def postgres(self) -> EmbeddedPostgres:
        return EmbeddedPostgres(self.data)

    def write(self, statement: LiteralString, *values: Any) -> Any:
        """Run a statement on another connection; returns the first row, if there is one."""
        with psycopg.connect(self.postgres.url, autocommit=True) as connection:
            cursor = connection.execute(statement, values)
            row = cursor.fetchone() if cursor.description else None
        return row and row[0]

    def psql(self, statement: str) -> str:
        """The output of psql, run as the page says."""
        about = httpx.get(f"{self.home}/demo/about", trust_env=False).json()
        options = ["--quiet", "--no-align", "--tuples-only", "--command", statement]
        command = [*shlex.split(about["psql"]), *options]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        return answer.stdout.strip()

    def sessions(self) -> float:
        """How many connections the gateway has."""
        lines = httpx.get(f"{self.home}/metrics", trust_env=False).text.splitlines()
        return sum(
            float(line.split()[1]) for line in lines if line.startswith("headwater_sessions{")
        )

    def close(self, number: signal.Signals = signal.SIGINT) -> int:
        """Stop it, and wait until it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        assert self.process.stderr is not None
        if not self.process.stderr.closed:
            with self.process.stderr as rest:
                self.said += rest.read().splitlines()
        return self.process.wait(60)


@contextmanager
def opened(folder: Path, *options: str) -> Iterator[Demo]:
    demo = Demo(folder, *options)
    try:
        yield demo
    finally:
        demo.close()
