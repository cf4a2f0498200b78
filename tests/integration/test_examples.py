"""The examples run as they say: each docstring's own commands, against a database of the tests.

The first command serves the application, `curl -N` follows a live query of it, and the last one
writes what the follower then hears of.
"""

from __future__ import annotations

import ast
import asyncio
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
WAIT_SECONDS = 60.0


def commands(example: Path) -> list[str]:
    """What the docstring shows to be typed."""
    text = ast.get_docstring(ast.parse(example.read_text())) or ""
    return re.findall(r"^    (.+)$", text, re.M)


@asynccontextmanager
async def running(command: str, url: str) -> AsyncIterator[asyncio.subprocess.Process]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_")}
    environment = inherited | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HEADWATER_URL": url,
        "NO_PROXY": "*",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    process = await asyncio.create_subprocess_shell(
        command,
        cwd=EXAMPLES,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def heard(process: asyncio.subprocess.Process, pattern: str) -> re.Match[str]:
    """The next line that has this in it."""
    assert process.stdout is not None
    before = []
    while line := (await process.stdout.readline()).decode():
        before.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"{pattern} was not said, but:\n{''.join(before)}")


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*_app.py")), ids=lambda path: path.stem)
async def test_an_example(example: Path, url: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    serve, *before, write = commands(example)
    async with asyncio.timeout(WAIT_SECONDS), running(f"exec {serve} --port 0", url) as server:
        found = await heard(server, r"running on http://(127\.0\.0\.1:\d+)")
        *before, follow, write = (
            line.replace("localhost:8000", found[1]) for line in [*before, write]
        )
        async with running("\n".join([*before, f"exec {follow}"]), url) as follower:
            await heard(follower, '"type":"snapshot".*"rows":\\[]')
            async with running(write, url) as writer:
                assert await writer.wait() == 0
            await heard(follower, '"type":"deltas".*"delta":"enter"')
