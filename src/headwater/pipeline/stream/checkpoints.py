"""The checkpoint of a stream, and the lock of a lake.

Spark stores in a checkpoint at which offset each batch ends, before the batch runs. A checkpoint
lasts as long as a running stream: what the sink has stored says where the next one begins, and the
file `begin` has it.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import msgspec

from headwater.errors import PipelineError
from headwater.pipeline.files import FileLocation
from headwater.pipeline.permissions import make_folders
from headwater.pipeline.stream.offsets import Offset
from headwater.pipeline.stream.owner import owner_name as owner_name

_BEGIN = "begin"


class Checkpoint:
    """The checkpoint at a path or URL; it need not exist yet."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._place = FileLocation.of(path)

    def offset(self, batch: int) -> Offset:
        """Where a batch ends."""
        name = f"offsets/{batch}"
        lines = self._content(name).splitlines()
        # A version, facts about the batch, then a line for each source; there is one.
        if len(lines) != 3:
            raise self._unreadable(name, f"{len(lines)} lines instead of 3")
        try:
            return Offset.from_dict(self._decoded(name, lines[2]))
        except ValueError as error:
            raise self._unreadable(name, str(error)) from error

    def start(self, batch: int) -> Offset | None:
        """Where a batch starts; None where the stream has not begun."""
        return self.offset(batch - 1) if batch else self.begin

    def remove(self) -> None:
        """Remove it: the next stream here is a new one."""
        folder, _, name = self.path.rpartition("/")
        FileLocation.of(folder).remove(name)

    # -------------------------------------------------------------------- where it began

    @property
    def begin(self) -> Offset | None:
        """Where the stream began; None if it has not begun."""
        if not self._place.exists(_BEGIN):
            return None
        return Offset.from_dict(self._decoded(_BEGIN, self._content(_BEGIN)))

    def begin_at(self, offset: Offset) -> None:
        self._place.write(_BEGIN, msgspec.json.encode(offset.to_dict()))

    # -------------------------------------------------------------------- reading

    def _content(self, name: str) -> bytes:
        try:
            return self._place.read(name)
        except OSError as error:
            raise self._unreadable(name, str(error)) from error

    def _decoded(self, name: str, content: bytes) -> Any:
        try:
            return msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise self._unreadable(name, str(error)) from error

    def _unreadable(self, name: str, reason: str) -> PipelineError:
        return PipelineError(
            f"the checkpoint {self.path} cannot be read: {name}: {reason}",
            hint="The next start of the stream makes another one.",
            retryable=True,
        )


class LakeLock:
    """The lock of the one pipeline that writes to a lake. The system releases it when the process
    ends, however it ends. A lake under a URL has no lock: there, only Delta's commits prevent that
    two pipelines write the same batch."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._descriptor: int | None = None

    def __enter__(self) -> LakeLock:
        place = FileLocation.of(self._root)
        if place.is_local:
            make_folders(Path(place.base))
            self._take(Path(place.below("_lock")))
        return self

    def _take(self, path: Path) -> None:
        # The mode of the folder, which a team may share. A link could lead to another file.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, path.parent.stat().st_mode & 0o666)
        except OSError as error:
            raise PipelineError(
                f"the lock of the lake {self._root} cannot be opened: {error}",
                hint="This user must be able to write that file: look at it with ls -l, or give "
                "this pipeline another lake: --lake",
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 1000).decode("utf-8", "replace") or "an unknown process"
            os.close(descriptor)
            raise PipelineError(
                f"another pipeline writes to the lake {self._root}: {owner}",
                hint="Stop that pipeline first, or give this one another lake: --lake",
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, owner_name().encode())
        self._descriptor = descriptor

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None
