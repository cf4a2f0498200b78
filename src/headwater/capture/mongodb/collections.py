"""The collections of a database: which there are, of which kind, and whether they store images.

Only ordinary collections have change streams. Views and time series are refused by name, and so are
capped collections, whose oldest documents vanish without an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pymongo.errors import OperationFailure

from headwater.capture.mongodb.columns import Layout
from headwater.capture.mongodb.connection import Database
from headwater.capture.source import SourceDefinition, TableSpec
from headwater.errors import SourceRefused

_UNAUTHORIZED = 13
_NOT_CAPTURED = {
    "view": ("which has no change stream", "Capture the collection that it is made from."),
    "timeseries": ("which has no change stream", "Write to an ordinary collection as well."),
    "capped collection": (
        "whose oldest documents vanish without an event",
        "Use an ordinary collection with a TTL index, whose deletes are events.",
    ),
}


class Collection(NamedTuple):
    name: str
    kind: str
    """`collection`, `capped collection`, `view` or `timeseries`."""
    images: bool
    """Whether the server stores documents as they were before and after each change."""


async def existing(database: Database, names: list[str] | None = None) -> dict[str, Collection]:
    """Those with these names, or all except the server's own."""
    wanted = {"name": {"$in": names}} if names is not None else None
    try:
        found = [_of(entry) async for entry in await database.list_collections(filter=wanted)]
    except OperationFailure as error:
        if error.code != _UNAUTHORIZED or names is None:
            raise
        # A user may have the right to read some collections, and none to list them.
        found = [Collection(name, "collection", False) for name in names]
    return {each.name: each for each in sorted(found) if not each.name.startswith("system.")}


def _of(entry: Mapping[str, Any]) -> Collection:
    options = entry.get("options", {})
    images = options.get("changeStreamPreAndPostImages", {})
    kind = "capped collection" if options.get("capped") else entry.get("type", "collection")
    return Collection(entry["name"], kind, bool(images.get("enabled")))


def layouts(definition: SourceDefinition, found: dict[str, Collection]) -> list[Layout]:
    """Of the collections of the definition, in the order of their names. One that does not exist
    has a layout, too: it begins to exist with its first document."""
    specs = definition.tables or tuple(
        TableSpec(c.name) for c in found.values() if c.kind == "collection"
    )
    result = sorted((layout_of(spec, found) for spec in specs), key=lambda layout: layout.name)
    _check_targets(result)
    return result


def layout_of(spec: TableSpec, found: dict[str, Collection]) -> Layout:
    collection = found.get(spec.name)
    if collection is not None and collection.kind != "collection":
        reason, fix = _NOT_CAPTURED.get(collection.kind, _NOT_CAPTURED["view"])
        raise SourceRefused(f"{spec.name} is a {collection.kind}, {reason}", hint=fix)
    if not spec.name or spec.name.startswith("system.") or "$" in spec.name or "\0" in spec.name:
        raise SourceRefused(
            f"{spec.name!r:.100} is not the name of a collection that can be captured",
            hint="Name an ordinary collection of the database.",
        )
    return Layout(spec)


def _check_targets(found: list[Layout]) -> None:
    names: dict[str, str] = {}
    for layout in found:
        target = layout.table.target
        if target in names:
            raise SourceRefused(
                f"{names[target]} and {layout.name} would have the same mirror, {target}",
                hint='Name each collection once, and give one mirror another name with "target".',
            )
        names[target] = layout.name
