"""Which tables of a lake get typed tables, and with which options: from the settings and from the
shapes in the lake."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import msgspec

from headwater.errors import ConfigError
from headwater.model import Table
from headwater.pipeline.lake.events import OWN_SCHEMA
from headwater.pipeline.lake.shapes import Shape
from headwater.pipeline.tables.layout import folder
from headwater.pipeline.tables.options import TableOptions
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
        names = (table.label, f"{table.schema}.{table.name}")
        wanted = not self.include or _matches(self.include, names)
        return wanted and not _matches(self.exclude, names)

    def options(self, table: Table) -> TableOptions:
        """The options of a table. ConfigError for a column that it never had is not raised: it may
        have been dropped."""
        names = (table.label, f"{table.schema}.{table.name}")
        entry = next((self.entries[n] for n in names if n in self.entries), None)
        if entry is None:
            return TableOptions()
        return TableOptions(
            include=entry.include,
            exclude=entry.exclude,
            mask=entry.mask,
            hash=entry.hash,
            as_text=entry.as_text,
            secret=self.secret,
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


def find(known: Iterable[Shape], name: str) -> Table:
    """The table of a name. ConfigError if there is none."""
    for table in present_tables(known).values():
        if name in (table.label, f"{table.schema}.{table.name}"):
            return table
    raise ConfigError(
        f"the lake has no table {name}", hint=f"Enable it first: headwater enable {name}"
    )
