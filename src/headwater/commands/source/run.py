"""`source run`: runs sources in this process. A gateway starts it as a child process."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated

import typer

from headwater.app import database
from headwater.capture.mirror import registry
from headwater.capture.postgres import schema
from headwater.capture.running.supervisor import Supervisor
from headwater.child_process import stop_with_parent
from headwater.commands.execution import run
from headwater.commands.options import DataDir, Embedded, Json, Url, settings_for
from headwater.commands.output import print_note
from headwater.database import connect
from headwater.errors import NotFound
from headwater.limits import SOURCE_PROCESS_STOP_SECONDS
from headwater.logs import log_as_json

app = typer.Typer()


@app.command("run")
def run_sources(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME…", help="The sources; default: all.")
    ] = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Copy and follow sources, also those that are added later, until Ctrl-C.

    `headwater serve` does this itself, unless the setting [sources] run is false. Several processes
    may run: each source is run by one of them.

    Example: `headwater source run shop`
    """
    if json:
        log_as_json()
    stop_with_parent(SOURCE_PROCESS_STOP_SECONDS)

    async def work() -> None:
        async with database(settings_for(url, embedded, data_dir)) as found:
            await _check(found, names or [])
            if not json:
                print_note("Running the sources. Stop with Ctrl-C.")
            await run_until_cancelled(found, names or None)

    run(work())


async def _check(url: str, names: list[str]) -> None:
    connection = await connect(url, purpose="cli")
    try:
        await schema.require(connection)
        known = [each.definition.name for each in await registry.definitions(connection)]
    finally:
        await connection.close()
    for name in names:
        if name not in known:
            there = f"There are: {', '.join(known)}." if known else "No source is declared."
            raise NotFound(f"there is no source {name}", hint=there)


async def run_until_cancelled(url: str, names: list[str] | None) -> None:
    """Run sources. When cancelled, as by Ctrl-C, it finishes the transactions at hand and returns:
    that is the usual end."""
    supervisor = Supervisor(url)
    running = asyncio.create_task(supervisor.run(names), name="sources")
    try:
        with suppress(asyncio.CancelledError):
            await asyncio.shield(running)
    finally:
        await supervisor.stop()
        await asyncio.wait({running})
    running.result()
