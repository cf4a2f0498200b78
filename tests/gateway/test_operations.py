"""What operators see: how a gateway starts, refuses to start, stops, and reports its health."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater import connect
from headwater.database import Connection
from headwater.testing.gateway_process import serving
from tests.support.applications.shop import open_shop, until

QUERY = {"table": "orders", "limit": 3}


def serve(url: str, folder: Path, *arguments: str, **settings: str) -> tuple[int, dict[str, Any]]:
    """Run `headwater serve`, which must fail; returns its exit code and its error."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_")}
    environment |= {f"HEADWATER_{name.upper()}": value for name, value in settings.items()}
    done = subprocess.run(
        [sys.executable, "-m", "headwater", "serve", "--json", *arguments],
        cwd=folder,
        env=environment | {"HEADWATER_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, json.loads(done.stderr.splitlines()[-1])["error"]


def test_serving_without_authentication_needs_a_flag(url: str, tmp_path: Path) -> None:
    code, error = serve(url, tmp_path, "--host", "0.0.0.0", "--port", "0")
    assert code == 2
    assert "no authentication" in error["message"]
    assert "--insecure" in error["hint"]


def test_a_port_in_use_is_named(url: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, error = serve(url, tmp_path, "--port", str(port))
    assert code == 2
    assert str(port) in error["message"]


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("nothing:hw", "No module named"),
        ("shop:other", "has no attribute"),
        ("shop:number", "is not a Headwater object"),
        ("broken:hw", "division by zero"),
    ],
)
def test_a_program_that_cannot_be_served(
    url: str, tmp_path: Path, program: str, reason: str
) -> None:
    (tmp_path / "shop.py").write_text("number = 1")
    (tmp_path / "broken.py").write_text("1 / 0")
    code, error = serve(url, tmp_path, program)
    assert code == 2
    assert reason in error["message"]


def test_without_its_database_it_does_not_start(tmp_path: Path) -> None:
    code, error = serve("postgresql://127.0.0.1:1/nothing", tmp_path)
    assert code == 3
    assert error["code"] == "database"


async def test_health_and_metrics(url: str, connection: Connection, tmp_path: Path) -> None:
    await open_shop(connection, rows=10)
    with serving(url, tmp_path) as gateway:
        assert gateway.get("/healthz").json() == {"status": "ok"}
        ready = gateway.get("/readyz").json()
        assert ready["status"] == "ok"
        async with connect(gateway.url) as hw, hw.live(QUERY) as live:
            await connection.execute("update orders set note = 'new' where id = 1")
            await until(lambda: live.rows[0]["note"] == "new")
            assert gateway.metric("headwater_database_up") == 1
            assert gateway.metric("headwater_views") == 1
            assert gateway.metric("headwater_subscriptions", kind="live") == 1
            assert gateway.metric("headwater_sessions", transport="websocket") == 1
            assert gateway.metric("headwater_changes_total") == 1
            assert gateway.metric("headwater_flush_seconds_count") == 1
            assert gateway.metric("headwater_lag_seconds_count") == 1
        await until(lambda: gateway.metric("headwater_sessions") == 0)
        assert gateway.metric("headwater_subscriptions") == 0


TRACED = """
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    provider = TracerProvider()
    out = open("spans.json", "w", buffering=1)
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(
        out=out, formatter=lambda span: span.to_json(indent=None) + "\\n")))
    trace.set_tracer_provider(provider)

    from headwater import Headwater
    hw = Headwater()
"""


async def test_traces(url: str, connection: Connection, tmp_path: Path) -> None:
    await open_shop(connection, rows=10)
    (tmp_path / "traced.py").write_text(textwrap.dedent(TRACED))
    with serving(url, tmp_path, program="traced:hw") as gateway:
        async with connect(gateway.url) as hw, hw.live(QUERY) as live:
            await connection.execute("update orders set note = 'new' where id = 1")
            await until(lambda: live.rows[0]["note"] == "new")
    spans = [json.loads(line) for line in (tmp_path / "spans.json").read_text().splitlines()]
    (subscribe,) = [span for span in spans if span["name"] == "headwater.subscribe"]
    assert subscribe["attributes"] == {"headwater.kind": "live"}
    (flush,) = [span for span in spans if span["name"] == "headwater.flush"]
    assert flush["attributes"] == {"headwater.changes": 1, "headwater.views": 1}
    assert flush["start_time"] < flush["end_time"]


async def test_the_log_is_json(url: str, connection: Connection, tmp_path: Path) -> None:
    rule = """
        from headwater import Headwater
        hw = Headwater()

        @hw.authorize
        def rule(identity, request):
            raise ValueError("the password is swordfish")
    """
    await open_shop(connection, rows=1)
    (tmp_path / "failing.py").write_text(textwrap.dedent(rule))
    with serving(url, tmp_path, program="failing:hw") as gateway:
        answer = gateway.get("/v1/live", params={"q": json.dumps(QUERY)})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (403, "authorize_failed")
        assert "swordfish" not in answer.text
        assert gateway.stop() == 0
        lines = [json.loads(line) for line in gateway.log.read_text().splitlines()]
    (failed,) = [line for line in lines if line["level"] == "error"]
    assert "swordfish" in failed["error"]
    number = error["message"].partition("(error ")[2].rstrip(")")
    assert number in failed["message"]


async def test_stopping_ends_streams_and_refuses_new_ones(
    url: str, connection: Connection, tmp_path: Path
) -> None:
    await open_shop(connection, rows=1)
    with (
        serving(url, tmp_path) as gateway,
        httpx.stream("POST", f"{gateway.url}/v1/live", json=QUERY, trust_env=False) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines) == "event: hello"
        assert gateway.stop() == 0
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert rest[-1]["type"] == "error"
    assert (rest[-1]["code"], rest[-1]["retryable"]) == ("stopping", True)
