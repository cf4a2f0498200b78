"""A running pipeline lets others use its Spark, instead of starting one of their own, which takes
seconds.

It offers two ways. Commands put questions to it (`answers`) through a socket; Python programs use
its Spark as a Connect server (`Lake.connect`). Both are for the pipeline's own user only: the
socket lies in a folder that no other user may enter, and Connect wants a token. Where they are is
said by a file beside the lake's lock, which only that user can read. It counts only where no other
user can have written it, and where the socket is this user's own. A file whose socket does not
answer is what a killed pipeline has left; it counts for nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from headwater.limits import ANSWER_CONNECT_SECONDS, SERVICE_FILE_BYTES_MAX
from headwater.pipeline import ownership

FILE = "_service"

_PREFIX, _SOCKET = "headwater-", "pipeline"
_ADDRESS = re.compile(r"sc://localhost:[0-9]{1,5}")


class Service(msgspec.Struct, frozen=True):
    """Where a pipeline answers. `connect` and `token` are None where it is no Connect server."""

    pid: int
    socket: str
    connect: str | None = None
    token: str | None = None

    @property
    def remote(self) -> str | None:
        """The address for `SparkSession.builder.remote`."""
        if self.connect is None or self.token is None or not _ADDRESS.fullmatch(self.connect):
            return None
        return f"{self.connect}/;token={self.token}"


@contextmanager
def private_socket() -> Iterator[str]:
    """A path for a socket, short enough for one, in a folder that only this user may enter."""
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    try:
        yield f"{folder}/{_SOCKET}"
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
    unfinished.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(unfinished, flags, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(service))
    unfinished.rename(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def clear(root: str) -> None:
    """Remove what a pipeline that was killed has left: a socket, and the folder made for it. A file
    says where; so no more is removed than a socket and an empty folder."""
    left = _read(root)
    if left is None or _answers(left):
        return
    path = Path(left.socket)
    if path.parent.name.startswith(_PREFIX) and ownership.is_private_folder(path.parent):
        with suppress(OSError):
            if path.name == _SOCKET and stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
        with suppress(OSError):
            path.parent.rmdir()


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
    content = ownership.read_own(path, SERVICE_FILE_BYTES_MAX)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=Service)
    except msgspec.DecodeError:
        return None


def _answers(service: Service) -> bool:
    with suppress(OSError), opened(service):
        return True
    return False


def _check(path: Path) -> None:
    """OSError for a socket that may be another user's."""
    if not ownership.is_private_folder(path.parent) or not ownership.is_own(path.lstat()):
        raise PermissionError(f"{path} is not in a private folder of this user")


@contextmanager
def opened(service: Service, *, patience: float | None = None) -> Iterator[socket.socket]:
    """A connection to the pipeline. OSError where there is none; TimeoutError, which is one, where
    it says nothing for `patience` seconds."""
    with socket.socket(socket.AF_UNIX) as connection:
        _check(Path(service.socket))
        connection.settimeout(ANSWER_CONNECT_SECONDS)
        connection.connect(service.socket)
        connection.settimeout(patience)
        yield connection
