"""`watch`: shows a live query as a table in the terminal, as lines, or as JSON.

All three show the same deltas of the same client. Without `--gateway` the client is connected to a
hub in this process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live as Screen
from rich.table import Table as Grid
from rich.text import Text

from headwater.app import Headwater
from headwater.commands.execution import run
from headwater.commands.options import LIVE_PANEL, DataDir, Embedded, Json, Url, settings_for
from headwater.commands.output import encode, out, short
from headwater.errors import ConfigError
from headwater.live.filters.text import parse_conditions
from headwater.live.order import OrderBy
from headwater.live.query import LiveQuery
from headwater.model import (
    Delta,
    Enter,
    Key,
    Leave,
    Match,
    Move,
    Reset,
    Row,
    Unmatch,
    Update,
)

if TYPE_CHECKING:
    from headwater.client.connection import Connection
    from headwater.client.state.rows import RowsBatch
    from headwater.client.subscriptions.subscription import Live

_WATCH_HIGHLIGHT_SECONDS = 1.5
"""How long a row that is new or changed is marked on the screen."""

_WATCH_FRAMES_PER_SECOND_MAX = 20
"""The shortest time between two updates of the screen."""


app = typer.Typer()


@app.command(rich_help_panel=LIVE_PANEL)
def watch(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="The table to watch.")],
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Only rows that match: 'amount > 100'. If given several times, all must match.",
        ),
    ] = None,
    order: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Order by this: 'amount desc'. May be repeated."),
    ] = None,
    limit: Annotated[int, typer.Option(help="Show at most this many rows.")] = 20,
    columns: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="Only these columns and the primary key.")
    ] = None,
    gateway: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Watch through this gateway instead of the database."),
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="HEADWATER_TOKEN", help="The token for the gateway.")
    ] = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show the rows of a live query, and each change of them, until Ctrl-C.

    Example: `headwater watch orders --where 'amount > 100' --order 'amount desc'`
    """
    from headwater.client.connection import connect
    from headwater.commands.hub_transport import hub_transport
    from headwater.hub.hub import Hub

    async def work() -> None:
        query = LiveQuery(
            table,
            where=parse_conditions(where or ()),
            order=tuple(map(OrderBy.parse, order or ())),
            limit=limit,
            columns=tuple(name.strip() for name in columns.split(",")) if columns else None,
        )
        if gateway is not None:
            if url is not None or embedded:
                raise ConfigError(
                    "--gateway and a database contradict each other", hint="Give one of them."
                )
            await _watch(connect(gateway, token=token), query, json=json)
            return
        settings = settings_for(url, embedded, data_dir)
        async with Headwater(settings=settings) as hw, Hub(hw.url) as hub:
            await _watch(connect("local", transport=hub_transport(hub)), query, json=json)

    run(work())


async def _watch(connecting: Connection, query: LiveQuery, *, json: bool) -> None:
    def print_line(line: str) -> None:
        print(line, flush=True)

    async with connecting as connection:
        live = connection.live(query)
        if out.is_terminal and not json:
            await watch_on_screen(connection, live, f"{query.table}, live. Stop with Ctrl-C", out)
        else:
            await watch_as_lines(live, print_line, json=json)


async def watch_on_screen(connection: Connection, live: Live, title: str, console: Console) -> None:
    """Show the rows as a table; new and changed rows are marked for a moment."""
    marks = ChangeMarks()
    async with live, aclosing(live.deltas()) as batches:
        with Screen(console=console, auto_refresh=False) as screen:
            following = asyncio.create_task(anext(batches))
            try:
                while True:
                    fading = marks.fades_in(time.monotonic())
                    done, _ = await asyncio.wait({following}, timeout=fading)
                    if done:
                        marks.note(following.result(), time.monotonic())
                        following = asyncio.create_task(anext(batches))
                    rows = list(zip(live.keys, live.rows, strict=True))
                    styles = marks.styles(time.monotonic())
                    note = "" if connection.session else "reconnecting …"
                    screen.update(rows_view(title, rows, styles, note), refresh=True)
                    await asyncio.sleep(1 / _WATCH_FRAMES_PER_SECOND_MAX)
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)


async def watch_as_lines(live: Live, print_line: Callable[[str], None], *, json: bool) -> None:
    """A line for each delta, or as JSON for each batch of them."""
    async with aclosing(live.deltas()) as batches:
        async for batch in batches:
            for line in [batch_as_json(batch)] if json else batch_lines(batch):
                print_line(line)


class ChangeMarks:
    """The rows that are new or changed, until their marks fade. Pure: the caller passes the
    time."""

    def __init__(self) -> None:
        self._marks: dict[Key, tuple[str, float]] = {}

    def note(self, batch: RowsBatch, now: float) -> None:
        entered = {key for key, style in self.styles(now).items() if style == "green"}
        until = now + _WATCH_HIGHLIGHT_SECONDS
        for delta in batch.deltas:
            match delta:
                case Reset():
                    self._marks = {}
                    return
                case Enter(key) | Match(key):
                    self._marks[key] = ("green", until)
                case Update(key) | Move(key) if key not in entered:
                    self._marks[key] = ("yellow", until)

    def styles(self, now: float) -> dict[Key, str]:
        self._marks = {key: mark for key, mark in self._marks.items() if mark[1] > now}
        return {key: style for key, (style, _) in self._marks.items()}

    def fades_in(self, now: float) -> float | None:
        """Seconds until the next mark fades; None if there is none."""
        if not self._marks:
            return None
        return max(min(until for _, until in self._marks.values()) - now, 0.0)


# ------------------------------------------------------------------------ as text and JSON


def rows_view(
    title: str, rows: Sequence[tuple[Key, Row]], styles: Mapping[Key, str], note: str
) -> Group:
    """The rows of a live query as a table; `styles` has the rows that are new or changed."""
    names = list(rows[0][1]) if rows else []
    grid = Grid(*names, box=None, header_style="bold", pad_edge=False)
    for key, row in rows:
        grid.add_row(*(Text(short(row.get(name))) for name in names), style=styles.get(key, ""))
    count = f"{len(rows)} row{'' if len(rows) == 1 else 's'}"
    caption = Text(" · ".join(filter(None, (title, count, note))), style="dim")
    return Group(grid, caption) if rows else Group(caption)


def batch_as_json(batch: RowsBatch) -> str:
    """A batch as `headwater watch --json` prints it; docs/reference/cli.md explains the fields."""
    return encode(batch).decode()


def batch_lines(batch: RowsBatch) -> list[str]:
    """A batch as text: a line for each delta."""
    return [line for delta in batch.deltas for line in _delta_lines(delta)]


def _delta_lines(delta: Delta) -> list[str]:
    name = type(delta).__name__.lower()
    match delta:
        case Reset(rows):
            return [name, *(line for row in rows for line in _delta_lines(row))]
        case Leave(key) | Unmatch(key):
            return [f"{name:<8}{_key(key)}"]
        case Enter(key, row) | Update(key, row) | Move(key, row) | Match(key, row):
            values = " ".join(f"{column}={short(value)}" for column, value in row.items())
            return [f"{name:<8}{_key(key)}  {values}"]


def _key(key: Key) -> str:
    return ",".join(map(short, key))
