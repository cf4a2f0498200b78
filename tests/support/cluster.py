"""A PostgreSQL whose files a test may copy, and put back later, as volume snapshots are."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal

from headwater.embedded.account import account_for
from headwater.embedded.binaries import find_binaries
from tests.support.databases import FAST, passable_folder

StopMode = Literal["immediate", "fast"]


class Cluster:
    """A server in a folder of its own; `url` is the same after every start."""

    def __init__(
        self, binaries: Path, folder: Path, settings: Mapping[str, str] | None = None
    ) -> None:
        self._settings = dict(settings or {})
        self._binaries = binaries
        self._folder = folder
        self._user = pwd.getpwnam("postgres") if os.geteuid() == 0 else None
        self.data = folder / "data"
        if self._user:
            shutil.chown(folder, self._user.pw_uid)
        self.url = f"postgresql://postgres@:5432/postgres?host={folder}"
        self.hidden_url = f"{self.url}/hidden"

    def create(self) -> None:
        self._run("initdb", "-D", str(self.data), "-U", "postgres", "--auth=trust",
                  "-E", "UTF8", "--locale=C.UTF-8", "-N")  # fmt: skip

    def start(self, *, hidden: bool = False) -> None:
        """Start it. If `hidden`, it listens under another URL, which only the test knows."""
        sockets = self._folder / "hidden" if hidden else self._folder
        sockets.mkdir(exist_ok=True)
        if self._user:
            shutil.chown(sockets, self._user.pw_uid)
        settings = FAST | {
            "listen_addresses": "",
            "max_prepared_transactions": "40",
            "shared_buffers": "16MB",
            "min_wal_size": "32MB",
            **self._settings,
        }
        options = " ".join(
            [f"-k {sockets}", *(f"-c {name}={value}" for name, value in settings.items())]
        )
        log = str(self.data / "server.log")
        self._run("pg_ctl", "-D", str(self.data), "-w", "-l", log, "-o", options, "start")

    def stop(self, mode: StopMode = "immediate") -> None:
        self._run("pg_ctl", "-D", str(self.data), "-w", "-m", mode, "stop")

    def kill(self) -> None:
        """As the system does that ran out of memory: with SIGKILL, without a chance to clean up."""
        pid = int((self.data / "postmaster.pid").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)

    def copy(self, name: str) -> None:
        """Copy the files. The server is stopped."""
        self._copy(self.data, self._folder / name)

    def put_back(self, name: str) -> None:
        """Replace the files by an earlier copy. The server is stopped."""
        self._copy(self._folder / name, self.data)

    def _copy(self, source: Path, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run(["cp", "-a", str(source), str(target)], check=True)

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [str(self._binaries / program), *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            user=self._user.pw_uid if self._user else None,
            group=self._user.pw_gid if self._user else None,
            cwd="/",
        )


@cache
def releases() -> dict[str, Path]:
    """The programs of the embedded PostgreSQL, and of the machine's own."""
    with passable_folder() as folder:
        found = {"18": find_binaries(account_for(folder / "data", folder / "data"))}
    own = max(Path("/usr/lib/postgresql").glob("*/bin"), default=None)
    return found if own is None else found | {own.parent.name: own}


@contextmanager
def running(release: str, settings: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    with passable_folder() as folder:
        cluster = Cluster(releases()[release], folder, settings)
        cluster.create()
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop()
