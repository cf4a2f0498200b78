"""Every command that takes --embedded, on an embedded database in which nothing is installed.

The commands come from the command line itself, so a command that is added must be listed here. They
run in this process, except those that run until they are stopped. Spark is not started: the tests
look at the database that a command finds before.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner

from headwater.capture.postgres.schema import LATEST
from headwater.commands.cli import app
from headwater.commands.lake import replay
from headwater.embedded import EmbeddedPostgres
from headwater.errors import ConfigError
from headwater.pipeline import application
from tests.support.command_tree import COMMANDS, options_of
from tests.support.databases import FAST, passable_folder

ARGUMENTS: dict[str, list[str]] = {
    "url": [],
    "init": [],
    "stop": ["--force"],
    "enable": ["orders"],
    "disable": ["orders"],
    "status": [],
    "doctor": [],
    "watch": ["nowhere"],
    "explain": ["select * from orders"],
    "uninstall": ["--yes"],
    "replay": ["orders", "--into", "orders_again"],
    "pipeline run": ["--once"],
    "pipeline snapshot": ["orders"],
    "pipeline resnapshot": [],
    "pipeline reconcile": ["orders"],
    "source add": ["sqlite:////nowhere/shop.db", "--into", "shop"],
    "source check": ["shop"],
    "source list": [],
    "source status": ["shop"],
    "source pause": ["shop"],
    "source resume": ["shop"],
    "source resnapshot": ["shop"],
    "source remove": ["shop", "--yes"],
    "view list": [],
    "view rebuild": ["revenue"],
    "view drop": ["revenue", "--yes"],
}
ENDLESS = {"tail": [], "serve": ["--port", "0"]}

LEAVE_NOTHING = ("stop", "uninstall")
"""Commands after which there is no schema to look for."""


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with passable_folder() as folder:
        found = EmbeddedPostgres(folder / "data", settings=FAST)
        yield found
        found.stop(force=True)


@pytest.fixture
def fresh(server: EmbeddedPostgres) -> Iterator[EmbeddedPostgres]:
    """The server, and a table of a user in a database as initdb leaves it."""
    with server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("drop schema if exists headwater cascade")
            connection.execute("create table if not exists orders (id int primary key)")
        yield server


@contextmanager
def no_lake(*_: object) -> Iterator[Any]:
    raise ConfigError("there is no lake here")
    yield


async def no_spark(url: str, *_: object, **__: object) -> list[Any]:
    return []


def version(server: EmbeddedPostgres) -> object:
    with server, psycopg.connect(server.url) as connection:
        row = connection.execute("select max(version) from headwater.migrations").fetchone()
    assert row is not None
    return row[0]


def wait_for_reader(server: EmbeddedPostgres) -> None:
    """Wait until a command follows the log."""
    statement = "select from pg_stat_activity where application_name = 'headwater reader'"
    with psycopg.connect(server.url, autocommit=True) as connection:
        while connection.execute(statement).fetchone() is None:
            time.sleep(0.05)


def test_every_command_is_here() -> None:
    takes = {command for command in COMMANDS if "--embedded" in options_of(command)}
    # Running sources prints nothing that this file could wait for.
    assert takes == ARGUMENTS.keys() | ENDLESS.keys() | {"source run"}


@pytest.mark.parametrize("command", ARGUMENTS)
def test_a_command_installs_what_it_needs_and_prints_json(
    command: str, fresh: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "run", no_spark)
    monkeypatch.setattr(replay, "open_lake", no_lake)
    monkeypatch.setenv("HEADWATER_DATA_DIR", str(fresh.data_dir))
    monkeypatch.setenv("HEADWATER_LAKE_LOCATION", str(tmp_path / "lake"))
    done = CliRunner().invoke(app, [*command.split(), *ARGUMENTS[command], "--embedded", "--json"])
    said = f"{done.output} {done.exception}"
    assert "installed in this database" not in said
    assert "headwater init" not in said
    for line in done.stdout.splitlines():
        json.loads(line)
    if command not in LEAVE_NOTHING:
        assert version(fresh) == LATEST


@pytest.mark.parametrize("command", ENDLESS)
def test_a_long_running_command_installs_what_it_needs(
    command: str, fresh: EmbeddedPostgres
) -> None:
    environment = os.environ | {"HEADWATER_DATA_DIR": str(fresh.data_dir)}
    arguments = [command, *ENDLESS[command], "--embedded"]
    with subprocess.Popen(
        [sys.executable, "-m", "headwater", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(("Following", "Serving"))
        assert version(fresh) == LATEST
        process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("command", ENDLESS)
def test_a_command_that_runs_on_prints_json(command: str, fresh: EmbeddedPostgres) -> None:
    environment = os.environ | {"HEADWATER_DATA_DIR": str(fresh.data_dir)}
    arguments = [command, *ENDLESS[command], "--embedded", "--json"]
    with subprocess.Popen(
        [sys.executable, "-m", "headwater", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        if command == "serve":
            assert json.loads(process.stdout.readline())["url"].startswith("http://")
        else:
            wait_for_reader(fresh)
        process.send_signal(signal.SIGTERM)
        for line in process.stdout:
            json.loads(line)


def test_the_url_says_how_its_server_is_stopped(fresh: EmbeddedPostgres) -> None:
    folder = ["--data-dir", str(fresh.data_dir)]
    found = CliRunner().invoke(app, ["url", "--embedded", "--json", *folder])
    document = json.loads(found.stdout)
    assert document["url"] == fresh.url
    assert document["stop"] == f"headwater stop --embedded --data-dir {fresh.data_dir}"


def test_a_server_in_use_is_stopped_by_force_only(server: EmbeddedPostgres) -> None:
    stop = ["stop", "--embedded", "--data-dir", str(server.data_dir)]
    server.start()
    server.close(keep_running=True)
    with psycopg.connect(server.url, application_name="ledger"):
        refused = CliRunner().invoke(app, stop)
        assert "is in use: ledger as postgres" in str(refused.exception)
        assert "Stopped the server of" in CliRunner().invoke(app, [*stop, "--force"]).stdout
    assert "No server runs in" in CliRunner().invoke(app, stop).stdout
    refused = CliRunner().invoke(app, ["stop"])
    assert "only the embedded PostgreSQL" in str(refused.exception)
