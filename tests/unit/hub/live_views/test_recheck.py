"""Rights of live queries are checked again, whatever happens to one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from headwater.errors import Unavailable
from headwater.hub.live_views.recheck import recheck
from headwater.hub.live_views.registry import LiveViews
from headwater.hub.reading.tables import Tables


class FakeViews(list[Any]):
    """Guarded views of the tables 0, 1 and 2."""

    def __init__(self) -> None:
        super().__init__(
            SimpleNamespace(
                request=SimpleNamespace(table=f"{number}"),
                known=None,
                scope=SimpleNamespace(checked=True),
                removed=False,
                live=True,
            )
            for number in range(3)
        )
        self.read: list[str] = []

    def open(self, view: Any, *, quiet: bool) -> None:
        assert quiet
        self.read.append(view.request.table)


async def rechecked(error: Exception) -> tuple[list[str], list[str]]:
    """The tables that were looked up, and those of the views that were read, if the first table
    cannot be looked up."""
    views, found = FakeViews(), list[str]()

    async def find(name: str) -> Any:
        found.append(name)
        raise error

    tables = SimpleNamespace(find=find)
    await recheck(cast(LiveViews, views), cast(Tables, tables), 0.0)
    return found, views.read


async def test_an_error_of_one_table_stops_no_other_check() -> None:
    assert await rechecked(RuntimeError()) == (["0", "1", "2"], ["0", "1", "2"])


async def test_a_database_that_is_away_ends_the_round() -> None:
    with pytest.raises(Unavailable):
        await rechecked(Unavailable("the database is away", hint="Try again."))
