"""What every way of capture promises, tried over each of them with its own database.

The source is the judge of the rows, and the log must have each of its changes once.
"""

from __future__ import annotations

import asyncio
import random
from decimal import Decimal
from typing import Any

import pytest

from tests.contract.sources.capture import Capture, LogChange
from tests.contract.sources.driver import SourceDriver


def row(id: int, **values: Any) -> dict[str, Any]:
    return {
        "id": id,
        "name": f"row {id}",
        "amount": Decimal(id) / 4 + Decimal("0.25"),
        "note": None if id % 3 == 0 else f"note {id}",
    } | values


async def write(driver: SourceDriver, *steps: tuple[Any, ...]) -> None:
    """One transaction of these steps: ("insert", table, row), ("update", table, id, values), …"""
    writer = await driver.writer()
    for method, *arguments in steps:
        await getattr(writer, method)(*arguments)
    await writer.commit()


def need(driver: SourceDriver, *abilities: str) -> None:
    """End a test of what this database does not have at all; `SourceDriver.can` has the list."""
    missing = set(abilities) - driver.can
    if missing:
        pytest.skip(f"{driver.kind} has no {', '.join(sorted(missing))}")


async def test_rows_from_before_and_changes_after(driver: SourceDriver, capture: Capture) -> None:
    await driver.create_table("orders")
    await write(driver, ("insert_many", "orders", [row(id) for id in range(1, 8)]))
    await capture.begin("orders")
    await capture.same("orders")
    await write(driver, ("insert", "orders", row(10)))
    await write(driver, ("update", "orders", 10, {"note": None, "amount": Decimal("-0.10")}))
    await write(driver, ("delete", "orders", 3))
    await capture.same("orders")
    changes = await capture.changes("orders")
    assert [change.op for change in changes] == ["insert", "update", "delete"]
    insert, update, delete = changes
    assert insert.before is None
    assert insert.after == update.before
    assert update.after is not None
    assert update.after["note"] is None
    assert delete.before is not None
    assert delete.before["name"] == "row 3"
    assert delete.after is None


async def test_a_key_that_changes(driver: SourceDriver, capture: Capture) -> None:
    need(driver, "rekey")
    await driver.create_table("orders")
    await write(driver, ("insert_many", "orders", [row(1), row(2)]))
    await capture.begin("orders")
    await write(driver, ("rekey", "orders", 1, 5), ("update", "orders", 5, {"name": "moved"}))
    await capture.same("orders")
    assert [change.op for change in await capture.changes("orders")] == [
        "delete", "insert", "update",
    ]  # fmt: skip


async def test_a_rollback_leaves_nothing(driver: SourceDriver, capture: Capture) -> None:
    need(driver, "transactions")
    await driver.create_table("orders")
    await capture.begin("orders")
    writer = await driver.writer()
    await writer.insert("orders", row(1))
    await writer.insert_many("orders", [row(id) for id in range(100, 130)])
    await writer.rollback()
    await write(driver, ("insert", "orders", row(2)))
    await capture.same("orders")
    assert [change.key for change in await capture.changes("orders")] == [2]


async def test_a_transaction_arrives_whole(driver: SourceDriver, capture: Capture) -> None:
    need(driver, "transactions")
    for table in ("orders", "lines"):
        await driver.create_table(table)
    await capture.begin("orders", "lines")
    await write(
        driver,
        ("insert", "orders", row(1)),
        ("insert", "lines", row(1)),
        ("update", "orders", 1, {"name": "twice"}),
        ("insert", "lines", row(2)),
        ("delete", "lines", 1),
    )
    await capture.same("orders", "lines")
    changes = await capture.changes()
    assert [(change.table, change.op) for change in changes] == [
        ("orders", "insert"),
        ("lines", "insert"),
        ("orders", "update"),
        ("lines", "insert"),
        ("lines", "delete"),
    ]
    assert len({change.xid for change in changes}) == 1


async def test_two_writers_at_once(driver: SourceDriver, capture: Capture) -> None:
    need(driver, "interleave")
    await driver.create_table("orders")
    await capture.begin("orders")
    first, second = await driver.writer(), await driver.writer()
    await first.insert("orders", row(1))
    await second.insert("orders", row(2))
    await first.insert("orders", row(3))
    await second.commit()
    await write(driver, ("update", "orders", 2, {"name": "after the second"}))
    await first.update("orders", 1, {"name": "from the first"})
    await first.commit()
    await capture.same("orders")
    changes = [(change.op, change.key) for change in await capture.changes("orders")]
    if driver.kind == "triggers":
        # Rows are numbered when they are written; readers put transactions in commit order.
        changes.sort(key=lambda change: [2, 1, 3].index(change[1]))
        changes.insert(3, changes.pop())
    assert changes == [
        ("insert", 2), ("update", 2), ("insert", 1), ("insert", 3), ("update", 1),
    ]  # fmt: skip


async def test_bulk(driver: SourceDriver, capture: Capture) -> None:
    """More rows than a part has."""
    await driver.create_table("orders")
    await capture.begin("orders")
    await write(driver, ("insert_many", "orders", [row(id) for id in range(1, 5_002)]))
    await capture.same("orders")
    changes = await capture.changes("orders")
    assert [change.key for change in changes] == list(range(1, 5_002))
    if "transactions" in driver.can:
        assert len({change.xid for change in changes}) == 1


async def test_a_large_value(driver: SourceDriver, capture: Capture) -> None:
    """One of 300 KB that the updates after it do not touch."""
    await driver.create_table("orders")
    await write(driver, ("insert", "orders", row(1, note="ä" * 150_000)))
    await capture.begin("orders")
    await write(driver, ("update", "orders", 1, {"name": "small"}))
    await write(driver, ("insert", "orders", row(2, note="é" * 150_000)))
    await write(driver, ("update", "orders", 2, {"name": "small, too"}))
    await capture.same("orders")
    assert all(
        change.after and len(change.after["note"]) == 150_000
        for change in await capture.changes("orders")
    )


async def test_truncate(driver: SourceDriver, capture: Capture) -> None:
    need(driver, "truncate")
    await driver.create_table("orders")
    await write(driver, ("insert_many", "orders", [row(1), row(2)]))
    await capture.begin("orders")
    await write(driver, ("truncate", "orders"))
    await write(driver, ("insert", "orders", row(3)))
    await capture.same("orders")
    ops = [change.op for change in await capture.changes("orders")]
    assert ops[-1] == "insert"
    assert set(ops[:-1]) <= {"truncate", "delete"}
    assert ops[:-1]


async def test_every_type(driver: SourceDriver, capture: Capture) -> None:
    """The same text for a value that was copied and for one that came as a change."""
    cases = driver.types
    await driver.create_typed_table("typed", cases)
    await driver.insert_typed("typed", 1, list(cases))
    await driver.insert_typed("typed", 2, [None] * len(cases))
    await capture.begin("typed")
    await driver.insert_typed("typed", 3, list(cases))
    await driver.insert_typed("typed", 4, [None] * len(cases))
    await capture.eventually(lambda: capture.count("typed"), 4)
    expected = [case.mirror_value for case in cases]
    for column, case in enumerate(cases):
        assert await capture.type_of("typed", f"c{column}") == case.mirror_type, case
    for id in (1, 3):
        values = await capture.texts("typed", id)
        for case, value, wanted in zip(cases, values, expected, strict=True):
            assert value == wanted, (id, case)
    for id in (2, 4):
        assert await capture.texts("typed", id) == [None] * len(cases)


async def test_names(driver: SourceDriver, capture: Capture) -> None:
    need(driver, "names")
    name = 'Größe "of" ord\'ers; 表'
    await driver.create_table(name)
    special = row(1, name="naïve — 漢字 🙂", note="tab\tline\nback\\slash")
    await write(driver, ("insert", name, special))
    await capture.begin(name)
    await write(driver, ("insert", name, row(2, name="\\N", note="")))
    await write(driver, ("update", name, 1, {"note": "'\"{}, \\."}))
    await capture.same(name)


async def test_columns_that_change(driver: SourceDriver, capture: Capture) -> None:
    need(driver, "ddl")
    for table in ("orders", "other"):
        await driver.create_table(table)
    await write(driver, ("insert_many", "orders", [row(id) for id in range(1, 6)]))
    await capture.begin("orders", "other")
    await write(driver, ("insert", "orders", row(6)))
    await driver.add_column("orders", "extra", 7)
    await write(driver, ("insert", "orders", row(7, extra=70)))
    await write(driver, ("update", "orders", 6, {"name": "after"}))
    await capture.same("orders")
    await driver.drop_column("orders", "extra")
    await write(driver, ("update", "orders", 2, {"name": "without it"}))
    await write(driver, ("insert", "other", row(1)))
    await capture.same("orders", "other")


async def test_a_copy_under_writes(driver: SourceDriver, capture: Capture) -> None:
    """No gap between the copy and what follows: a writer is at work all the time."""
    await driver.create_table("orders")
    generator = random.Random(8123)
    present = set(range(1, 400))
    await write(driver, ("insert_many", "orders", [row(id) for id in sorted(present)]))
    begun = asyncio.Event()

    async def work() -> None:
        number = 1_000
        while not begun.is_set():
            number += 1
            await write(driver, *random_steps(generator, present, number))
            await asyncio.sleep(0)

    writing = asyncio.create_task(work())
    await capture.begin("orders", chunk_rows=40)
    begun.set()
    await writing
    await capture.same("orders")


def random_steps(generator: random.Random, present: set[int], number: int) -> list[tuple[Any, ...]]:
    """Up to three writes to rows that exist, and one new row."""
    steps: list[tuple[Any, ...]] = [("insert", "orders", row(number))]
    for id in generator.sample(sorted(present), min(3, len(present))):
        if generator.random() < 0.3:
            steps.append(("delete", "orders", id))
            present.discard(id)
        else:
            steps.append(("update", "orders", id, {"name": f"changed in {number}"}))
    present.add(number)
    return steps


@pytest.mark.parametrize("seed", range(3))
async def test_generated_histories(driver: SourceDriver, capture: Capture, seed: int) -> None:
    """Random transactions; after each pause the mirror equals the source, and the log's changes,
    folded from the beginning, give the same rows."""
    generator = random.Random(seed)
    await driver.create_table("orders")
    present: set[int] = set(range(1, 20))
    await write(driver, ("insert_many", "orders", [row(id) for id in sorted(present)]))
    await capture.begin("orders")
    state = {key: dict(values) for key, values in await capture.images("orders")}
    number = 1_000
    for _ in range(4):
        for _ in range(generator.randrange(1, 8)):
            number += 1
            steps = random_steps(generator, present, number)
            if "rekey" in driver.can and generator.random() < 0.4 and len(present) > 1:
                id = generator.choice(sorted(present - {number}))
                steps.append(("rekey", "orders", id, number + 5_000))
                present.remove(id)
                present.add(number + 5_000)
            if "transactions" in driver.can and generator.random() < 0.2:
                await roll_back(driver, [("insert", "orders", row(number + 9_000))])
            await write(driver, *steps)
        await capture.same("orders")
        assert fold(dict(state), await capture.changes("orders")) == dict(
            await capture.images("orders")
        )


async def roll_back(driver: SourceDriver, steps: list[tuple[Any, ...]]) -> None:
    writer = await driver.writer()
    for method, *arguments in steps:
        await getattr(writer, method)(*arguments)
    await writer.rollback()


def fold(state: dict[int, Any], changes: list[LogChange]) -> dict[int, Any]:
    """The rows after the changes; each change must begin where the one before it ended."""
    for change in changes:
        if change.op == "truncate":
            state.clear()
            continue
        assert state.get(change.key) == change.before, change
        if change.after is None:
            del state[change.key]
        else:
            state[change.key] = change.after
    return state
