"""What a query or mutation function is given: `ctx.fetch`, and who calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from headwater.database import Connection
from headwater.identity import Identity
from headwater.queries.events import Events
from headwater.queries.statements import Executed


class Context:
    """The database as of one moment, and who asks. Passed to every query as its first argument."""

    def __init__(
        self,
        connection: Connection,
        identity: Identity,
        *,
        function: str,
        kind: Literal["query", "mutation"] = "query",
        trace_id: str | None = None,
        events: Events | None = None,
        observe: Callable[[Executed], None] | None = None,
    ) -> None:
        """`observe` hears of every statement before it is sent. Transaction, role and claims are
        the caller's business."""
        raise NotImplementedError

    @property
    def careful(self) -> bool:
        """Whether anything was fetched that JSON cannot hold as it stands (floats, bytes)."""
        raise NotImplementedError

    async def fetch(self, sql: str, *args: Any, **named: Any) -> list[Any]:
        """All rows, as dictionaries."""
        raise NotImplementedError

    def close(self) -> None:
        """From here on every use raises: the function has returned, or took too long."""
        raise NotImplementedError
