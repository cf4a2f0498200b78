"""An archive of the classes that Spark loads, so that Spark starts faster.

Java can save loaded and linked classes in a file: an AOT cache since Java 24, a class-data archive
before. `headwater pipeline warm` makes one with a small job (`training_run`); Spark uses it from
then on. It fits one Java, one PySpark and one processor. Its name has the first two, and Java
silently ignores an archive that does not fit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from headwater.errors import PipelineError
from headwater.limits import CLASS_ARCHIVE_SECONDS
from headwater.pipeline.permissions import make_private
from headwater.pipeline.spark.java import Java, find_java

AOT_SINCE = 24
"""The first Java with an AOT cache that is made in one run."""

_TRAINING = "HEADWATER_WARM_OUTPUT"


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
        if not self.path.is_file():
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
    """Make the archive, or replace it. PipelineError if that fails."""
    make_private(folder)
    archive = Archive.of(folder, find_java(folder))
    archive.path.parent.mkdir(exist_ok=True)
    unfinished = archive.path.with_name(f"{archive.path.name}.{os.getpid()}")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "headwater.pipeline.spark.training_run", str(folder)],
            env=os.environ | {_TRAINING: str(unfinished)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=CLASS_ARCHIVE_SECONDS,
        )
        if done.returncode or not unfinished.is_file():
            raise PipelineError(
                f"the archive {archive.path} could not be made: {done.stderr.strip()[-500:]}",
                hint="Spark still starts without it. headwater doctor checks the installed Java.",
            )
        unfinished.rename(archive.path)
    except subprocess.TimeoutExpired as error:
        raise PipelineError(
            f"the archive {archive.path} was not ready after {CLASS_ARCHIVE_SECONDS:.0f} s",
            hint="Try again when the machine is less busy.",
        ) from error
    finally:
        # Java itself leaves a file beside it when it is interrupted.
        for left in archive.path.parent.glob(f"{unfinished.name}*"):
            left.unlink(missing_ok=True)
    return archive
