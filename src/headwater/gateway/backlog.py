"""The memory of the frames that wait for one client. Pure.

A user is charged in full for the frames that its clients do not read. In the total, bytes that wait
for many clients count once.
"""

from __future__ import annotations

from collections import deque

from headwater.memory import Holding, Memory
from headwater.protocol import Shared


class Backlog:
    """The frames in a sink that the network has not accepted yet, in order."""

    __slots__ = ("_bytes", "_holding", "_memory", "_waiting")

    def __init__(self, memory: Memory, holding: Holding) -> None:
        self._memory = memory
        self._holding = holding
        self._waiting: deque[Shared] = deque()
        self._bytes = 0

    def add(self, frame: Shared, buffered: int) -> None:
        """Add a frame at the end. `buffered` bytes wait in all."""
        if frame.holders == 0:
            self._memory.add(frame.bytes)
        frame.holders += 1
        self._waiting.append(frame)
        self._bytes += frame.bytes
        self.settle(buffered)

    def settle(self, buffered: int) -> None:
        """Only `buffered` bytes still wait: remove the frames before them."""
        waiting = self._waiting
        while waiting and self._bytes - waiting[0].bytes >= buffered:
            frame = waiting.popleft()
            self._bytes -= frame.bytes
            frame.holders -= 1
            if frame.holders == 0:
                self._memory.add(-frame.bytes)
        self._holding.resize(self._bytes)

    def close(self) -> None:
        """Remove all frames."""
        self.settle(0)
        self._holding.close()
