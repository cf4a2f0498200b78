"""`view …`: streaming views, the tables that the pipeline keeps up to date."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table as Grid
from rich.text import Text

from headwater.capture.postgres import schema
from headwater.commands.execution import connected, run
from headwater.commands.options import (
    DataDir,
    Embedded,
    Json,
    Url,
    Yes,
    confirm,
    new_app,
    settings_for,
)
from headwater.commands.output import print_message, print_result
from headwater.pipeline.views import catalog
from headwater.pipeline.views.catalog import ViewStatus

app = new_app(help="Show and change streaming views: tables that the pipeline keeps up to date.")

ViewName = Annotated[str, typer.Argument(metavar="NAME", help="The view.")]


@app.command("list")
def list_views(
    url: Url = None, embedded: Embedded = False, data_dir: DataDir = None, json: Json = False
) -> None:
    """Show the streaming views: state, rows, position, error.

    Example: `headwater view list`
    """

    async def work() -> None:
        async with connected(settings_for(url, embedded, data_dir)) as connection:
            await schema.require(connection)
            found = await catalog.list_views(connection)
        print_result(found, views_view(found), json=json)

    run(work())


@app.command()
def rebuild(
    name: ViewName,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Rebuild a view from its tables, by the running pipeline or by the next one.

    Example: `headwater view rebuild revenue`
    """

    async def work() -> None:
        async with connected(settings_for(url, embedded, data_dir)) as connection:
            await schema.require(connection)
            await catalog.rebuild(connection, name)
        print_message(
            {"view": name, "state": "due"}, f"The pipeline will rebuild {name}.", json=json
        )

    run(work())


@app.command()
def drop(
    name: ViewName,
    yes: Yes = False,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Remove a view and its table. Remove its function from the application first.

    Example: `headwater view drop revenue`
    """
    confirm(f"Drop the view {name} and its table?", yes=yes, json=json)

    async def work() -> None:
        async with connected(settings_for(url, embedded, data_dir)) as connection:
            await schema.require(connection)
            await catalog.drop(connection, name)
        print_message({"view": name, "dropped": True}, f"Dropped {name}.", json=json)

    run(work())


def views_view(views: Sequence[ViewStatus]) -> Grid | Text:
    """The streaming views for people."""
    if not views:
        return Text(
            "There is no streaming view. How to write one: docs/howto/views.md", style="dim"
        )
    grid = Grid("view", "state", "rows", "position", "changed", "error", box=None)
    for view in views:
        grid.add_row(
            view.name,
            _state(view),
            "its table was dropped" if view.rows is None and view.built_at else str(view.rows or 0),
            view.position or "–",
            f"{view.changed_at:%Y-%m-%d %H:%M:%S}",
            Text(view.error or "", style="red"),
        )
    return grid


def _state(view: ViewStatus) -> Text | str:
    if view.error:
        return Text("failed", style="red")
    if view.built_percent is None:
        return view.state
    left = "" if view.seconds_left is None else f", about {view.seconds_left:.0f} s left"
    return f"{view.state}, {view.built_percent} % built{left}"
