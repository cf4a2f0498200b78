"""The frames that wait for one client, as memory counts them. Pure.

They count in full for the user whose client does not read. In all they count once, however many
clients the same bytes wait for.
"""

from __future__ import annotations

from collections import deque

from headwater.memory import Holding, Memory
from headwater.protocol import Shared


class Backlog:
    """What a sink has been given and the network has not taken, in order."""

    __slots__ = ("_bytes", "_holding", "_memory", "_waiting")

    def __init__(self, memory: Memory, holding: Holding) -> None:
        self._memory = memory
        self._holding = holding
        self._waiting: deque[Shared] = deque()
        self._bytes = 0

    def add(self, frame: Shared, buffered: int) -> None:
        """One more waits, behind the others; that many bytes wait in all."""
        if frame.holders == 0:
            self._memory.add(frame.bytes)
        frame.holders += 1
        self._waiting.append(frame)
        self._bytes += frame.bytes
        self.settle(buffered)

    def settle(self, buffered: int) -> None:
        """Only so many bytes still wait: those before them were taken."""
        waiting = self._waiting
        while waiting and self._bytes - waiting[0].bytes >= buffered:
            frame = waiting.popleft()
            self._bytes -= frame.bytes
            frame.holders -= 1
            if frame.holders == 0:
                self._memory.add(-frame.bytes)
        self._holding.resize(self._bytes)

    def close(self) -> None:
        """Nothing waits any more."""
        self.settle(0)
        self._holding.close()
