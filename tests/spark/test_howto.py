"""The program on the page about Spark, run as a new user would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psycopg

from tests.integration.test_docs import blocks
from tests.support.paths import ROOT


def test_the_program_prints_every_change(
    url: str, orders: psycopg.Connection, tmp_path: Path
) -> None:
    (program,) = (b for b in blocks(ROOT / "docs/howto/spark.md") if b.mark == "changes.py")
    (tmp_path / "changes.py").write_text(program.text)
    orders.execute("insert into orders values (1, 5)")
    orders.execute("update orders set amount = 6")
    orders.execute("delete from orders")
    done = subprocess.run(
        [sys.executable, "changes.py", url],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.stdout.splitlines() == [
        'insert {"id":1} {"id":1,"amount":5}',
        'update {"id":1} {"id":1,"amount":6}',
        'delete {"id":1} None',
    ], done.stderr
