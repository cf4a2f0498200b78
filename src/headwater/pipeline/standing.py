"""A running pipeline lets others use its Spark, instead of starting one of their own, which takes
seconds.

It offers two ways. Commands put questions to it (`answers`) through a socket; Python programs use
its Spark as a Connect server (`Lake.connect`). Both are for the pipeline's own user only: the
socket lies in a folder that nobody else may enter, and Connect wants a token. Where they are is
said by a file beside the lake's lock, which only that user can read. A file whose socket nobody
answers is what a killed pipeline has left; it counts for nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from headwater.limits import ANSWER_CONNECT_SECONDS

FILE = "_service"


class Service(msgspec.Struct, frozen=True):
    """Where a pipeline answers. `connect` and `token` are None where it is no Connect server."""

    pid: int
    socket: str
    connect: str | None = None
    token: str | None = None

    @property
    def remote(self) -> str | None:
        """The address for `SparkSession.builder.remote`."""
        if self.connect is None or self.token is None:
            return None
        return f"{self.connect}/;token={self.token}"


@contextmanager
def private_socket() -> Iterator[str]:
    """A path for a socket, short enough for one, in a folder that only this user may enter."""
    folder = tempfile.mkdtemp(prefix="headwater-")
    try:
        yield f"{folder}/pipeline"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def announced(root: str, service: Service) -> Iterator[None]:
    """Say where the pipeline of a lake answers, for as long as this lasts. Only for whoever holds
    the lake's lock. A lake under a URL says nothing."""
    path = _file(root)
    if path is None:
        yield
        return
    clear(root)
    unfinished = path.with_name(f"{FILE}.{os.getpid()}")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(service))
    unfinished.rename(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def clear(root: str) -> None:
    """Remove what a pipeline that was killed has left."""
    left = _read(root)
    if left is not None and not _answers(left):
        folder = Path(left.socket).parent
        if folder.name.startswith("headwater-"):
            shutil.rmtree(folder, ignore_errors=True)


def find(root: str) -> Service | None:
    """The pipeline that writes to a lake, where one runs and this user may use it."""
    service = _read(root)
    return service if service is not None and _answers(service) else None


def _file(root: str) -> Path | None:
    return None if "://" in root else Path(root).expanduser() / FILE


def _read(root: str) -> Service | None:
    path = _file(root)
    if path is None:
        return None
    # Not there, somebody else's, or not ours at all: then there is none for us.
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=Service)
    return None


def _answers(service: Service) -> bool:
    with suppress(OSError), opened(service):
        return True
    return False


@contextmanager
def opened(service: Service, *, patience: float | None = None) -> Iterator[socket.socket]:
    """A connection to the pipeline. OSError where there is none; TimeoutError, which is one, where
    it says nothing for `patience` seconds."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_CONNECT_SECONDS)
        connection.connect(service.socket)
        connection.settimeout(patience)
        yield connection
