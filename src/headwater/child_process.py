"""A part of Headwater as a child process of a gateway, an application or the demo.

The parent starts it, restarts it after a growing pause when it ends by itself, and stops it when
the parent stops. The child's standard input is a pipe that the parent holds: when the parent ends
for any reason, also by SIGKILL, the pipe ends and the child stops. Each line that the child prints
is passed on. What the child does is imported in the child only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import msgspec

from headwater.tasks import ended

logger = logging.getLogger(__name__)

PARENT = "HEADWATER_PARENT"
"""Set in the environment of a child that must stop when its standard input ends."""

_FINAL_EXIT_CODES = {2: "its settings are wrong", 4: "it needs a resync"}
"""Exit codes after which a restart would not help."""


class ChildProcess:
    """`headwater`, or another module, with these arguments. `print_line` gets each line that it
    prints, and messages about the process itself."""

    def __init__(
        self,
        arguments: Sequence[str],
        print_line: Callable[[str], None],
        *,
        environment: Mapping[str, str],
        restart_seconds: tuple[float, float],
        stop_seconds: float,
        module: str = "headwater",
    ) -> None:
        """`environment` is added to that of this process: everybody can read a command line, so a
        URL, which may hold a password, belongs there. `restart_seconds` are the first and the
        longest pause; a child that does not stop in `stop_seconds` is killed."""
        self._command = [sys.executable, "-m", module, *arguments]
        self._process: Process | None = None
        self.environment = os.environ | dict(environment) | {PARENT: "1"}
        self._print_line = print_line
        self._restart_seconds = restart_seconds
        self._stop_seconds = stop_seconds

    @property
    def pid(self) -> int | None:
        """While it runs."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process is not None else None

    async def run(self) -> None:
        """Run it again and again, until cancelled or until a restart would not help."""
        pause, longest = self._restart_seconds
        while True:
            started = asyncio.get_running_loop().time()
            code = await self.run_once()
            if code in _FINAL_EXIT_CODES:
                self._print_line(f"ended: {_FINAL_EXIT_CODES[code]}. It is not restarted")
                return
            if asyncio.get_running_loop().time() - started > longest:
                pause = self._restart_seconds[0]
            self._print_line(f"ended with exit code {code}; restarting in {pause:.0f} s")
            await asyncio.sleep(pause)
            pause = min(pause * 2, longest)

    async def run_once(self) -> int:
        """Run it until it ends, and return its exit code. When cancelled, stop it."""
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            env=self.environment,
            # Ctrl-C reaches only the parent, which stops the child when it is ready to.
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
            self._print_line(line.decode("utf-8", "replace").rstrip())

    async def _stop(self, process: Process) -> None:
        """Send SIGTERM and wait. Output is still read: the child must not block on a full pipe."""
        process.send_signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._stop_seconds):
                await self._pass_on(process)
                await process.wait()
        if process.returncode is None:
            self._print_line("did not stop in time and is killed")
            process.kill()
            await process.wait()


async def _line(stream: asyncio.StreamReader) -> bytes:
    """A line, or a part of one that is too long."""
    try:
        return await stream.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)


class _Record(msgspec.Struct):
    """A line of `headwater.logs`."""

    level: str
    logger: str
    message: str
    error: str | None = None


_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "error": logging.ERROR}


def log_line(line: str) -> None:
    """Log a line that a child printed. A child that logs as JSON appears in the log of this process
    as if it were a part of it."""
    try:
        record = msgspec.json.decode(line, type=_Record)
    except msgspec.DecodeError:
        logger.warning("a child process: %s", line)
        return
    text = record.message if record.error is None else f"{record.message}\n{record.error}"
    level = _LEVELS.get(record.level, logging.WARNING)
    logging.getLogger(record.logger).log(level, "%s", text)


@asynccontextmanager
async def supervised(process: ChildProcess, name: str) -> AsyncIterator[None]:
    """Run the process inside the block. After the block it has ended."""
    task = asyncio.create_task(process.run(), name=name)
    try:
        yield
    finally:
        await ended(task)


def stop_with_parent(stop_seconds: float) -> None:
    """Called in the child: stop when the parent has ended, and exit if stopping takes too long."""
    if os.environ.pop(PARENT, None):
        arguments = (stop_seconds,)
        threading.Thread(
            target=_wait_for_parent, args=arguments, name="parent", daemon=True
        ).start()


def _wait_for_parent(stop_seconds: float) -> None:
    with suppress(OSError):
        while os.read(0, 4096):
            pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(stop_seconds)
    os._exit(1)
