"""The PostgreSQL source against real servers: what each change of the database becomes."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from headwater.capture.postgres.wal.source import PostgresSource
from headwater.capture.source import (
    UNCHANGED,
    RowChanges,
    TransactionPart,
)
from tests.contract.sources.drivers.postgres_wal import PostgresWalDriver
from tests.integration.capture.wal.replica import Replica, judge


@pytest.fixture
async def source(driver: PostgresWalDriver) -> AsyncIterator[PostgresSource]:
    await driver.create_table("orders")
    found = PostgresSource(driver.definition("orders"))
    yield found
    await found.remove()
    await found.close()


async def changes_of(
    driver: PostgresWalDriver, source: PostgresSource, *statements: str
) -> list[RowChanges]:
    """The changes of transactions that follow a first copy."""
    replica = Replica(source)
    await replica.begin()
    await replica.catch_up(driver.url)
    replica.save()
    await driver.execute(*statements)
    replica.items.clear()
    await replica.catch_up(driver.url)
    for name, table in replica.tables.items():
        if name not in replica.dropped:
            rows = sorted(replica.rows[name].values(), key=repr)
            assert rows == await judge(driver.url, table, f"public.{name}"), name
    return [c for item in replica.items if isinstance(item, TransactionPart) for c in item.changes]


async def test_each_operation_is_one_change(
    driver: PostgresWalDriver, source: PostgresSource
) -> None:
    changes = await changes_of(
        driver,
        source,
        "insert into orders values (1, 'a', 1.5, null), (2, 'b', 2, 'x')",
        "update orders set name = 'c' where id = 1",
        "update orders set id = 3 where id = 1",
        "delete from orders where id = 2",
        "truncate orders",
    )
    assert changes == [
        RowChanges("orders", "insert", [("1", "a", "1.50", None), ("2", "b", "2.00", "x")]),
        RowChanges("orders", "update", [("1", "c", "1.50", None)]),
        RowChanges(
            "orders", "update", [("3", "c", "1.50", None)], [("1", UNCHANGED, UNCHANGED, UNCHANGED)]
        ),
        RowChanges("orders", "delete", (), [("2", UNCHANGED, UNCHANGED, UNCHANGED)]),
        RowChanges("orders", "truncate"),
    ]
