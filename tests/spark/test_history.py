"""The history of a row, the audit, and both on the command line."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from headwater.admin.history import Version, from_lake
from headwater.commands.cli import app
from headwater.errors import ConfigError, InvalidQuery
from headwater.model import Position
from headwater.pipeline.lake import audit
from headwater.pipeline.lake.parquet import write_files
from tests.support.lake.truth import Database, copy, fill, lake_at, opened

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headwater.pipeline.reading.lake import Lake

pytestmark = pytest.mark.timeout(900)


class Shop:
    """Orders with a history."""

    lake: Lake
    then: Position
    url: str


def write(database: Database, who: str, *statements: str) -> None:
    with database.transaction():
        database.execute("select set_config('headwater.user_id', %s, true)", [who])
        database.execute("select set_config('headwater.function_name', 'sell', true)")
        for statement in statements:
            database.execute(statement.encode())


@pytest.fixture
def shop(url: str, spark: SparkSession, tmp_path: Path) -> Shop:
    shop = Shop()
    shop.lake, shop.url = lake_at(tmp_path, spark), url
    with opened(url) as database:
        database.execute("create table orders (id int primary key, amount numeric(8,2), note text)")
        database.execute("insert into orders values (1, 1, 'old'), (2, 2, 'same')")
        database.execute("select headwater.enable_reactivity('orders')")
        shop.lake.snapshot(url, "orders")
        write(database, "ann", "update orders set amount = 5.5 where id = 1")
        write(database, "bob", "insert into orders values (42, 7, null)")
        shop.then = copy(database, "orders").position
        write(
            database,
            "ann",
            "update orders set note = 'a' where id = 42",
            "update orders set note = 'b', amount = 8 where id = 42",
        )
        write(database, "bob", "delete from orders where id = 42")
        database.execute("alter table orders add column extra int")
        write(database, "ann", "insert into orders values (42, 9, 'again', 3)")
        database.execute("truncate orders")
        database.execute("truncate orders")
    fill(shop.lake, url)
    return shop


def versions(lake: Lake, key: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = lake.history("orders", key).toArrow().to_pylist()
    return found


def test_history(shop: Shop) -> None:
    found = versions(shop.lake, 42)
    assert [(v["op"], v["user_id"], v["changed"]) for v in found] == [
        ("insert", "bob", None),
        ("update", "ann", ["note"]),
        ("update", "ann", ["amount", "note"]),
        ("delete", "bob", None),
        ("insert", "ann", None),
        ("truncate", None, None),
    ]
    assert [v["row"] and str(v["row"]["amount"]) for v in found] == [
        "7.00", "7.00", "8.00", None, "9.00", None,
    ]  # fmt: skip
    assert [v["row"] and v["row"]["extra"] for v in found] == [None, None, None, None, 3, None]
    # Valid until the next one; a version that its own transaction replaced was never visible.
    assert all(one["valid_to"] == two["valid_from"] for one, two in pairwise(found[:4]))
    assert found[1]["valid_from"] == found[1]["valid_to"]
    assert found[3]["valid_to"] is None


def test_the_console_reads_the_lake(shop: Shop) -> None:
    def read(*key: str) -> list[Version]:
        slots = asyncio.Semaphore(1)
        return asyncio.run(from_lake(shop.lake.root, shop.url, "orders", key, slots))

    found = read("42")
    assert [(version.op, version.user) for version in found[:3]] == [
        ("truncate", None), ("insert", "ann"), ("delete", "bob"),
    ]  # fmt: skip
    assert found[1].after is not None
    assert b'"amount":9.00' in bytes(found[1].after)
    with pytest.raises(InvalidQuery, match="the key of orders"):
        read("42", "43")


def test_rows_from_before_capture(shop: Shop) -> None:
    first = versions(shop.lake, 1)
    assert [(v["op"], v["valid_from"] is None) for v in first] == [
        ("before", True),
        ("update", False),
        ("truncate", False),
    ]
    assert [v["row"] and v["row"]["note"] for v in first] == ["old", "old", None]
    assert [v["op"] for v in versions(shop.lake, (2,))] == ["before", "truncate"]
    assert versions(shop.lake, {"id": 3}) == []


def test_audit(shop: Shop) -> None:
    lake = shop.lake
    counted = lake.audit(["user", "operation"]).toArrow().to_pylist()
    assert {(row["user"], row["operation"]): row["changes"] for row in counted} == {
        (None, "reset"): 1,
        (None, "truncate"): 2,
        ("ann", "insert"): 1,
        ("ann", "update"): 3,
        ("bob", "delete"): 1,
        ("bob", "insert"): 1,
    }
    counted = audit.rolled(audit.counted(lake.events().toArrow()))
    rolled = audit.AuditTable(lake.audit_path)
    for _ in range(2):
        rolled.add(write_files(lake.audit_path, counted, ["day"]), "")
    (total,) = lake.audit([]).toArrow().to_pylist()
    assert total["changes"] == 2 * 9
    day = total["first_at"].replace(hour=0, minute=0, second=0, microsecond=0)
    (whole,) = lake.audit(["function"], since=day).filter("function = 'sell'").collect()
    assert whole["changes"] == 2 * 6
    assert lake.audit(["table"], since=total["last_at"]).collect()[0]["changes"] == 1
    assert lake.audit(["table"], until=day).collect() == []
    with pytest.raises(InvalidQuery, match="cannot be counted by 'colour'"):
        lake.audit(["colour"])


def test_commands(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, lake = CliRunner(), ["--lake", shop.lake.root]

    def run(*arguments: str) -> str:
        done = runner.invoke(app, [*arguments, *lake], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    then = str(shop.then)
    lines = run("asof", "orders", then, "--where", "amount > 2", "--json").splitlines()
    assert sorted(map(json.loads, lines), key=lambda row: int(row["id"])) == [
        {"id": 1, "amount": 5.50, "note": "old"},
        {"id": 42, "amount": 7.00, "note": None},
    ]
    csv = run("asof", "orders", then, "--key", "42", "--format", "csv", "--as-text", "amount")
    assert csv == "id,amount,note\n42,7.00,\n"
    table = run("asof", "orders", then)
    assert "5.50" in table
    assert "same" in table
    file = tmp_path / "orders.parquet"
    run("asof", "orders", then, "--format", "parquet", "--output", str(file))
    assert str(pq.read_table(file).column("amount").type) == "decimal128(8, 2)"
    output = run("history", "orders", "42")
    assert 'note: null → "a"' in output
    assert "bob" in output
    assert "ann" in run("audit", "--today", "--by", "user")
    result = runner.invoke(
        app, ["pipeline", "snapshot", "orders", "--url", shop.url, "--json", *lake]
    )
    assert json.loads(result.stdout)["rows"] == 0
    # Without the option the setting counts, as for the pipeline.
    del lake[:]
    monkeypatch.setenv("HEADWATER_LAKE_LOCATION", shop.lake.root)
    assert "ann" in run("audit", "--by", "user")
    assert "0 days and 0 snapshots removed" in run("pipeline", "trim", "--keep", "90 days")
    with pytest.raises(ConfigError, match="for ever"):
        run("pipeline", "trim")
    with pytest.raises(ConfigError, match="neither a time nor a position"):
        run("asof", "orders", "yesterday")
    with pytest.raises(ConfigError, match="--today and --since"):
        run("audit", "--today", "--since", "2026-01-01")
    with pytest.raises(ConfigError, match="parquet cannot be printed"):
        run("asof", "orders", then, "--format", "parquet")
