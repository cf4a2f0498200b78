"""The JavaScript client against a real gateway: pytest starts the servers, `node --test` tests."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.embedded import EmbeddedPostgres
from tests.support.databases import FAST, fresh_database, passable_folder
from tests.support.node import node, packages
from tests.support.paths import ROOT
from tests.support.stage import staged

CLIENT = ROOT / "clients" / "js"

ALONE = (
    "values", "connection", "topics", "subscriptions", "slides", "tabs", "positions", "release"
)  # fmt: skip
STAGED = ("client", "reconnect")


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL of its own, which the test restarts."""
    with passable_folder() as folder, EmbeddedPostgres(folder / "data", settings=FAST) as server:
        yield server


def run(name: str, **environment: str) -> None:
    # Node 20 has a WebSocket only with an option.
    command = [
        str(node()),
        "--experimental-websocket",
        "--test",
        str(CLIENT / "tests" / f"{name}.test.js"),
    ]
    done = subprocess.run(
        command,
        cwd=CLIENT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", STAGED)
def test_the_tests_that_need_a_server(name: str, server: EmbeddedPostgres, tmp_path: Path) -> None:
    with (
        fresh_database(server.url, installed=True) as database,
        staged(server, database, tmp_path) as control,
    ):
        run(name, HEADWATER_STAGE=control)


def test_types() -> None:
    packages(CLIENT)
    command = [str(node()), "node_modules/typescript/bin/tsc", "--project", "."]
    done = subprocess.run(command, cwd=CLIENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ALONE)
def test_the_tests_that_need_no_server(name: str) -> None:
    run(name)
