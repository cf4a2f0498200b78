"""Types of arguments and results: those of msgspec, IP addresses, and pydantic models.

Models are recognised by their methods, so pydantic is not required.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

_ADDRESSES = (
    ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Network,
    ipaddress.IPv4Interface, ipaddress.IPv6Interface,
)  # fmt: skip


def convert(value: Any, type_: Any) -> Any:
    """The value as that type. msgspec.ValidationError if it does not fit."""
    # In JSON every key is a text.
    return msgspec.convert(value, type_, from_attributes=True, dec_hook=_decode, str_keys=True)


def _decode(type_: Any, value: Any) -> Any:
    if isinstance(value, type_):
        return value
    if is_model(type_):
        try:
            return type_.model_validate(value, from_attributes=True)
        except ValueError as error:
            raise ValueError(_model_reason(error)) from None
    if type_ in _ADDRESSES and isinstance(value, str):
        return type_(value)
    raise TypeError(f"Expected `{type_.__name__}`, got `{type(value).__name__}`")


def encode(value: Any) -> Any:
    """The JSON form of a value that msgspec does not know. NotImplementedError if there is none."""
    if is_model(type(value)):
        return value.model_dump()
    if isinstance(value, _ADDRESSES):
        return str(value)
    raise NotImplementedError(type(value).__name__)


def is_model(type_: Any) -> bool:
    return hasattr(type_, "model_validate") and hasattr(type_, "model_dump")


def _model_reason(error: ValueError) -> str:
    """The first error of a model, in one line."""
    errors: Any = getattr(error, "errors", None)
    if errors is None:
        return str(error)
    first = errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else str(first["msg"])


def unsupported_reason(type_: Any) -> str | None:
    """Why values of a type can be neither read nor written; None if they can."""
    try:
        unknown = [t.cls for t in _parts(inspect.type_info(type_)) if _is_unknown(t)]
        msgspec.json.Decoder(type_, dec_hook=_decode)
    except (TypeError, NameError) as error:
        return str(error).splitlines()[0]
    return f"{unknown[0].__name__} is not a type that JSON can be turned into" if unknown else None


def _is_unknown(type_: inspect.Type) -> bool:
    if not isinstance(type_, inspect.CustomType):
        return False
    return not is_model(type_.cls) and type_.cls not in _ADDRESSES


def _parts(type_: inspect.Type, seen: set[Any] | None = None) -> Iterator[Any]:
    """A type and the types inside it."""
    seen = set() if seen is None else seen
    cls = getattr(type_, "cls", None)
    if cls is not None and cls in seen:
        return
    seen.add(cls)
    yield type_
    for name in getattr(type_, "__struct_fields__", ()):
        below = getattr(type_, name)
        for part in below if isinstance(below, tuple) else (below,):
            if isinstance(part, inspect.Field):
                part = part.type
            if isinstance(part, inspect.Type):
                yield from _parts(part, seen)
