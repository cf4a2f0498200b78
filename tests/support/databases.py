"""Databases for tests: settings of a server that may lose data in a crash, folders that it may
enter, and a fresh database for each test, copied from one in which Headwater is installed."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg

from headwater.capture.postgres import schema
from headwater.database import connect

_numbers = itertools.count(1)

# Tests do not crash the machine; without this each commit waits for the disk.
FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


@contextmanager
def passable_folder() -> Iterator[Path]:
    """Not pytest's own: as root the server runs as another user, who may not enter that."""
    with tempfile.TemporaryDirectory(prefix="headwater-") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@contextmanager
def fresh_database(server_url: str, *, installed: bool) -> Iterator[str]:
    """The URL of a new database on that server, with or without Headwater's schema."""
    name = f"test_{next(_numbers)}"
    template = _template(server_url) if installed else "template0"
    # As files: no other session writes to the template, and the usual way logs every page.
    creation = f"create database {name} template {template} strategy file_copy"
    _drop_finished(server_url)
    run_statements(server_url, creation)
    url = database_url(server_url, name)
    if installed:
        run_statements(url, *_NEW_IDENTITY)
    try:
        yield url
    finally:
        _finished.setdefault(server_url, []).append(name)


_NEW_IDENTITY = (
    "delete from headwater.shapes",
    "update headwater.secret set key = headwater.new_secret()",
    "update headwater.installation set home = headwater.home(), id = left(md5(random()::text), 16)",
)
"""What `headwater.adopt()` does with a copy in which nothing is captured. It also truncates each
partition of the log, which takes longer than the copy."""

_finished: dict[str, list[str]] = {}
"""By server, the databases of tests that are over. Each is dropped when the next one is created:
its sessions have ended by then, and PostgreSQL waits 100 ms for one that has not."""


def _drop_finished(server_url: str) -> None:
    """A slot of the database may still be read by a process that is ending."""
    with psycopg.connect(server_url, autocommit=True) as connection:
        for name in _finished.pop(server_url, []):
            until = time.monotonic() + 10
            while True:
                try:
                    connection.execute(f"drop database if exists {name} with (force)".encode())
                    break
                except psycopg.errors.ObjectInUse:
                    if time.monotonic() > until:
                        raise
                    connection.execute(
                        "select pg_terminate_backend(active_pid, 1000) from pg_replication_slots"
                        " where database = %s and active",
                        (name,),
                    )


@cache
def _template(server_url: str) -> str:
    """A database with the schema, made once a server: copying it is quicker than installing."""
    run_statements(server_url, "create database headwater_template template template0")

    async def install() -> None:
        connection = await connect(
            database_url(server_url, "headwater_template"), purpose="test", application_path=True
        )
        await schema.install(connection)
        await connection.close()

    finish(install())
    return "headwater_template"


def finish(work: Coroutine[Any, Any, None]) -> None:
    """Run it to its end in a thread; fixtures may run inside an event loop of their own."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, work).result()


def run_statements(server_url: str, *statements: str) -> None:
    with psycopg.connect(server_url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def database_url(server_url: str, name: str) -> str:
    return urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))
