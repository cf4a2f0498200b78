"""What nobody foresaw: an id for the client, the details for the log."""

from __future__ import annotations

import logging
import secrets

from headwater.errors import HeadwaterError

logger = logging.getLogger(__name__)


def unforeseen() -> HeadwaterError:
    """For an exception that is no error of ours, where it is handled: the log has it."""
    id = secrets.token_hex(4)
    logger.exception("request failed (%s)", id)
    return HeadwaterError(f"something went wrong here; the log has it under {id}", code="internal")
