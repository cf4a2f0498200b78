"""Queries and mutations as the application registers them: arguments from type hints, results
encoded by their types."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from headwater.identity import Identity, Sharing
from headwater.queries.context import Context


class Arguments:
    """A call's arguments, checked. `key` tells calls apart: equal only if all arguments are, in
    value and type."""

    values: Mapping[str, Any]
    key: Hashable


class Function:
    """What queries and mutations have in common."""

    name: str
    timeout: float | None
    """In seconds; None for the setting's."""
    trusted: bool
    """Runs as Headwater's own database role, whoever calls."""

    def bind(self, args: Mapping[str, Any]) -> Arguments:
        """Check a call's arguments; InvalidQuery names the one that is wrong."""
        raise NotImplementedError

    async def run(self, context: Context, arguments: Arguments) -> Any:
        """Call the function: in a thread if it is not async. Raises what it raises."""
        raise NotImplementedError

    def encode(self, value: Any, *, careful: bool = True) -> bytes:
        """What it returned as JSON, by its declared type. `careful` says that there may be floats
        or bytes in it. ResultError for what does not fit or is too large."""
        raise NotImplementedError


class Query(Function):
    """A reactive query."""

    consistent: bool
    """Always executed on the database itself, never on a replica."""
    share: Sharing
    key: tuple[str, ...]
    """The fields that identify a row of the result, for row deltas; empty for none."""

    def identity(self, caller: Identity) -> Identity:
        """What it may know of who calls: those for whom this is equal share a result."""
        raise NotImplementedError


class Mutation(Function):
    """A function that writes."""
