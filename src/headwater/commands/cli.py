"""All commands of `headwater`, in the order of the help. The commands are in the other modules.

Each has an example in its help, accepts `--json`, and ends with an exit code:
0 done · 1 an error · 2 wrong usage or settings · 3 the database cannot be reached · 4 resync needed

A module that takes long to import, and that only one command needs, is imported inside that
command: the other commands start without it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from headwater import __version__
from headwater.commands import database, demo, explain, serve, status, tail, watch
from headwater.commands.lake import pipeline, queries, reconcile, replay, tables, views
from headwater.commands.options import DATABASE_PANEL, LAKE_PANEL, new_app
from headwater.commands.source import add, requests, show
from headwater.commands.source import run as source_run

app = new_app(name="headwater", help="Turn a database into live data.")
for group in (database, status, tail, watch, explain, serve, demo, queries, replay):
    app.add_typer(group.app)
sources = new_app(help="Mirror tables of databases elsewhere: PostgreSQL, MySQL, MongoDB, SQLite.")
for group in (add, show, requests, source_run):
    sources.add_typer(group.app)
app.add_typer(sources, name="source", rich_help_panel=DATABASE_PANEL)
pipeline.app.add_typer(reconcile.app)
pipeline.app.add_typer(tables.app, name="table")
app.add_typer(pipeline.app, name="pipeline", rich_help_panel=LAKE_PANEL)
app.add_typer(views.app, name="view", rich_help_panel=LAKE_PANEL)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headwater {__version__}")
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Turn a database into live data."""
