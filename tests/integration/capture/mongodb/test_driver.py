"""The driver of the contract suite does what its protocol says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from pathlib import Path

import pytest

from headwater.capture.mongodb.source import MongoSource
from headwater.capture.source import SourceDefinition
from headwater.errors import PositionLost
from tests.contract.sources.drivers.mongodb import MongoDriver
from tests.support.mongodb.follower import Mirror, copied, following
from tests.support.mongodb.process import REAL

Sources = Callable[[SourceDefinition], MongoSource]


@pytest.fixture
async def source_of() -> AsyncIterator[Sources]:
    sources = list[MongoSource]()

    def make(definition: SourceDefinition) -> MongoSource:
        sources.append(MongoSource(definition))
        return sources[-1]

    yield make
    for source in sources:
        await source.close()


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[MongoDriver]:
    driver = MongoDriver(tmp_path)
    yield driver
    await driver.close()


async def test_rows_are_mirrored(driver: MongoDriver, source_of: Sources) -> None:
    name = 'Bestellungen "Zoë"'
    await driver.create_table(name)
    source = source_of(driver.definition(name))
    mirror = Mirror(await source.start())
    async with following(source, mirror) as until:
        writer = await driver.writer()
        row = {"id": 1, "name": "a", "amount": Decimal("1.50"), "note": None}
        await writer.insert_many(name, [row, row | {"id": 2}, row | {"id": 3}])
        await writer.update(name, 1, {"amount": Decimal("2.25"), "note": "n"})
        await writer.delete(name, 3)
        await writer.commit()
        lost = await driver.writer()
        await lost.insert(name, row | {"id": 4})
        await lost.rollback()
        await until(lambda: mirror.transactions)
    assert await driver.rows(name) == [
        (1, "a", Decimal("2.25"), "n"), (2, "a", Decimal("1.50"), None),
    ]  # fmt: skip
    found = [row[2:] for row in mirror.tables[name].values()]
    assert found == [("1", "a", "2.25", "n"), ("2", "a", "1.50", None)]


async def test_typed_tables(driver: MongoDriver, source_of: Sources) -> None:
    await driver.create_typed_table("typed", driver.types)
    await driver.insert_typed("typed", 1, list(driver.types))
    await driver.insert_typed("typed", 2, [None] * len(driver.types))
    source = source_of(driver.definition("typed"))
    (table,) = await source.tables()
    assert [c.type for c in table.columns][3:] == [case.declared for case in driver.types]
    first, second = await copied(source, table)
    assert [value is None for value in first[3:]] == [c.mirror_value is None for c in driver.types]
    assert set(second[3:]) == {None}


@pytest.mark.skipif(REAL is not None, reason="breaks the server")
async def test_the_server_can_be_broken(driver: MongoDriver, source_of: Sources) -> None:
    await driver.create_table("orders")
    source = source_of(driver.definition("orders"))
    position = await source.start()
    await driver.kill_server()
    await driver.start_server()
    writer = await driver.writer()
    await writer.insert("orders", {"id": 1})
    await writer.commit()
    assert len(await driver.rows("orders")) == 1
    await driver.lose_position()
    mirror = Mirror(position)
    async with following(source, mirror) as until:
        with pytest.raises(PositionLost):
            await until(lambda: False)
