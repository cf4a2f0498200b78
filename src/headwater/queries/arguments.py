"""The arguments of a function, from its type hints; and the checked arguments of a call.

Values from JSON and objects from Python go through the same check.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from types import FunctionType
from typing import Any

import msgspec

from headwater.errors import ConfigError, InvalidQuery
from headwater.limits import ARGUMENT_DEPTH_MAX, ARGUMENT_LARGE_INTEGERS_MAX
from headwater.queries import types


class Arguments(msgspec.Struct, frozen=True):
    """The checked arguments of a call. `key` identifies the call: two keys are equal only if all
    arguments are equal in value and type."""

    values: Mapping[str, Any]
    key: Hashable


class Parameter(msgspec.Struct, frozen=True):
    """One argument that a function takes."""

    name: str
    type: Any = Any
    default: Any = inspect.Parameter.empty

    @property
    def field(self) -> tuple[str, Any] | tuple[str, Any, Any]:
        if self.default is inspect.Parameter.empty:
            return self.name, self.type
        return self.name, self.type, msgspec.field(default_factory=lambda: self.default)


class Signature:
    """The arguments that a function takes."""

    def __init__(self, function: str, parameters: Sequence[Parameter]) -> None:
        self.function = function
        self.names = tuple(parameter.name for parameter in parameters)
        for parameter in parameters:
            if reason := types.unsupported_reason(parameter.type):
                raise ConfigError(
                    f"{function}: argument {parameter.name}: {reason}",
                    hint="Use types that JSON can hold, structs, dataclasses or pydantic models.",
                )
        self.struct = msgspec.defstruct(
            "Arguments",
            [parameter.field for parameter in parameters],
            kw_only=True,
            forbid_unknown_fields=True,
        )
        """The arguments as a type, for JSON schemas."""

    def bind(
        self, args: Mapping[str, Any], *, most: int | None = None, keyed: bool = True
    ) -> Arguments:
        """Check a call's arguments. InvalidQuery names the one that is wrong. They may have at most
        `most` values. Without `keyed`, no key is made."""
        try:
            _check_size(args, most)
            bound = types.convert(dict(args), self.struct)
            values = {name: getattr(bound, name) for name in self.names}
            return Arguments(values, key_of(values) if keyed else None)
        except msgspec.ValidationError as error:
            path, reason = path_and_reason(error)
            raise InvalidQuery(
                reason, path="args" + path.removeprefix("$"), hint=self._hint()
            ) from None
        except RecursionError:
            raise InvalidQuery("nested too deeply", path="args") from None

    def by_name(self, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call in Python, all by name."""
        if len(args) > len(self.names):
            raise InvalidQuery(
                f"{self.function} takes {len(self.names)} arguments, not {len(args)}",
                path="args",
                hint=self._hint(),
            )
        placed = dict(zip(self.names, args, strict=False))
        if twice := placed.keys() & named.keys():
            raise InvalidQuery("given twice", path=f"args.{min(twice)}")
        return {**placed, **named}

    def _hint(self) -> str:
        names = ", ".join(self.names)
        return (
            f"{self.function} takes {names}." if names else f"{self.function} takes no arguments."
        )


def _check_size(args: Mapping[str, Any], most: int | None) -> None:
    """Refuse values that would take long to compare, and values that are nested too deeply."""
    count = large = 0
    level: list[Any] = [args]
    for _ in range(ARGUMENT_DEPTH_MAX + 2):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.values()
            elif isinstance(value, list | tuple):
                below += value
            elif isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
                large += 1
        count += len(below)
        if most is not None and count > most:
            raise InvalidQuery(
                f"more than {most:,} values",
                path="args",
                hint="Pass them as one text, or use several calls.",
            )
        level = below
        if not level:
            break
    if level:
        raise RecursionError("nested too deeply")
    if large > ARGUMENT_LARGE_INTEGERS_MAX:
        raise InvalidQuery(
            f"more than {ARGUMENT_LARGE_INTEGERS_MAX} integers of more than {_INTEGER_BITS} bits",
            path="args",
            hint="Pass them as texts.",
        )


_INTEGER_BITS = 64


def path_and_reason(error: msgspec.ValidationError) -> tuple[str, str]:
    """The path and the reason of an error of msgspec.

    >>> path_and_reason(msgspec.ValidationError("Expected `int`, got `str` - at `$[3].amount`"))
    ('$[3].amount', 'expected int, got str')
    """
    reason, _, path = str(error).partition(" - at `")
    reason = reason.replace("`", "").replace("Object ", "")
    reason = reason[:1].lower() + reason[1:]
    if path.startswith("key` in `"):
        path, reason = path.removeprefix("key` in `"), f"a key: {reason}"
    return path.rstrip("`") or "$", reason


def parameters_of(function: Callable[..., Any], name: str) -> list[Parameter]:
    """The arguments of a function after its context."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise ConfigError(
            f"{name}: {error}", hint="Write a function around it: def …(ctx, …)"
        ) from error
    if not found or found[0].kind not in _BY_PLACE:
        written = getattr(function, "__name__", "…")
        raise ConfigError(
            f"{name} takes no context",
            hint=f"Its first argument is the context: def {written}(ctx, …)",
        )
    hints = hints_of(function, name)
    return [_parameter(each, hints, name) for each in found[1:]]


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def hints_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """The types of a function's arguments after the context, and of its result."""
    written = underlying(function)
    annotations = dict(getattr(written, "__annotations__", {}))
    for parameter in list(inspect.signature(function).parameters)[:1]:
        annotations.pop(parameter, None)  # It may be known to type checkers only.
    try:
        return typing.get_type_hints(_annotated(written, annotations), include_extras=True)
    except (NameError, TypeError, AttributeError, SyntaxError) as error:
        raise ConfigError(
            f"{name}: a type hint cannot be resolved: {error}",
            hint="Define or import the type where the module begins, not below TYPE_CHECKING or "
            "inside a function.",
        ) from error


def underlying(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of the application, inside of decorators, `partial` and callable objects."""
    function = inspect.unwrap(function)
    if isinstance(function, partial):
        return underlying(function.func)
    if not inspect.isroutine(function):
        return underlying(type(function).__call__)
    return function


def _annotated(function: Callable[..., Any], annotations: dict[str, Any]) -> Any:
    """An object with these annotations, and with the function's names to resolve them."""

    def empty() -> None: ...

    found = FunctionType(empty.__code__, getattr(function, "__globals__", {}))
    found.__annotations__ = annotations
    return found


def _parameter(parameter: inspect.Parameter, hints: dict[str, Any], function: str) -> Parameter:
    match parameter.kind:
        case inspect.Parameter.VAR_POSITIONAL | inspect.Parameter.VAR_KEYWORD:
            raise ConfigError(
                f"{function}: {str(parameter).partition(':')[0]} cannot be checked",
                hint="Name every argument; a list or a dict can be one: tags: list[str].",
            )
        case inspect.Parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"{function}: argument {parameter.name} has no name for callers",
                hint="Arguments are passed by name: remove the / from the function's arguments.",
            )
    return Parameter(parameter.name, hints.get(parameter.name, Any), parameter.default)


# ------------------------------------------------------------------------ keys of calls


def key_of(value: Any, depth: int = 0) -> Hashable:
    """Equal for two values only if they are equal in value and type, all the way down.
    RecursionError for one that is nested too deeply to be compared.

    >>> len({key_of(value) for value in (1, 1.0, True, "1", [1], [1.0], ["1"])})
    7
    """
    if type(value) in _EXACT:
        return type(value).__name__, value
    if depth > ARGUMENT_DEPTH_MAX:
        raise RecursionError("nested too deeply")
    below = partial(key_of, depth=depth + 1)
    match value:
        case Mapping():
            items = frozenset((below(name), below(each)) for name, each in value.items())
            return type(value).__name__, items
        case list() | tuple():
            return type(value), tuple(map(below, value))
        case set() | frozenset():
            return type(value).__name__, frozenset(map(below, value))
        case msgspec.Struct():
            fields = type(value).__struct_fields__
            return type(value), tuple(below(getattr(value, name)) for name in fields)
    if types.is_model(type(value)):
        # All fields: the `repr` of a model may leave some out.
        return type(value), below(dict(value))
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        return type(value), tuple(below(getattr(value, name)) for name in names)
    # Different values may print the same, as secrets do; equal ones differently, as times do.
    if isinstance(value, Hashable) and not isinstance(value, float | Decimal):
        return type(value), repr(value), value
    return type(value), repr(value)


_EXACT = (type(None), bool, int, str, bytes)
