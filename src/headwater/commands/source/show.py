"""`source list` and `source status`: the state of sources, and of the copy of each table."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from headwater.admin.sources import (
    SourceReport,
    copied_share,
    find_source,
    problem_of,
    reports,
    shown_definition,
)
from headwater.capture.mirror.registry import SourceState, TableState
from headwater.capture.postgres import schema
from headwater.commands.execution import connected, run
from headwater.commands.options import DataDir, Embedded, Json, Url, settings_for
from headwater.commands.output import print_result, short_period, short_size

app = typer.Typer()

SourceName = Annotated[str, typer.Argument(metavar="NAME", help="The source.")]

STATE_STYLES = {
    "running": "green",
    "copying": "cyan",
    "checking": "cyan",
    "paused": "yellow",
    "failed": "bold red",
    "refused": "bold red",
    "lost": "bold red",
    "diverged": "bold red",
}


@app.command("list")
def list_sources(
    url: Url = None, embedded: Embedded = False, data_dir: DataDir = None, json: Json = False
) -> None:
    """Show the sources: state, tables, lag, changes, error.

    Example: `headwater source list`
    """

    async def work() -> None:
        async with connected(settings_for(url, embedded, data_dir)) as connection:
            await schema.require(connection)
            found = await reports(connection)
        print_result(found, sources_view(found), json=json)

    run(work())


@app.command()
def status(
    name: SourceName,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show one source: its definition, its state and the copy of each table.

    Example: `headwater source status shop`
    """

    async def work() -> None:
        async with connected(settings_for(url, embedded, data_dir)) as connection:
            await schema.require(connection)
            declared, source = await find_source(connection, name)
        definition = shown_definition(declared)
        document = msgspec.structs.asdict(source) | {"definition": definition}
        print_result(document, source_view(definition, source), json=json)

    run(work())


# ------------------------------------------------------------------------ for people


def sources_view(sources: list[SourceReport]) -> Group | Text:
    if not sources:
        text = "There is no source. Add one: headwater source add URL --into SCHEMA"
        return Text(text, style="dim")
    grid = _grid("source", "into", "kind", "state", "tables", "lag", "changes")
    for source in sources:
        grid.add_row(
            source.name,
            source.into_schema + (" (feed only)" if source.feed_only else ""),
            source.kind,
            state_text(source),
            tables_text(source),
            _lag(source),
            f"{source.changes:,}",
        )
    problems = [line for source in sources for line in problem_lines(source)]
    return Group(grid, "", *problems) if problems else Group(grid)


def _grid(*names: str) -> Grid:
    """A table of which nothing is cut in a narrow terminal: long names continue on the next line,
    words and numbers do not."""
    grid = Grid(box=None)
    for name in names:
        grid.add_column(name, overflow="fold", no_wrap=name in ("kind", "state", "changes"))
    return grid


def state_text(source: SourceState) -> Text:
    return Text(source.state, style=STATE_STYLES.get(source.state, "dim"))


def tables_text(source: SourceState) -> str:
    """How many tables are live; while some are copied, how far that is."""
    tables = [table for table in source.tables if table.state not in ("dropped", "removed")]
    live = sum(table.state == "live" for table in tables)
    if live == len(tables):
        return str(live)
    share = copied_share(tables)
    return f"{live} of {len(tables)}" + ("" if share is None else f", {share:.0%} copied")


def _lag(source: SourceState) -> str:
    lag = "–" if source.lag is None else short_period(timedelta(seconds=source.lag))
    return lag if source.lag_bytes is None else f"{lag}, {short_size(source.lag_bytes)}"


def problem_lines(source: SourceReport) -> list[Text]:
    """What is wrong, below the table: a line for each problem, and one for what to do."""
    problem = problem_of(source)
    if problem is None:
        return []
    style = "yellow" if problem.warning else "red"
    lines = [Text(f"{source.name}: {each}", style=style) for each in problem.what.splitlines()]
    return lines + [Text(f"  {each}") for each in problem.fix.splitlines()]


def source_view(definition: dict[str, Any], source: SourceReport) -> Group:
    facts = Grid.grid(padding=(0, 2))
    facts.add_column()
    facts.add_column(overflow="fold")
    facts.add_row(
        "source", f"{source.name} ({source.kind}), declared by {definition['declared_by']}"
    )
    facts.add_row("from", definition["url"])
    facts.add_row("into", source.into_schema + (", changes only" if source.feed_only else ""))
    facts.add_row("state", state_text(source))
    if source.error:
        facts.add_row("error", Text(source.error, style="red"))
    if source.hint:
        facts.add_row("what to do", source.hint)
    if source.warning:
        facts.add_row("warning", Text(source.warning, style="yellow"))
    facts.add_row("position", source.position or "–")
    if source.committed_at is not None:
        facts.add_row("last commit", f"{source.committed_at:%Y-%m-%d %H:%M:%S}, at the source")
    facts.add_row("lag", _lag(source))
    changes = f"{source.changes:,} in {source.transactions:,} transactions"
    facts.add_row("changes", changes)
    runner = source.runner if source.is_run else None
    facts.add_row("run by", runner or "no process. Run one: headwater source run")
    facts.add_row("reported", f"{source.updated_at:%Y-%m-%d %H:%M:%S}")
    parts: list[RenderableType] = [facts]
    if source.tables:
        parts += ["", _tables(source.tables)]
    return Group(*parts)


def _tables(tables: tuple[TableState, ...]) -> Grid:
    grid = _grid("table", "mirror", "state", "rows copied")
    for table in tables:
        style = {"live": "green", "dropped": "red"}.get(table.state, "cyan")
        grid.add_row(
            table.name,
            table.target,
            Text(table.state, style=style),
            copied_text(table),
        )
    return grid


def copied_text(table: TableState) -> str:
    """The estimate is for the copy; a live table has had more rows or fewer since."""
    copying = table.state in ("copying", "recopying") and table.estimate is not None
    return f"{table.copied:,}" + (f" of about {table.estimate:,}" if copying else "")
