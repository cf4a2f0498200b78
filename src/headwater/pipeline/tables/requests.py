"""What a user asked for a typed table by a command: pause, resume, backfill.

A request is a file in the lake, so that it reaches a pipeline on any machine. The pipeline reads
the file before it works on the table.
"""

from __future__ import annotations

from uuid import uuid4

import msgspec

from headwater.model import Table
from headwater.pipeline.files import FileLocation
from headwater.pipeline.tables.layout import FOLDER, folder

_FOLDER = "_tables"


class TableRequest(msgspec.Struct, frozen=True):
    """`fill` is the last request to fill the table again; its tables have it in their progress."""

    paused: bool = False
    fill: str = ""


def load(root: str, table: Table) -> TableRequest:
    place, name = FileLocation.of(root), _file(table)
    if not place.exists(name):
        return TableRequest()
    return msgspec.json.decode(place.read(name), type=TableRequest)


def stored(root: str) -> dict[str, TableRequest]:
    """Every request of a lake, by the folder of its table."""
    place = FileLocation.of(root)
    names = [info.path.removeprefix(f"{place.base}/") for info in place.files(_FOLDER)]
    return {
        f"{FOLDER}/{name.partition('/')[2].removesuffix('.json')}": msgspec.json.decode(
            place.read(name), type=TableRequest
        )
        for name in names
        if name.endswith(".json")
    }


def pause(root: str, table: Table, *, paused: bool) -> TableRequest:
    return _save(root, table, msgspec.structs.replace(load(root, table), paused=paused))


def backfill(root: str, table: Table) -> TableRequest:
    return _save(root, table, msgspec.structs.replace(load(root, table), fill=uuid4().hex[:12]))


def _save(root: str, table: Table, request: TableRequest) -> TableRequest:
    FileLocation.of(root).write(_file(table), msgspec.json.encode(request))
    return request


def _file(table: Table) -> str:
    return f"{_FOLDER}/{folder(table).partition('/')[2]}.json"
