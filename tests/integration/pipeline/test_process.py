"""`headwater serve --with-pipeline`: a child process that is restarted when it ends, and that ends
with its parent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from headwater.errors import ConfigError
from headwater.pipeline import packages
from headwater.pipeline.lake import delta
from headwater.pipeline.spark import shared_session
from headwater.pipeline.tables import layout
from headwater.pipeline.tables.options import MASKED
from tests.support.lake.tables import execute, make_orders

pytestmark = pytest.mark.timeout(300)


@contextmanager
def serving(url: str, lake: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_")}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "headwater", "serve", "--port", "0", "--with-pipeline"],
            env=environment | {"HEADWATER_URL": url, "HEADWATER_LAKE_LOCATION": str(lake)},
            cwd=log.parent,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def owner(lake: Path) -> int | None:
    """The process that holds the lake's lock."""
    try:
        found = re.search(r"process (\d+)", (lake / "_lock").read_text())
    except FileNotFoundError:
        return None
    return int(found[1]) if found and is_alive(int(found[1])) else None


def is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def typed_orders(lake: Path) -> list[tuple[Any, ...]]:
    """The rows of the typed table; none while it is missing."""
    table = delta.open_table(str(lake / layout.FOLDER / "public" / "orders" / layout.CURRENT))
    rows = [] if table is None else table.to_pyarrow_table().to_pylist()
    return [(row["id"], row["note"]) for row in rows]


def until(condition: Callable[[], object], log: Path, seconds: float = 120) -> None:
    pause = Event()
    for _ in range(int(seconds / 0.1)):
        if condition():
            return
        pause.wait(0.1)
    raise AssertionError(log.read_text())


def test_a_child_of_the_gateway(url: str, tmp_path: Path) -> None:
    make_orders(url)
    execute(url, "insert into orders values (1, 5, 'private')")
    lake, log = tmp_path / "lake", tmp_path / "log"
    (tmp_path / "headwater.toml").write_text(
        "[lake]\ntables = '0 seconds'\n[lake.table.orders]\nmask = ['note']\n"
    )
    with serving(url, lake, log) as gateway:
        until(lambda: owner(lake), log)
        first = owner(lake)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: owner(lake) not in (None, first), log)
        second = owner(lake)
        assert second is not None
        until(lambda: shared_session.find(str(lake)), log)
        until(lambda: typed_orders(lake), log)
        assert typed_orders(lake) == [(1, MASKED)]
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(100) == 0, log.read_text()
        assert not is_alive(second)
    assert not (lake / shared_session.FILE).exists()
    assert "pipeline │ ended with exit code -9; restarting in 1 s" in log.read_text()
    assert "killed" not in log.read_text()

    with serving(url, lake, log) as gateway:
        until(lambda: owner(lake), log)
        third = owner(lake)
        assert third is not None
        gateway.kill()
        until(lambda: not is_alive(third), log)


def test_without_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PACKAGES", ("no_such_package",))
    with pytest.raises(ConfigError, match="no_such_package") as caught:
        packages.require()
    assert caught.value.hint == "pip install 'headwater[spark]'"
