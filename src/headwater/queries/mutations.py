"""Runs mutations: one transaction each, with its actor, on a pooled connection."""

from __future__ import annotations

from typing import Any

from headwater.identity import Identity
from headwater.model import Position
from headwater.queries.functions import Arguments, Mutation


class Mutations:
    """The connections that mutations run on."""

    async def run(
        self,
        mutation: Mutation,
        arguments: Arguments,
        identity: Identity,
        *,
        trace_id: str | None = None,
    ) -> tuple[Any, Position]:
        """What it returned, and a position that contains what it wrote."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
