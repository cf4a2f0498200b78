"""`pipeline table …`: the typed tables of the lake. They are requests to the running pipeline, or
to the next one, and need no database."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table as Grid
from rich.text import Text

from headwater.commands.lake.connection import open_lake
from headwater.commands.options import Json, LakeFolder, Tables, new_app
from headwater.commands.output import print_message, print_result
from headwater.errors import ConfigError
from headwater.pipeline import packages
from headwater.settings import load_settings

if TYPE_CHECKING:
    from headwater.commands.lake.typed_tables import TypedTableStatus
    from headwater.model import Table
    from headwater.pipeline.tables.requests import TableRequest

app = new_app(help="Show and change typed tables: the tables of the lake that any engine reads.")


@app.command("list")
def list_tables(lake: LakeFolder = None, json: Json = False) -> None:
    """Show the typed tables: state, rows, the position they are exact at.

    Example: `headwater pipeline table list`
    """
    packages.require()
    from headwater.commands.lake.typed_tables import typed_tables
    from headwater.pipeline.tables.choice import Choice

    settings = load_settings(overrides={"lake_location": lake}).lake
    found = list(typed_tables(_root(lake), Choice.of(settings) or Choice()))
    print_result(found, _view(found), json=json)


@app.command()
def pause(tables: Tables, lake: LakeFolder = None, json: Json = False) -> None:
    """Stop merging changes into the typed tables of a table, until `resume`.

    Example: `headwater pipeline table pause orders`
    """
    from headwater.pipeline.tables import requests

    _request(tables, lake, json, "Paused {}.", lambda r, t: requests.pause(r, t, paused=True))


@app.command()
def resume(tables: Tables, lake: LakeFolder = None, json: Json = False) -> None:
    """Merge changes into paused tables again, with those since the pause.

    Example: `headwater pipeline table resume orders`
    """
    from headwater.pipeline.tables import requests

    _request(tables, lake, json, "Resumed {}.", lambda r, t: requests.pause(r, t, paused=False))


@app.command()
def backfill(tables: Tables, lake: LakeFolder = None, json: Json = False) -> None:
    """Fill the typed tables of a table again from the lake, by the running pipeline or the next.

    Example: `headwater pipeline table backfill orders`
    """
    from headwater.pipeline.tables import requests

    _request(tables, lake, json, "The pipeline will fill {} again.", requests.backfill)


@app.command()
def register(tables: Tables, lake: LakeFolder = None, json: Json = False) -> None:
    """Register typed tables with the catalog of Spark that `[lake] tables_catalog` names.

    Example: `headwater pipeline table register orders`
    """
    packages.require()
    from headwater.pipeline.lake import shapes
    from headwater.pipeline.tables.catalog import Catalog
    from headwater.pipeline.tables.choice import Choice, present_tables
    from headwater.pipeline.tables.layout import folder

    settings = load_settings(overrides={"lake_location": lake}).lake
    name, choice = settings.tables_catalog, Choice.of(settings) or Choice()
    if name is None:
        raise ConfigError(
            "no catalog is set: [lake] tables_catalog",
            hint="Name a schema of Spark's catalog: HEADWATER_LAKE_TABLES_CATALOG=lake",
        )
    chosen = [_find(_root(lake), each) for each in tables]
    with open_lake(lake) as found:
        known = present_tables(shapes.load(f"{found.root}/shapes")).values()
        among = [each for each in known if choice.includes(each)]
        for table in chosen:
            root = f"{found.root}/{folder(table)}"
            names = Catalog(name).register(found.spark, root, table, among)
            text = f"Registered {' and '.join(names)}."
            print_message({"table": table.label, "registered": names}, text, json=json)


def _request(
    names: Sequence[str],
    lake: str | None,
    json: bool,
    text: str,
    ask: Callable[[str, Table], TableRequest],
) -> None:
    packages.require()
    root = _root(lake)
    for table in [_find(root, name) for name in names]:
        request = ask(root, table)
        document = {"table": table.label, "paused": request.paused, "fill": request.fill or None}
        print_message(document, text.format(table.label), json=json)


def _find(root: str, name: str) -> Table:
    from headwater.pipeline.lake import shapes
    from headwater.pipeline.tables import choice

    return choice.find(shapes.load(f"{root}/shapes", name), name)


def _root(lake: str | None) -> str:
    from headwater.pipeline.reading.lake import Lake

    return Lake(load_settings(overrides={"lake_location": lake}).lake.location).root


def _view(tables: Sequence[TypedTableStatus]) -> Grid | Text:
    """The typed tables for people."""
    if not tables:
        return Text("The lake has no typed tables: see docs/howto/lake-tables.md", style="dim")
    grid = Grid("table", "state", "rows", "versions", "position", "at", "folder", box=None)
    for each in tables:
        grid.add_row(
            each.table,
            Text(each.state, style="" if each.state == "ready" else "yellow"),
            "–" if each.rows is None else f"{each.rows:,}",
            "–" if each.versions is None else f"{each.versions:,}",
            "–" if each.position is None else str(each.position),
            "–" if each.at is None else f"{each.at:%Y-%m-%d %H:%M:%S}",
            each.folder,
        )
    return grid
