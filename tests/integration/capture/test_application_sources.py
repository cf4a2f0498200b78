"""The sources of an application: declared when it starts, and run in one child process that ends
with its parent. The source of these tests cannot be reached: how sources are read is tested
elsewhere."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headwater import Headwater, c
from headwater.capture.declaration import define_source
from headwater.capture.mirror import registry
from headwater.capture.mirror.registry import DeclaredSource
from headwater.database import Connection
from headwater.errors import ConfigError
from headwater.settings import load_settings
from headwater.testing.gateway_process import serving

NOWHERE = "postgresql://headwater:secret@127.0.0.1:9/shop"
"""No server listens on this port."""

WAIT_SECONDS = 30.0


def until(condition: Callable[[], Any]) -> Any:
    """The first value of the condition that is true."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.05)
    return found


def declared(hw: Headwater, **options: Any) -> Headwater:
    hw.source(NOWHERE, **{"tables": ["orders"], "into": "shop", **options})
    return hw


async def known(connection: Connection) -> dict[str, DeclaredSource]:
    return {each.definition.name: each for each in await registry.definitions(connection)}


# ------------------------------------------------------------------------ declared


async def test_a_source_is_written_to_the_database(url: str, connection: Connection) -> None:
    async with declared(Headwater(url, sources_run=False)) as hw:
        found = await known(connection)
        assert found["shop"].definition == hw.sources["shop"]
        assert found["shop"].declared_by == "application"
    tables = {"orders": {"exclude": ["card"], "where": c.status == "open"}, "customers": {}}
    async with declared(Headwater(url, sources_run=False), tables=tables) as hw:
        found = await known(connection)
        assert found["shop"].definition == hw.sources["shop"]
        assert [table.name for table in found["shop"].definition.tables] == ["orders", "customers"]


async def test_a_source_that_is_no_longer_declared_is_reported(
    url: str, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async with declared(Headwater(url, sources_run=False)):
        pass
    await registry.declare(connection, define_source(NOWHERE, into="byhand"), "command")
    await registry.request_pause(connection, "shop")
    await registry.request_pause(connection, "byhand")
    served = Headwater(url)
    served.asgi()
    with caplog.at_level(logging.INFO):
        async with served:
            assert set(await known(connection)) == {"shop", "byhand"}
    (record,) = [each for each in caplog.records if "does not declare it" in each.message]
    assert (record.levelname, "source shop" in record.message) == ("INFO", True)
    assert "source remove" not in caplog.text
    assert "byhand" not in caplog.text


async def test_sources_of_the_file(
    url: str, connection: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOP_PASSWORD", "p@ss")
    text = f"""
        url = "{url}"
        [sources]
        run = false
        [source.shop]
        url = "mysql://headwater:${{SHOP_PASSWORD}}@127.0.0.1:9/shop"
        tables = ["orders"]
    """
    (tmp_path / "headwater.toml").write_text(text)
    settings = load_settings(environment={}, folder=tmp_path)
    async with Headwater(settings=settings):
        found = (await known(connection))["shop"]
    assert found.declared_by == "file"
    assert found.definition.url == "mysql://headwater:${SHOP_PASSWORD}@127.0.0.1:9/shop"
    hw = Headwater(settings=settings)
    with pytest.raises(ConfigError, match=r"source shop is declared already in headwater\.toml"):
        declared(hw)


async def test_what_is_wrong_is_an_error_at_once(url: str, connection: Connection) -> None:
    hw = declared(Headwater(url, sources_run=False))
    with pytest.raises(ConfigError, match="source shop is declared already"):
        declared(hw)
    with pytest.raises(ConfigError, match="source shop2: the URL of a source begins with"):
        hw.source("oracle://db/shop", into="shop2")
    async with hw:
        with pytest.raises(ConfigError, match="source late is declared too late"):
            declared(hw, into="late")
    other = Headwater(url)
    other.source("mysql://app:${NO_SUCH_VARIABLE}@db/shop", into="other")
    with pytest.raises(ConfigError, match=r"source other: .*NO_SUCH_VARIABLE, which is not set"):
        await other.__aenter__()
    assert set(await known(connection)) == {"shop"}


# ------------------------------------------------------------------------ run

PROGRAM = f"""
from headwater import Headwater

hw = Headwater()
hw.source({NOWHERE!r}, tables=["orders"], into="shop")
"""


def runner(url: str, name: str = "shop") -> int | None:
    """The process that reports the state of the source."""
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "select runner from headwater.sources where name = %s and error is not null", (name,)
        ).fetchone()
    return int(row[0].rpartition(":")[2]) if row and row[0] else None


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_one_child_process_runs_the_sources(url: str, tmp_path: Path) -> None:
    """It is another process than the gateway, is started again, and ends with a gateway that is
    killed."""
    (tmp_path / "shop.py").write_text(PROGRAM)
    with serving(url, tmp_path, program="shop:hw") as gateway:
        first = until(lambda: runner(url))
        assert first != gateway.process.pid
        arguments = Path(f"/proc/{first}/cmdline").read_bytes().split(b"\0")
        assert arguments[-4:-1] == [b"source", b"run", b"--json"]
        os.kill(first, signal.SIGKILL)
        second = until(lambda: runner(url) != first and runner(url))
        assert is_alive(second)
        assert gateway.get("/readyz").status_code == 200
        assert "ended with exit code -9" in gateway.log.read_text()
        assert "secret" not in gateway.log.read_text()
        gateway.kill()
        until(lambda: not is_alive(second))


def test_the_child_process_ends_with_its_gateway(url: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(PROGRAM)
    with serving(url, tmp_path, program="shop:hw") as gateway:
        child = until(lambda: runner(url))
        assert gateway.stop() == 0
        assert not is_alive(child)


async def test_a_gateway_runs_sources_that_are_added_later(
    url: str, tmp_path: Path, connection: Connection
) -> None:
    with serving(url, tmp_path):
        await registry.declare(connection, define_source(NOWHERE, into="shop"), "command")
        assert until(lambda: runner(url))


def test_sources_run_elsewhere(url: str, tmp_path: Path) -> None:
    """With `[sources] run = false`, the gateway has no child."""
    (tmp_path / "shop.py").write_text(PROGRAM)
    with serving(url, tmp_path, program="shop:hw", sources_run=False) as gateway:
        children = Path(f"/proc/{gateway.process.pid}/task/{gateway.process.pid}/children")
        assert children.read_text() == ""
        assert runner(url) is None
