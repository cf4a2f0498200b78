"""Signals in the log: which rows they are, and the channel on which each topic's are announced."""

from __future__ import annotations

from hashlib import md5

from headwater.model import Table


def is_signals(table: Table) -> bool:
    """Whether it is the table, always empty, whose shape signals have. They are no changes of
    anything, so readers are not shown them unless they ask for them."""
    return table.name == "signals" and table.schema == "headwater"


def channel_of(topic: str) -> str:
    """The NOTIFY channel of a topic, as headwater.signal computes it. It only wakes: that two
    topics may share one does no harm.

    >>> channel_of("chat:42")
    'headwater:788a9140c25e6eb3'
    """
    return "headwater:" + md5(topic.encode(), usedforsecurity=False).hexdigest()[:16]
