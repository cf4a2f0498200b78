"""Opens the shop: database, gateway, page, trade, assistant and pipeline. And closes all of it.

The page is there as soon as the gateway is. Spark takes longer to start, and the page says how far
it is.
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
from headwater.demo import assistant, by_hand, shop, site, spark, trade
from headwater.demo.alone import alone
from headwater.demo.application import application
from headwater.errors import ConfigError
from headwater.gateway.http import server
from headwater.settings.groups import AuthSettings, GatewaySettings, LimitSettings, Settings

Say = Callable[[str], None]
"""Gets what the demo tells about itself, a line at a time."""

HOST = "127.0.0.1"


class DemoPlan(msgspec.Struct, frozen=True):
    """How the shop is to be opened. Without a port it is the usual one, or a free one where another
    program has that. Without a lake, there is no pipeline."""

    folder: str
    lake: str | None = None
    port: int | None = None
    seconds: float | None = None


async def open_shop(
    plan: DemoPlan,
    say: Say,
    *,
    opened: Callable[[str], None],
    beside: Callable[[Headwater], Coroutine[Any, Any, None]] | None = None,
) -> None:
    """Keep the shop open until Ctrl-C, or until the time is over. `opened` is called with the
    address of the page; `beside` runs meanwhile."""
    began = time.monotonic()
    say("Starting PostgreSQL …")
    place = Settings(data_dir=plan.folder)
    async with database(place) as url, alone(plan.folder) as tell_others:
        await shop.build(url)
        settings = _settings(url)
        hw = application(settings)
        app = site.site(hw.asgi(), settings, by_hand.about(url, plan.lake))
        async with hw, _together() as tasks:
            working = [tasks.create_task(trade.go_on(hw)), tasks.create_task(assistant.serve(hw))]
            if beside is not None:
                working.append(tasks.create_task(beside(hw)))

            def ready(port: int) -> None:
                home = f"http://{HOST}:{port}"
                say(f"A shop is open, after {time.monotonic() - began:.1f} s. Ctrl-C closes it.")
                for line in by_hand.lines(home, url):
                    say(f"  {line}")
                tell_others(f"{home}/demo/")
                opened(f"{home}/demo/")
                if plan.lake is not None:
                    working.append(tasks.create_task(spark.keep(hw, plan.lake, say)))

            await _serve(app, hw, plan, ready)
            say("Closing the shop …")
            for each in working:
                each.cancel()


@asynccontextmanager
async def _together() -> AsyncIterator[asyncio.TaskGroup]:
    """Tasks that end together. Why they do is said by the first that fails."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


def _settings(url: str) -> Settings:
    """The visitor is one person with many hands: quotas for strangers would only be in the way."""
    roles = tuple(person.role for person in shop.PEOPLE.values())
    return Settings(
        url=url,
        auth=AuthSettings(secret=site.new_secret(), roles=roles),
        gateway=GatewaySettings(metrics="open", openapi="open", drain="1 second"),
        limits=LimitSettings(requests_per_second=5_000, sessions_per_user=64, sessions_per_ip=256),
    )


async def _serve(app: ASGIApp, hw: Headwater, plan: DemoPlan, ready: Callable[[int], None]) -> None:
    """Serve until Ctrl-C or SIGTERM, or until the time is over."""
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
