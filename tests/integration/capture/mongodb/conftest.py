"""A MongoDB for the tests of this folder: the stand-in, or the server of
`HEADWATER_TEST_MONGODB_URL`, with a fresh database for each test."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pymongo import AsyncMongoClient
from pymongo.asynchronous.database import AsyncDatabase

from headwater.capture.mongodb.source import MongoSource
from headwater.capture.source import SourceDefinition, TableSpec
from tests.support.mongodb.process import REAL, StandIn, with_new_database

UNRAISABLE = "pytest.PytestUnraisableExceptionWarning"


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """PyMongo does not close its socket when connecting is cancelled. It is collected here, so that
    the warning belongs to this test and not to a later one."""
    yield
    gc.collect()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/capture/mongodb/" in item.nodeid:
            item.add_marker(pytest.mark.filterwarnings(f"ignore::{UNRAISABLE}"))


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if REAL is not None:
        yield REAL
        return
    server = StandIn(tmp_path_factory.mktemp("mongodb"))
    yield server.url
    server.kill()


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[Callable[..., StandIn]]:
    """Starts servers of a test's own, to break or to configure."""
    servers = list[StandIn]()

    def start(*options: str) -> StandIn:
        servers.append(StandIn(tmp_path, *options))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@pytest.fixture
def mongodb_url(shared_server: str) -> str:
    return with_new_database(shared_server)


Shop = AsyncDatabase[dict[str, Any]]


@pytest.fixture
async def shop(mongodb_url: str) -> AsyncIterator[Shop]:
    client: AsyncMongoClient[dict[str, Any]] = AsyncMongoClient(mongodb_url)
    database = client.get_default_database()
    yield database
    with suppress(Exception):
        await client.drop_database(database.name)
    await client.close()


@pytest.fixture
async def source_of(mongodb_url: str) -> AsyncIterator[Callable[..., MongoSource]]:
    """Makes sources of the test's database, or of another URL, and closes them."""
    sources = list[MongoSource]()

    def make(*tables: TableSpec | str, url: str = mongodb_url, **options: Any) -> MongoSource:
        specs = tuple(TableSpec(t) if isinstance(t, str) else t for t in tables)
        sources.append(MongoSource(SourceDefinition("shop", url, "shop", specs, options=options)))
        return sources[-1]

    yield make
    for source in sources:
        await source.close()
