"""`tail`: the changes of the log as they are committed."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

import typer
from rich.text import Text

from headwater.app import Headwater
from headwater.commands.execution import run
from headwater.commands.options import (
    LIVE_PANEL,
    DataDir,
    Embedded,
    Json,
    Url,
    settings_for,
)
from headwater.commands.output import OP_STYLES, change_as_json, out, print_note, short
from headwater.errors import ConfigError
from headwater.live.filters.text import parse_conditions
from headwater.model import Change, Origin, Position, Row, Transaction

app = typer.Typer()


@app.command(rich_help_panel=LIVE_PANEL)
def tail(
    tables: Annotated[
        list[str] | None, typer.Argument(metavar="[TABLE…]", help="Default: all tables.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="POSITION", help="Start after this position.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Only changes of rows that match before or after the change: 'region = 7'."
            " If given several times, all must match.",
        ),
    ] = None,
    cursor: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Continue where this cursor stopped, and save it."),
    ] = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show changes as they are committed, until Ctrl-C.

    Example: `headwater tail orders --where 'amount > 100' --json`
    """

    async def work() -> None:
        position = _position(since)
        only = parse_conditions(where) if where else None
        settings = settings_for(url, embedded, data_dir)
        async with Headwater(settings=settings) as hw:
            if not json:
                print_note(f"Following {', '.join(tables or ['every table'])}. Stop with Ctrl-C.")
            feed = hw.changes(*(tables or []), where=only, since=position, cursor=cursor)
            await _print_changes(feed, json=json)

    run(work())


def _position(text: str | None) -> Position | None:
    try:
        return Position.parse(text) if text is not None else None
    except ValueError as error:
        raise ConfigError(
            f"--since: {error}", hint="headwater status prints the current position."
        ) from error


async def _print_changes(feed: AsyncGenerator[Transaction, None], *, json: bool) -> None:
    async with aclosing(feed):
        async for transaction in feed:
            for change in transaction.changes:
                if json:
                    print(change_as_json(change, transaction))
                else:
                    out.print(change_line(change))
            sys.stdout.flush()


# ------------------------------------------------------------------------ for people


def change_line(change: Change) -> Text:
    """A change for people: when, what, which row, and what changed in it."""
    line = Text()
    line.append(f"{change.at:%H:%M:%S.%f} "[:-4] + " ", style="dim")
    line.append(f"{change.op:<8} ", style=OP_STYLES[change.op])
    line.append(change.table.label, style="bold")
    if change.key:
        line.append(" " + ",".join(map(short, change.key)), style="cyan")
    match change.op:
        case "insert" | "delete":
            line.append("  " + _columns(change.after or change.before or {}, change.table.key))
        case "update":
            line.append("  ").append_text(_differences(change))
    if change.actor.user_id:
        line.append(f"  by {change.actor.user_id}", style="dim")
    if change.origin:
        line.append("  " + _origin(change.origin), style="dim")
    return line


def _origin(origin: Origin) -> str:
    return f"from {origin.source}" + (f" at {short(origin.position)}" if origin.position else "")


def _columns(row: Row, key: tuple[str, ...]) -> str:
    return " ".join(f"{name}={short(value)}" for name, value in row.items() if name not in key)


def _differences(change: Change) -> Text:
    text = Text()
    before, after = change.before or {}, change.after or {}
    for name in change.changed:
        text.append(" " if text else "").append(f"{name} ")
        text.append(short(before.get(name)), style="red").append("→", style="dim")
        text.append(short(after.get(name)), style="green")
    return text
