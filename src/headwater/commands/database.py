"""Commands for the database: `init` and `uninstall` the schema, `enable` and `disable` the capture
of tables; `url` and `stop` for the embedded server."""

from __future__ import annotations

import shlex
from enum import Enum
from typing import Annotated

import typer

from headwater.app import database
from headwater.capture.postgres import schema, triggers
from headwater.commands.execution import connected, run
from headwater.commands.options import (
    DATABASE_PANEL,
    DataDir,
    Embedded,
    Json,
    Tables,
    Url,
    Yes,
    confirm,
    settings_for,
)
from headwater.commands.output import print_message, print_note
from headwater.embedded import EmbeddedPostgres
from headwater.errors import ConfigError
from headwater.pipeline.views import catalog as view_catalog

app = typer.Typer()


class Capture(Enum):
    """How the changes of a table reach the log."""

    trigger = "trigger"
    wal = "wal"


@app.command(rich_help_panel=DATABASE_PANEL)
def init(
    url: Url = None, embedded: Embedded = False, data_dir: DataDir = None, json: Json = False
) -> None:
    """Install Headwater's schema in the database, or upgrade it. Safe to run again.

    Example: `headwater init --url postgresql://localhost/shop`
    """

    async def work() -> None:
        settings = settings_for(url, embedded, data_dir)
        async with connected(settings, installed=False) as connection:
            applied = await schema.install(connection)
        text = (
            f"Installed version {schema.LATEST} of the schema headwater."
            if applied
            else f"The schema headwater is already installed, in version {schema.LATEST}."
        )
        print_message({"version": schema.LATEST, "applied": applied}, text, json=json)

    run(work())


@app.command(rich_help_panel=DATABASE_PANEL)
def enable(
    tables: Tables,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    capture: Annotated[
        Capture | None,
        typer.Option(help="By triggers, or from the write-ahead log, which costs writers less."),
    ] = None,
    json: Json = False,
) -> None:
    """Capture the changes of tables from now on. Safe to run again.

    Example: `headwater enable orders sales.invoices '"Order Lines"'`
    """

    async def work() -> None:
        async with connected(settings_for(url, embedded, data_dir)) as connection:
            await schema.install(connection)
            for name in tables:
                way: triggers.Capture | None = None
                if capture is not None:
                    way = "wal" if capture is Capture.wal else "trigger"
                label = await triggers.enable(connection, name, way)
                print_message({"table": label, "enabled": True}, f"Capturing {label}.", json=json)

    run(work())


@app.command(rich_help_panel=DATABASE_PANEL)
def disable(
    tables: Tables,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Stop capturing the changes of tables. Subscriptions stay open and get no updates.

    Example: `headwater disable orders`
    """

    async def work() -> None:
        async with connected(settings_for(url, embedded, data_dir)) as connection:
            await schema.require(connection)
            for name in tables:
                label = await triggers.disable(connection, name)
                text = f"No longer capturing {label}. Subscriptions to it get no updates."
                print_message({"table": label, "enabled": False}, text, json=json)

    run(work())


@app.command(rich_help_panel=DATABASE_PANEL)
def uninstall(
    yes: Yes = False,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Remove the schema headwater with its log, cursors and triggers. Your tables stay, and so do
    the tables of streaming views.

    Example: `headwater uninstall --yes`
    """
    confirm("Remove Headwater's log, cursors and triggers from the database?", yes=yes, json=json)

    async def work() -> None:
        settings = settings_for(url, embedded, data_dir)
        async with connected(settings, installed=False) as connection:
            view_tables = await view_catalog.tables_of_views(connection)
            removed = await schema.uninstall(connection)
        text = "Removed." if removed else "Headwater was not installed."
        if view_tables:
            names = ", ".join(view_tables)
            text += (
                f"\nThe tables of streaming views stay unchanged: {names}."
                f"\nThis statement removes them too: drop table {names};"
            )
        print_message({"removed": removed, "tables_of_views": view_tables}, text, json=json)

    run(work())


@app.command(rich_help_panel=DATABASE_PANEL)
def url(
    url: Url = None, embedded: Embedded = False, data_dir: DataDir = None, json: Json = False
) -> None:
    """Print the connection URL, for psql and drivers. Starts the embedded server, which then runs
    until `headwater stop`.

    Example: `psql "$(headwater url --embedded)"`
    """

    async def work() -> None:
        settings = settings_for(url, embedded, data_dir)
        async with database(settings, keep_running=True) as found:
            if settings.url is not None:
                print_message({"url": found}, found, json=json)
                return
            command = " ".join(("headwater stop --embedded", *_folder_option(data_dir)))
            print_message({"url": found, "stop": command}, found, json=json)
        if not json:
            print_note(f"The server runs until: {command}")

    run(work())


def _folder_option(data_dir: str | None) -> tuple[str, ...]:
    return () if data_dir is None else ("--data-dir", shlex.quote(data_dir))


@app.command(rich_help_panel=DATABASE_PANEL)
def stop(
    force: Annotated[
        bool, typer.Option("--force", help="Disconnect the clients of a server that is in use.")
    ] = False,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Stop the embedded server that `headwater url` started.

    Example: `headwater stop --embedded`
    """
    if not embedded:
        raise ConfigError(
            "Headwater can stop only the embedded PostgreSQL", hint="headwater stop --embedded"
        )
    server = EmbeddedPostgres(settings_for(None, embedded, data_dir).data_dir)
    stopped = server.stop(force=force)
    text = "Stopped the server of" if stopped else "No server runs in"
    document = {"stopped": stopped, "data_dir": str(server.data_dir)}
    print_message(document, f"{text} {server.data_dir}.", json=json)
