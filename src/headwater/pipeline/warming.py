"""An archive of the classes that Spark loads, so that it starts faster.

Java keeps what it has loaded and linked in a file: an AOT cache from Java 24 on, a class-data
archive before. `headwater pipeline warm` makes one by running a small job; every Spark started
after that uses it. It fits one Java, one PySpark and one processor: its name says the first two,
and Java itself passes over one that does not fit, without a word.
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
from headwater.limits import WARM_SECONDS
from headwater.pipeline.java import Java, find_java
from headwater.pipeline.ownership import make_own

AOT_SINCE = 24
"""The first Java with an AOT cache that is made in one run."""

_TRAINING = "HEADWATER_WARM_OUTPUT"


class Archive(msgspec.Struct, frozen=True):
    """Where the archive for a Java is, whether it is there or not."""

    path: Path
    is_aot: bool

    @classmethod
    def of(cls, folder: Path, java: Java) -> Archive:
        is_aot = java.version >= AOT_SINCE
        kind = "aot" if is_aot else "jsa"
        # A Java that was updated is another one, under the same number.
        changed = (java.home / "bin" / "java").resolve().stat().st_mtime_ns // 1_000_000
        name = f"spark-{version('pyspark')}-java-{java.version}-{changed}.{kind}"
        return cls(folder / "archives" / name, is_aot)

    def use(self) -> tuple[str, ...]:
        """What Java is told to use it; nothing where it is not there."""
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
        """What Java is told to make it when it ends."""
        if self.is_aot:
            return (f"-XX:AOTCacheOutput={self.path}", "-Xlog:aot=off,cds=off")
        return (f"-XX:ArchiveClassesAtExit={self.path}", "-Xlog:cds=off,class+path=off")


def options(folder: Path, java: Java) -> Sequence[str]:
    """What a Spark that is started now should tell its Java."""
    try:
        if output := os.environ.get(_TRAINING):
            archive = Archive.of(folder, java)
            return msgspec.structs.replace(archive, path=Path(output)).make()
        return Archive.of(folder, java).use()
    except OSError:  # an archive only saves time
        return ()


def warm(folder: Path) -> Archive:
    """Make the archive; the one that was there is replaced. PipelineError if that fails."""
    make_own(folder)
    archive = Archive.of(folder, find_java(folder))
    archive.path.parent.mkdir(exist_ok=True)
    unfinished = archive.path.with_name(f"{archive.path.name}.{os.getpid()}")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "headwater.pipeline.training", str(folder)],
            env=os.environ | {_TRAINING: str(unfinished)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=WARM_SECONDS,
        )
        if done.returncode or not unfinished.is_file():
            raise PipelineError(
                f"the archive could not be made: {done.stderr.strip()[-500:]}",
                hint="Spark starts without it as before. headwater doctor looks at its Java.",
            )
        unfinished.rename(archive.path)
    except subprocess.TimeoutExpired as error:
        raise PipelineError(
            f"the archive was not ready after {WARM_SECONDS:.0f} s", hint="Is the machine busy?"
        ) from error
    finally:
        # Java itself leaves a file beside it when it is interrupted.
        for left in archive.path.parent.glob(f"{unfinished.name}*"):
            left.unlink(missing_ok=True)
    return archive
