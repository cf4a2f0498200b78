"""`pipeline reconcile`: compares tables of the database with the lake."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from headwater.app import database
from headwater.commands.execution import run
from headwater.commands.options import (
    DataDir,
    Embedded,
    Json,
    LakeFolder,
    Url,
    new_app,
    settings_for,
)
from headwater.commands.output import print_message
from headwater.pipeline import packages

if TYPE_CHECKING:
    from headwater.pipeline.reconcile.drift import TableOutcome


app = new_app()


@app.command()
def reconcile(
    tables: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TABLE…]", help="Tables to compare; default: all captured ones."),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Read tables that differ again, and record the gap."),
    ] = False,
    lake: LakeFolder = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Compare tables with their state in the lake, both at one position: which rows are missing in
    the lake, only there, or different.

    Exits with 1 if a table differs or could not be compared, and was not repaired.

    Example: `headwater pipeline reconcile --repair orders --lake /var/lib/shop/lake`
    """
    packages.require()

    async def work() -> None:
        settings = settings_for(url, embedded, data_dir, lake)
        async with database(settings) as found:
            is_open = await asyncio.to_thread(
                _reconcile, settings.lake.location, found, tables or [], repair, json
            )
        if is_open:
            raise typer.Exit(1)

    run(work())


def _reconcile(folder: str, url: str, names: list[str], repairing: bool, json: bool) -> bool:
    """Print each outcome. Returns whether one of them needs attention."""
    from headwater.pipeline.reading.lake import Lake
    from headwater.pipeline.reconcile import job, tables
    from headwater.pipeline.spark import shared_session

    lake, outcomes = Lake.connect(folder), []
    for found in tables.reconcile(lake, url, names, repairing=repairing):
        outcomes.append(found)
        lines = [f"{found.table}: {job.text(found)}", *_key_lines(found)]
        print_message(msgspec.structs.asdict(found), "\n".join(lines), json=json)
    if shared_session.find(lake.root) is None:  # a running pipeline reports it itself
        job.report(url, outcomes)
    return any(each.is_open for each in outcomes)


_KEYS_SHOWN = 10


def _key_lines(found: TableOutcome) -> Iterator[str]:
    for each in found.keys[:_KEYS_SHOWN]:
        yield f"  {each.kind} {each.key}"
    if found.differing > _KEYS_SHOWN:
        yield f"  and {found.differing - _KEYS_SHOWN:,} more"
