"""A real MariaDB for tests, in a folder of its own on a free port, with the binary log that capture
needs. A test may kill it with SIGKILL and start it again over the same files. It does not wait for
the disk: tests do not crash the machine."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pymysql
from pymysql.connections import Connection

from tests.support.databases import passable_folder

SETTINGS = {
    "log-bin": "binlog",
    "server-id": "1",
    "binlog-format": "ROW",
    "binlog-row-image": "FULL",
    "binlog-row-metadata": "FULL",
    "innodb-flush-log-at-trx-commit": "2",
    "innodb-buffer-pool-size": "64M",
    "innodb-log-file-size": "48M",
    "innodb-use-native-aio": "0",
    "sync-binlog": "0",
    "expire-logs-days": "10",
    "max-allowed-packet": "256M",
    "skip-name-resolve": "1",
    "performance-schema": "0",
}

PASSWORD = "p@ss/wörd:%"
"""Of the user `headwater`. It has characters that a URL must escape."""

ESCAPED_PASSWORD = "p%40ss%2Fw%C3%B6rd%3A%25"

_numbers = itertools.count(1)


class MariaDB:
    """One server. `port` is the same after every start."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        self._folder = folder
        self._settings = SETTINGS | settings
        self._process: subprocess.Popen[bytes] | None = None
        self._user = "mysql" if os.geteuid() == 0 else None
        self.port = _free_port()
        self.data = folder / "data"
        if self._user:
            shutil.chown(folder, self._user)

    def create(self) -> None:
        command = [
            "mariadb-install-db", "--no-defaults", f"--datadir={self.data}",
            "--auth-root-authentication-method=normal", "--skip-test-db", "--skip-name-resolve",
            "--innodb-use-native-aio=0", "--innodb-buffer-pool-size=16M",
        ]  # fmt: skip
        if self._user:
            command.append(f"--user={self._user}")
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        program = shutil.which("mariadbd", path=os.environ.get("PATH", "") + ":/usr/sbin")
        assert program, "MariaDB is missing (Debian: apt-get install mariadb-server)"
        command = [
            program, "--no-defaults", f"--datadir={self.data}", f"--port={self.port}",
            "--bind-address=127.0.0.1", f"--socket={self._folder}/sock",
            f"--pid-file={self._folder}/pid", f"--log-error={self._folder}/log",
        ]  # fmt: skip
        command += [f"--{name}={value}" for name, value in self._settings.items()]
        if self._user:
            command.append(f"--user={self._user}")
        self._process = subprocess.Popen(command, cwd=self._folder)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + 60
        while True:
            with suppress(pymysql.err.OperationalError), self.connect():
                return
            log = self._folder / "log"
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(log.read_text(errors="replace") if log.exists() else "no log")
            time.sleep(0.05)

    def stop(self) -> None:
        self._end(kill=False)

    def kill(self) -> None:
        """With SIGKILL, as a crash."""
        self._end(kill=True)

    def _end(self, *, kill: bool) -> None:
        if self._process is None:
            return
        if kill:
            self._process.kill()
        else:
            self._process.terminate()
        self._process.wait(60)
        self._process = None

    def connect(self, database: str | None = None, **options: Any) -> Connection[Any]:
        """As an administrator."""
        arguments: dict[str, Any] = {
            "host": "127.0.0.1", "port": self.port, "user": "root", "charset": "utf8mb4",
            "database": database, "autocommit": True, "connect_timeout": 10,
        }  # fmt: skip
        return pymysql.connect(**(arguments | options))

    def run(self, *statements: str, database: str | None = None) -> list[tuple[Any, ...]]:
        """The rows of the last statement."""
        with self.connect(database) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall())

    def url(self, database: str, user: str = "headwater", password: str = ESCAPED_PASSWORD) -> str:
        return f"mariadb://{user}:{password}@127.0.0.1:{self.port}/{database}"

    def create_user(self) -> None:
        """The user of the tests, with the rights that the documentation names."""
        self.run(
            f"create or replace user headwater@'%' identified by '{PASSWORD}'",
            "grant replication slave, binlog monitor, select on *.* to headwater@'%'",
        )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def running_mariadb(**settings: str) -> Iterator[MariaDB]:
    """A server with further settings (`binlog_format="STATEMENT"`), stopped at the end."""
    with passable_folder() as folder:
        server = MariaDB(folder, {key.replace("_", "-"): value for key, value in settings.items()})
        server.create()
        server.start()
        server.create_user()
        try:
            yield server
        finally:
            server.kill()


@contextmanager
def fresh_mariadb_database(server: MariaDB) -> Iterator[str]:
    """The name of a new database on that server."""
    name = f"shop_{os.getpid()}_{next(_numbers)}"
    server.run(f"create database {name} character set utf8mb4")
    try:
        yield name
    finally:
        with suppress(pymysql.err.OperationalError):
            server.run(f"drop database if exists {name}")
