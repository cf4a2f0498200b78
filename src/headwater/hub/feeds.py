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


import msgspec


class FeedQuery(msgspec.Struct, frozen=True):
    tables: tuple[str, ...]
    where: object
    since: Position | None
    format: str
