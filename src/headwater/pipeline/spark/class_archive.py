"""An archive of the classes that Spark loads, so that Spark starts faster.

Java can save loaded and linked classes in a file: an AOT cache since Java 24, a class-data archive
before. `headwater pipeline warm` makes one with a small job (`training_run`), and so does a
pipeline that has run for a minute where there is none; Spark uses it from then on. It fits one
Java, one PySpark and one processor. Its name has the first two, and Java silently ignores an
archive that does not fit.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event
from typing import IO

import msgspec

from headwater.child_process import PARENT, stop_with_parent
from headwater.errors import HeadwaterError, PipelineError
from headwater.limits import CLASS_ARCHIVE_SECONDS, CLASS_ARCHIVE_UNUSED_SECONDS
from headwater.pipeline.permissions import make_private
from headwater.pipeline.spark.java import Java, find_java

AOT_SINCE = 24
"""The first Java with an AOT cache that is made in one run."""

log = logging.getLogger(__name__)

_TRAINING = "HEADWATER_WARM_OUTPUT"
_NICENESS = "HEADWATER_WARM_NICENESS"

_LOOK_SECONDS = 0.2

_STOP_SECONDS = 5.0
"""How long the process that makes an archive may take to end with the one that started it."""


class Archive(msgspec.Struct, frozen=True):
    """The archive for a Java, whether it exists or not."""

    path: Path
    is_aot: bool

    @classmethod
    def of(cls, folder: Path, java: Java) -> Archive:
        is_aot = java.version >= AOT_SINCE
        kind = "aot" if is_aot else "jsa"
        # An updated Java has the same version number, and needs another archive.
        changed = (java.home / "bin" / "java").resolve().stat().st_mtime_ns // 1_000_000
        name = f"spark-{version('pyspark')}-java-{java.version}-{changed}.{kind}"
        return cls(folder / "archives" / name, is_aot)

    def use(self) -> tuple[str, ...]:
        """The options of Java that use it; none if it does not exist."""
        try:
            if not self.path.stat().st_size:
                return ()
            os.utime(self.path)  # it is in use
        except OSError:
            return ()
        if self.is_aot:
            return (f"-XX:AOTCache={self.path}", "-XX:AOTMode=auto", "-Xlog:aot=off,cds=off")
        return (
            f"-XX:SharedArchiveFile={self.path}",
            "-Xshare:auto",
            "-Xlog:cds=off,class+path=off",
        )

    def make(self) -> tuple[str, ...]:
        """The options with which Java makes it when it ends."""
        if self.is_aot:
            return (f"-XX:AOTCacheOutput={self.path}", "-Xlog:aot=off,cds=off")
        return (f"-XX:ArchiveClassesAtExit={self.path}", "-Xlog:cds=off,class+path=off")


def options(folder: Path, java: Java) -> Sequence[str]:
    """The options for the Java of a Spark that is started now."""
    try:
        if output := os.environ.get(_TRAINING):
            archive = Archive.of(folder, java)
            return msgspec.structs.replace(archive, path=Path(output)).make()
        return Archive.of(folder, java).use()
    except OSError:  # an archive only saves time
        return ()


def warm(folder: Path) -> Archive:
    """Make the archive, or replace it. PipelineError if that fails, or is being done already."""
    make_private(folder)
    archive = Archive.of(folder, find_java(folder))
    archive.path.parent.mkdir(exist_ok=True)
    with _alone(archive.path.parent) as is_alone:
        if not is_alone:
            raise PipelineError(
                f"the archive {archive.path} is being made by another process",
                hint="Wait for it, or try again later.",
            )
        _make(archive, folder, Event())
    return archive


def make_quietly(folder: Path, stop: Event) -> None:
    """Make the archive if this machine has none, with the lowest priority, until `stop` is set.
    Remove archives that were not used for a long time. Errors are only logged: an archive saves
    time, nothing else."""
    try:
        _make_missing(folder, stop)
    except (HeadwaterError, OSError) as error:
        log.warning("An archive of Spark's classes could not be made: %s", error)


def _make_missing(folder: Path, stop: Event) -> None:
    archive = Archive.of(folder, find_java(folder))
    archive.path.parent.mkdir(exist_ok=True)
    with _alone(archive.path.parent) as is_alone:
        if not is_alone:
            return
        _remove_unused(archive.path.parent)
        if archive.path.is_file():
            return
        try:
            _make(archive, folder, stop, niceness=19)
        except PipelineError as error:
            if not error.retryable:
                # Not again with each start: an empty file is no archive for Java, which ignores it.
                archive.path.touch()
            log.warning("%s. %s", error, error.hint)


def _make(archive: Archive, folder: Path, stop: Event, niceness: int = 0) -> None:
    unfinished = archive.path.with_name(f"{archive.path.name}.{os.getpid()}")
    with (
        TemporaryFile() as output,
        subprocess.Popen(
            [sys.executable, "-m", "headwater.pipeline.spark.training_run", str(folder)],
            env=os.environ | {_TRAINING: str(unfinished), _NICENESS: str(niceness), PARENT: "1"},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        ) as training,
    ):
        try:
            deadline = time.monotonic() + CLASS_ARCHIVE_SECONDS
            while training.poll() is None and time.monotonic() < deadline:
                if stop.wait(_LOOK_SECONDS):
                    return
            if training.returncode != 0 or not unfinished.is_file():
                raise _not_made(archive, training.returncode, output)
            unfinished.rename(archive.path)
        finally:
            if training.poll() is None:
                # With the Java that it has started.
                os.killpg(training.pid, signal.SIGKILL)
                training.wait()
            # Java itself leaves a file beside it when it is interrupted.
            for left in archive.path.parent.glob(f"{unfinished.name}*"):
                left.unlink(missing_ok=True)


def _not_made(archive: Archive, code: int | None, output: IO[bytes]) -> PipelineError:
    if code is None:
        return PipelineError(
            f"the archive {archive.path} was not ready after {CLASS_ARCHIVE_SECONDS:.0f} s",
            hint="Try again when the machine is less busy.",
            retryable=True,
        )
    output.seek(0)
    printed = output.read().decode("utf-8", "replace").strip()
    return PipelineError(
        f"the archive {archive.path} could not be made: {printed[-500:]}",
        hint="Spark still starts without it. headwater doctor checks the installed Java.",
    )


@contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether no other process makes an archive in this folder now."""
    with (folder / "_lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _remove_unused(folder: Path) -> None:
    """Remove archives that no Spark uses, and what killed processes have left half made. The caller
    holds the lock: no other process makes one."""
    for path in folder.glob("spark-*"):
        is_complete = path.suffix in (".aot", ".jsa")
        with suppress(OSError):
            age = time.time() - path.stat().st_mtime
            if not is_complete or age > CLASS_ARCHIVE_UNUSED_SECONDS:
                path.unlink()


def lower_priority() -> None:
    """Called in the process that makes an archive, before Java starts."""
    with suppress(ValueError, OSError):
        os.nice(int(os.environ.pop(_NICENESS, "0")))


def end_with_parent() -> None:
    """Called there, too: end when the process that started it has ended. Java is killed with it,
    because at its own end it would still write the archive."""
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    stop_with_parent(_STOP_SECONDS)
