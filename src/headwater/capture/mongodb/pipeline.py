"""The part of a definition that the server applies: which events a change stream sends, which
fields of their documents, and which documents a copy reads.

A pushed filter may let too much pass, because the runner filters again; it must never hold back a
row that matches. So it only concerns inserts and copies: an update or a replacement may make a
document leave the filter, and always passes, as deletes do. Of the filter, only those conditions
are pushed whose meaning in MongoDB is surely that in PostgreSQL, for values of the same type;
values of every other type pass.

Fields are left out with `$project` and `$unset`. One stream serves several collections with
different fields, so the document of each restricted collection moves to a place of its own first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headwater.capture.mongodb.columns import Field, Layout, outermost

ROW_EVENTS = ("insert", "update", "replace", "delete")
COLLECTION_EVENTS = ("create", "drop", "rename")
DATABASE_EVENTS = ("dropDatabase", "invalidate")

Stage = dict[str, Any]

_FIELDS = (
    "_id", "operationType", "ns", "nsType", "to", "documentKey._id", "clusterTime", "wallTime",
    "lsid", "txnNumber",
)  # fmt: skip
_DOCUMENTS = {"fullDocument": "document", "fullDocumentBeforeChange": "before"}
"""The fields of an event that have a document, and how the places of restricted ones begin."""


def stream_pipeline(layouts: Sequence[Layout], *, everything: bool, splits: bool) -> list[Stage]:
    """The stages after `$changeStream`. `everything` watches collections without a layout, too;
    `splits` says that the server can split an event that is too large."""
    restricted = [layout for layout in layouts if layout.projection()]
    stages = [_matched(layouts, everything), *_pushed(layouts), *_moved(restricted)]
    stages.append(_projected(restricted))
    if left_out := _left_out(restricted):
        stages.append({"$unset": left_out})
    if splits:
        stages.append({"$changeStreamSplitLargeEvent": {}})
    return stages


class Places(NamedTuple):
    """The fields of an event that have a collection's document after and before the change."""

    after: str
    before: str


ANYWHERE = Places(*_DOCUMENTS)
"""Of a collection whose fields are not restricted."""


def places(layouts: Sequence[Layout]) -> dict[str, Places]:
    """Where the pipeline puts the documents of each collection."""
    found = dict.fromkeys((layout.name for layout in layouts), ANYWHERE)
    restricted = (layout for layout in layouts if layout.projection())
    for number, layout in enumerate(restricted):
        found[layout.name] = Places(*(f"{place}{number}" for place in _DOCUMENTS.values()))
    return found


# ------------------------------------------------------------------------ stages


def _matched(layouts: Sequence[Layout], everything: bool) -> Stage:
    names: Any = {"$in": sorted(layout.name for layout in layouts)}
    if everything:
        names = {"$not": {"$regex": r"^system\."}}
    return {
        "$match": {
            "$or": [
                {"operationType": {"$in": [*ROW_EVENTS, *COLLECTION_EVENTS]}, "ns.coll": names},
                {"operationType": "rename", "to.coll": names},
                {"operationType": {"$in": list(DATABASE_EVENTS)}},
            ]
        }
    }


def _pushed(layouts: Sequence[Layout]) -> list[Stage]:
    stages = []
    for layout in layouts:
        if condition := pushed(layout, "fullDocument."):
            others = {"operationType": {"$ne": "insert"}}, {"ns.coll": {"$ne": layout.name}}
            stages.append({"$match": {"$or": [*others, condition]}})
    return stages


def _moved(restricted: Sequence[Layout]) -> list[Stage]:
    if not restricted:
        return []
    moves: dict[str, Any] = {}
    names = [layout.name for layout in restricted]
    for field, place in _DOCUMENTS.items():
        for number, name in enumerate(names):
            moves[f"{place}{number}"] = _if({"$eq": ["$ns.coll", name]}, f"${field}", "$$REMOVE")
        moves[field] = _if({"$in": ["$ns.coll", names]}, "$$REMOVE", f"${field}")
    return [{"$addFields": moves}]


def _if(condition: Any, then: str, otherwise: str) -> dict[str, Any]:
    return {"$cond": [condition, then, otherwise]}


def _projected(restricted: Sequence[Layout]) -> Stage:
    fields = dict.fromkeys((*_FIELDS, *_DOCUMENTS), 1)
    for number, layout in enumerate(restricted):
        for place in _DOCUMENTS.values():
            if layout.spec.columns is None:
                fields[f"{place}{number}"] = 1
            else:
                fields |= {f"{place}{number}.{path}": 1 for path in layout.projection() or ()}
    return {"$project": fields}


def _left_out(restricted: Sequence[Layout]) -> list[str]:
    return [
        f"{place}{number}.{path}"
        for number, layout in enumerate(restricted)
        for place in _DOCUMENTS.values()
        for path in outermost(layout.spec.exclude)
    ]


# ------------------------------------------------------------------------ filters


_INTEGERS = {"smallint", "int2", "integer", "int", "int4", "bigint", "int8"}
_NUMBERS = _INTEGERS | {"numeric", "decimal", "double precision", "float8"}
_TEXTS = {"text", "varchar", "character varying"}
_SCALARS = _NUMBERS | _TEXTS | {"boolean", "bool", "date", "uuid", "timestamptz", "timestamp"}
_EXACT = 2**53
"""Whole numbers below this are the same as integers, doubles and decimals."""
_OPERATORS = {"=": "$eq", "!=": "$ne", "<": "$lt", "<=": "$lte", ">": "$gt", ">=": "$gte"}


def pushed(layout: Layout, prefix: str = "") -> dict[str, Any] | None:
    """What of the filter the server may apply to a document; None for nothing."""
    return _condition(layout.spec.where, {f.column: f for f in layout.fields}, prefix)


def _condition(where: Any, fields: Mapping[str, Field], prefix: str) -> dict[str, Any] | None:
    match where:
        case [str(column), str(operator), *operand]:
            return _simple(fields.get(column), operator, operand, prefix)
        case list() | tuple() if where:
            return _all(where, fields, prefix)
        case {"and": [_, *_] as parts}:
            return _all(parts, fields, prefix)
        case {"or": [_, *_] as parts}:
            each = [_condition(part, fields, prefix) for part in parts]
            return None if None in each else {"$or": each}
    return None


def _all(parts: Any, fields: Mapping[str, Field], prefix: str) -> dict[str, Any] | None:
    each = [found for part in parts if (found := _condition(part, fields, prefix))]
    return {"$and": each} if each else None


def _simple(
    field: Field | None, operator: str, operand: list[Any], prefix: str
) -> dict[str, Any] | None:
    if field is None or field.type not in _SCALARS or any(s.isdecimal() for s in field.path):
        return None
    path = prefix + ".".join(field.path)
    match operator, operand:
        case "is not null", []:
            return {path: {"$ne": None}}
        case (("=" | "!=" | "<" | "<=" | ">" | ">="), [value]) if _same(field, operator, [value]):
            return _unless_other(path, field, {path: {_OPERATORS[operator]: value}})
        case "in", [[*values]] if _same(field, "=", values):
            return _unless_other(path, field, {path: {"$in": values}})
        case "not in", [[*values]] if _same(field, "=", values):
            return _unless_other(path, field, {path: {"$nin": values}})
    return None


def _same(field: Field, operator: str, values: Sequence[Any]) -> bool:
    """Whether both databases compare these constants alike. Texts only for equality, because their
    order depends on the collation."""
    if field.type in _NUMBERS:
        return all(type(value) is int and -_EXACT < value < _EXACT for value in values)
    if field.type in _TEXTS and operator in ("=", "!="):
        return all(isinstance(value, str) and "\ufffd" not in value for value in values)
    return False


def _unless_other(path: str, field: Field, condition: dict[str, Any]) -> dict[str, Any]:
    if field.type not in _NUMBERS:
        return {"$or": [condition, {path: {"$not": {"$type": "string"}}}]}
    # NaN is below all numbers in MongoDB, and above them in PostgreSQL.
    others = {path: {"$not": {"$type": ["int", "long", "double"]}}}
    return {"$or": [condition, {path: math.nan}, others]}
