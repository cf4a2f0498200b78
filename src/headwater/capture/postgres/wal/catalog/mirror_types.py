"""Which type a column of the mirror has, for a type of the source.

Built-in types map to themselves, domains to their base type, enumerations to `text`. Everything
whose meaning depends on objects of the source (composites, types of extensions, `regclass`) maps to
`text`, and arrays of these to `text[]`. So the mirror's database needs none of those objects.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headwater.capture.postgres.wal.connecting import fetch
from headwater.database import Connection


class TypeInfo(msgspec.Struct, frozen=True):
    """A row of the source's catalog. `kind` is its `typtype`; `element` is 0 unless it is an
    array."""

    oid: int
    name: str
    kind: str
    built_in: bool
    base: int = 0
    base_modifier: int = -1
    element: int = 0


_NOT_PORTABLE = frozenset({
    "regclass", "regcollation", "regconfig", "regdictionary", "regnamespace", "regoper",
    "regoperator", "regproc", "regprocedure", "regrole", "regtype", "aclitem", "xml",
    "pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list", "pg_brin_bloom_summary",
    "pg_brin_minmax_multi_summary", "gtsvector",
})  # fmt: skip
"""Built-in types whose values another database may not read: names and numbers of objects, and
`xml`, which not every build has."""


class TypeCatalog:
    """The types of a source that were met so far."""

    def __init__(self) -> None:
        self._types: dict[int, TypeInfo] = {}
        self._names: dict[tuple[int, int], str] = {}

    async def load(self, connection: Connection, columns: Iterable[tuple[int, int]]) -> None:
        """Learn what `mirror_type` needs for these types and modifiers."""
        wanted = {(oid, each) for oid, modifier in columns for each in (modifier, -1)}
        missing = {oid for oid, _ in wanted} - self._types.keys()
        while missing:
            rows = await fetch(connection, _TYPES, list(missing))
            for row in rows:
                self._types[row[0]] = TypeInfo(*row)
            unknown = missing - self._types.keys()
            # Dropped since: its values are texts here.
            self._types |= {oid: TypeInfo(oid, "", "p", False) for oid in unknown}
            found = [self._types[oid] for oid in missing]
            missing = {o for t in found for o in (t.base, t.element) if o} - self._types.keys()
        names = {base for oid, mod in wanted for base in self._parts(oid, mod)} - self._names.keys()
        await self._load_names(connection, sorted(names))

    async def _load_names(self, connection: Connection, wanted: list[tuple[int, int]]) -> None:
        if wanted:
            rows = await fetch(connection, _NAMES, [o for o, _ in wanted], [m for _, m in wanted])
            self._names |= {(oid, modifier): name for oid, modifier, name in rows}

    def _parts(self, oid: int, modifier: int) -> set[tuple[int, int]]:
        """The types whose names `mirror_type` may use."""
        base, modifier = self._base(oid, modifier)
        parts = {(base.oid, modifier)}
        if base.element:
            element, element_modifier = self._base(base.element, modifier)
            parts.add((element.oid, element_modifier))
        return parts

    def mirror_type(self, oid: int, modifier: int) -> str:
        """The type as in `create table`."""
        base, modifier = self._base(oid, modifier)
        if base.element:
            element, element_modifier = self._base(base.element, modifier)
            portable = _is_portable(element) and not element.element
            return f"{self._names[element.oid, element_modifier] if portable else 'text'}[]"
        return self._names[base.oid, modifier] if _is_portable(base) else "text"

    def is_built_in(self, oid: int) -> bool:
        """Whether the operators of the type are PostgreSQL's own. Those of enumerations are."""
        base, _ = self._base(oid, -1)
        return (base.built_in and not base.element) or base.kind == "e"

    def becomes_text(self, oid: int) -> bool:
        """Whether the mirror has text in place of a type that is none."""
        base, _ = self._base(oid, -1)
        if base.element:
            base, _ = self._base(base.element, -1)
        return not _is_portable(base) and base.kind != "e"

    def _base(self, oid: int, modifier: int) -> tuple[TypeInfo, int]:
        """The type below all domains."""
        found = self._types[oid]
        while found.kind == "d":
            modifier = found.base_modifier if modifier == -1 else modifier
            found = self._types[found.base]
        return found, modifier


def _is_portable(found: TypeInfo) -> bool:
    return found.built_in and found.kind in "brm" and found.name not in _NOT_PORTABLE


_TYPES = """
    select t.oid::bigint, t.typname::text, t.typtype::text,
           n.nspname = 'pg_catalog' and not exists (
             select from pg_depend d where d.classid = 'pg_type'::regclass and d.objid = t.oid
               and d.deptype = 'e'),
           t.typbasetype::bigint, t.typtypmod,
           case when t.typcategory = 'A' and t.typlen = -1 and t.typtype = 'b'
             and t.typname not in ('int2vector', 'oidvector') then t.typelem::bigint else 0 end
    from pg_type t join pg_namespace n on n.oid = t.typnamespace
    where t.oid = any (%s::bigint[]::oid[])
"""

_NAMES = """
    select o, m, format_type(o::oid, m) from unnest(%s::bigint[], %s::int[]) as wanted(o, m)
"""
