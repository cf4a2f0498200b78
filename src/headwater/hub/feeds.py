"""Change feeds (being built)."""

from __future__ import annotations

from headwater.model import Position, Transaction


class Feeds:
    def flushed(self, transactions: list[Transaction]) -> None:
        pass

    def fell_behind(self, since: Position) -> None:
        pass

    def gap(self) -> None:
        pass
