"""The frames of a view that a returning subscriber may have missed. Pure.

A position that was sent marks how many frames its receiver has; to resume there means to send the
frames after it. If the position is not stored, or a frame after it was dropped, the answer is None,
and the subscriber gets a snapshot. Only the text of a frame is stored, which is small. It is
bounded per view, and by `ReplayBuffers` in total.
"""

from __future__ import annotations

from collections import deque

from headwater.protocol import Frame, read_server

_RECENT_FRAMES_MAX = 256
"""Frames of one live query that are stored for returning subscribers. Older ones are dropped: then
a returning subscriber gets a snapshot instead."""

_RECENT_BYTES_MAX = 32 * 1024 * 1024
"""Bytes of all stored frames together, as sent. The oldest are dropped first."""


class ReplayBuffer:
    """The last frames of one view."""

    __slots__ = ("_frames", "_marks", "_sent")

    def __init__(self) -> None:
        self._sent = 0
        self._frames: deque[bytes] = deque()
        self._marks: dict[str, int] = {}

    def mark(self, position: str) -> None:
        """A subscriber was sent this position, and has every frame so far."""
        self._marks.pop(position, None)
        self._marks[position] = self._sent
        if len(self._marks) > _RECENT_FRAMES_MAX:
            del self._marks[next(iter(self._marks))]

    def add(self, frame: Frame, position: str) -> None:
        """A frame was sent to all subscribers."""
        self._sent += 1
        self._frames.append(frame.json)
        self.mark(position)

    def after(self, position: str) -> list[Frame] | None:
        """The frames after a position that was sent; None if they are not stored."""
        had = self._marks.get(position)
        if had is None or self._sent - had > len(self._frames):
            return None
        missed = self._sent - had
        return [Frame(read_server(text)) for text in list(self._frames)[len(self) - missed :]]

    def drop_oldest(self) -> int:
        """Drop the oldest frame. Returns its size."""
        return len(self._frames.popleft())

    def clear(self) -> int:
        """Positions that were sent before are no longer valid. Returns the size of what was
        dropped."""
        size = sum(map(len, self._frames))
        self._frames.clear()
        self._marks.clear()
        return size

    def __len__(self) -> int:
        return len(self._frames)


class ReplayBuffers:
    """Keeps the frames of all views within the bounds."""

    def __init__(self) -> None:
        self._by_age: dict[ReplayBuffer, None] = {}
        self._bytes = 0

    def add(self, replay: ReplayBuffer, frame: Frame, position: str) -> None:
        replay.add(frame, position)
        self._bytes += frame.size
        self._by_age.pop(replay, None)
        self._by_age[replay] = None
        if len(replay) > _RECENT_FRAMES_MAX:
            self._bytes -= replay.drop_oldest()
        while self._bytes > _RECENT_BYTES_MAX:
            self._drop_from(next(iter(self._by_age)))

    def clear(self, replay: ReplayBuffer) -> None:
        self._bytes -= replay.clear()
        self._by_age.pop(replay, None)

    def _drop_from(self, idle_longest: ReplayBuffer) -> None:
        self._bytes -= idle_longest.drop_oldest()
        if not len(idle_longest):
            del self._by_age[idle_longest]
