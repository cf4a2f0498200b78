"""`replay`: rebuilds a table from its events, or replays its changes one by one."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
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

from headwater.app import install
from headwater.commands.lake.connection import open_lake
from headwater.commands.lake.moments import given_moment
from headwater.commands.options import (
    LAKE_PANEL,
    DataDir,
    Embedded,
    Json,
    LakeFolder,
    Url,
    settings_for,
)
from headwater.commands.output import change_as_json, err, print_message
from headwater.embedded import EmbeddedPostgres
from headwater.errors import ConfigError
from headwater.settings import Settings

if TYPE_CHECKING:
    from headwater.pipeline.lake.moments import Moment
    from headwater.pipeline.reading.lake import Lake
    from headwater.pipeline.replay.replay import ProgressCallback
    from headwater.pipeline.replay.targets import ReplayRun

app = typer.Typer()


@app.command(rich_help_panel=LAKE_PANEL)
def replay(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="The table.")],
    into: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write to this table, which is created.")
    ] = None,
    emit: Annotated[
        bool,
        typer.Option(
            "--emit", help="Replay its changes one by one, as JSON lines or in the table of --into."
        ),
    ] = False,
    since: Annotated[
        str | None, typer.Option(metavar="WHEN", help="Only changes after this time or position.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="WHEN", help="Only changes up to this time or position.")
    ] = None,
    speed: Annotated[
        str | None,
        typer.Option(
            metavar="10x",
            help="Keep the pauses between changes, divided by this; default: no pauses.",
        ),
    ] = None,
    cursor: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Save in this file how far the output is, and continue there."
        ),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start again instead of continuing.")
    ] = False,
    lake: LakeFolder = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Rebuild a table as it was at a time, or replay its changes.

    Example: `headwater replay orders --until '2026-11-15 10:00' --into orders_restored`
    """
    _check(into, emit, since, speed, cursor)
    begin, end = (None if each is None else given_moment(each) for each in (since, until))
    pace = None if speed is None else parse_speed(speed)
    with _database(settings_for(url, embedded, data_dir)) as found, open_lake(lake, found) as at:
        if into is None:
            _print_changes(at, table, begin, end, pace, cursor, restart)
            return
        from headwater.pipeline.replay.replay import reapply, rebuild

        with _progress("changes" if emit else "rows") as progress:
            run = (
                reapply(
                    at, found, table, into=into, since=begin, until=end, speed=pace,
                    restart=restart, progress=progress,
                )
                if emit
                else rebuild(
                    at, found, table, into=into, until=end, restart=restart, progress=progress
                )
            )  # fmt: skip
    _print_result(run, into, json=json)


def _check(
    into: str | None, emit: bool, since: str | None, speed: str | None, cursor: Path | None
) -> None:
    if into is None and not emit:
        raise ConfigError(
            "replay needs --into or --emit",
            hint="--into NAME rebuilds the table under that name; --emit prints its changes.",
        )
    if not emit and (since is not None or speed is not None):
        raise ConfigError(
            "--since and --speed need --emit",
            hint="A rebuild has no single changes: add --emit, or leave them out.",
        )
    if cursor is not None and into is not None:
        raise ConfigError(
            "--cursor is only for changes that are printed",
            hint="Leave it out: with --into the database stores how far the replay is.",
        )


def parse_speed(text: str) -> float:
    """How many times faster.

    >>> parse_speed("10x"), parse_speed("0.5")
    (10.0, 0.5)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)x?", text.strip())
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--speed: {text!r:.40} is not a speed", hint="Write 10x, 1x or 0.5x.")
    return float(match[1])


@contextmanager
def _database(settings: Settings) -> Iterator[str]:
    """The URL. Outside of an event loop, so that Ctrl-C interrupts the replay itself."""
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
    from headwater.pipeline.replay.replay import emit

    found = emit(lake, table, since=since, until=until, speed=speed, cursor=cursor, restart=restart)
    # Closed also when the reader ends early: the cursor then has all that was printed.
    with closing(found):
        for transaction in found:
            for change in transaction.changes:
                print(change_as_json(change, transaction))
            sys.stdout.flush()


class _Rate(ProgressColumn):
    """How many per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f}/s" if task.speed else "", style="dim")


@contextmanager
def _progress(unit: str) -> Iterator[ProgressCallback]:
    """A progress bar, if there is a terminal."""
    columns = (
        TextColumn(unit),
        BarColumn(),
        MofNCompleteColumn(),
        _Rate(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as bar:
        task = bar.add_task(unit, total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield progress


def _print_result(run: ReplayRun, into: str, *, json: bool) -> None:
    counted = "rows" if run.kind == "rebuild" else "changes"
    document = {"table": run.source, "into": into, counted: run.count, "position": run.end}
    if run.kind == "rebuild":
        text = f"Rebuilt {run.source} in {into}: {run.count:,} rows, as of {run.end}."
    else:
        text = f"Replayed {run.count:,} changes of {run.source} in {into}, up to {run.end}."
    print_message(document, text, json=json)
