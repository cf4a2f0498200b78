"""Runs the stand-in as a process that can be killed and started again with the same data, and gives
each test a database: there, or on the real server that `HEADWATER_TEST_MONGODB_URL` names."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from tests.support.paths import ROOT

REAL = os.environ.get("HEADWATER_TEST_MONGODB_URL")
_numbers = itertools.count(1)


class StandIn:
    """One server process on a free port of the loopback interface."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._data, self._options = folder / f"oplog-{uuid.uuid4().hex}.bson", options
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        alone = {"--standalone", "--router"} & set(self._options)
        name = "" if alone else "?replicaSet=standin"
        return f"mongodb://127.0.0.1:{self.port}/{name}"

    def start(self) -> None:
        command = [
            sys.executable, "-m", "tests.support.mongodb.server",
            "--port", str(self.port), "--data", str(self._data), *self._options,
        ]  # fmt: skip
        # The server ends when its standard input does: it never outlives a test that is killed.
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        """With SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdout is not None
            assert process.stdin is not None
            process.stdout.close()
            process.stdin.close()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def with_new_database(server_url: str) -> str:
    """The server's URL with the name of a database that no other test uses."""
    name = f"headwater_test_{os.getpid()}_{next(_numbers)}"
    return urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))
