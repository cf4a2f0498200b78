"""Starts and stops the demo: database, gateway, page, workload, assistant and pipeline.

The page is served as soon as the gateway runs. Spark takes longer to start, and the page shows its
progress.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
from starlette.types import ASGIApp

from headwater.app import Headwater, database
from headwater.demo import assistant, pipeline, shop, site, terminal_commands, workload
from headwater.demo.application import application
from headwater.demo.lock import demo_lock
from headwater.errors import ConfigError
from headwater.gateway.http import server
from headwater.settings.groups import AuthSettings, GatewaySettings, LimitSettings, Settings

PrintLine = Callable[[str], None]
"""Called with each line that the demo prints."""

HOST = "127.0.0.1"


class DemoPlan(msgspec.Struct, frozen=True):
    """The options of the demo. Without a port, the default port is used, or a free one if that is
    in use. Without a lake, there is no pipeline."""

    folder: str
    lake: str | None = None
    port: int | None = None
    seconds: float | None = None


async def run_demo(
    plan: DemoPlan,
    print_line: PrintLine,
    *,
    on_ready: Callable[[str], None],
    background: Callable[[Headwater], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Run the demo until Ctrl-C, or for the time in the plan. `on_ready` is called with the address
    of the page; `background` runs as long as the demo does."""
    began = time.monotonic()
    print_line("Starting PostgreSQL …")
    async with database(Settings(data_dir=plan.folder)) as url, demo_lock(plan.folder) as save_page:
        await shop.build(url)
        settings = _settings(url)
        hw = application(settings)
        app = site.site(hw.asgi(), settings, terminal_commands.commands(url, plan.lake))
        async with hw, _task_group() as tasks:
            running = [tasks.create_task(workload.run(hw)), tasks.create_task(assistant.serve(hw))]
            if background is not None:
                running.append(tasks.create_task(background(hw)))

            def ready(port: int) -> None:
                home = f"http://{HOST}:{port}"
                seconds = time.monotonic() - began
                print_line(f"The shop is open after {seconds:.1f} s. Ctrl-C closes it.")
                for line in terminal_commands.lines(home, url):
                    print_line(f"  {line}")
                save_page(f"{home}/demo/")
                on_ready(f"{home}/demo/")
                if plan.lake is not None:
                    job = pipeline.run_pipeline(hw, plan.lake, print_line)
                    running.append(tasks.create_task(job))

            await _serve(app, hw, plan, ready)
            print_line("Closing the shop …")
            for task in running:
                task.cancel()


@asynccontextmanager
async def _task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the first error itself, not a group of errors."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


def _settings(url: str) -> Settings:
    """High quotas: all tabs of the demo belong to one person."""
    roles = tuple(person.role for person in shop.PEOPLE.values())
    return Settings(
        url=url,
        auth=AuthSettings(secret=site.new_secret(), roles=roles),
        gateway=GatewaySettings(metrics="open", openapi="open", drain="1 second"),
        limits=LimitSettings(requests_per_second=5_000, sessions_per_user=64, sessions_per_ip=256),
    )


async def _serve(app: ASGIApp, hw: Headwater, plan: DemoPlan, ready: Callable[[int], None]) -> None:
    """Serve until Ctrl-C or SIGTERM, or for the time in the plan."""
    assert hw.gateway is not None
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    if plan.seconds is not None:
        loop.call_later(plan.seconds, stop.set)
    serve = partial(
        server.serve,
        app,
        host=HOST,
        drain=hw.settings.gateway.drain_period.total_seconds(),
        on_stopping=hw.gateway.stop,
        ready=ready,
        stop=stop,
    )
    try:
        await serve(port=hw.settings.gateway.port if plan.port is None else plan.port)
    except ConfigError as error:
        if plan.port is not None or not _is_taken(error):
            raise
        await serve(port=0)


def _is_taken(error: ConfigError) -> bool:
    """Whether another program has the port."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
