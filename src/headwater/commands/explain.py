"""`explain`: what a query reads, and so which changes make it run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Group
from rich.table import Table as Grid
from rich.text import Text

from headwater.app import database
from headwater.commands.execution import load_application, run
from headwater.commands.options import LIVE_PANEL, DataDir, Embedded, Json, Url, settings_for
from headwater.commands.output import as_json, out
from headwater.errors import ConfigError, InvalidQuery
from headwater.live.filters.filter import EVERYTHING, And
from headwater.live.filters.text import in_words
from headwater.queries.analysis.statements import Executed, Statement
from headwater.settings import Settings

if TYPE_CHECKING:
    from headwater.queries.analysis.analyst import Analysis

app = typer.Typer()


@app.command(rich_help_panel=LIVE_PANEL)
def explain(
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help="SQL, or the name of a query of the application.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE…]", help="The arguments of the query."),
    ] = None,
    program: Annotated[
        str | None,
        typer.Option(
            "--app", metavar="MODULE:NAME", help="The application that defines the query."
        ),
    ] = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show what a query reads: which changes make it run again.

    Example: `headwater explain 'select * from orders where region = 7'`, or for a query of an
    application `headwater explain open_orders region=7 --app shop:hw`
    """

    async def work() -> None:
        if not any(map(str.isspace, query.strip())):
            found = await _explain_function(query, arguments or [], program)
        elif arguments or program is not None:
            raise ConfigError(
                "SQL takes no arguments and needs no application",
                hint="Write values into the statement, or $1, $2, … in their place.",
            )
        else:
            found = await _explain_sql(query, settings_for(url, embedded, data_dir))
        documents = [explanation(*each) for each in found]
        if json:
            for document in documents:
                print(as_json(document))
        else:
            out.print(explanation_view(documents))

    run(work())


async def _explain_sql(sql: str, settings: Settings) -> list[tuple[Executed, Analysis]]:
    from headwater.queries.analysis import explain as explain_

    async with database(settings) as url:
        found = await explain_.analyse(url, [Executed(Statement(sql))])
    for _, analysis in found:
        if analysis.refused is not None:
            raise InvalidQuery(f"the database refuses this statement: {analysis.refused}")
    return found


async def _explain_function(
    name: str, arguments: list[str], program: str | None
) -> list[tuple[Executed, Analysis]]:
    """The statements that a query of the application runs, each with what it reads."""
    from headwater.queries.analysis import explain as explain_

    if program is None:
        raise ConfigError(
            f"{name!r} is not SQL, and no application is given",
            hint="Give the statement in quotes, 'select …', or the application: --app shop:hw",
        )
    hw = load_application(program)
    query = hw.queries.get(name)
    if query is None:
        known = ", ".join(hw.queries) or "none"
        raise ConfigError(f"{program} has no query {name!r}", hint=f"It has: {known}.")
    values = dict(map(_argument, arguments))
    seconds = hw.settings.query.timeout_period.total_seconds()
    async with database(hw.settings) as url:
        return await explain_.explain(url, query, query.bind(values), seconds)


def _argument(text: str) -> tuple[str, Any]:
    """Parse `region=7` or `name=ann`: the value is JSON, or a text if it is not valid JSON."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is not an argument", hint="Write NAME=VALUE: region=7")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


# ------------------------------------------------------------------------ output


def explanation(executed: Executed, analysis: Analysis) -> dict[str, Any]:
    """What a statement reads, as `headwater explain --json` prints it. Parameters without a value
    are called `$1`, `$2`, …"""
    bound = analysis.reads(executed) if executed.values else ()
    filters = [read.where for read in bound] or [And(each.conditions) for each in analysis.tables]
    return {
        "sql": executed.statement.sql,
        "everything": analysis.everything,
        "tables": [
            {
                "table": each.table.label,
                "columns": None if each.columns is None else sorted(each.columns),
                "where": None if where == EVERYTHING else in_words(where),
                "through": list(each.through),
            }
            for each, where in zip(analysis.tables, filters, strict=True)
        ],
        "uncaptured": list(analysis.uncaptured),
        "notes": list(analysis.notes),
    }


def explanation_view(documents: Sequence[Mapping[str, Any]]) -> Group:
    """What the statements read, for people."""
    return Group(*(part for each in documents for part in _statement_parts(each)))


def _statement_parts(document: Mapping[str, Any]) -> list[Grid | Text]:
    parts: list[Grid | Text] = [Text(document["sql"].strip(), style="bold")]
    if document["tables"]:
        grid = Grid("table", "columns", "rows", "through", box=None)
        for each in document["tables"]:
            columns = each["columns"]
            grid.add_row(
                Text(each["table"]),
                Text("any" if columns is None else ", ".join(columns) or "none"),
                Text(each["where"] or "any"),
                Text(", ".join(each["through"])),
            )
        parts.append(grid)
    elif not document["everything"]:
        parts.append(Text("It reads no captured table: no change makes it run again.", style="dim"))
    if document["everything"]:
        parts.append(
            Text("Every change of every captured table makes it run again.", style="yellow")
        )
    parts += [
        Text(f"Changes of {label} are not captured.", style="bold red")
        for label in document["uncaptured"]
    ]
    parts += [Text(f"· {note}", style="yellow") for note in document["notes"]]
    return parts
