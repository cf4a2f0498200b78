"""Which users of this machine may read and write the folders and files of the pipeline.

A lake has every row that was ever written, and no policy protects it: folders that Headwater
creates are for their owner only. The mode of a folder that existed before is never changed, because
a team may share a lake by its group; it is reported (`readers`). A file that Headwater acts upon is
trusted only where no other user can have written it (`read_private`).
"""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headwater.errors import ConfigError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents, for this user alone."""
    for folder in reversed([path, *path.parents]):
        with suppress(FileExistsError, IsADirectoryError):
            folder.mkdir(0o700)


def make_private(path: Path) -> None:
    """Create a folder for Headwater only, or close an existing one to other users. ConfigError if
    another user can have written to it: programs are started from it."""
    make_folders(path)
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
        raise ConfigError(
            f"other users can write to {path}, and Spark would be started from it",
            hint="Remove that folder, or choose another one with XDG_CACHE_HOME.",
        )
    if found.st_mode & _OTHERS:
        path.chmod(0o700)


def readers(path: Path) -> str | None:
    """The users besides the owner who can read a folder, in words; None for no other user."""
    found = path.stat()
    above = [folder.stat().st_mode for folder in path.resolve().parents]
    if found.st_mode & stat.S_IRWXO and all(mode & stat.S_IXOTH for mode in above):
        return "every user of this machine"
    if found.st_mode & stat.S_IRWXG and all(mode & (stat.S_IXOTH | stat.S_IXGRP) for mode in above):
        return f"the group {_group(found.st_gid)}"
    return None


def open_lake_warning(root: str, who: str) -> str:
    """The warning for a lake that other users can read."""
    return (
        f"{root} can be read by {who}. It has every row that was ever written, and no policy "
        f"protects it. To close it: chmod 700 {root}"
    )


def _group(number: int) -> str:
    with suppress(KeyError):
        return grp.getgrgid(number).gr_name
    return str(number)


@contextmanager
def umask_of(root: Path) -> Iterator[int]:
    """Inside the block, new files are closed to users who may not enter the folder. Sets the umask
    of the whole process, and of processes that it starts."""
    before = os.umask(0o077)
    chosen = _umask_for(root, before)
    os.umask(chosen)
    try:
        yield chosen
    finally:
        os.umask(before)


def future_umask(root: Path) -> int:
    """The umask that `umask_of` is going to set. A folder that does not exist yet will be made for
    this user alone."""
    return _umask_for(root, current_umask())


def current_umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _umask_for(root: Path, before: int) -> int:
    mode = root.stat().st_mode if root.exists() else 0o700
    return before | (~mode & _OTHERS)


def read_private(path: Path, bytes_max: int) -> bytes | None:
    """The content of a file that this user or root wrote. None for a file that does not exist, is a
    link, is too large, or that another user owns or could have replaced."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or not is_written_by_us(found) or not _is_closed(path):
            return None
        content = file.read(bytes_max + 1)
    return content if len(content) <= bytes_max else None


def is_written_by_us(found: os.stat_result) -> bool:
    """Whether only this user or root can have written it."""
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & _OTHERS_WRITE


def _is_closed(path: Path) -> bool:
    """Whether no other user can replace this file. Folders are checked upwards as long as this user
    owns them. In a sticky folder, only the owner of a file can replace it."""
    for folder in path.absolute().parents:
        found = folder.stat()
        if found.st_uid != os.geteuid():
            return True
        if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
            return False
    return True


def is_private_folder(path: Path) -> bool:
    """Whether it is a folder (not a link to one) that no other user may enter."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and is_written_by_us(found) and not found.st_mode & _OTHERS
