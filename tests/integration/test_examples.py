"""The examples run as they say: each docstring's own commands, against a database of the tests.

The first command serves the application, `curl -N` follows a query of it, and the last one writes
a change that the follower receives. The FastAPI example is used from Python as well, by two users.
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

import httpx
import pytest

from headwater import Refused, Unauthorized, connect
from tests.support.applications.chat import EventSource, following
from tests.support.applications.shop import until
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
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


async def line_with(process: asyncio.subprocess.Process, pattern: str) -> re.Match[str]:
    """The next line of output with this pattern."""
    assert process.stdout is not None
    before = []
    while line := (await process.stdout.readline()).decode():
        before.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"{pattern} was not said, but:\n{''.join(before)}")


@asynccontextmanager
async def served(example: Path, url: str) -> AsyncIterator[str]:
    """The example as its first command serves it; where."""
    command = f"exec {commands(example)[0]} --port 0"
    async with asyncio.timeout(WAIT_SECONDS), running(command, url) as server:
        yield (await line_with(server, r"running on http://(127\.0\.0\.1:\d+)"))[1]


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*_app.py")), ids=lambda path: path.stem)
async def test_an_example(example: Path, url: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    async with served(example, url) as address:
        _, *before, follow, write = (
            line.replace("localhost:8000", address) for line in commands(example)
        )
        async with running("\n".join([*before, f"exec {follow}"]), url) as follower:
            await line_with(follower, r'"(rows|value)":\[]')
            async with running("\n".join([*before, write]), url) as writer:
                assert await writer.wait() == 0
            await line_with(follower, r'"delta":"enter"|"type":"result".*"title":"Sweep"')


async def test_the_chat(url: str) -> None:
    """Two viewers in terminals and one like a browser see an answer grow; a late viewer sees all of
    it, and no client can follow a chat that does not exist."""
    async with served(EXAMPLES / "chat.py", url) as address:
        _, watch, ask = commands(EXAMPLES / "chat.py")
        watch = f"CHAT_URL=http://{address}/live exec {watch}"
        source = EventSource(f"http://{address}/live", "chat:1,chat:9")
        async with running(watch, url) as ann, running(watch, url) as bob, following(source):
            for viewer in (ann, bob):
                await line_with(viewer, "watching chat:1")
            async with running(ask.replace("localhost:8000", address), url) as asking:
                assert await asking.wait() == 0
            for viewer in (ann, bob):
                await line_with(viewer, r"you: Why is the sky blue\? \(done\)")
                await line_with(viewer, r"model: .+ \(streaming\)")
                await line_with(viewer, r"model: You ask: .* it is still open\. \(done\)")
            await until(lambda: {row["state"] for row in source.rows.values()} == {"done"})
            assert source.shrunk == []
            assert source.batches > 3
            assert source.errors == {"chat:9": "forbidden"}
            async with running(watch, url) as late:
                await line_with(late, r"it is still open\. \(done\)")
        async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as http:
            assert "EventSource" in (await http.get("/")).text


async def token_of(user: str, password: str, address: str) -> str:
    async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as http:
        answer = await http.post("/token", auth=(user, password))
        assert answer.status_code == 200, answer.text
        return answer.text


async def test_a_new_user_of_the_fastapi_example(url: str) -> None:
    async with served(EXAMPLES / "fastapi_app.py", url) as address:
        live = f"http://{address}/live"
        with pytest.raises(Unauthorized) as refused:
            async with connect(live):
                pass
        assert refused.value.code == "token_missing"
        ann, bob = await token_of("ann", "tea", address), await token_of("bob", "pot", address)
        async with connect(live, token=ann) as hw, connect(live, token=bob) as other:
            async with (
                hw.subscribe("open_tasks") as tasks,
                other.subscribe("open_tasks") as others,
                hw.live("tasks") as rows,
            ):
                assert (tasks.value, others.value, rows.rows) == ([], [], [])
                added = await hw.mutate("add_task", title="Sweep")
                await hw.wait_for(added.position)
                await other.wait_for(added.position)
                assert tasks.value == [{"id": added.value, "title": "Sweep"}]
                assert [row["owner"] for row in rows.rows] == ["ann"]
                assert others.value == []
            with pytest.raises(Refused, match="a task needs a title") as no:
                await hw.mutate("add_task", title=" ")
            assert no.value.code == "title"


async def test_the_fastapi_example_refuses_clients_without_a_token(url: str) -> None:
    async with (
        served(EXAMPLES / "fastapi_app.py", url) as address,
        httpx.AsyncClient(base_url=f"http://{address}", trust_env=False) as http,
    ):
        assert (await http.post("/token", auth=("ann", "pot"))).status_code == 401
        for path in ("query/open_tasks", "query/open_tasks/subscribe", "mutation/add_task", "live"):
            answer = await http.post(f"/live/v1/{path}", json={"title": "Sweep"})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "token_missing"
