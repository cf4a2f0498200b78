"""A database that the release before the restructuring made is used by this one.

`tests/support/upgrade` says how it was made, and what a restored dump does and does not show. The
lake is opened in `tests/spark/test_upgrade.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater import Headwater, Position
from headwater.capture.postgres.schema import LATEST
from headwater.testing.gateway_process import Served, serving
from tests.integration.commands.test_cli import documents, headwater
from tests.support.lake.tables import execute
from tests.support.upgrade import restore, shop

VERSION = 22
"""The schema of that release."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with restore.restored_database() as url:
        upgraded = documents(headwater("init", "--url", url, "--json"))
        assert upgraded == [{"version": LATEST, "applied": LATEST - VERSION}]
        yield url


def test_status_and_doctor_report_no_problem(url: str) -> None:
    (status,) = documents(headwater("status", "--url", url, "--json"))
    (cursor,) = status["cursors"]
    assert cursor["name"] == restore.facts()["cursor"]["name"]
    assert status["log"]["position"].partition("-")[0] == cursor["position"].partition("-")[0]
    captured = [
        each["name"] for each in status["tables"] if each["enabled"] and not each["altered"]
    ]
    assert captured == ["headwater.pipeline", "kinds", "orders", "parcels", "revenue"]
    (findings,) = documents(headwater("doctor", "--url", url, "--json"))
    tables = [each for each in findings if each["topic"].startswith("table ")]
    assert {each["level"] for each in tables} == {"ok"}
    (views,) = documents(headwater("view", "list", "--url", url, "--json"))
    assert [(each["name"], each["state"], each["error"]) for each in views] == [
        ("revenue", "live", None)
    ]


def test_capture_continues_with_the_same_shape_and_without_a_reset(url: str) -> None:
    last, shape = execute(url, f"select seq, shape {OF_ORDERS} order by seq desc limit 1")[0]
    execute(url, "insert into orders values (40, 'r4', 4, 'new', null)")
    logged = execute(url, f"select op, key ->> 'id', shape {OF_ORDERS} and seq > {last}")
    assert logged == [("insert", "40", shape)]


OF_ORDERS = "from headwater.changes where table_name = 'orders'"


async def test_a_cursor_and_a_position_continue_where_they_were(url: str) -> None:
    seen = f"(select max(seq) {OF_ORDERS} and key ->> 'id' = '7')"
    expected = [seq for (seq,) in execute(url, f"select seq {OF_ORDERS} and seq > {seen}")]
    cursor = restore.facts()["cursor"]
    async with Headwater(url) as hw:
        for options in ({"since": Position.parse(cursor["position"])}, {"cursor": cursor["name"]}):
            found: list[int] = []
            async for transaction in hw.changes("orders", **options):
                found += [change.seq for change in transaction.changes]
                if len(found) >= len(expected):
                    break
            assert found == expected


@pytest.fixture
def gateway(url: str, tmp_path: Path) -> Iterator[Served]:
    shutil.copy(shop.__file__, tmp_path)
    with serving(url, tmp_path, program="shop:hw") as served:
        yield served


def test_clients_continue_at_a_gateway(url: str, gateway: Served) -> None:
    orders = execute(url, "select * from orders order by id")
    mutation = restore.facts()["mutation"]
    again = httpx.post(
        f"{gateway.url}/v1/mutation/{mutation['name']}", json=mutation["arguments"],
        headers={"Idempotency-Key": mutation["key"]}, trust_env=False, timeout=30,
    )  # fmt: skip
    # It is not executed again, or the amount would be another.
    assert again.json()["value"] == mutation["answer"]["value"]
    assert execute(url, "select * from orders order by id") == orders
    live = restore.facts()["live"]
    answer = _snapshot(gateway, {"live": live["query"], "since": live["message"]["position"]})
    ids = [row[0] for row in orders[: live["query"]["limit"]]]
    assert [enter["row"]["id"] for enter in answer["rows"]] == ids
    assert list(answer) == list(live["message"])
    assert list(answer["rows"][0]) == list(live["message"]["rows"][0])


def _snapshot(gateway: Served, body: object) -> dict[str, Any]:
    with httpx.stream(
        "POST", f"{gateway.url}/v1/live", json=body, trust_env=False, timeout=30
    ) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: ") and '"snapshot"' in line:
                found: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return found
    raise AssertionError("no snapshot")
