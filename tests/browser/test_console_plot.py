"""What the console plots: its module `plot.js`, run by Node."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import headwater
from tests.support.node import node

SOURCES = Path(headwater.__file__).parent

SCRIPT = """
import { readFileSync } from "node:fs";
import { RateSeries } from "./console/plot.js";
const series = new RateSeries();
const [calls, at] = [JSON.parse(readFileSync(0, "utf8")), []];
for (const [name, ...given] of calls) {
  series[name](...given);
  at.push(series.last ?? null);
}
const highest = Math.max(...series.points.map((point) => point.value));
console.log(JSON.stringify({ at, highest }));
"""

# Each: calls of the series, and the rate after each of them.
RATES: dict[str, tuple[list[list[Any]], list[float | None]]] = {
    "reports": (
        [["report", 0, 0], ["report", 1000, 10], ["report", 2000, 30], ["report", 3000, 30]],
        [None, 10, 20, 0],
    ),
    "two reports at nearly the same time": (
        [["report", 0, 0], ["report", 1000, 10], ["report", 1025, 11], ["report", 2000, 20]],
        [None, 10, 10, 10],
    ),
    "no report": (
        [["report", 0, 0], ["report", 1000, 10], ["rest", 3000], ["rest", 4500], ["rest", 9000]],
        [None, 10, 10, 0, 0],
    ),
    "a report after a pause is not a mean over the pause": (
        [["report", 0, 0], ["rest", 60_000], ["report", 60_000, 50], ["report", 120_000, 70]],
        [None, 0, 50, 20],
    ),
    "a source that is paused": (
        [["report", 0, 0], ["report", 1000, 10], ["end"], ["rest", 9000], ["report", 9000, 10],
         ["report", 10_000, 15]],
        [None, 10, None, None, None, 5],
    ),
    "a counter that begins again": (
        [["report", 0, 100], ["report", 1000, 3], ["report", 2000, 5]],
        [None, 0, 2],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RATES)
def test_the_rate_of_a_counter(name: str, tmp_path: Path) -> None:
    calls, rates = RATES[name]
    shutil.copytree(SOURCES / "console", tmp_path / "console")
    shutil.copytree(SOURCES / "javascript", tmp_path / "client")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "ask.js").write_text(SCRIPT)
    done = subprocess.run(
        [str(node()), "ask.js"], cwd=tmp_path, input=json.dumps(calls), capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["at"] == rates
    assert found["highest"] == max(rate for rate in rates if rate is not None)
