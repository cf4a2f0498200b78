"""Options that commands share, and what they mean together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
import typer

from headwater.errors import ConfigError
from headwater.settings import Settings, load_settings

Url = Annotated[
    str | None,
    typer.Option(help="The database; else HEADWATER_URL or url in headwater.toml."),
]
Embedded = Annotated[
    bool, typer.Option("--embedded", help="Use the PostgreSQL that comes with Headwater.")
]
DataDir = Annotated[str | None, typer.Option(help="Where the embedded PostgreSQL keeps its data.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one document a line.")]


LakeFolder = Annotated[
    str | None,
    typer.Option(
        "--lake", metavar="FOLDER", help="The folder or URL of the lake; else the setting lake."
    ),
]


def settings_for(
    url: str | None, embedded: bool, data_dir: str | None, lake: str | None = None
) -> Settings:
    """The settings for a command, which must say which database it means."""
    if url is not None and embedded:
        raise ConfigError("--url and --embedded contradict each other", hint="Give one of them.")
    settings = load_settings(overrides={"url": url, "data_dir": data_dir, "lake": lake})
    if embedded:
        return msgspec.structs.replace(settings, url=None)
    if settings.url is None:
        raise ConfigError(
            "no database is given",
            hint="Use --url postgresql://…, HEADWATER_URL, a headwater.toml, or --embedded.",
        )
    return settings


@contextmanager
def spark_needed() -> Iterator[None]:
    """Around imports of the pipeline: without its packages, the way to them."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the pipeline needs {error.name}, which is not installed",
            hint="pip install 'headwater[spark]'",
        ) from error
