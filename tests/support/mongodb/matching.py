"""Query conditions on documents: the operators that the source sends, with MongoDB's meaning of
paths through arrays, missing fields and values of another type."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from bson.decimal128 import Decimal128
from bson.int64 import Int64

from tests.support.mongodb.ordering import order


class Unsupported(Exception):
    """The stand-in lacks something that a real server has."""


def matches(document: Any, condition: dict[str, Any]) -> bool:
    return all(_clause(document, name, value) for name, value in condition.items())


def _clause(document: Any, name: str, value: Any) -> bool:
    match name:
        case "$and":
            return all(matches(document, each) for each in value)
        case "$or":
            return any(matches(document, each) for each in value)
        case "$nor":
            return not any(matches(document, each) for each in value)
    if name.startswith("$"):
        raise Unsupported(name)
    return _on_path(document, name, value)


def _on_path(document: Any, path: str, value: Any) -> bool:
    if isinstance(value, dict) and value and all(name.startswith("$") for name in value):
        return all(_operator(document, path, name, operand) for name, operand in value.items())
    return _operator(document, path, "$eq", value)


def _operator(document: Any, path: str, name: str, operand: Any) -> bool:
    match name:
        case "$ne":
            return not _operator(document, path, "$eq", operand)
        case "$nin":
            return not _operator(document, path, "$in", operand)
        case "$not":
            return not _on_path(document, path, operand)
        case "$in":
            return any(_operator(document, path, "$eq", each) for each in operand)
    found = list(values(document, path.split(".")))
    if name == "$exists":
        return bool(found) is bool(operand)
    if name == "$eq" and operand is None and not found:
        return True
    test = _TESTS.get(name)
    if test is None:
        raise Unsupported(name)
    return any(test(each, operand) for each in found)


def values(document: Any, path: list[str]) -> Iterator[Any]:
    """The values at a path, those of the elements of arrays included."""
    if not path:
        yield document
        if isinstance(document, list):
            yield from document
    elif isinstance(document, dict):
        if path[0] in document:
            yield from values(document[path[0]], path[1:])
    elif isinstance(document, list):
        if path[0].isdecimal() and int(path[0]) < len(document):
            yield from values(document[int(path[0])], path[1:])
        for element in document:
            if isinstance(element, dict):
                yield from values(element, path)


def _compare(test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def compare(value: Any, operand: Any) -> bool:
        one, other = order(value), order(operand)
        return one[0] == other[0] and test(one, other)

    return compare


def _has_type(value: Any, names: Any) -> bool:
    return type_name(value) in ([names] if isinstance(names, str) else names)


def type_name(value: Any) -> str:
    match value:
        case bool():
            return "bool"
        case Int64():
            return "long"
        case int():
            return "int"
        case float():
            return "double"
        case Decimal128():
            return "decimal"
        case str():
            return "string"
        case dict():
            return "object"
        case list():
            return "array"
        case None:
            return "null"
    return "other"


def _regex(value: Any, pattern: str) -> bool:
    return isinstance(value, str) and re.search(pattern, value) is not None


_TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "$eq": lambda value, operand: order(value) == order(operand),
    "$lt": _compare(lambda one, other: one < other),
    "$lte": _compare(lambda one, other: one <= other),
    "$gt": _compare(lambda one, other: one > other),
    "$gte": _compare(lambda one, other: one >= other),
    "$type": _has_type,
    "$regex": _regex,
}
