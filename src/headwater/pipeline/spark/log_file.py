"""The log file of Spark and its Java, instead of output on the user's terminal.

Most of the output is for developers of Spark, hundreds of lines an hour. Errors that matter are
raised in Python, and reported in one line. The file is bounded: at its limit it is renamed to
`….old`, which replaces the one before.
"""

from __future__ import annotations

import os
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread

from headwater.limits import SPARK_LOG_BYTES_MAX

_FILE = "_spark.log"
_READ_BYTES = 65_536
_JOIN_SECONDS = 5.0


def of_lake(root: str, otherwise: Path) -> Path:
    """The log file of a lake's pipeline: in the lake, or in the folder `otherwise` for a lake under
    a URL."""
    return otherwise / _FILE if "://" in root else Path(root).expanduser().absolute() / _FILE


def found(root: str, otherwise: Path) -> str | None:
    """The log file, if it exists and this user can read it."""
    path = of_lake(root, otherwise)
    return str(path) if os.access(path, os.R_OK) else None


class LogPipe:
    """A descriptor for the output of a program, which is copied to a file until every process has
    closed the descriptor. The program may start before the file is known."""

    def __init__(self) -> None:
        self._source, self.descriptor = os.pipe()
        self._path: Path | None = None
        self._known = Event()
        self._thread = Thread(target=self._copy, name="spark log", daemon=True)
        self._thread.start()

    def write_to(self, path: Path) -> None:
        self._path = path
        self._known.set()

    def close(self) -> None:
        """Close the descriptor in this process. The program has its own."""
        os.close(self.descriptor)

    def join(self) -> None:
        """Wait until everything that an ended program printed is in the file."""
        self._thread.join(_JOIN_SECONDS)

    def _copy(self) -> None:
        self._known.wait()
        assert self._path is not None
        target: int | None = None
        try:
            while chunk := os.read(self._source, _READ_BYTES):
                # On a full disk lines are lost; Java must not wait for a reader.
                with suppress(OSError):
                    target = _open(self._path) if target is None else _next(self._path, target)
                    os.write(target, chunk)
        finally:
            os.close(self._source)
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


# ------------------------------------------------------------------------ errors


_current: Path | None = None


def use(path: Path) -> None:
    """The file that the Spark of this program writes to."""
    global _current
    _current = path


def record(error: BaseException) -> str:
    """Write an error with its causes to the log of this program's Spark. A sentence that says where
    it is, for the hint of the error that users see."""
    if _current is None:
        return "Spark's log has the details; headwater status prints the path of that file."
    text = "".join(traceback.format_exception(error))
    # A full disk: the message has to be enough.
    with suppress(OSError):
        target = _open(_current)
        try:
            os.write(target, f"{datetime.now(UTC):%y/%m/%d %H:%M:%S} ERROR {text}\n".encode())
        finally:
            os.close(target)
    return f"The whole error is in {_current}."


def cause(text: str) -> str:
    """The line of an error of Spark that says what happened. Errors of Python's workers and of Java
    begin with where they were noticed.

    >>> cause("An exception was thrown:\\n'Traceback (most recent call last):"
    ...       '\\n  File "a.py", line 1, in f\\nValueError: no such region\\n')
    'ValueError: no such region'
    >>> cause("Job aborted.\\nCaused by: java.io.IOException: no route to host\\n\\tat a.b(C.java)")
    'java.io.IOException: no route to host'
    >>> cause("\\nThe table orders is not there. SQLSTATE: 42P01\\n== SQL ==")
    'The table orders is not there. SQLSTATE: 42P01'
    """
    lines = text.splitlines()
    ends = [at for at, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    for line in lines[ends[-1] + 1 :] if ends else ():
        if line.strip() and not line.startswith(" "):
            return line.strip().rstrip("'")
    caused = [line for line in lines if line.startswith("Caused by: ")]
    if caused:
        return caused[-1].removeprefix("Caused by: ").strip()
    return next((line.strip() for line in lines if line.strip()), "")


def last_line(path: Path) -> str:
    """The last line of the log, for an error message."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _READ_BYTES))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines()]
        return next((line for line in reversed(lines) if line), "")
    return ""
