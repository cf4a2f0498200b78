"""The types of dependencies: the statements that a function ran, and what they read."""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.live.filters.filter import EVERYTHING, Filter
from headwater.model import Table


class Statement(msgspec.Struct, frozen=True):
    """A statement as the server got it: parameters are `$1`, `$2`, …; `types` are their type oids,
    0 where the server is to find out."""

    sql: str
    types: tuple[int, ...] = ()


class Executed(msgspec.Struct, frozen=True):
    """A statement that was executed, with the values of its parameters in their order."""

    statement: Statement
    values: tuple[Any, ...] = ()


class Read(msgspec.Struct, frozen=True):
    """One captured table as a statement reads it.

    A change that alters none of the `columns` (None for any; inserts and deletes always count), or
    whose row matches `where` neither before nor after, cannot change what the statement returns.
    """

    table: Table
    columns: frozenset[str] | None = None
    where: Filter = EVERYTHING
