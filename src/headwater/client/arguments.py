"""Converts the arguments of a connection's methods to messages.

Pure. Invalid arguments are refused here, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from headwater.errors import InvalidQuery, LimitExceeded
from headwater.limits import REQUEST_BYTES_MAX
from headwater.live.filters.filter import EVERYTHING, Filter, from_json
from headwater.live.order import OrderBy
from headwater.live.query import LiveQuery, Mode
from headwater.model import Position

Where: TypeAlias = Filter | list[Any] | tuple[Any, ...] | dict[str, Any]
Order: TypeAlias = str | Sequence[str | Sequence[str] | OrderBy]


def live_query(
    table: str,
    where: Where | None,
    order: Order,
    limit: int | None,
    after: Sequence[Any] | None,
    columns: Sequence[str] | None,
    mode: Mode,
) -> LiveQuery:
    return LiveQuery(
        table,
        where=EVERYTHING if where is None else filter_of(where),
        order=_order(order),
        limit=limit,
        after=None if after is None else tuple(after),
        columns=None if columns is None else tuple(columns),
        mode=mode,
    )


def filter_of(where: Where) -> Filter:
    return from_json(where) if isinstance(where, list | tuple | dict) else where


def _order(order: Order) -> tuple[OrderBy, ...]:
    """`"amount desc, id"`, or a list of such columns."""
    parts = order.split(",") if isinstance(order, str) else order
    return tuple(
        by
        if isinstance(by, OrderBy)
        else OrderBy.from_json(by.strip() if isinstance(by, str) else list(by), path=f"order[{i}]")
        for i, by in enumerate(parts)
        if by
    )


def position_of(position: str | Position, path: str) -> Position:
    try:
        return Position.parse(position) if isinstance(position, str) else position
    except ValueError as error:
        raise InvalidQuery(str(error), path=path) from error


def call_arguments(args: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a query or mutation, given in a mapping, by name or both.

    >>> call_arguments({"after": 1}, {"region": 7})
    {'after': 1, 'region': 7}
    """
    for name in named:
        if args is not None and name in args:
            raise InvalidQuery(
                "the argument is given twice",
                hint="Give it in the mapping or by name.",
                path=f"args.{name}",
            )
    try:
        # Times, UUIDs and similar values become texts.
        plain: dict[str, Any] = msgspec.to_builtins({**(args or {}), **named})
        size = len(msgspec.json.encode(plain))
    except (TypeError, ValueError) as error:
        raise InvalidQuery(
            str(error), path="args", hint="Give a value that JSON can represent."
        ) from error
    if size > REQUEST_BYTES_MAX:
        raise _too_large(size)
    return plain


def _too_large(size: int) -> LimitExceeded:
    error = LimitExceeded(
        f"the arguments are {size:,} bytes: a request has at most {REQUEST_BYTES_MAX:,}",
        hint="Pass less in one call.",
        code="too_large",
    )
    error.retryable = False
    return error
