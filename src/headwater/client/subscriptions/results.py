"""`Results` of a subscribed reactive query, and `Mutated`, the result of a mutation. A slow reader
of results gets the latest one only.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.client.state.query import QueryState
from headwater.client.state.rows import QueryRowsState
from headwater.client.subscriptions.subscription import Latest, SubscriptionOwner
from headwater.errors import HeadwaterError
from headwater.protocol import QueryCall


class Mutated(msgspec.Struct, frozen=True):
    """The return value of a mutation, and a position that contains its writes."""

    value: Any
    position: str


class Results(Latest[Any]):
    """A subscribed reactive query.

    ```python
    async for orders in hw.subscribe("open_orders", region=7): ...

    async with hw.subscribe("open_orders", region=7) as orders:
        orders.value
    ```
    """

    state: QueryState | QueryRowsState

    def __init__(self, owner: SubscriptionOwner, call: QueryCall) -> None:
        super().__init__(owner)
        self._call = call
        self.state = self._new_state()

    def _new_state(self) -> QueryState | QueryRowsState:
        return QueryRowsState(self._call) if self._call.delta else QueryState(self._call)

    @property
    def value(self) -> Any:
        """The current result; None before the first."""
        return self.state.value

    @property
    def position(self) -> str | None:
        """The position that the value contains; None while it is unknown."""
        return self.state.position

    @property
    def error(self) -> HeadwaterError | None:
        """Why the value may be out of date: the query could not be executed again. None again with
        the next result."""
        return self.state.error

    def _present(self) -> Any:
        return self.value
