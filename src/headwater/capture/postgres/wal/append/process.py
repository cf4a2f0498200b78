"""Runs `WalCapture` in a process of its own, so that decoding does not stop an event loop.

`WalCaptureProcess` watches the database once a second. When tables are captured from the WAL and no
process does it, it starts one; so does every other gateway, and one of them gets the lock. The URL
goes to the process through its standard input, which stays open: when its parent has gone, the
process reads the end of it and stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys

import psycopg

from headwater.capture.postgres.wal.append import runner
from headwater.database import Connection, connect
from headwater.errors import HeadwaterError

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
"""How long a process may take to stop; then it is killed, which loses nothing."""


class WalCaptureProcess:
    """`run` watches until it is cancelled."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process that captures, if this one started it."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process is not None else None

    async def run(self) -> None:
        connection: Connection | None = None
        try:
            while True:
                try:
                    if connection is None or connection.closed:
                        connection = await connect(self._url, purpose="WAL capture watch")
                    await self._look(connection)
                except (psycopg.Error, HeadwaterError, OSError) as error:
                    logger.debug("cannot look after WAL capture: %s", error)
                await asyncio.sleep(runner.LOOK_SECONDS)
        finally:
            if connection is not None:
                await connection.close()
            await self._stop()

    async def _look(self, connection: Connection) -> None:
        if self.pid is None and await runner.is_free(connection):
            await self._start()

    async def _start(self) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", WalCaptureProcess.__module__,
            stdin=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(self._url.encode() + b"\n")
        await process.stdin.drain()
        self._process = process

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _main() -> None:
    loop, capture = asyncio.get_running_loop(), None
    stdin = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    url = (await stdin.readline()).decode().strip()
    capture = runner.WalCapture(url, leaves_when_idle=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, capture.stop)
    running = asyncio.create_task(capture.run())
    parent = asyncio.create_task(stdin.read())
    await asyncio.wait({running, parent}, return_when=asyncio.FIRST_COMPLETED)
    capture.stop()
    parent.cancel()
    await running


if __name__ == "__main__":
    # Writers and readers go first where there are not enough processors; a batch is larger then.
    with contextlib.suppress(OSError):
        os.nice(1)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    asyncio.run(_main())
