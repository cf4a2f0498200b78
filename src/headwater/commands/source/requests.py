"""`source pause`, `resume`, `resnapshot` and `remove`: what the process that runs a source is asked
to do."""

from __future__ import annotations

from typing import Annotated

import typer

from headwater.admin.sources import find_source
from headwater.app import database
from headwater.capture.mirror import registry
from headwater.capture.postgres import schema
from headwater.capture.running.removal import left_behind, remove_source
from headwater.commands.execution import connected, run
from headwater.commands.options import (
    DataDir,
    Embedded,
    Json,
    Url,
    Yes,
    confirm,
    settings_for,
)
from headwater.commands.output import print_message, print_note
from headwater.commands.source.progress import wait_until_live
from headwater.commands.source.show import SourceName
from headwater.database import connect, without_password

app = typer.Typer()


@app.command()
def pause(
    name: SourceName,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Stop following a source until `headwater source resume`. The source stores its changes.

    Example: `headwater source pause shop`
    """

    async def work() -> None:
        async with connected(settings_for(url, embedded, data_dir)) as connection:
            await schema.require(connection)
            await registry.request_pause(connection, name)
        text = f"Source {name} is paused. Its database stores the changes until it is resumed."
        print_message({"source": name, "paused": True}, text, json=json)

    run(work())


@app.command()
def resume(
    name: SourceName,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Follow a paused source again, from where it was paused.

    Example: `headwater source resume shop`
    """

    async def work() -> None:
        async with connected(settings_for(url, embedded, data_dir)) as connection:
            await schema.require(connection)
            await registry.request_resume(connection, name)
        text = f"Source {name} is resumed."
        print_message({"source": name, "paused": False}, text, json=json)

    run(work())


@app.command()
def resnapshot(
    name: SourceName,
    tables: Annotated[
        list[str] | None,
        typer.Argument(metavar="TABLE…", help="Tables of the source; default: all."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Show the copy, and end when the source is live.")
    ] = False,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Copy tables of a source again, for example when its position is lost.

    The mirrors serve the old rows until the copy is complete, and then change in one transaction.

    Example: `headwater source resnapshot shop orders`
    """

    async def work() -> None:
        async with connected(settings_for(url, embedded, data_dir)) as connection:
            await schema.require(connection)
            await registry.request_resnapshot(connection, name, tuple(tables or ()))
            what = ", ".join(tables) if tables else "all tables"
            document = {"source": name, "tables": tables or ["*"]}
            print_message(document, f"Source {name} copies {what} again.", json=json)
            if wait:
                await wait_until_live(connection, name, json=json)

    run(work())


@app.command()
def remove(
    name: SourceName,
    drop_tables: Annotated[
        bool,
        typer.Option(
            "--drop-tables/--keep-tables", help="Drop the mirrors; default: they become tables."
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Remove it here only, and leave at the source what was made there."
        ),
    ] = False,
    yes: Yes = False,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Stop mirroring a source, and remove what was made at it: a slot, a publication, triggers.

    The mirrors become ordinary tables, or are dropped. A source that the application or
    headwater.toml declares is added again at their next start: remove it there first. Mirrors that
    became tables must be dropped before the same source is added again.

    Example: `headwater source remove shop --drop-tables`
    """
    confirm(_question(name, drop_tables, force), yes=yes, json=json)

    async def work() -> None:
        async with database(settings_for(url, embedded, data_dir)) as found:
            connection = await connect(found, purpose="cli")
            try:
                await schema.require(connection)
                declared, _ = await find_source(connection, name)
                definition = declared.definition
                if not json:
                    print_note(f"Removing {name} at {without_password(definition.url)} …")
                await remove_source(connection, found, name, drop=drop_tables, force=force)
            finally:
                await connection.close()
        left = left_behind(definition) if force else None
        mirrors = f"The mirrors in {definition.into} are"
        mirrors += " dropped." if drop_tables else " ordinary tables now."
        text = f"Removed source {name}. {mirrors}"
        text += f"\nAt the source stays: {left}." if left else ""
        if declared.declared_by != "command":
            place = "headwater.toml" if declared.declared_by == "file" else "the application"
            text += f"\n{place} declares it: remove it there, or the next start adds it again."
        document = {"source": name, "removed": True, "dropped": drop_tables, "left_behind": left}
        print_message(document, text, json=json)

    run(work())


def _question(name: str, drop_tables: bool, force: bool) -> str:
    mirrors = "drop its mirrors" if drop_tables else "keep its mirrors as ordinary tables"
    source = "without asking its database" if force else "and what was made at its database"
    return f"Remove source {name} {source}, and {mirrors}?"
