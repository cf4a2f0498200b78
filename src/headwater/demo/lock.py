"""Allows one demo per data folder: two would both write orders, both answer in the chat, and have
two pipelines write to one lake.

It is a file lock and not one of the database, because visitors may restart the database. It ends
with the process that holds it. The file contains the address of the demo's page.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from headwater.embedded.folder import Folder
from headwater.embedded.locks import FileLock
from headwater.errors import ConfigError

PAGE_BYTES_MAX = 1_000
"""How much of the file is read as the address of the page."""


@asynccontextmanager
async def demo_lock(data_dir: str) -> AsyncIterator[Callable[[str], None]]:
    """Hold the lock of a data folder inside the block. Yields a function that saves the address of
    the page in the lock file. ConfigError if another demo holds the lock."""
    path = Folder(data_dir).run / "demo.lock"
    with FileLock(path) as lock:
        if not lock.take():
            page = os.pread(lock.fileno(), PAGE_BYTES_MAX, 0).decode("utf-8", "replace")
            raise ConfigError(
                f"the demo is already running in this data folder{page and f': {page}'}",
                hint="Stop the other demo with Ctrl-C, or choose another folder with --data-dir.",
            )
        os.ftruncate(lock.fileno(), 0)
        yield lambda page: _write(lock, page)


def _write(lock: FileLock, page: str) -> None:
    os.ftruncate(lock.fileno(), 0)
    os.write(lock.fileno(), page.encode())
