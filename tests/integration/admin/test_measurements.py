"""The metrics of sources and cursors, as they are in the database."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headwater import Headwater
from headwater.admin import measurements
from headwater.admin.measurements import DatabaseMetrics
from headwater.database import Connection
from headwater.log import cursors
from headwater.metrics import Metrics

Value = Callable[..., float | None]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def value(metrics: Metrics) -> Value:
    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"headwater_{name}", labels)

    return value


@pytest.fixture(autouse=True)
def read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "METRICS_SECONDS_MIN", 0.0)


SOURCES = """
    insert into headwater.sources (name, kind, into_schema, tables, lag, state, changes,
                                   transactions, lag_bytes)
    values
      ('shop', 'mysql', 'shop', '[{"name": "a", "target": "a", "state": "copying", "copied": 25,
        "estimate": 100}, {"name": "b", "target": "b", "state": "live", "copied": 7}]',
       1.5, 'copying', 12, 3, 4096),
      ('crm', 'sqlite', 'crm', '[]', null, 'failed', 0, 0, null)
"""


async def test_sources(url: str, connection: Connection, metrics: Metrics, value: Value) -> None:
    await connection.execute(SOURCES)
    probe = DatabaseMetrics(url, metrics)
    await probe.measure()
    assert value("source_state", source="shop", state="copying") == 1
    assert value("source_state", source="shop", state="failed") == 0
    assert value("source_up", source="shop") == 0, "no process has its lease"
    assert value("source_lag_seconds", source="shop") == 1.5
    assert value("source_lag_seconds", source="crm") is None
    assert value("source_lag_bytes", source="shop") == 4096
    assert value("source_changes_total", source="shop") == 12
    assert value("source_transactions_total", source="shop") == 3
    assert value("source_copied_rows", source="shop") == 32
    assert value("source_estimated_rows", source="shop") == 100
    assert value("source_tables_copying", source="shop") == 1
    await connection.execute("delete from headwater.sources where name = 'crm'")
    await connection.execute("update headwater.sources set state = 'running', changes = 20")
    await probe.measure()
    assert value("source_state", source="crm", state="failed") is None
    assert value("source_state", source="shop", state="running") == 1
    assert value("source_changes_total", source="shop") == 20


async def test_cursors(url: str, connection: Connection, metrics: Metrics, value: Value) -> None:
    await connection.execute("create table orders (id int primary key)")
    hw = Headwater(url)
    hw.table("orders")
    async with hw:
        await cursors.save(connection, "late", await hw.position())
        await connection.execute("insert into orders values (1)")
        await cursors.save(connection, "current", await hw.position())
        await DatabaseMetrics(url, metrics).measure()
    retention = 30 * 86_400
    assert value("cursor_lag_seconds", cursor="current") == 0
    assert value("cursor_left_seconds", cursor="current") == retention
    lag, left = (value(f"cursor_{name}_seconds", cursor="late") for name in ("lag", "left"))
    assert lag is not None
    assert lag > 0
    assert left is not None
    assert left < retention
    assert value("cursor_lost", cursor="late") == 0


async def test_there_are_none_while_the_database_is_away(
    url: str, connection: Connection, metrics: Metrics, value: Value
) -> None:
    await connection.execute(SOURCES)
    probe = DatabaseMetrics(url, metrics)
    await probe.measure()
    assert value("source_up", source="shop") is not None
    probe._url = "postgresql://127.0.0.1:9/nowhere"
    await probe.measure()
    assert value("source_up", source="shop") is None
    assert value("source_changes_total", source="shop") is None
