"""A Spark cluster of processes on this machine: a master and a worker, from the wheel."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from headwater.pipeline.spark.java import find_java

_PACKAGE = "org.apache.spark.deploy"
_SECONDS = 60.0


@contextmanager
def spark_cluster(folder: Path, *, cores: int = 2) -> Iterator[str]:
    """The address of a master with one worker. Both end with the block."""
    home = Path(pyspark.__file__).parent
    environment = os.environ | {
        "SPARK_HOME": str(home),
        "JAVA_HOME": str(find_java(folder).home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_WORKER_DIR": str(folder / "work"),
    }
    start = [str(home / "bin" / "spark-class")]
    place = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    master = [*start, f"{_PACKAGE}.master.Master", *place]
    worker = [*start, f"{_PACKAGE}.worker.Worker", *place, "--cores", str(cores), "--memory", "1g"]
    with _running(master, environment, folder / "master.log") as log:
        address = _found(log, r"Starting Spark master at (spark://[\w.:]+)")
        with _running([*worker, address], environment, folder / "worker.log") as log:
            _found(log, r"(Successfully registered with master)")
            yield address


@contextmanager
def _running(command: list[str], environment: dict[str, str], log: Path) -> Iterator[Path]:
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            yield log
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(_SECONDS)


def _found(log: Path, pattern: str) -> str:
    """What a program writes to its log; waits for it."""
    pause = threading.Event()
    for _ in range(int(_SECONDS / 0.1)):
        if match := re.search(pattern, log.read_text()):
            return match[1]
        pause.wait(0.1)
    raise AssertionError(log.read_text())


def executors(folder: Path) -> list[int]:
    """The processes of the executors of the cluster in a folder."""
    return [
        int(each.name)
        for each in Path("/proc").iterdir()
        if each.name.isdigit() and _is_executor(each, folder / "work")
    ]


def _is_executor(process: Path, work: Path) -> bool:
    try:
        is_here = (process / "cwd").readlink().is_relative_to(work)
        return is_here and b"CoarseGrainedExecutorBackend" in (process / "cmdline").read_bytes()
    except OSError:  # it has ended
        return False
