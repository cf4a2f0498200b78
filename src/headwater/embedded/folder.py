"""The paths of an embedded server.

    <data folder>/postgres/       the cluster (PGDATA); `postgres.new/` while initdb runs
    <data folder>/postgres.log    the server's log; `postgres.log.old` is the one before
    <data folder>/run/            the socket, the locks of `postgres` and `server`, and `stays`: the
                                  running server is not stopped when its last user closes it

Only the owner can enter any of it. When root starts the server, another account runs it: that
account owns what is inside, while the data folder itself stays root's and can be passed through but
not listed (0711). Nothing outside the data folder is ever changed. Every path depends only on the
data folder's path, so that all processes use the same ones.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from headwater.embedded.account import Account
from headwater.errors import EmbeddedError
from headwater.limits import EMBEDDED_SOCKET_PATH_BYTES_MAX

ROOT_DATA_DIR = Path("/var/lib/headwater")
SOCKET_NAME = ".s.PGSQL.5432"
ELSEWHERE = "choose another data folder with --data-dir or HEADWATER_DATA_DIR"


def default_data_dir() -> Path:
    """$HEADWATER_DATA_DIR; else /var/lib/headwater for root and the XDG data home for others."""
    if chosen := os.environ.get("HEADWATER_DATA_DIR"):
        return _absolute(chosen)
    if os.geteuid() == 0:
        return ROOT_DATA_DIR
    data_home = os.environ.get("XDG_DATA_HOME", "")
    # The XDG specification says to ignore a relative path.
    return _absolute(data_home if os.path.isabs(data_home) else "~/.local/share") / "headwater"


class Folder:
    """The layout of one data folder. Symbolic links are resolved: one folder, one server."""

    def __init__(self, data_dir: str | os.PathLike[str] | None) -> None:
        self.data_dir = default_data_dir() if data_dir is None else _absolute(data_dir)
        self.cluster = self.data_dir / "postgres"
        self.unfinished_cluster = self.data_dir / "postgres.new"
        self.log = self.data_dir / "postgres.log"
        self.run = self.data_dir / "run"
        self.start_lock = self.run / "start.lock"
        self.users_lock = self.run / "users.lock"
        self.server_lock = self.run / "server.lock"
        self.stays = self.run / "stays"
        self.socket_dir = self.run if _fits_a_socket(self.run) else _short_socket_dir(self.data_dir)

    def create(self, account: Account) -> None:
        """Create what is missing; what exists must be usable by the account."""
        make_folders(self.data_dir, account)
        self._make_passable(account)
        make_private(self.run, account)

    def create_socket_dir(self, account: Account) -> None:
        """The server requires no password, so only the account may enter the folder of its
        socket."""
        if self.socket_dir != self.run:
            make_private(self.socket_dir, account)

    def remove_socket_dir(self) -> None:
        """Leave nothing behind in /tmp."""
        if self.socket_dir != self.run:
            with suppress(OSError):
                shutil.rmtree(self.socket_dir)

    def remove_dead_server_files(self) -> None:
        """Remove the files of a killed server. PostgreSQL does not start while the process id in
        these files belongs to any live process, which may happen after a restart of the machine.
        The file `stays` was for the killed server."""
        self.stays.unlink(missing_ok=True)
        (self.cluster / "postmaster.pid").unlink(missing_ok=True)
        (self.socket_dir / f"{SOCKET_NAME}.lock").unlink(missing_ok=True)

    def postmaster_pid(self) -> int | None:
        """The files that the server wrote; valid only while it is alive."""
        try:
            first, *_ = (self.cluster / "postmaster.pid").read_text().splitlines()
            return int(first)
        except (FileNotFoundError, ValueError):
            return None

    def _make_passable(self, account: Account) -> None:
        if not account.is_other or account.can_enter(self.data_dir):
            return
        parent = account.first_closed(self.data_dir)
        if parent == self.data_dir and _is_empty_and_ours(self.data_dir):
            self.data_dir.chmod(0o711)
        if not account.can_enter(self.data_dir):
            raise EmbeddedError(
                f"PostgreSQL cannot run as root, and the user {account.name!r} that it would run "
                f"as may not enter {parent}, a parent of {self.data_dir}",
                hint=f"Let others enter it with chmod o+x {parent}, or {ELSEWHERE}.",
            )


def make_folders(path: Path, account: Account) -> None:
    """Create the folder and its missing parents: private, or passable when another account than
    ours must reach what is inside."""
    for folder in reversed([path, *path.parents]):
        try:
            folder.mkdir(0o700)
        except (FileExistsError, IsADirectoryError):
            continue
        if account.is_other:
            folder.chmod(0o711)


def open_private(path: Path) -> int:
    """Open a file to read and append that only its owner may use; a new one belongs to the owner
    of its folder. No link is followed: that owner may have fewer rights than we."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    file, folder = os.fstat(descriptor), path.parent.stat()
    if os.geteuid() == file.st_uid == 0 != folder.st_uid:
        os.fchown(descriptor, folder.st_uid, folder.st_gid)
    return descriptor


def own(path: Path, account: Account) -> None:
    if account.is_other:
        os.chown(path, account.uid, account.gid, follow_symlinks=False)


def make_private(path: Path, account: Account) -> None:
    try:
        path.mkdir(0o700)
    except FileExistsError:
        found = path.lstat()
        mine = found.st_uid in (account.uid, os.geteuid())
        # Where other users can write, they may have placed their own socket.
        if not (stat.S_ISDIR(found.st_mode) and mine and not found.st_mode & 0o022):
            raise EmbeddedError(
                f"{path} exists and is not a private folder of {account.name!r}",
                hint=f"Remove it, or {ELSEWHERE}.",
            ) from None
        path.chmod(0o700)
    own(path, account)


def _is_empty_and_ours(path: Path) -> bool:
    """An empty folder of this user was made for us, so its mode may be changed."""
    return path.stat().st_uid == os.geteuid() and not any(path.iterdir())


def _absolute(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(os.path.realpath(Path(path).expanduser()))
    except RuntimeError as error:
        raise EmbeddedError(f"cannot find a data folder: {error}", hint=ELSEWHERE) from error


def _fits_a_socket(folder: Path) -> bool:
    """libpq reads a comma as the end of a host, and the system limits the length of a socket's
    path."""
    path = os.fsencode(folder / SOCKET_NAME)
    return len(path) <= EMBEDDED_SOCKET_PATH_BYTES_MAX and b"," not in path


def _short_socket_dir(data_dir: Path) -> Path:
    """Always below /tmp: processes with different TMPDIR must find the same folder."""
    return Path("/tmp") / f"headwater-{hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]}"
