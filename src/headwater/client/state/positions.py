"""The positions that a client has seen, on all its subscriptions and connections.

Pure. Each gateway of a database reads the log at its own pace. So that data never goes back in time
at another gateway, a client sends with every subscription the least position that covers everything
it has seen, and refuses results that are older than what a subscription has shown.
"""

from __future__ import annotations

from collections.abc import Iterable

from headwater.model import Position


def is_older(position: str, shown: str | None) -> bool:
    """Whether a position lacks something of the same log that was shown before.

    >>> is_older("a-5:5:", "a-6:6:"), is_older("a-6:6:", "a-5:5:"), is_older("b-1:1:", "a-5:5:")
    (True, False, False)
    """
    if shown is None or position == shown:
        return False
    one, other = Position.parse(position), Position.parse(shown)
    return one.log == other.log and not one.covers(other)


def joined(positions: Iterable[str | None]) -> str | None:
    """The least position that covers all of these. If they are of several logs, the last log
    counts: the database was restored meanwhile.

    >>> joined(["a-5:9:5,7", None, "a-4:8:4,5"])
    'a-5:9:5'
    """
    found: Position | None = None
    for text in dict.fromkeys(positions):
        if text is not None:
            position = Position.parse(text)
            same = found is not None and found.log == position.log
            found = found.joined(position) if same and found is not None else position
    return None if found is None else str(found)
