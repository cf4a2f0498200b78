"""The sources of an application: those of its code and of `headwater.toml`.

When the application starts they are written to the database, and a child process runs the sources
of the database: also those that were added by a command, or are added later. A source that is
declared elsewhere, or no longer, is reported and not removed: its mirrors may be in use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

import psycopg

from headwater.capture.declaration import from_settings
from headwater.capture.kinds import open_source
from headwater.capture.mirror import registry
from headwater.capture.mirror.registry import DeclaredBy
from headwater.capture.running.process import SourcesProcess
from headwater.capture.source import SourceDefinition
from headwater.database import Connection
from headwater.errors import ConfigError, HeadwaterError
from headwater.limits import SOURCE_LOOK_SECONDS
from headwater.settings.sources import SourceEntry

logger = logging.getLogger(__name__)

ANY_SOURCES = "select exists (select from headwater.source_definitions)"

Asks = Callable[[str, None], Awaitable[list[tuple[bool]]]]
"""Executes a query, such as `ANY_SOURCES`, without values."""


class ApplicationSources:
    """The declared sources, by name."""

    def __init__(self, entries: Mapping[str, SourceEntry]) -> None:
        self._declared: dict[str, tuple[SourceDefinition, DeclaredBy]] = {
            name: (from_settings(name, entry), "file") for name, entry in entries.items()
        }

    @property
    def definitions(self) -> Mapping[str, SourceDefinition]:
        return {name: definition for name, (definition, _) in self._declared.items()}

    @property
    def in_code(self) -> bool:
        """Whether the application itself declares one."""
        return any(by == "application" for _, by in self._declared.values())

    def add(self, definition: SourceDefinition) -> None:
        """Declare a source in code."""
        name = definition.name
        if name in self._declared:
            place = " in headwater.toml" if self._declared[name][1] == "file" else ""
            raise ConfigError(
                f"source {name} is declared already{place}",
                hint="Give one of them another name, and another schema (into).",
            )
        self._declared[name] = (definition, "application")

    async def declare(self, connection: Connection, *, runs: bool) -> None:
        """Write the definitions to the database. `runs` says that this process will run them, so
        that their environment and drivers must be complete."""
        for definition, declared_by in self._declared.values():
            if runs:
                await _check_open(definition)
            if await registry.declare(connection, definition, declared_by):
                logger.info("source %s is declared", definition.name)

    async def report_others(self, connection: Connection) -> None:
        """Report sources that were declared in code or in a file, and not here: by another
        application on this database, or by this one before."""
        for known in await registry.definitions(connection):
            name = known.definition.name
            if known.declared_by == "command" or name in self._declared or known.removing:
                continue
            logger.info("source %s runs too; this application does not declare it", name)

    async def run(self, url: str, ask: Asks) -> None:
        """Run the sources of the database in a child process, as soon as there is one."""
        while not self._declared and not await _any(ask):  # noqa: ASYNC110 (others add them)
            await asyncio.sleep(SOURCE_LOOK_SECONDS)
        await SourcesProcess(url).run()


async def _check_open(definition: SourceDefinition) -> None:
    """ConfigError for an option that its kind does not have, a driver that is not installed, or a
    variable that is not set. The source is not asked."""
    try:
        await open_source(definition).close()
    except ConfigError as error:
        raise ConfigError(f"source {definition.name}: {error}", hint=error.hint) from error


async def _any(ask: Asks) -> bool:
    try:
        return (await ask(ANY_SOURCES, None))[0][0]
    except (psycopg.Error, HeadwaterError):
        return False  # The database is away for a moment: the next look finds out.
