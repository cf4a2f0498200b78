"""What a program holds of reactive queries and mutations: `Results` of a query that is followed,
`Mutated` of a mutation. Results are latest-wins: a slow reader skips to the latest.
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
    """What a mutation returned, and a position that contains what it wrote."""

    value: Any
    position: str


class Results(Latest[Any]):
    """A reactive query that is followed.

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
        """The present result; None before the first."""
        return self.state.value

    @property
    def position(self) -> str | None:
        """What the value is complete up to; None while it is not known."""
        return self.state.position

    @property
    def error(self) -> HeadwaterError | None:
        """Why the value may be out of date: the query could not be executed again. None again with
        the next result."""
        return self.state.error

    def _present(self) -> Any:
        return self.value
