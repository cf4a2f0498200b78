"""Checks a source: before it is added, and when people ask what is wrong with it. It changes
nothing, neither at the source nor here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Iterator

import msgspec

from headwater.capture.kinds import open_source
from headwater.capture.running.filters import check_predicate
from headwater.capture.source import Problem, Source, SourceDefinition, SourceTable
from headwater.errors import PositionLost, SourceError, SourceRefused
from headwater.limits import SOURCE_CHECK_SECONDS


class CheckedSource(msgspec.Struct, frozen=True):
    """What is wrong with a source, and its tables if nothing prevents that they are mirrored."""

    problems: tuple[Problem, ...]
    tables: tuple[SourceTable, ...] = ()

    @property
    def is_refused(self) -> bool:
        """Whether a problem prevents that it is captured."""
        return any(not problem.warning for problem in self.problems)


async def check_source(definition: SourceDefinition, known: Container[str] = ()) -> CheckedSource:
    """Check a source, of which the known tables were mirrored before. ConfigError if its driver is
    not installed or its environment is not complete."""
    source = open_source(definition)
    try:
        async with asyncio.timeout(SOURCE_CHECK_SECONDS):
            return await _checked(source, definition, known)
    except TimeoutError:
        return CheckedSource((_silent(),))
    except PositionLost:
        raise
    except SourceError as error:
        return CheckedSource((Problem(str(error), error.hint or ""),))
    finally:
        await source.close()


async def _checked(
    source: Source, definition: SourceDefinition, known: Container[str]
) -> CheckedSource:
    problems = tuple(tolerate_missing(await source.check(), known))
    found = CheckedSource(problems)
    if found.is_refused:
        return found
    tables = await source.tables()
    if not source.filters_rows:
        problems += tuple(_predicate_problems(definition, tables))
    return CheckedSource(problems, tuple(tables))


def _predicate_problems(
    definition: SourceDefinition, tables: Iterable[SourceTable]
) -> Iterator[Problem]:
    predicates = {spec.name: spec.where for spec in definition.tables if spec.where is not None}
    for table in tables:
        if table.name in predicates:
            try:
                check_predicate(table, predicates[table.name])
            except SourceRefused as error:
                yield Problem(str(error), error.hint or "")


def tolerate_missing(problems: Iterable[Problem], known: Container[str]) -> list[Problem]:
    """A table that was mirrored before and no longer exists does not stop the others."""
    return [
        msgspec.structs.replace(problem, warning=True) if problem.missing in known else problem
        for problem in problems
    ]


def _silent() -> Problem:
    return Problem(
        f"the source did not answer in {SOURCE_CHECK_SECONDS:.0f} seconds",
        "Check its host and port, and that a firewall lets this machine connect.",
    )
