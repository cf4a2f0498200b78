"""The data pipeline of the demo: a child process that writes the lake and the streaming view."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headwater.app import Headwater
from headwater.child_process import supervised
from headwater.demo import terminal_commands
from headwater.pipeline.process import PipelineProcess
from headwater.pipeline.spark import shared_session

VIEW = "headwater.demo.revenue:hw"
LOOK_SECONDS = 0.5
STOP_SECONDS = 5.0
"""How long the demo waits for its pipeline to stop. Then it is killed, which loses no change."""


async def run_pipeline(hw: Headwater, lake: str, print_line: Callable[[str], None]) -> None:
    """Run the pipeline until cancelled. Prints when Spark is starting and when it is ready."""

    def print_problem(line: str) -> None:
        if line.startswith(("error", "hint", "ended")):  # not Spark's other output
            print_line(f"Spark: {line}")

    print_line("Spark is starting, which takes some seconds …")
    began = time.monotonic()
    process = PipelineProcess(
        hw.url, lake, print_problem, options=("--app", VIEW), stop_seconds=STOP_SECONDS
    )
    async with supervised(process, "pipeline"):
        while not shared_session.find(lake):  # noqa: ASYNC110 (another process makes it true)
            await asyncio.sleep(LOOK_SECONDS)
        seconds = time.monotonic() - began
        print_line(f"Spark is ready after {seconds:.0f} s, and writes every change to {lake}")
        print_line(f"  history    {terminal_commands.as_of(lake)}")
        await asyncio.Event().wait()
