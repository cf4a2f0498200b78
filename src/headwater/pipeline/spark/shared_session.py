"""How other programs use the Spark of a running pipeline. To start their own takes
seconds.

There are two ways. Commands send requests over a socket (`reading.requests`); Python programs use
the pipeline's Spark as a Connect server (`Lake.connect`). Both are for the pipeline's own user: the
socket is in a folder that no other user may enter, and Connect requires a token. The file
`_service` in the lake has their addresses; only the user can read it. It is trusted only where no
other user can have written it, and where the socket belongs to this user. If the socket does not
answer, a killed pipeline has left the file, and it is ignored.
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

from headwater.pipeline import permissions

_ANSWER_CONNECT_SECONDS = 2.0
"""How long a command waits until a running pipeline accepts its request. Then it starts its own
Spark."""

_SERVICE_FILE_BYTES_MAX = 10_000
"""The largest file `_service`, with the addresses of a running pipeline. A larger one is
ignored."""


FILE = "_service"

_PREFIX, _SOCKET = "headwater-", "pipeline"
_ADDRESS = re.compile(r"sc://localhost:[0-9]{1,5}")


class PipelineService(msgspec.Struct, frozen=True):
    """The addresses of a running pipeline. `connect` and `token` are None if it is no Connect
    server."""

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
def announced(root: str, service: PipelineService) -> Iterator[None]:
    """Publish the addresses of a lake's pipeline inside the block. The caller holds the lake's
    lock. Nothing is published for a lake under a URL."""
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
    """Remove what a killed pipeline has left: its socket, and the folder of the socket. Their path
    comes from a file; so nothing but a socket and an empty folder is removed."""
    left = _read(root)
    if left is None or _answers(left):
        return
    path = Path(left.socket)
    if path.parent.name.startswith(_PREFIX) and permissions.is_private_folder(path.parent):
        with suppress(OSError):
            if path.name == _SOCKET and stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
        with suppress(OSError):
            path.parent.rmdir()


def find(root: str) -> PipelineService | None:
    """The pipeline that writes to a lake, if one runs and this user may use it."""
    service = _read(root)
    return service if service is not None and _answers(service) else None


def _file(root: str) -> Path | None:
    return None if "://" in root else Path(root).expanduser() / FILE


def _read(root: str) -> PipelineService | None:
    path = _file(root)
    if path is None:
        return None
    content = permissions.read_private(path, _SERVICE_FILE_BYTES_MAX)
    if content is None:
        return None
    try:
        return msgspec.json.decode(content, type=PipelineService)
    except msgspec.DecodeError:
        return None


def _answers(service: PipelineService) -> bool:
    with suppress(OSError), opened(service):
        return True
    return False


def _check(path: Path) -> None:
    """OSError for a socket that may be another user's."""
    if not permissions.is_private_folder(path.parent) or not permissions.is_written_by_us(
        path.lstat()
    ):
        raise PermissionError(f"{path} is not in a private folder of this user")


@contextmanager
def opened(service: PipelineService, *, patience: float | None = None) -> Iterator[socket.socket]:
    """A connection to the pipeline. OSError if it does not run; TimeoutError, a subclass, if it
    sends nothing for `patience` seconds."""
    with socket.socket(socket.AF_UNIX) as connection:
        _check(Path(service.socket))
        connection.settimeout(_ANSWER_CONNECT_SECONDS)
        connection.connect(service.socket)
        connection.settimeout(patience)
        yield connection
