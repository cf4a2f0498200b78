"""The ways of capture that the suite runs over, each with a database of its own for each test.

A test that asks for `mirror` is about sources only; one that asks for `capture` is about every way.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from headwater.database import Connection
from tests.contract.sources.capture import Capture, LocalCapture, MirrorCapture
from tests.contract.sources.driver import SourceDriver
from tests.contract.sources.drivers.local import LocalDriver
from tests.contract.sources.drivers.mongodb import MongoDriver
from tests.contract.sources.drivers.mysql import MysqlDriver
from tests.contract.sources.drivers.postgres_wal import SETTINGS, PostgresWalDriver
from tests.contract.sources.drivers.sqlite import SqliteDriver
from tests.support.cluster import Cluster, releases, running
from tests.support.mariadb import MariaDB, running_mariadb

LOCAL = ("triggers", "same database WAL")
FOREIGN = ("embedded PostgreSQL", "Debian's PostgreSQL", "MariaDB", "MongoDB", "SQLite")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "way" in metafunc.fixturenames:
        ways = FOREIGN if "mirror" in metafunc.fixturenames else (*LOCAL, *FOREIGN)
        metafunc.parametrize("way", ways)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """PyMongo does not close its socket when connecting is cancelled, which a crash does."""
    for item in items:
        if "[MongoDB" in item.nodeid:
            for kind in ("pytest.PytestUnraisableExceptionWarning", "ResourceWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))


@pytest.fixture(scope="session")
def embedded_cluster() -> Iterator[Cluster]:
    with running("18", SETTINGS) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def system_cluster() -> Iterator[Cluster]:
    (release,) = releases().keys() - {"18"}
    with running(release, SETTINGS) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    with running_mariadb() as server:
        yield server


@pytest.fixture
async def driver(
    way: str, url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[SourceDriver]:
    async with _opened(way, url, tmp_path, request) as driver:
        yield driver


def _opened(
    way: str, url: str, folder: Path, request: pytest.FixtureRequest
) -> AbstractAsyncContextManager[SourceDriver]:
    match way:
        case "embedded PostgreSQL":
            return PostgresWalDriver.opened(request.getfixturevalue("embedded_cluster"))
        case "Debian's PostgreSQL":
            return PostgresWalDriver.opened(request.getfixturevalue("system_cluster"))
        case "MariaDB":
            return MysqlDriver.opened(request.getfixturevalue("mariadb"))
        case "MongoDB":
            return MongoDriver.opened(folder)
        case "SQLite":
            return SqliteDriver.opened(folder)
        case _:
            return LocalDriver.opened(url, way)


@pytest.fixture
async def capture(
    way: str, driver: SourceDriver, connection: Connection, url: str
) -> AsyncIterator[Capture]:
    if way in LOCAL:
        local = partial(LocalCapture, way="wal" if "WAL" in way else "trigger")
        capture: Capture = local(driver, connection, url)
    else:
        capture = MirrorCapture(driver, connection, url)
    async with _ended(capture):
        yield capture


@pytest.fixture
async def mirror(
    driver: SourceDriver, connection: Connection, url: str
) -> AsyncIterator[MirrorCapture]:
    capture = MirrorCapture(driver, connection, url)
    async with _ended(capture):
        yield capture


@asynccontextmanager
async def _ended(capture: Capture) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await capture.end()
