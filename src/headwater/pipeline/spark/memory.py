"""How much memory Spark's Java may take: a share of the machine's, within bounds.

A container has less than its machine: the limits of the process's control groups count.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from headwater import limits

_SHARE = 4
"""One part in this many of the memory is for the heap: Python's workers, the database and the
system's cache of files need the rest."""

_LEAST_BYTES = 512 * 1024 * 1024
"""With less, Spark refuses to start."""

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def heap_bytes(chosen: int = 0) -> int:
    """The heap of Spark's Java: the setting `[lake] memory`, or where that is 0, a share of the
    machine's memory."""
    if chosen:
        return max(chosen, _LEAST_BYTES)
    least, most = limits.SPARK_HEAP_BYTES
    return max(least, min(machine_bytes() // _SHARE, most))


def heap_setting(chosen: int = 0) -> str:
    """The same for the setting `spark.driver.memory`."""
    return f"{heap_bytes(chosen) // 2**20}m"


def machine_bytes() -> int:
    """The memory that this process may use."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group_limits()])


def _group_limits() -> Iterator[int]:
    """The limits of this process's control groups and of the groups around them."""
    with suppress(OSError):
        for line in _OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _limits(_CGROUPS, path, "memory.max")
            elif "memory" in controllers.split(","):
                yield from _limits(_CGROUPS / "memory", path, "memory.limit_in_bytes")


def _limits(root: Path, path: str, name: str) -> Iterator[int]:
    """`max`, or no file, is for no limit. A container sees its own group as the root."""
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        with suppress(OSError, ValueError):
            yield int((folder / name).read_text())
        if folder == root:
            return
