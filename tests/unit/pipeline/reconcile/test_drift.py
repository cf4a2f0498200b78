"""The outcomes of comparisons in the lake: the last ones, and those that are removed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from deltalake import DeltaTable

from headwater.model import Position
from headwater.pipeline.lake import delta
from headwater.pipeline.reconcile import drift
from headwater.pipeline.reconcile.comparison import DriftKey
from headwater.pipeline.reconcile.drift import Outcome, TableOutcome

NOW = datetime.now(UTC)


def found(table: str, relation: int, days: float, outcome: Outcome) -> TableOutcome:
    return TableOutcome(
        NOW - timedelta(days=days),
        relation,
        table,
        outcome,
        position=str(Position("1f", 10, 10)),
        missing=2 if outcome == "drift" else 0,
        keys=(DriftKey('{"id":1}', "missing"),) if outcome == "drift" else (),
    )


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "drift")


def rows(path: str) -> list[tuple[str, int, str]]:
    stored = delta.read_arrow(DeltaTable(path), drift.DRIFT).to_pylist()
    ages = ((row["table"], round((NOW - row["at"]).days), row["outcome"]) for row in stored)
    return sorted(ages)


def test_old_outcomes_are_removed(path: str) -> None:
    drift.remove_old(path, timedelta(days=90))  # there is no table
    equal = [found("items", 1, age, "equal") for age in (300, 200)]
    differing = [found("items", 1, age, "drift") for age in (150, 91, 89, 1)]
    dropped = [found("it's gone", 2, age, "failed") for age in (400, 200)]
    drift.save(path, equal)
    for each in [*differing, *dropped]:
        drift.save(path, [each])
    drift.remove_old(path, timedelta(days=90))
    left = [
        ("it's gone", 200, "failed"),
        ("items", 1, "drift"),
        ("items", 89, "drift"),
        ("items", 200, "equal"),
    ]
    assert rows(path) == left
    assert drift.last_equal(path, 1, "1f") == (Position("1f", 10, 10), equal[1].at)
    version = DeltaTable(path).version()
    drift.remove_old(path, timedelta(days=90))
    assert DeltaTable(path).version() == version


def test_the_last_outcomes(path: str) -> None:
    assert drift.last(path) == []
    drift.save(path, [found("items", 1, 1, "drift"), found("orders", 2, 1, "equal")])
    drift.save(path, [found("items", 1, 2, "equal")])
    items, orders = drift.last(path)
    assert (items.table, items.outcome, items.differing, items.keys) == ("items", "drift", 2, ())
    assert (orders.table, orders.outcome, orders.at) == ("orders", "equal", NOW - timedelta(days=1))
