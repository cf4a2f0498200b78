"""Who else may use the folders and files of a lake: other users of the machine, as a rule, not.

A lake has every row that was ever written, and no policy guards it: folders that Headwater makes
are for their owner alone. A folder that was there before is never changed: its mode is how a team
shares a lake by its group, and it is reported (`openness`). What Headwater reads back from a file
and acts upon counts only where no other user can have written it (`read_own`).
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


def make_own(path: Path) -> None:
    """A folder that only Headwater uses, closed to others also where it existed. ConfigError if
    another user can have put something there: programs are started from it."""
    make_folders(path)
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & _OTHERS_WRITE:
        raise ConfigError(
            f"{path} can be written to by other users, and Spark would be started from it",
            hint="Remove it, or name another place: XDG_CACHE_HOME.",
        )
    if found.st_mode & _OTHERS:
        path.chmod(0o700)


def openness(path: Path) -> str | None:
    """Who beside the owner can read a folder, in words; None for no other user."""
    found = path.stat()
    above = [folder.stat().st_mode for folder in path.resolve().parents]
    if found.st_mode & stat.S_IRWXO and all(mode & stat.S_IXOTH for mode in above):
        return "every user of this machine"
    if found.st_mode & stat.S_IRWXG and all(mode & (stat.S_IXOTH | stat.S_IXGRP) for mode in above):
        return f"the group {_group(found.st_gid)}"
    return None


def notice(root: str, who: str) -> str:
    """The line for a lake that others can read."""
    return (
        f"{root} can be read by {who}: it has every row that was ever written, and no policy "
        f"guards it. To close it: chmod 700 {root}"
    )


def _group(number: int) -> str:
    with suppress(KeyError):
        return grp.getgrgid(number).gr_name
    return str(number)


@contextmanager
def umask_of(root: Path) -> Iterator[int]:
    """Inside, what is created is open to those at most who may enter the folder: the umask of the
    whole process, and of those it starts."""
    before = os.umask(0o077)
    chosen = before | (~root.stat().st_mode & _OTHERS)
    os.umask(chosen)
    try:
        yield chosen
    finally:
        os.umask(before)


def read_own(path: Path, bytes_max: int) -> bytes | None:
    """The content of a file that this user, or root, wrote. None for one that is not there, is a
    link, is larger, or that another user owns or could have put there."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or not is_own(found) or not _is_closed(path):
            return None
        content = file.read(bytes_max + 1)
    return content if len(content) <= bytes_max else None


def is_own(found: os.stat_result) -> bool:
    """Whether only this user, or root, can have written it."""
    return found.st_uid in (os.geteuid(), 0) and not found.st_mode & _OTHERS_WRITE


def _is_closed(path: Path) -> bool:
    """Whether no other user can put a file in the place of this one, as far up as folders are this
    user's own. In a sticky folder files can be replaced by their owner only."""
    for folder in path.absolute().parents:
        found = folder.stat()
        if found.st_uid != os.geteuid():
            return True
        if found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
            return False
    return True


def is_private_folder(path: Path) -> bool:
    """Whether it is a folder, not a link to one, that no other user may enter."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and is_own(found) and not found.st_mode & _OTHERS
