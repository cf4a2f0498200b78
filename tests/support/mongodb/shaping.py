"""Documents that become others: projections, the expressions of `$addFields`, updates."""

from __future__ import annotations

import copy
from typing import Any

from tests.support.mongodb.matching import Unsupported
from tests.support.mongodb.ordering import order

_REMOVED = object()


def project(document: dict[str, Any], projection: dict[str, Any] | None) -> dict[str, Any]:
    """An inclusion or an exclusion, as `find` and `$project` have them."""
    if not projection:
        return document
    fields = {path: bool(on) for path, on in projection.items()}
    if any(on for path, on in fields.items() if path != "_id"):
        fields.setdefault("_id", True)
        return _included(document, [path.split(".") for path, on in fields.items() if on])
    if fields == {"_id": True}:
        return _included(document, [["_id"]])
    return without(document, [path for path, on in fields.items() if not on])


def _included(document: dict[str, Any], paths: list[list[str]]) -> dict[str, Any]:
    result = {}
    for name, value in document.items():
        inner = [path[1:] for path in paths if path[0] == name]
        if [] in inner:
            result[name] = value
        elif inner and (rest := _included_within(value, inner)) is not _REMOVED:
            result[name] = rest
    return result


def _included_within(value: Any, paths: list[list[str]]) -> Any:
    """Below a name that is not included as a whole, only documents and arrays of them remain."""
    match value:
        case dict():
            return _included(value, paths)
        case list():
            inner = [_included_within(each, paths) for each in value]
            return [each for each in inner if each is not _REMOVED]
    return _REMOVED


def without(document: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    result: dict[str, Any] = _excluded(document, [path.split(".") for path in paths])
    return result


def _excluded(value: Any, paths: list[list[str]]) -> Any:
    match value:
        case dict():
            result = {}
            for name, inner in value.items():
                deeper = [path[1:] for path in paths if path[0] == name]
                if [] not in deeper:
                    result[name] = _excluded(inner, deeper) if deeper else inner
            return result
        case list():
            return [_excluded(each, paths) for each in value]
    return value


def add_fields(document: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    result = dict(document)
    for name, expression in fields.items():
        value = _evaluate(document, expression)
        if value is _REMOVED:
            result.pop(name, None)
        else:
            result[name] = value
    return result


def _evaluate(document: dict[str, Any], expression: Any) -> Any:
    match expression:
        case "$$REMOVE":
            return _REMOVED
        case str() if expression.startswith("$"):
            value: Any = document
            for step in expression[1:].split("."):
                if not isinstance(value, dict) or step not in value:
                    return _REMOVED
                value = value[step]
            return value
        case {"$cond": [condition, then, otherwise]}:
            return _evaluate(document, then if _evaluate(document, condition) else otherwise)
        case {"$eq": [one, other]}:
            return _same(_evaluate(document, one), _evaluate(document, other))
        case {"$in": [one, list(others)]}:
            return any(_same(_evaluate(document, one), _evaluate(document, o)) for o in others)
        case dict():
            raise Unsupported(str(expression))
    return expression


def _same(one: Any, other: Any) -> bool:
    if one is _REMOVED or other is _REMOVED:
        return one is other
    return order(one) == order(other)


def updated(document: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """After a replacement, or after update operators."""
    if not any(name.startswith("$") for name in change):
        return {"_id": document["_id"]} | copy.deepcopy(change)
    result = copy.deepcopy(document)
    for operator, fields in change.items():
        for path, operand in fields.items():
            _apply(result, operator, path.split("."), operand)
    return result


def _apply(document: dict[str, Any], operator: str, path: list[str], operand: Any) -> None:
    *parents, name = path
    for step in parents:
        document = document.setdefault(step, {})
    match operator:
        case "$set":
            document[name] = operand
        case "$unset":
            document.pop(name, None)
        case "$inc":
            document[name] = document.get(name, 0) + operand
        case "$push":
            document.setdefault(name, []).append(operand)
        case _:
            raise Unsupported(operator)
