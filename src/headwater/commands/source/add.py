"""`source add` and `source check`: what is wrong with a source is shown with the fix. Nothing is
changed until nothing is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from headwater.capture.declaration import define_source, from_settings
from headwater.capture.mirror import registry
from headwater.capture.postgres import schema
from headwater.capture.running.check import CheckedSource, check_source
from headwater.capture.source import SourceDefinition
from headwater.commands.execution import connected, run
from headwater.commands.options import DataDir, Embedded, Json, Url, settings_for
from headwater.commands.output import print_message, print_note, print_result
from headwater.commands.source.progress import wait_until_live
from headwater.database import Connection
from headwater.errors import ConfigError, NotFound
from headwater.settings import Settings

app = typer.Typer()

Columns = Annotated[
    list[str] | None,
    typer.Option(metavar="'TABLE: COLUMN, …'", help="Mirror only these columns of a table."),
]


@app.command()
def add(
    source_url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="The database: mysql://user:${PASSWORD}@host/database, …"
        ),
    ],
    into: Annotated[
        str, typer.Option(metavar="SCHEMA", help="The schema for the mirrors; it is created.")
    ],
    name: Annotated[
        str | None, typer.Option(help="The name of the source; default: that of the schema.")
    ] = None,
    table: Annotated[
        list[str] | None, typer.Option(metavar="TABLE", help="A table; default: all. Repeatable.")
    ] = None,
    columns: Columns = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="'TABLE: COLUMN, …'", help="Leave out these columns of a table."),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="'TABLE: CONDITION'", help="Mirror only rows that match."),
    ] = None,
    types: Annotated[
        list[str] | None,
        typer.Option("--type", metavar="'TABLE: COLUMN TYPE'", help="The type of a column."),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of the kind of source."),
    ] = None,
    feed_only: Annotated[
        bool, typer.Option("--feed-only", help="Record changes, without a mirror.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Show the first copy, and end when the source is live.")
    ] = False,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Check a database elsewhere, and mirror its tables into a schema of this one.

    A running `headwater serve` copies it, or `headwater source run`.

    Example: `headwater source add 'mysql://headwater:${SHOP_PASSWORD}@db/shop' --into shop --table
    orders --wait`
    """
    parts = {"columns": columns, "exclude": exclude, "where": where, "types": types}
    definition = define_source(
        source_url,
        into=into,
        name=name,
        tables=_tables(table or [], {key: each or [] for key, each in parts.items()}),
        feed_only=feed_only,
        options=_options(option or []),
    )

    async def work() -> None:
        settings = settings_for(url, embedded, data_dir)
        async with connected(settings) as connection:
            checked = await check_source(definition, await _known(connection, definition.name))
            if checked.is_refused:
                _print_check(definition, checked, json=json)
                raise typer.Exit(1)
            await schema.install(connection)
            added = await registry.declare(connection, definition, "command")
            _print_added(definition, checked, added, json=json)
            if wait:
                await wait_until_live(connection, definition.name, json=json)
                if not json:
                    print_note(f"Source {definition.name} is live.")

    run(work())


def _print_added(
    definition: SourceDefinition, checked: CheckedSource, added: bool, *, json: bool
) -> None:
    name = definition.name
    if not json and checked.problems:
        print_result(None, _problems(checked), json=False)
    document = {
        "source": name,
        "added": added,
        "tables": [table.name for table in checked.tables],
        "problems": checked.problems,
    }
    count = f"{len(checked.tables)} table{'s' * (len(checked.tables) != 1)} into {definition.into}"
    text = f"Source {name} mirrors {count}." if added else f"Source {name} exists, unchanged."
    print_message(document, text, json=json)


@app.command()
def check(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME…", help="The sources; default: all.")
    ] = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Check rights, settings and tables of sources: what is wrong, and how to fix it.

    Also for sources of headwater.toml that do not run yet. Exits with 1 if one cannot be captured.

    Example: `headwater source check shop`
    """

    async def work() -> None:
        settings = settings_for(url, embedded, data_dir)
        async with connected(settings) as connection:
            await schema.require(connection)
            chosen = await _chosen(connection, settings, names or [])
            refused = False
            for definition in chosen:
                known = await registry.tables_of(connection, definition.name)
                checked = await check_source(definition, known)
                refused = refused or checked.is_refused
                _print_check(definition, checked, json=json)
        if refused:
            raise typer.Exit(1)

    run(work())


async def _known(connection: Connection, name: str) -> list[str]:
    """The tables that were mirrored before; none if Headwater is not installed or
    upgraded yet."""
    if await schema.installed_version(connection) < schema.LATEST:
        return []
    return await registry.tables_of(connection, name)


async def _chosen(
    connection: Connection, settings: Settings, names: list[str]
) -> list[SourceDefinition]:
    """Those of the database, and those of the file."""
    known = {name: from_settings(name, entry) for name, entry in settings.source.items()}
    for declared in await registry.definitions(connection):
        known[declared.definition.name] = declared.definition
    for name in names:
        if name not in known:
            there = f"There are: {', '.join(known)}." if known else "No source is declared."
            raise NotFound(f"there is no source {name}", hint=there)
    return [known[name] for name in names or sorted(known)]


# ------------------------------------------------------------------------ options


def _tables(names: list[str], parts: dict[str, list[str]]) -> dict[str, Any]:
    """The options of each table. `'orders: card, note'` names the table first."""
    tables: dict[str, Any] = {name: {} for name in names}
    for option, texts in parts.items():
        for text in texts:
            table, separator, rest = text.partition(":")
            name = table.strip()
            if not separator or not rest.strip():
                flag = "--type" if option == "types" else f"--{option}"
                raise ConfigError(
                    f"{flag} {text!r:.200} names no table",
                    hint=f"Write the table first: {flag} 'orders: …'",
                )
            if name not in names:
                raise ConfigError(
                    f"{text!r:.200} is about table {name}, which is not mirrored",
                    hint=f"Add --table {name}",
                )
            _add_part(tables[name], option, rest.strip())
    return tables


def _add_part(table: dict[str, Any], option: str, text: str) -> None:
    if option == "where":
        if "where" in table:
            raise ConfigError("one table has two conditions", hint="Write both as JSON: [[…], […]]")
        table["where"] = text
    elif option == "types":
        column, _, type_ = text.partition(" ")
        table.setdefault("types", {})[column] = type_.strip()
    else:
        table.setdefault(option, []).extend(_split(text))


def _split(text: str) -> Iterable[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _options(texts: list[str]) -> dict[str, Any]:
    """A value is a number, true or false if it is written so, and otherwise a text."""
    options: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.strip():
            # Not with the text: an option may be a password.
            raise ConfigError("--option needs a name and a value", hint="Write --option name=value")
        try:
            options[name.strip()] = msgspec.json.decode(value, type=bool | int | float)
        except msgspec.DecodeError:
            options[name.strip()] = value
    return options


# ------------------------------------------------------------------------ for people


def _print_check(definition: SourceDefinition, checked: CheckedSource, *, json: bool) -> None:
    document = {
        "source": definition.name,
        "ok": not checked.is_refused,
        "tables": [table.name for table in checked.tables],
        "problems": checked.problems,
    }
    print_result(document, _check_view(definition, checked), json=json)


def _check_view(definition: SourceDefinition, checked: CheckedSource) -> Group:
    head = f"Source {definition.name}: "
    if checked.is_refused:
        title = Text(f"{head}it cannot be captured yet. Nothing was changed.", style="red")
    else:
        title = Text(f"{head}{len(checked.tables)} tables can be mirrored.", style="green")
    parts: list[RenderableType] = [title]
    if checked.problems:
        parts.append(_problems(checked))
    return Group(*parts)


def _problems(checked: CheckedSource) -> Grid:
    grid = Grid.grid(padding=(0, 2))
    for problem in checked.problems:
        level = Text("warn", style="yellow") if problem.warning else Text("fail", style="bold red")
        detail = Text(problem.what)
        if problem.fix:
            detail.append(f"\n{problem.fix}", style="dim")
        grid.add_row(level, detail)
    return grid
