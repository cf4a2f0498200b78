"""Who runs a pipeline: the name of this process, for messages and for its lease.

Nothing here needs the packages of the pipeline.
"""

from __future__ import annotations

import getpass
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache


@cache
def owner_name() -> str:
    """The user, machine and process of this pipeline, for messages and as its lease."""
    user = str(os.getuid())
    with suppress(KeyError, OSError):
        user = getpass.getuser()
    now = datetime.now(UTC)
    return (
        f"{user}@{socket.gethostname()}, process {os.getpid()}, since {now:%Y-%m-%d %H:%M:%S} UTC"
    )
