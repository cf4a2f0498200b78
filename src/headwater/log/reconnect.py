"""What to do about a lost database connection: whether an error means one, and how long to wait
before the next attempt."""

from __future__ import annotations

import random

import psycopg

from headwater.errors import DatabaseError
from headwater.limits import RECONNECT_SECONDS


def reconnect_pause(attempt: int) -> float:
    """Seconds to wait before this attempt to reach a lost database. Partly random, so that not all
    clients of a server that returns connect at once."""
    first, longest = RECONNECT_SECONDS
    pause = min(first * 2.0 ** min(attempt, 16), longest)
    return pause * random.uniform(0.5, 1.0)


def is_lost(error: psycopg.Error | DatabaseError) -> bool:
    """Whether the connection or the server failed, and not the statement."""
    if isinstance(error, DatabaseError):
        return error.retryable
    passing = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return passing and (error.sqlstate is None or error.sqlstate[:2] in ("08", "40", "53", "57"))
