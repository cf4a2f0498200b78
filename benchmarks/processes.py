"""The processor time of a process and everything it started, from `/proc`."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from pathlib import Path
from types import TracebackType

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
            for task in Path(f"/proc/{pid}/task").iterdir():
                for child in (task / "children").read_text().split():
                    self._look(int(child))
        except (OSError, IndexError):
            return

    def seconds(self) -> float:
        """Processor seconds of all processes until the last look."""
        return sum(seconds for _, seconds in self._own.values())

    def by_program(self) -> dict[str, float]:
        """The same, by the names of the programs."""
        found = defaultdict[str, float](float)
        for name, seconds in self._own.values():
            found[name] += seconds
        return {name: round(seconds, 2) for name, seconds in found.items()}
