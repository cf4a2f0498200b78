"""One server of each PostgreSQL release, whose log can be read, and a database for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.contract.sources.drivers.postgres_wal import SETTINGS, PostgresWalDriver
from tests.support.cluster import Cluster, releases, running


@pytest.fixture(scope="session", params=sorted(releases()))
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with running(request.param, SETTINGS) as server:
        yield server


@pytest.fixture(scope="session")
def newest() -> Iterator[Cluster]:
    with running(max(releases(), key=int), SETTINGS) as server:
        yield server


@pytest.fixture
async def driver(cluster: Cluster) -> AsyncIterator[PostgresWalDriver]:
    async with PostgresWalDriver.opened(cluster) as found:
        yield found
