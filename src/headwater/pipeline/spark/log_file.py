"""The log file of Spark and its Java, instead of output on the user's terminal.

Most of the output is for developers of Spark, hundreds of lines an hour. Errors that matter are
raised in Python, and reported in one line. The file is bounded: at its limit it is renamed to
`….old`, which replaces the one before.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from threading import Thread

from headwater.limits import SPARK_LOG_BYTES_MAX

_FILE = "_spark.log"
_READ_BYTES = 65_536


def of_lake(root: str, otherwise: Path) -> Path:
    """The log file of a lake's pipeline: in the lake, or in the folder `otherwise` for a lake under
    a URL."""
    return otherwise / _FILE if "://" in root else Path(root).expanduser().absolute() / _FILE


def found(root: str, otherwise: Path) -> str | None:
    """The log file, if it exists and this user can read it."""
    path = of_lake(root, otherwise)
    return str(path) if os.access(path, os.R_OK) else None


def start(path: Path) -> int:
    """A descriptor for the output of a program. It is copied to the file until every process has
    closed the descriptor."""
    source, target = os.pipe()
    Thread(target=_copy, args=(source, path), name="spark log", daemon=True).start()
    return target


def _copy(source: int, path: Path) -> None:
    target: int | None = None
    try:
        while chunk := os.read(source, _READ_BYTES):
            # On a full disk lines are lost; Java must not wait for a reader.
            with suppress(OSError):
                target = _open(path) if target is None else _next(path, target)
                os.write(target, chunk)
    finally:
        os.close(source)
        if target is not None:
            os.close(target)


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def _next(path: Path, target: int) -> int:
    """The file to write to: a new one when this one is full."""
    if os.fstat(target).st_size < SPARK_LOG_BYTES_MAX:
        return target
    path.replace(path.with_name(f"{path.name}.old"))
    new = _open(path)
    os.close(target)
    return new


def last_line(path: Path) -> str:
    """The last line of the log, for an error message."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _READ_BYTES))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")
    return ""
