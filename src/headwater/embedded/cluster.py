"""The cluster: the folder with the data of one server, made by initdb.

It is made in a temporary folder and renamed when complete, so an interrupted initdb leaves nothing
that a later start would use as a cluster. Text is UTF-8 and ordered by code point ("C.UTF-8" of
PostgreSQL's own, the same on every system).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from headwater.embedded.account import Account
from headwater.embedded.binaries import MAJOR_VERSION
from headwater.embedded.folder import ELSEWHERE, Folder, make_private
from headwater.errors import EmbeddedError
from headwater.limits import EMBEDDED_COMMAND_SECONDS, EMBEDDED_LOG_TAIL_BYTES

# Written to postgresql.conf: defaults, which ALTER SYSTEM may change.
_SETTINGS = {
    "max_connections": "200",
    "shared_buffers": "128MB",
    "log_checkpoints": "off",
    # Headwater sets the address when it starts the server. This default is for a server that is
    # started by hand: it must not be reachable from other machines either.
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
}


def ensure_cluster(folder: Folder, account: Account, binaries: Path, server_lock: int) -> None:
    """Check the cluster, or create it. The caller holds the server lock, which initdb inherits."""
    # An empty folder is treated as missing: the rename below replaces it.
    if folder.cluster.exists() and any(folder.cluster.iterdir()):
        return _check(folder, account)
    _remove_unfinished(folder)
    make_private(folder.unfinished_cluster, account)
    try:
        _initdb(folder.unfinished_cluster, account, binaries, server_lock)
        folder.unfinished_cluster.rename(folder.cluster)
        _sync(folder.data_dir)
    finally:
        _remove_unfinished(folder)
    return None


def _check(folder: Folder, account: Account) -> None:
    try:
        version = (folder.cluster / "PG_VERSION").read_text().strip()
    except FileNotFoundError:
        raise EmbeddedError(
            f"{folder.cluster} is not empty and contains no PostgreSQL data", hint=ELSEWHERE
        ) from None
    if version != MAJOR_VERSION:
        raise EmbeddedError(
            f"the data in {folder.cluster} is of PostgreSQL {version}, "
            f"the embedded server is PostgreSQL {MAJOR_VERSION}",
            hint=f"Move it with pg_upgrade or pg_dump of PostgreSQL {version}, or {ELSEWHERE}.",
        )
    if folder.cluster.stat().st_uid != account.uid:
        raise EmbeddedError(
            f"{folder.cluster} does not belong to {account.name!r}, the user that runs its server",
            hint=f"Run chown -R {account.name} {folder.cluster}, or {ELSEWHERE}.",
        )


def _initdb(target: Path, account: Account, binaries: Path, server_lock: int) -> None:
    # The system's locale hardly matters, and not every system has C.UTF-8.
    output = ""
    for locale in ("C.UTF-8", "C"):
        command = [str(binaries / "initdb"), "-D", str(target)]
        command += ["--username=postgres", "--encoding=UTF8"]
        command += ["--auth-local=trust", "--auth-host=reject", "--no-instructions"]
        command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8", f"--locale={locale}"]
        command += [f"--set={name}={value}" for name, value in _SETTINGS.items()]
        try:
            done = account.run(command, keep_open=(server_lock,), timeout=EMBEDDED_COMMAND_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise EmbeddedError(f"initdb of {target} took too long: {error}") from error
        if done.returncode == 0:
            return
        output = done.stdout[-EMBEDDED_LOG_TAIL_BYTES:].strip()
        if "invalid locale name" not in output:
            break
    hint = f"Make sure that the disk is not full, or {ELSEWHERE}."
    if "could not look up effective user ID" in output:  # As in a container run with --user.
        hint = f"PostgreSQL needs a name for its user: add uid {account.uid} to /etc/passwd."
    raise EmbeddedError(f"initdb could not make a cluster in {target}:\n{output}", hint=hint)


def _remove_unfinished(folder: Folder) -> None:
    if folder.unfinished_cluster.exists():
        shutil.rmtree(folder.unfinished_cluster)


def _sync(folder: Path) -> None:
    """Make a rename in the folder durable: data written below the new name must be found there."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
