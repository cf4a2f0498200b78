"""What a process and everything it started use, from `/proc`: processor time and memory.

Memory is proportional: pages that processes share are divided by those who share them.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")


class Usage:
    """Looks at the tree of a process inside the block, several times a second: a process that ends
    between two looks is counted as its parent counts it, when it has waited for it."""

    def __init__(self, pid: int, pause: float = 0.1) -> None:
        self._pid = pid
        self._pause = pause
        self._own: dict[int, tuple[str, float]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Usage:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._look(self._pid)
            self._stop.wait(self._pause)

    def _look(self, pid: int) -> None:
        try:
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            self._own[pid] = name, (int(fields[11]) + int(fields[12])) / _TICKS
        except (OSError, IndexError):  # it has ended
            return
        for child in _children(pid):
            self._look(child)

    def seconds(self) -> float:
        """Processor seconds of all processes until the last look."""
        return sum(seconds for _, seconds in self._own.values())

    def by_program(self) -> dict[str, float]:
        """The same, by the names of the programs."""
        found = defaultdict[str, float](float)
        for name, seconds in self._own.values():
            found[name] += seconds
        return {name: round(seconds, 2) for name, seconds in found.items()}


# ------------------------------------------------------------------------ at rest


class Rest(NamedTuple):
    """What a process and all that it started use while there is no work: bytes of memory and the
    share of a core by the names of the programs, and the number of processes."""

    memory: Mapping[str, int]
    cores: Mapping[str, float]
    processes: int

    @property
    def memory_text(self) -> str:
        return f"{sum(self.memory.values()) / 2**30:.2f} GB"

    @property
    def cpu_text(self) -> str:
        return f"{100 * sum(self.cores.values()):.1f} % of a core"


def at_rest(pid: int, seconds: float) -> Rest:
    """Watch a process that has no work for some seconds."""
    with Usage(pid) as usage:
        time.sleep(1)
        before, began = usage.by_program(), time.monotonic()
        time.sleep(seconds)
        after, took = usage.by_program(), time.monotonic() - began
    cores = {name: (used - before.get(name, 0.0)) / took for name, used in after.items()}
    memory, pids = defaultdict[str, int](int), list(tree(pid))
    for each in pids:
        memory[_program(each)] += memory_bytes(each)
    return Rest(memory, cores, len(pids))


def tree(pid: int) -> Iterator[int]:
    """A process, and all that it started."""
    yield pid
    for child in _children(pid):
        yield from tree(child)


def _children(pid: int) -> list[int]:
    found = list[int]()
    with suppress(OSError):  # the process has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has ended
                found += map(int, (task / "children").read_text().split())
    return found


def memory_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(kib) for kib in re.findall(r"^Pss: +(\d+) kB", text, re.M)) * 1024


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended"
