"""The data pipeline as a child process of a gateway or of the demo.

Started, and started again with a pause that grows when it ends by itself; told to stop and waited
for when its parent stops. Its input is a pipe that the parent holds: when the parent dies, however
it dies, the pipe ends and the child stops. What it prints is passed on, each line with a prefix.
Spark runs in that other process: nothing of it is loaded here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec

from headwater.errors import ConfigError
from headwater.limits import CHILD_RESTART_SECONDS, CHILD_STOP_SECONDS
from headwater.tasks import ended

PARENT = "HEADWATER_PARENT"
"""Set for a child that is to end with its input."""

PACKAGES = ("pyspark", "deltalake", "adbc_driver_postgresql", "pyarrow")

_FOR_GOOD = {2: "its settings are wrong", 4: "it must begin anew"}
"""Exit codes after which starting it again would not help."""


def missing() -> list[str]:
    """The packages of the pipeline that are not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


def require() -> None:
    """ConfigError where the pipeline is not installed."""
    if lacking := missing():
        raise ConfigError(
            f"the pipeline needs {lacking[0]}, which is not installed",
            hint="pip install 'headwater[spark]'",
        )


class Child:
    """A pipeline that is kept running. `say` gets the lines that it prints, and ours about it."""

    def __init__(
        self,
        url: str,
        lake: str,
        say: Callable[[str], None],
        *,
        options: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
        patience: float = CHILD_STOP_SECONDS,
    ) -> None:
        self._command = [sys.executable, "-m", "headwater", "pipeline", "run", *options]
        # The URL may hold a password: everybody can read a command line.
        own = {PARENT: "1", "HEADWATER_URL": url, "HEADWATER_LAKE": lake}
        self._environment = os.environ | dict(settings or {}) | own
        self._say = say
        self._patience = patience

    async def run(self) -> None:
        """Keep it running, until cancelled or until it ends for good."""
        pause, longest = CHILD_RESTART_SECONDS
        while True:
            started = asyncio.get_running_loop().time()
            code = await self._once()
            if code in _FOR_GOOD:
                self._say(f"ended: {_FOR_GOOD[code]}. It is not started again")
                return
            if asyncio.get_running_loop().time() - started > longest:
                pause = CHILD_RESTART_SECONDS[0]
            self._say(f"ended with {code}; it is started again in {pause:.0f} s")
            await asyncio.sleep(pause)
            pause = min(pause * 2, longest)

    async def _once(self) -> int:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            env=self._environment,
            # Ctrl-C is for the parent, which then says it to the child in its own time.
            start_new_session=True,
        )
        try:
            await self._pass_on(process)
            return await process.wait()
        finally:
            if process.returncode is None:
                await self._stop(process)

    async def _pass_on(self, process: Process) -> None:
        assert process.stdout is not None
        while line := await _line(process.stdout):
            self._say(line.decode("utf-8", "replace").rstrip())

    async def _stop(self, process: Process) -> None:
        """Tell it to stop, and wait; it prints meanwhile, and must not wait for a reader."""
        process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                await self._pass_on(process)
                await process.wait()
        if process.returncode is None:
            self._say("did not stop in time, and is killed")
            process.kill()
            await process.wait()


def absolute(lake: str) -> str:
    """The lake, wherever a process that is told of it runs."""
    return lake if "://" in lake else os.path.abspath(os.path.expanduser(lake))


async def _line(stream: asyncio.StreamReader) -> bytes:
    """A line, or a piece of one that is too long."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)


@asynccontextmanager
async def kept_running(child: Child) -> AsyncIterator[None]:
    """The child inside the block; after it, it has ended."""
    task = asyncio.create_task(child.run(), name="pipeline")
    try:
        yield
    finally:
        await ended(task)


def end_with_parent() -> None:
    """For the child: stop when the parent is gone. What does not stop in time is ended."""
    if os.environ.pop(PARENT, None):
        threading.Thread(target=_watch, name="parent", daemon=True).start()


def _watch() -> None:
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(CHILD_STOP_SECONDS)
    os._exit(1)
