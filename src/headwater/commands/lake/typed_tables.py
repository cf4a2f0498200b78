"""The typed tables of a lake as a command shows them, read from the lake alone."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import msgspec

from headwater.model import Position
from headwater.pipeline.lake import delta, shapes
from headwater.pipeline.tables import requests
from headwater.pipeline.tables.choice import Choice, present_tables
from headwater.pipeline.tables.layout import CURRENT, HISTORY, Progress, folder


class TypedTableStatus(msgspec.Struct, frozen=True):
    """`state` is `ready`, `paused`, `due` (to be filled) or `excluded`. The table is exact at
    `position`; `at` is a time after all transactions of it."""

    table: str
    state: str
    rows: int | None
    versions: int | None
    position: Position | None
    at: datetime | None
    folder: str


def typed_tables(root: str, choice: Choice) -> Iterator[TypedTableStatus]:
    """Each table of the lake that has typed tables, or is to get them."""
    for table in present_tables(shapes.load(f"{root}/shapes")).values():
        name = folder(table)
        current, history = (delta.open_table(f"{root}/{name}/{w}") for w in (CURRENT, HISTORY))
        progress = None if current is None else Progress.of(current)
        if progress is None and not choice.includes(table):
            continue
        request = requests.load(root, table)
        if not choice.includes(table):
            state = "excluded"
        elif request.paused:
            state = "paused"
        else:
            is_filled = progress is not None and progress.fill == request.fill
            state = "ready" if is_filled else "due"
        yield TypedTableStatus(
            table.label,
            state,
            None if current is None else current.count(),
            None if history is None else history.count(),
            None if progress is None else progress.position,
            None if progress is None else progress.at,
            name,
        )
