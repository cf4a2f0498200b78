"""A table that is dropped at the source: its mirror stays as it was, and the other tables are
followed, whether or not a runner was there when it happened."""

from __future__ import annotations

from functools import partial

import pytest

from headwater.capture.mirror import registry
from tests.contract.sources.capture import MirrorCapture
from tests.contract.sources.driver import SourceDriver
from tests.contract.sources.test_contract import need, row, write


async def warns(mirror: MirrorCapture) -> bool:
    (source,) = await registry.sources(mirror.connection)
    return "the table customers is no longer at the source" in (source.warning or "")


@pytest.mark.parametrize("runs", [True, False], ids=["running", "stopped"])
async def test_a_dropped_table(driver: SourceDriver, mirror: MirrorCapture, runs: bool) -> None:
    need(driver, "missing")
    for table in ("orders", "customers"):
        await driver.create_table(table)
        await write(driver, ("insert", table, row(1)))
    await mirror.begin("orders", "customers")
    if not runs:
        await mirror.stop()
    await write(driver, ("insert", "orders", row(2)))
    await driver.drop_table("customers")
    await write(driver, ("insert", "orders", row(3)))
    if not runs:
        await mirror.start()
    await mirror.eventually(partial(mirror.states, "orders", "customers"), ["live", "dropped"])
    await mirror.same("orders")
    await mirror.eventually(mirror.state, "running")
    await mirror.eventually(partial(warns, mirror), True)
    assert await mirror.count("customers") == 1


async def test_a_dropped_table_that_is_created_again(
    driver: SourceDriver, mirror: MirrorCapture
) -> None:
    """The next start of its runner copies it."""
    need(driver, "missing")
    for table in ("orders", "customers"):
        await driver.create_table(table)
        await write(driver, ("insert", table, row(1)))
    await mirror.begin("orders", "customers")
    await driver.drop_table("customers")
    await mirror.eventually(partial(mirror.states, "orders", "customers"), ["live", "dropped"])
    await mirror.stop()
    await driver.create_table("customers")
    await write(driver, ("insert", "customers", row(7)))
    await mirror.start()
    await mirror.eventually(partial(mirror.states, "orders", "customers"), ["live", "live"])
    await mirror.same("orders", "customers")
    await mirror.eventually(partial(warns, mirror), False)
