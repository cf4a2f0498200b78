"""Tasks that are ended by whoever started them."""

from __future__ import annotations

import asyncio
from typing import Any


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel it, and wait until it has ended; what it raised is raised. Whoever waits here may be
    cancelled as well, which is not mistaken for the end of the other."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
