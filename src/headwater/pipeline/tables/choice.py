"""Which tables of a lake get typed tables, and with which options: from the settings and from the
shapes in the lake."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import msgspec

from headwater.errors import ConfigError
from headwater.model import Table
from headwater.pipeline.lake.events import OWN_SCHEMA
from headwater.pipeline.lake.shapes import Shape
from headwater.pipeline.tables.layout import folder
from headwater.pipeline.tables.options import TableOptions
from headwater.pipeline.tables.renames import followed
from headwater.settings.groups import LakeSettings
from headwater.settings.tables import TableEntry


class Choice(msgspec.Struct, frozen=True):
    """The settings of typed tables."""

    include: tuple[str, ...] = ()
    """Patterns of tables; none for all."""
    exclude: tuple[str, ...] = ()
    entries: Mapping[str, TableEntry] = {}
    secret: str = ""
    seconds: float = 0.0
    """The pause between two merges; 0 for with each batch."""
    catalog: str | None = None

    @classmethod
    def of(cls, settings: LakeSettings) -> Choice | None:
        """None where typed tables are off."""
        if settings.tables_seconds is None:
            return None
        return cls(
            settings.tables_include,
            settings.tables_exclude,
            settings.table,
            settings.tables_secret or "",
            settings.tables_seconds,
            settings.tables_catalog,
        )

    def includes(self, table: Table) -> bool:
        """Whether a table gets typed tables.

        >>> table = Table(1, "sales", "orders", (), ("id",))
        >>> Choice().includes(table), Choice(exclude=("sales.*",)).includes(table)
        (True, False)
        """
        if table.schema == OWN_SCHEMA:
            return False
        names = _names(table)
        wanted = not self.include or _matches(self.include, names)
        return wanted and not _matches(self.exclude, names)

    def options(self, shapes: Sequence[Table]) -> TableOptions:
        """The options of a table with these shapes, the oldest first. They follow renamed tables
        and columns. ConfigError for a column that it never had is not raised: it may have been
        dropped."""
        found = TableOptions()
        for name in dict.fromkeys(name for table in reversed(shapes) for name in _names(table)):
            if name in self.entries:
                found = _both(found, self.entries[name])
        if found != TableOptions():
            found = msgspec.structs.replace(found, secret=self.secret)
        return followed(found, shapes)


def _names(table: Table) -> tuple[str, str]:
    return table.label, f"{table.schema}.{table.name}"


def _both(found: TableOptions, entry: TableEntry) -> TableOptions:
    """What is hidden by the settings for one name of a table or another one that it had."""
    include = found.include or entry.include
    if found.include and entry.include:
        # No column has an empty name: nothing but the key.
        include = tuple(name for name in found.include if name in entry.include) or ("",)
    return TableOptions(
        include,
        found.exclude + entry.exclude,
        found.mask + entry.mask,
        found.hash + entry.hash,
        found.as_text + entry.as_text,
    )


def _matches(patterns: Iterable[str], names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def present_tables(known: Iterable[Shape]) -> dict[int, Table]:
    """The last shape of each table, by its relation. Of several tables that had the same name, only
    the last one is left."""
    by_relation: dict[int, Shape] = {}
    for shape in known:
        by_relation[shape.table.oid] = shape
    by_folder: dict[str, Shape] = {}
    for shape in by_relation.values():
        other = by_folder.get(folder(shape.table))
        if other is None or shape.first_seen >= other.first_seen:
            by_folder[folder(shape.table)] = shape
    return {shape.table.oid: shape.table for shape in by_folder.values()}


def by_relation(known: Iterable[Shape]) -> dict[int, list[Table]]:
    """The shapes of each table, the oldest first."""
    found: dict[int, list[Table]] = {}
    for shape in known:
        found.setdefault(shape.table.oid, []).append(shape.table)
    return found


def find(known: Iterable[Shape], name: str) -> Table:
    """The table of a name. ConfigError if there is none."""
    for table in present_tables(known).values():
        if name in _names(table):
            return table
    raise ConfigError(
        f"the lake has no table {name}", hint=f"Enable it first: headwater enable {name}"
    )
