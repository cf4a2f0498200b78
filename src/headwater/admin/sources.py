"""What people see of a source: its definition without passwords, its problem with the fix, how far
the first copy has come, and what an admin must do. Commands, `doctor` and the metrics use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from headwater.capture.mirror import registry
from headwater.capture.mirror.registry import DeclaredSource, SourceState, TableState
from headwater.capture.postgres.doctor import Finding
from headwater.capture.running.check import check_source
from headwater.capture.running.runner import LEASE_CLASS
from headwater.capture.source import Problem
from headwater.database import Connection, translated, without_password
from headwater.errors import HeadwaterError, NotFound

WITHOUT_RUNNER = frozenset({"paused", "failed", "refused", "lost", "diverged"})
"""States in which a process may have the source without its lease."""

BROKEN = frozenset({"failed", "refused", "lost", "diverged"})
"""States in which no change arrives until something is repaired."""


async def find_source(connection: Connection, name: str) -> tuple[DeclaredSource, SourceReport]:
    """NotFound if there is no such source."""
    declared = {each.definition.name: each for each in await registry.definitions(connection)}
    states = {each.name: each for each in await reports(connection)}
    if name not in declared or name not in states:
        known = ", ".join(declared)
        raise NotFound(
            f"there is no source {name}",
            hint=f"There are: {known}." if known else "Add one: headwater source add",
        )
    return declared[name], states[name]


def shown_definition(declared: DeclaredSource) -> dict[str, Any]:
    """The definition as it may be printed. Options may be passwords: only their names are shown."""
    definition = declared.definition
    return {
        "url": without_password(definition.url),
        "tables": msgspec.to_builtins(definition.tables),
        "feed_only": definition.feed_only,
        "options": sorted(definition.options),
        "declared_by": declared.declared_by,
        "paused": declared.paused,
        "removing": declared.removing,
    }


def copied_share(tables: Iterable[TableState]) -> float | None:
    """How much of the copies is done, from 0 to 1; None if the number of rows is not known.

    >>> tables = [TableState("a", "a", "copying", 25, 100), TableState("b", "b", "live", 90, 100)]
    >>> copied_share(tables)
    0.625
    """
    known = [table for table in tables if table.estimate is not None]
    total = sum(_expected(table) for table in known)
    if not total:
        return None
    done = sum(_expected(t) if t.state == "live" else t.copied for t in known)
    return done / total


def _expected(table: TableState) -> int:
    """An estimate may be too small, and is not corrected after the copy."""
    return max(table.copied, table.estimate or 0)


class SourceReport(SourceState, frozen=True):
    """The state of a source, and whether a process runs it: one that was killed cannot report."""

    is_run: bool


async def reports(connection: Connection) -> list[SourceReport]:
    """All sources, in the order of their names."""
    found = await registry.sources(connection)
    with translated():
        cursor = await connection.execute(_LEASES, (LEASE_CLASS,))
        leased = {name for (name,) in await cursor.fetchall()}
    return [
        SourceReport(
            **msgspec.structs.asdict(each),
            is_run=each.name in leased or each.state in WITHOUT_RUNNER,
        )
        for each in found
    ]


_LEASES = """
    select s.name
    from headwater.sources s
    join pg_locks l
      on l.locktype = 'advisory' and l.objsubid = 2 and l.granted
     and l.objid = (hashtext(s.name)::bigint & 4294967295)::oid
    where l.classid = %s::bigint::oid
      and l.database = (select oid from pg_database where datname = current_database())
"""


def problem_of(source: SourceReport) -> Problem | None:
    """What is wrong, and what to do about it."""
    if source.error is not None:
        return Problem(source.error, source.hint or "")
    if source.state in BROKEN:
        return Problem(f"it is {source.state}", source.hint or "")
    if not source.is_run:
        fix = "Start headwater serve, or: headwater source run"
        return Problem("no process runs it", fix, warning=True)
    if source.warning is not None:
        return Problem(source.warning, source.hint or "", warning=True)
    return None


# ------------------------------------------------------------------------ doctor


async def examine(connection: Connection, *, at_source: bool = False) -> list[Finding]:
    """A finding for each source; with `at_source`, also what its database refuses."""
    findings = [of_source(each) for each in await reports(connection)]
    if at_source:
        for declared in await registry.definitions(connection):
            findings += await _of_database(connection, declared)
    return findings


def of_source(source: SourceReport) -> Finding:
    """The state of a source, as its runner last reported it."""
    topic = f"source {source.name}"
    problem = problem_of(source)
    if problem is not None:
        if problem.warning:
            return Finding(topic, "warn", problem.what, problem.fix or None)
        return Finding(topic, "fail", f"{source.state}: {problem.what}", problem.fix or None)
    if source.state == "paused":
        fix = f"Run: headwater source resume {source.name}"
        return Finding(topic, "warn", "is paused: the source stores its changes meanwhile", fix)
    return Finding(topic, "ok", f"is {source.state}")


async def _of_database(connection: Connection, declared: DeclaredSource) -> list[Finding]:
    topic = f"source {declared.definition.name}"
    known = await registry.tables_of(connection, declared.definition.name)
    try:
        found = await check_source(declared.definition, known)
    except HeadwaterError as error:
        return [Finding(topic, "fail", str(error), error.hint)]
    return [
        Finding(topic, "warn" if problem.warning else "fail", problem.what, problem.fix or None)
        for problem in found.problems
    ]
