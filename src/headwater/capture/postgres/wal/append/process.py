"""Runs `WalCapture` in a process of its own, so that decoding does not stop an event loop.

`WalCaptureProcess` looks at the database once a second. When tables are captured from the WAL and
no process does it, it starts one; so does every other gateway, and one of them gets the slot. After
a process that ended early, the next look is later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from asyncio import sleep

import psycopg

from headwater.capture.postgres.wal.append import runner
from headwater.child_process import ChildProcess, log_line, stop_with_parent
from headwater.database import Connection, connect
from headwater.errors import HeadwaterError
from headwater.logs import log_as_json
from headwater.settings.names import variable

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
"""How long a process may take to stop; then it is killed, which loses nothing."""


_LONGEST_PAUSE_SECONDS = 30.0


class WalCaptureProcess(ChildProcess):
    """`run` looks until it is cancelled."""

    def __init__(self, url: str) -> None:
        super().__init__(
            [],
            log_line,
            module=WalCaptureProcess.__module__,
            environment={variable("url"): url},
            restart_seconds=(runner.LOOK_SECONDS, _LONGEST_PAUSE_SECONDS),
            stop_seconds=_STOP_SECONDS,
        )
        self._url = url

    async def run(self) -> None:
        connection: Connection | None = None
        shortest, longest = self._restart_seconds
        pause = shortest
        try:
            while True:
                ended_early = False
                try:
                    if connection is None or connection.closed:
                        connection = await connect(self._url, purpose="WAL capture watch")
                    if await runner.is_free(connection):
                        started = time.monotonic()
                        await self.run_once()
                        ended_early = time.monotonic() < started + runner.STEADY_SECONDS
                except (psycopg.Error, HeadwaterError, OSError) as error:
                    logger.debug("cannot look after WAL capture: %s", error)
                if not ended_early:
                    pause = shortest
                await sleep(pause)
                pause = min(pause * 2, longest)
        finally:
            if connection is not None:
                await connection.close()


async def _main() -> None:
    capture = runner.WalCapture(os.environ[variable("url")], leaves_when_idle=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, capture.stop)
    await capture.run()


if __name__ == "__main__":
    # Writers and readers go first where there are not enough processors; a batch is larger then.
    with contextlib.suppress(OSError):
        os.nice(1)
    log_as_json(logging.WARNING)
    stop_with_parent(_STOP_SECONDS)
    asyncio.run(_main())
