"""Ends asyncio tasks."""

from __future__ import annotations

import asyncio
from typing import Any


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait until it has ended; its error is raised. If the caller is cancelled
    meanwhile, that is not mistaken for the end of the task."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
