"""Signals in the log: which rows they are, and the NOTIFY channel of each topic's signals."""

from __future__ import annotations

from hashlib import md5

from headwater.model import Table


def is_signals(table: Table) -> bool:
    """Whether this is the table of signals, which is always empty. Signals are no changes of a row,
    so readers get them only on request."""
    return table.name == "signals" and table.schema == "headwater"


def channel_of(topic: str) -> str:
    """The NOTIFY channel of a topic, as headwater.signal computes it. Two topics may share one: it
    only wakes readers.

    >>> channel_of("chat:42")
    'headwater:788a9140c25e6eb3'
    """
    return "headwater:" + md5(topic.encode(), usedforsecurity=False).hexdigest()[:16]
