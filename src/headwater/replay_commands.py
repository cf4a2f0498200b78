"""`headwater replay`: a table from its events once more, rebuilt or change by change."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from headwater import render
from headwater.app import install
from headwater.command_options import DataDir, Embedded, Json, LakeFolder, Url, settings_for
from headwater.embedded import EmbeddedPostgres
from headwater.errors import ConfigError
from headwater.lake_commands import opened, parse_moment
from headwater.settings import Settings

if TYPE_CHECKING:
    from headwater.pipeline.lake import Lake
    from headwater.pipeline.replay import Told
    from headwater.pipeline.state import Moment
    from headwater.pipeline.targets import Run

app = typer.Typer()
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False)


@app.command()
def replay(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="The table.")],
    into: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write to this table, which is made.")
    ] = None,
    emit: Annotated[
        bool, typer.Option("--emit", help="Make its changes again, one after the other.")
    ] = False,
    since: Annotated[
        str | None, typer.Option(metavar="WHEN", help="Only changes after this time or position.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="WHEN", help="Up to this time or position; else all.")
    ] = None,
    speed: Annotated[
        str | None, typer.Option(metavar="10x", help="With the pauses there were, so much shorter.")
    ] = None,
    cursor: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep here how far the output has come.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew instead of going on.")
    ] = False,
    lake: LakeFolder = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Rebuild a table as it was, or make its changes again.

    Example: `headwater replay orders --until '2026-11-15 10:00' --into orders_restored`
    """
    _check(into, emit, since, speed, cursor)
    begin, end = (None if each is None else parse_moment(each) for each in (since, until))
    pace = None if speed is None else parse_speed(speed)
    with _database(settings_for(url, embedded, data_dir)) as found, opened(lake, found) as at:
        if into is None:
            _print_changes(at, table, begin, end, pace, cursor, restart)
            return
        from headwater.pipeline.replay import reapply, rebuild

        with _progress("changes" if emit else "rows") as told:
            run = (
                reapply(
                    at, found, table, into=into, since=begin, until=end, speed=pace,
                    restart=restart, told=told,
                )
                if emit
                else rebuild(at, found, table, into=into, until=end, restart=restart, told=told)
            )  # fmt: skip
    _tell(run, into, json=json)


def _check(
    into: str | None, emit: bool, since: str | None, speed: str | None, cursor: Path | None
) -> None:
    if into is None and not emit:
        raise ConfigError(
            "replay needs to know what for",
            hint="--into NAME rebuilds the table under that name; --emit prints its changes.",
        )
    if not emit and (since is not None or speed is not None):
        raise ConfigError(
            "--since and --speed are for changes, and a rebuild has none", hint="Add --emit."
        )
    if cursor is not None and into is not None:
        raise ConfigError(
            "--cursor is for changes that are printed",
            hint="A table keeps by itself how far it is.",
        )


def parse_speed(text: str) -> float:
    """How many times as quick.

    >>> parse_speed("10x"), parse_speed("0.5")
    (10.0, 0.5)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)x?", text.strip())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--speed: {text!r:.40} is not a speed", hint="Write 10x, 1x or 0.5x.")
    return float(match[1])


@contextmanager
def _database(settings: Settings) -> Iterator[str]:
    """Not in an event loop: Ctrl-C must reach what is being done."""
    if settings.url is not None:
        yield settings.url
        return
    with EmbeddedPostgres(settings.data_dir) as server:
        asyncio.run(install(server.url))
        yield server.url


def _print_changes(
    lake: Lake,
    table: str,
    since: Moment | None,
    until: Moment | None,
    speed: float | None,
    cursor: Path | None,
    restart: bool,
) -> None:
    from headwater.pipeline.replay import emit

    found = emit(lake, table, since=since, until=until, speed=speed, cursor=cursor, restart=restart)
    # Closed also when nobody reads on: what was printed whole is then in the cursor.
    with closing(found):
        for transaction in found:
            for change in transaction.changes:
                print(render.change_as_json(change, transaction))
            sys.stdout.flush()


class _Rate(ProgressColumn):
    """How many a second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f}/s" if task.speed else "", style="dim")


@contextmanager
def _progress(unit: str) -> Iterator[Told]:
    """A bar for people; nothing where nobody looks."""
    columns = (
        TextColumn(unit),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as bar:
        task = bar.add_task(unit, total=None)

        def told(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield told


def _tell(run: Run, into: str, *, json: bool) -> None:
    if json:
        counted = "rows" if run.kind == "rebuild" else "changes"
        document = {"table": run.source, "into": into, counted: run.count, "position": run.end}
        print(render.as_json(document))
    elif run.kind == "rebuild":
        out.print(Text(f"Rebuilt {run.source} in {into}: {run.count:,} rows, as of {run.end}."))
    else:
        out.print(
            Text(f"Made {run.count:,} changes of {run.source} again in {into}, up to {run.end}.")
        )
