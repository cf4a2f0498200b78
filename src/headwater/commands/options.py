"""Options that several commands share, the settings that they make, and how commands are grouped
in the help."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from headwater.errors import ConfigError
from headwater.settings import Settings, load_settings

DATABASE_PANEL = "Database"
LIVE_PANEL = "Live data"
LAKE_PANEL = "Lake and history"


def new_app(**options: Any) -> typer.Typer:
    """A group of commands, with the help that all of them have."""
    return typer.Typer(
        no_args_is_help=True,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


Url = Annotated[
    str | None,
    typer.Option(help="The database; default: HEADWATER_URL, or url in headwater.toml."),
]
Embedded = Annotated[
    bool, typer.Option("--embedded", help="Use the PostgreSQL that comes with Headwater.")
]
DataDir = Annotated[str | None, typer.Option(help="The data folder of the embedded PostgreSQL.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one document per line.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
Tables = Annotated[list[str], typer.Argument(metavar="TABLE…", help="One or more tables.")]
LakeFolder = Annotated[
    str | None,
    typer.Option(
        "--lake",
        metavar="FOLDER",
        help="The folder or URL of the lake; default: the setting [lake] location.",
    ),
]


def settings_for(
    url: str | None, embedded: bool, data_dir: str | None, lake: str | None = None
) -> Settings:
    """The settings of a command that needs a database. ConfigError if none is given."""
    if url is not None and embedded:
        raise ConfigError("--url and --embedded contradict each other", hint="Give one of them.")
    settings = load_settings(overrides={"url": url, "data_dir": data_dir, "lake_location": lake})
    if embedded:
        return msgspec.structs.replace(settings, url=None)
    if settings.url is None:
        raise ConfigError(
            "no database is given",
            hint="Use --url postgresql://…, HEADWATER_URL, a headwater.toml, or --embedded.",
        )
    return settings


def confirm(question: str, *, yes: bool, json: bool) -> None:
    """Ask the user, unless `--yes` is given. A program that reads JSON cannot answer."""
    if yes:
        return
    if json:
        raise ConfigError("with --json no question is asked", hint="Confirm with --yes.")
    typer.confirm(question, abort=True, err=True)
