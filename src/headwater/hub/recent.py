"""The frames of a view that a returning subscriber may have missed. Pure.

A position that was handed out marks how many frames its receiver had; resuming there brings exactly
the frames after that. A position that nobody remembers, or behind which a frame was dropped, cannot
be resumed: the answer is None, and the subscriber gets a snapshot. What is kept is the text of a
frame, a fraction of what the frame itself takes, and bounded per view and, through `Recents`, in
all.
"""

from __future__ import annotations

from collections import deque

from headwater import limits
from headwater.protocol import Frame, read_server


class Recent:
    """What one view has sent lately."""

    __slots__ = ("_frames", "_marks", "_sent")

    def __init__(self) -> None:
        self._sent = 0
        self._frames: deque[bytes] = deque()
        self._marks: dict[str, int] = {}

    def mark(self, position: str) -> None:
        """Somebody was told this position, having every frame so far."""
        self._marks.pop(position, None)
        self._marks[position] = self._sent
        if len(self._marks) > limits.RECENT_FRAMES_MAX:
            del self._marks[next(iter(self._marks))]

    def add(self, frame: Frame, position: str) -> None:
        """A frame was sent to all."""
        self._sent += 1
        self._frames.append(frame.json)
        self.mark(position)

    def after(self, position: str) -> list[Frame] | None:
        """The frames that who was told the position has not seen; None if they are not known."""
        had = self._marks.get(position)
        if had is None or self._sent - had > len(self._frames):
            return None
        missed = self._sent - had
        return [Frame(read_server(text)) for text in list(self._frames)[len(self) - missed :]]

    def drop_oldest(self) -> int:
        """Forget a frame; returns its size."""
        return len(self._frames.popleft())

    def clear(self) -> int:
        """Positions told before mean nothing any more. Returns the size of what is dropped."""
        size = sum(map(len, self._frames))
        self._frames.clear()
        self._marks.clear()
        return size

    def __len__(self) -> int:
        return len(self._frames)


class Recents:
    """Keeps the frames of all views within the bounds."""

    def __init__(self) -> None:
        self._by_age: dict[Recent, None] = {}
        self._bytes = 0

    def add(self, recent: Recent, frame: Frame, position: str) -> None:
        recent.add(frame, position)
        self._bytes += frame.size
        self._by_age.pop(recent, None)
        self._by_age[recent] = None
        if len(recent) > limits.RECENT_FRAMES_MAX:
            self._bytes -= recent.drop_oldest()
        while self._bytes > limits.RECENT_BYTES_MAX:
            self._drop_from(next(iter(self._by_age)))

    def clear(self, recent: Recent) -> None:
        self._bytes -= recent.clear()
        self._by_age.pop(recent, None)

    def _drop_from(self, idle_longest: Recent) -> None:
        self._bytes -= idle_longest.drop_oldest()
        if not len(idle_longest):
            del self._by_age[idle_longest]
