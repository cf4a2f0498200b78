"""The pipeline as users run it: `headwater pipeline run` in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from headwater.pipeline.spark import shared_session


def headwater(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "headwater", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=_environment() | environment,
    )


def _environment() -> dict[str, str]:
    """Without typed tables, which few tests need, and without an archive made meanwhile."""
    own = {k: v for k, v in os.environ.items() if not k.startswith("HEADWATER_")}
    return own | {"HEADWATER_LAKE_TABLES": "off", "HEADWATER_LAKE_ARCHIVE": "false"}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


class Running:
    """A pipeline that runs."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, lake: str) -> None:
        self.process = process
        self.log = log
        self.lake = lake

    def until(self, condition: Callable[[], object], seconds: float = 100) -> None:
        """Wait for something while the pipeline runs."""
        pause = Event()
        for _ in range(int(seconds / 0.1)):
            if condition():
                return
            assert self.process.poll() is None, self.log.read_text()
            pause.wait(0.1)
        raise AssertionError(self.log.read_text())

    def service(self) -> shared_session.PipelineService:
        self.until(lambda: shared_session.find(self.lake))
        found = shared_session.find(self.lake)
        assert found is not None
        return found

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(100)


@contextmanager
def running(url: str, lake: str, log: Path, *options: str, **variables: str) -> Iterator[Running]:
    """A pipeline inside the block; it is killed if it was not stopped."""
    command = ["pipeline", "run", "--lake", lake, "--master", "local[2,4]", *options]
    environment = _environment() | {"HEADWATER_URL": url, "HEADWATER_LAKE_INTERVAL": "0.2 seconds"}
    environment |= variables
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "headwater", *command],
            env=environment,
            stdout=output,
            stderr=output,
            umask=0o022,
        )
    try:
        yield Running(process, log, lake)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
