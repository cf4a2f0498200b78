"""One demo at a time in a data folder: two would trade twice, both answer in the chat, and have two
pipelines write to one lake.

The lock is one of a file, not of the database, which visitors may restart while the demo goes on.
It dies with its holder, and its file says where the page is.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headwater.embedded.folder import Folder
from headwater.embedded.locks import FileLock
from headwater.errors import ConfigError

PAGE_BYTES_MAX = 1_000
"""How much of the file is shown as the address of the page."""


@asynccontextmanager
async def alone(data_dir: str) -> AsyncIterator[Callable[[str], None]]:
    """Have the folder, whose server runs, for oneself; gives a function that takes the address of
    the page. ConfigError where a demo runs there already."""
    path = Folder(data_dir).run / "demo.lock"
    with FileLock(path) as lock:
        if not lock.take():
            page = os.pread(lock.fileno(), PAGE_BYTES_MAX, 0).decode("utf-8", "replace")
            raise ConfigError(
                f"the demo runs already{page and f': {page}'}",
                hint="Stop the other demo with Ctrl-C, or choose another folder with --data-dir.",
            )
        os.ftruncate(lock.fileno(), 0)
        yield lambda page: _write(lock, page)


def _write(lock: FileLock, page: str) -> None:
    os.ftruncate(lock.fileno(), 0)
    os.write(lock.fileno(), page.encode())
