"""Which user account the server runs as.

PostgreSQL refuses to run as root. An ordinary user runs it under their own account. Root runs it as
the owner of the data folder if that is another user, else as the system user `postgres`, else as
`headwater`, which is created if needed. Access is tested by trying it as that account: permission
bits alone do not cover access lists, mount options and security modules.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headwater.errors import EmbeddedError

_SYSTEM_USERS = ("postgres", "headwater")
_KEPT_VARIABLES = ("PATH", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


@dataclass(frozen=True)
class Account:
    """Runs programs as its user: in the folder /, with an environment without our secrets and
    without PG* variables, which would change what PostgreSQL does."""

    name: str
    uid: int
    gid: int

    @property
    def is_other(self) -> bool:
        """Whether this is another user than the user of this process."""
        return self.uid != os.geteuid()

    def run(
        self,
        command: Sequence[str | Path],
        *,
        output: int = subprocess.PIPE,
        keep_open: tuple[int, ...] = (),
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; stdout and stderr go to `output` together."""
        return subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd="/",
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
            | {"LC_ALL": "C"},
            pass_fds=keep_open,
            start_new_session=True,
            timeout=timeout,
            check=False,
            user=self.uid if self.is_other else None,
            group=self.gid if self.is_other else None,
            extra_groups=[] if self.is_other else None,
        )

    def can_enter(self, folder: Path) -> bool:
        return self.run(["/bin/sh", "-c", 'cd "$1"', "sh", folder]).returncode == 0

    def first_closed(self, folder: Path) -> Path:
        """The topmost parent folder that the account may not enter."""
        ways = [*reversed(folder.parents), folder]
        return next((way for way in ways if not self.can_enter(way)), folder)


def account_for(data_dir: Path, cluster: Path) -> Account:
    """The account that runs, or would run, the server of this folder."""
    if os.geteuid() != 0:
        return _account(os.geteuid()) or Account(str(os.geteuid()), os.geteuid(), os.getegid())
    for folder in (cluster, data_dir):
        if folder.exists() and (owner := folder.stat().st_uid) and (account := _account(owner)):
            return account
    return _system_account() or _create_account()


def _account(user: int | str) -> Account | None:
    try:
        entry = pwd.getpwuid(user) if isinstance(user, int) else pwd.getpwnam(user)
    except KeyError:
        return None
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)


def _system_account() -> Account | None:
    return next((account for name in _SYSTEM_USERS if (account := _account(name))), None)


def _create_account() -> Account:
    name = _SYSTEM_USERS[-1]
    command = ["useradd", "--system", "--user-group", "--no-create-home"]
    command += ["--home-dir=/nonexistent", "--shell=/usr/sbin/nologin", name]
    output = "there is no useradd"
    if shutil.which(command[0]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        output = done.stderr.strip()
    # Another process may have created the user, so only its existence is checked.
    if account := _account(name):
        return account
    raise EmbeddedError(
        "PostgreSQL cannot run as root, and a system user to run it as could not be created: "
        + output,
        hint=f"Create a system user named {name!r}, or run Headwater as an ordinary user.",
    )
