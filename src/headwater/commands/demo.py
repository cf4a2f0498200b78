"""`demo`: a small shop in the browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from contextlib import aclosing
from threading import Thread
from typing import Annotated

import typer

from headwater.app import Headwater
from headwater.commands.execution import run
from headwater.commands.options import LIVE_PANEL, DataDir, Json
from headwater.commands.output import change_as_json, print_note
from headwater.embedded import default_data_dir
from headwater.pipeline import packages

app = typer.Typer()


@app.command(rich_help_panel=LIVE_PANEL)
def demo(
    data_dir: DataDir = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65_535,
            help="The port to listen on; default: 8484, or a free port if that is taken.",
        ),
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Stop after this many seconds.")] = None,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Do not open the page in a browser.")
    ] = False,
    no_pipeline: Annotated[
        bool, typer.Option("--no-pipeline", help="Run without the data pipeline.")
    ] = False,
    json: Json = False,
) -> None:
    """Open a small shop in the browser: PostgreSQL, gateway and Spark pipeline, until Ctrl-C.

    Example: `headwater demo --no-browser`
    """
    from headwater.demo import startup
    from headwater.gateway.http import server

    folder = data_dir or str(default_data_dir() / "demo-shop")
    has_pipeline = not no_pipeline and not packages.missing()
    lake = f"{folder.rstrip('/')}-lake" if has_pipeline else None
    plan = startup.DemoPlan(folder, lake, port, seconds)
    if not (has_pipeline or no_pipeline):
        print_note(f"Spark is not installed, so there is no pipeline: {packages.INSTALL}")

    def open_browser(page: str) -> None:
        if not no_browser and _has_browser():
            # A browser can take long to start, and the gateway must not wait for it.
            Thread(target=webbrowser.open, args=(page,), daemon=True).start()

    async def print_changes(hw: Headwater) -> None:
        async with aclosing(hw.changes("orders")) as feed:
            async for transaction in feed:
                for change in transaction.changes:
                    print(change_as_json(change, transaction), flush=True)

    work = startup.run_demo(
        plan, print_note, on_ready=open_browser, background=print_changes if json else None
    )
    run(work, server.new_event_loop)


def _has_browser() -> bool:
    """Whether a browser can be opened for a person at this machine."""
    if os.environ.get("CI") or not sys.stderr.isatty():
        return False
    return sys.platform == "darwin" or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )
