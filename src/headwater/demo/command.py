"""`headwater demo`."""

from __future__ import annotations

import os
import sys
import webbrowser
from contextlib import aclosing
from threading import Thread
from typing import Annotated

import typer

from headwater import child, render
from headwater.app import Headwater
from headwater.command_options import DataDir, Json
from headwater.command_work import err, run
from headwater.embedded import default_data_dir

app = typer.Typer()


@app.command()
def demo(
    data_dir: DataDir = None,
    port: Annotated[
        int | None, typer.Option(help="The port to listen on; else 8484, or any that is free.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Stop by itself after so many seconds.")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Do not open the page.")] = False,
    no_pipeline: Annotated[
        bool, typer.Option("--no-pipeline", help="Leave out the data pipeline.")
    ] = False,
    json: Json = False,
) -> None:
    """Open a small shop in the browser: PostgreSQL, gateway and Spark pipeline, until Ctrl-C.

    Example: `headwater demo --no-browser`
    """
    from headwater.demo import opening
    from headwater.gateway import server

    folder = data_dir or str(default_data_dir() / "demo-shop")
    has_pipeline = not no_pipeline and not child.missing()
    lake = f"{folder.rstrip('/')}-lake" if has_pipeline else None
    plan = opening.Plan(folder, lake, port, seconds)

    def say(line: str) -> None:
        err.print(line, markup=False, soft_wrap=True)

    if not (has_pipeline or no_pipeline):
        say("Spark is not installed, so there is no pipeline: pip install 'headwater[spark]'")

    def opened(page: str) -> None:
        if not no_browser and _has_browser():
            # The browser may take its time, and the gateway must not wait for it.
            Thread(target=webbrowser.open, args=(page,), daemon=True).start()

    async def print_changes(hw: Headwater) -> None:
        async with aclosing(hw.changes("orders")) as feed:
            async for transaction in feed:
                for change in transaction.changes:
                    print(render.change_as_json(change, transaction), flush=True)

    beside = print_changes if json else None
    run(opening.open_shop(plan, say, opened=opened, beside=beside), server.new_event_loop)


def _has_browser() -> bool:
    """Whether somebody sits there who could look at a page."""
    if os.environ.get("CI") or not sys.stderr.isatty():
        return False
    return sys.platform == "darwin" or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
