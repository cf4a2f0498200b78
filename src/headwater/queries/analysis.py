"""Asks the database what a statement reads: tables through views and functions, columns, and the
row predicate where the statement is simple. Widened when in doubt, never narrowed."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headwater.queries.statements import Executed, Read, Statement


class Analysis(msgspec.Struct, frozen=True):
    """What one statement reads.

    With `everything`, it may read any table (an opaque function): every change counts.
    `uncaptured` names what it reads and nobody captures, so that a change would be missed.
    """

    statement: Statement
    everything: bool = False
    uncaptured: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """In words for people, where and why it was widened."""

    def reads(self, executed: Executed) -> tuple[Read, ...]:
        """What it read with these values."""
        raise NotImplementedError


class Analyst:
    """Analyses statements over a connection of its own; each once, until the catalog changes."""

    def __init__(self, url: str) -> None:
        raise NotImplementedError

    async def analyse(self, statement: Statement, role: str | None = None) -> Analysis:
        """What the statement reads when that role executes it (None for Headwater's own)."""
        raise NotImplementedError

    def known(self, statement: Statement, role: str | None = None) -> Analysis | None:
        """The same, if it need not be asked for."""
        raise NotImplementedError

    async def recheck(self) -> set[Statement]:
        """Look again at everything that analyses rest on (views, functions, policies, tables,
        what is captured): the statements of analyses that no longer hold, which are forgotten."""
        raise NotImplementedError

    def forget(self, table_oids: Iterable[int]) -> set[Statement]:
        """Tables were altered: forget what rests on them. Which statements that was."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
