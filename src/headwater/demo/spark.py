"""The data pipeline of the demo, as a child process that keeps every change and the view."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headwater.app import Headwater
from headwater.demo import by_hand
from headwater.pipeline.process import PipelineProcess, supervised
from headwater.pipeline.spark import shared_session

VIEW = "headwater.demo.revenue:hw"
LOOK_SECONDS = 0.5
STOP_SECONDS = 5.0
"""How long the demo waits for its pipeline to stop. One that is killed has lost nothing."""


async def keep(hw: Headwater, lake: str, say: Callable[[str], None]) -> None:
    """Run the pipeline beside the shop, and say when it is up."""

    def hear(line: str) -> None:
        if line.startswith(("error", "hint", "ended")):  # the rest is Spark's own talk
            say(f"Spark: {line}")

    say("Spark is starting, which takes some seconds …")
    began = time.monotonic()
    process = PipelineProcess(
        hw.url, lake, hear, options=("--app", VIEW), stop_seconds=STOP_SECONDS
    )
    async with supervised(process):
        while not shared_session.find(lake):  # noqa: ASYNC110 (another process makes it true)
            await asyncio.sleep(LOOK_SECONDS)
        say(f"Spark is up after {time.monotonic() - began:.0f} s, and keeps every change in {lake}")
        say(f"  what was   {by_hand.as_of(lake)}")
        await asyncio.Event().wait()
