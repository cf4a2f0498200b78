"""One MariaDB for the tests of this folder, and a database of its own for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.contract.sources.drivers.mysql import MysqlDriver
from tests.support.mariadb import MariaDB, running_mariadb


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    with running_mariadb() as server:
        yield server


@pytest.fixture
async def driver(mariadb: MariaDB) -> AsyncIterator[MysqlDriver]:
    async with MysqlDriver.opened(mariadb) as driver:
        yield driver
