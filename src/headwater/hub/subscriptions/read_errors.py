"""The error that a subscriber is sent when the log cannot be read for it."""

from __future__ import annotations

import logging

import psycopg

from headwater.database import translate
from headwater.errors import DatabaseError, HeadwaterError, Unavailable
from headwater.log.reconnect import is_lost

logger = logging.getLogger(__name__)


def unreadable(error: psycopg.Error | DatabaseError, reader: str) -> HeadwaterError:
    """The error as a client may read it: without the database's address and role."""
    found = translate(error) if isinstance(error, psycopg.Error) else error
    if not is_lost(error):
        return found
    logger.warning("%s cannot read the log: %s", reader, found)
    return Unavailable(
        "the database does not answer; the gateway's log has the reason",
        hint="Try again in a moment.",
    )
