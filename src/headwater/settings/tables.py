"""The typed tables of `headwater.toml`: `[lake.table.orders]` has the options of one table.

They have no variable in the environment. Only the form is checked here, and errors name the place.
"""

from __future__ import annotations

from typing import Any

import msgspec

from headwater.errors import ConfigError

SEE = "docs/howto/lake-tables.md describes typed tables."


class TableEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`[lake.table.TABLE]`: how columns of the typed tables of a table are written."""

    include: tuple[str, ...] = ()
    """Only these columns, and the key. Default: all."""

    exclude: tuple[str, ...] = ()
    mask: tuple[str, ...] = ()
    hash: tuple[str, ...] = ()
    as_text: tuple[str, ...] = ()


def read_tables(value: Any) -> dict[str, TableEntry]:
    """The tables in the value of `table` in the section `[lake]`, by name."""
    if not isinstance(value, dict):
        raise ConfigError(
            "[lake] table: expected one table for each table",
            hint=f"Write [lake.table.NAME], as in [lake.table.orders]. {SEE}",
        )
    return {name: _read(name, entry) for name, entry in value.items()}


def _read(name: str, value: Any) -> TableEntry:
    try:
        entry = msgspec.convert(value, TableEntry)
    except msgspec.ValidationError as error:
        names = ", ".join(TableEntry.__struct_fields__)
        raise ConfigError(
            f"[lake.table.{name}] {error}", hint=f"It may have: {names}. {SEE}"
        ) from error
    if entry.include and entry.exclude:
        raise ConfigError(
            f"[lake.table.{name}]: include and exclude are both set",
            hint="Name the columns that the typed tables have (include), or those that they do not"
            " have (exclude).",
        )
    used = [*entry.exclude, *entry.mask, *entry.hash]
    for column in used:
        if used.count(column) > 1:
            raise ConfigError(
                f"[lake.table.{name}]: {column} is named twice",
                hint="A column is excluded, masked or hashed.",
            )
    return entry
