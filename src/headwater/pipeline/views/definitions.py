"""The definition of a streaming view: a function, a key, tables. Does not import Spark."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from headwater.database import is_reserved
from headwater.errors import ConfigError

ROW_ID = "row_id"
"""The primary key of a view's table: a digest of the row's key, so that NULL may be in it."""

_PART = re.compile(r"[a-z_][a-z0-9_]*")
_PART_CHARS_MAX = 63


class StreamingView(msgspec.Struct, frozen=True):
    """A streaming view. `tables` has the table of each of the function's parameters, in order."""

    name: str
    key: tuple[str, ...]
    tables: tuple[tuple[str, str], ...]
    function: Callable[..., Any]

    @property
    def schema(self) -> str:
        return self.name.rpartition(".")[0] or "public"

    @property
    def table(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(parameter for parameter, _ in self.tables)

    @property
    def sources(self) -> tuple[str, ...]:
        """The tables, each once, as the data source takes them."""
        return tuple(dict.fromkeys(table.replace('"', "") for _, table in self.tables))

    def digest(self, result: str) -> str:
        """A digest of the definition: the function's source, the key, the tables, and the columns
        of the result. Code that the function calls is not included."""
        parts = [_text(self.function), list(self.key), list(self.tables), result]
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


def define(
    function: Callable[..., Any],
    *,
    key: str | Iterable[str],
    tables: Mapping[str, str] | None = None,
    name: str | None = None,
) -> StreamingView:
    """The view of a function and its options. ConfigError for an invalid definition.

    >>> define(lambda orders: orders, key="region", name="revenue").tables
    (('orders', 'orders'),)
    """
    if not callable(function):
        raise ConfigError(
            f"{function!r} is not a function", hint="Put @hw.view(key=[…]) above a function."
        )
    name = _name(str(function.__name__) if name is None else name)
    columns = (key,) if isinstance(key, str) else tuple(key)
    if not columns or len(set(columns)) < len(columns):
        raise ConfigError(
            f"view {name} needs a key: the columns that identify its rows",
            hint='Name the columns it is grouped by: @hw.view(key=["region"])',
        )
    named = dict(tables or {})
    parameters = _parameters(function, name)
    if unknown := [each for each in named if each not in parameters]:
        raise ConfigError(
            f"view {name} has no parameter {unknown[0]}",
            hint=f"tables= names the tables of its parameters: {', '.join(parameters)}.",
        )
    read = tuple((each, named.get(each, each)) for each in parameters)
    if name in (table.removeprefix("public.") for _, table in read):
        raise ConfigError(
            f"view {name} reads the table that it is written to",
            hint='Give the view another name: name="…"',
        )
    return StreamingView(name, columns, read, function)


def _name(given: str) -> str:
    parts = given.split(".")
    if len(parts) > 2 or not all(
        _PART.fullmatch(part) and len(part) <= _PART_CHARS_MAX for part in parts
    ):
        raise ConfigError(
            f"{given!r} cannot be the name of a view",
            hint='Use lower-case letters, digits and _, as for a table: @hw.view(name="revenue"),'
            ' or with a schema, name="reports.revenue".',
        )
    if len(parts) == 2 and is_reserved(parts[0]):
        whose = "Headwater" if parts[0] == "headwater" else "PostgreSQL"
        raise ConfigError(
            f"view {given}: the schema {parts[0]} is {whose}'s own",
            hint=f'Use a schema of your own: @hw.view(name="public.{parts[1]}")',
        )
    return given.removeprefix("public.")


def _parameters(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    found = inspect.signature(function).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not found or any(each.kind not in plain for each in found):
        raise ConfigError(
            f"the parameters of view {name} must be tables",
            hint="For example, def revenue(orders): … reads the table orders.",
        )
    return tuple(each.name for each in found)


def _text(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):  # typed into a shell, or made by a program
        code = getattr(function, "__code__", None)
        return repr((code.co_code, code.co_consts, code.co_names)) if code else repr(function)
