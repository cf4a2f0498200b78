"""The sources of `headwater.toml`: `[source.shop]`, and `[source.shop.table.orders]` for a table.

They are the only part of the file that is not a setting with a fixed name, so they have no variable
in the environment: their URL may contain `${SHOP_PASSWORD}` instead. Only the form is checked here,
and errors name the place. `headwater.capture.declaration` checks what the values mean.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.errors import ConfigError

SEE = "docs/howto/sources.md describes sources."


class TableEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`[source.NAME.table.TABLE]`: what is mirrored of a table. `where` is a condition as text, or
    a filter in its JSON form."""

    target: str | None = None
    columns: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    where: Any = None
    types: dict[str, str] = {}


class SourceEntry(msgspec.Struct, frozen=True):
    """`[source.NAME]`. `into` is the name of the source unless it is given; `options` are all other
    names, which belong to the kind of source."""

    url: str
    into: str
    tables: tuple[str, ...] = ()
    feed_only: bool = False
    table: dict[str, TableEntry] = {}
    options: dict[str, Any] = {}


_FIELDS = {"url": str, "into": str, "tables": tuple[str, ...], "feed_only": bool}


def read_sources(value: Any) -> dict[str, SourceEntry]:
    """The sources in the value of `source` in the file, by name."""
    if not isinstance(value, dict):
        raise _not_a_table("source")
    return {name: _read_source(name, entry) for name, entry in value.items()}


def _read_source(name: str, value: Any) -> SourceEntry:
    if not isinstance(value, dict):
        raise _not_a_table(f"source.{name}")
    given = {field: value[field] for field in _FIELDS if field in value}
    fields = {field: _converted(name, field, given[field]) for field in given}
    if "url" not in fields:
        raise ConfigError(
            f"[source.{name}] url: it is missing",
            hint=f'Say where the source is: url = "mysql://user:${{PASSWORD}}@host/{name}". {SEE}',
        )
    tables = value.get("table", {})
    if not isinstance(tables, dict):
        raise ConfigError(
            f"[source.{name}] table: expected a table for each table",
            hint=f"Write [source.{name}.table.orders], or list names: tables = […].",
        )
    entries = {table: _read_table(name, table, entry) for table, entry in tables.items()}
    options = {key: each for key, each in value.items() if key not in (*_FIELDS, "table")}
    return SourceEntry(**{"into": name, **fields}, table=entries, options=options)


def _converted(source: str, field: str, value: Any) -> Any:
    try:
        return msgspec.convert(value, _FIELDS[field])
    except msgspec.ValidationError as error:
        raise ConfigError(f"[source.{source}] {field}: {error}", hint=SEE) from error


def _read_table(source: str, table: str, value: Any) -> TableEntry:
    try:
        return msgspec.convert(value, TableEntry)
    except msgspec.ValidationError as error:
        names = ", ".join(TableEntry.__struct_fields__)
        raise ConfigError(
            f"[source.{source}.table.{table}] {error}", hint=f"It may have: {names}."
        ) from error


def _not_a_table(place: str) -> ConfigError:
    return ConfigError(
        f"[{place}]: expected one table for each source",
        hint=f"Write [source.NAME], as in [source.shop], and its url below it. {SEE}",
    )
