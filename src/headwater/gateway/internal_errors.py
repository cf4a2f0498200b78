"""Unexpected errors: the client gets an id, the gateway's log gets the details."""

from __future__ import annotations

import logging
import secrets

from headwater.errors import HeadwaterError

logger = logging.getLogger(__name__)


def internal_error() -> HeadwaterError:
    """Log the current unexpected exception, and return the error that names its log entry."""
    id = secrets.token_hex(4)
    logger.exception("unexpected error %s", id)
    return HeadwaterError(
        f"unexpected error {id} in the gateway",
        code="internal",
        hint="The gateway's log has the details under this id.",
    )
