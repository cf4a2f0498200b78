"""Log messages about drift: a difference between what was sent and what the database has."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.model import Row

_RECONCILE_VALUE_CHARS = 100
"""Characters of a differing value in the log. The rest is cut."""


DRIFT = "what was sent is not what the database has"
"""Every log message about drift begins with this."""


def differing(ours: Row | None, theirs: Row | None, *, secret: bool) -> tuple[str, str]:
    """The values that differ, for the log. If they are `secret`, only the names of columns: not
    every user may see such rows."""
    if ours is None or theirs is None:
        return _whole(ours, secret=secret), _whole(theirs, secret=secret)
    names = [name for name in ours if _text(ours[name]) != _text(theirs.get(name))]
    if secret:
        listed = ", ".join(names)
        return f"other values of {listed}", "its own"
    return tuple(  # type: ignore[return-value]
        ", ".join(f"{name} = {cut(row.get(name))}" for name in names) or "it elsewhere"
        for row in (ours, theirs)
    )


def _whole(row: Row | None, *, secret: bool) -> str:
    if row is None:
        return "no row"
    return "a row" if secret or not row else cut(dict(row))


def _text(value: Any) -> bytes:
    return msgspec.json.encode(value)


def cut(value: Any) -> str:
    text = repr(value)
    most = _RECONCILE_VALUE_CHARS
    return text if len(text) <= most else f"{text[:most]}…"
