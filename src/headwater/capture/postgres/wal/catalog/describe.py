"""Describes tables from the source's catalog, and from the relations in its log.

The log says which columns a change has; the catalog adds what the log leaves out. The catalog may
be ahead of the log, so where they differ the log decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headwater.capture.postgres.wal.catalog.mirror_types import TypeCatalog
from headwater.capture.postgres.wal.connecting import fetch
from headwater.capture.postgres.wal.pgoutput import Relation
from headwater.capture.source import SourceColumn, SourceTable, TableSpec
from headwater.database import Connection, split_path


class CatalogColumn(msgspec.Struct, frozen=True):
    """`generated` is `s` (stored), `v` (virtual) or empty. `bare` says that it may be NULL and has
    no default, so rows that were there before it have NULL. `number` is its own for ever; `xmin` is
    the transaction that altered it last, `labels` those of an enumeration by their oids."""

    name: str
    type: int
    modifier: int
    generated: str
    bare: bool
    number: int
    xmin: str
    labels: dict[str, str]


class Leaf(msgspec.Struct, frozen=True):
    """A table that stores rows: the table itself, or a partition. `file` changes when all rows are
    written again. `attached` says that it was a table of its own before."""

    oid: int
    name: str
    file: int
    identity: str
    attached: bool


class CatalogTable(msgspec.Struct, frozen=True):
    """A table in the source's catalog, with the rights that our role has on it. The columns of
    `identity_key` are those of the index that is its replica identity."""

    oid: int
    schema: str
    name: str
    kind: str
    persistence: str
    identity: str
    is_partition: bool
    owned: bool
    readable: bool
    hides_rows: bool
    children: bool
    primary_key: tuple[str, ...]
    identity_key: tuple[str, ...]
    columns: tuple[CatalogColumn, ...]
    leaves: tuple[Leaf, ...]

    @property
    def quoted(self) -> str:
        return f"{_quoted(self.schema)}.{_quoted(self.name)}"

    @property
    def key(self) -> tuple[str, ...]:
        """The columns by which the log identifies a row, and the key of the mirror."""
        return self.identity_key if self.identity == "i" else self.primary_key

    @property
    def version(self) -> str:
        """Differs whenever columns were altered, so that rows may have changed without changes in
        the log. Does not differ when rows were only written again (VACUUM FULL)."""
        known = [(c.number, c.name, c.type, c.xmin, sorted(c.labels.items())) for c in self.columns]
        return hashlib.sha256(msgspec.json.encode(known)).hexdigest()[:32]

    def published(self, version: int) -> list[CatalogColumn]:
        """The columns that the log can have."""
        stored = version >= 180000
        return [c for c in self.columns if not c.generated or (c.generated == "s" and stored)]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


# ------------------------------------------------------------------------ names


def candidates(name: str) -> list[tuple[str, str]]:
    """The schemas and names that a name in a definition may mean, the best first. Without a schema
    it is `public`.

    >>> candidates("Orders")
    [('public', 'Orders'), ('public', 'orders')]
    >>> candidates('sales."Big Orders"')[0]
    ('sales', 'Big Orders')
    """
    schema, dot, rest = name.partition(".")
    found = [("public", name)]
    if dot:
        found.insert(0, (schema, rest))
    # The parser of a search path reads quoted names, separated by commas.
    parsed = split_path(_dots_to_commas(name))
    if parsed is not None and 0 < len(parsed) <= 2:
        parts = ("public", *parsed)[-2:]
        if '"' in name:
            found.insert(0, (parts[0], parts[1]))
        else:
            found.append((parts[0], parts[1]))
    return list(dict.fromkeys(found))


def _dots_to_commas(name: str) -> str:
    """Outside quotes."""
    pieces = name.split('"')
    return '"'.join(p if i % 2 else p.replace(".", ",") for i, p in enumerate(pieces))


# ------------------------------------------------------------------------ the catalog


async def find_tables(
    connection: Connection, specs: Sequence[TableSpec]
) -> list[tuple[TableSpec, CatalogTable | None]]:
    """The tables of the definition in the order of their names, None where there is none; without
    specs, all tables of the database."""
    if not specs:
        return [
            (_spec_of(table), table) for table in await _read(connection, _ALL, []) if table.columns
        ]
    wanted = {pair for spec in specs for pair in candidates(spec.name)}
    pairs = [list(column) for column in zip(*sorted(wanted), strict=True)]
    found = {(t.schema, t.name): t for t in await _read(connection, _NAMED, pairs)}
    return [
        (spec, next((found[p] for p in candidates(spec.name) if p in found), None))
        for spec in sorted(specs, key=lambda spec: spec.name)
    ]


def _spec_of(table: CatalogTable) -> TableSpec:
    if table.schema == "public":
        return TableSpec(table.name)
    return TableSpec(f"{table.schema}.{table.name}", target=f"{table.schema}_{table.name}")


async def _read(connection: Connection, which: str, values: list[Any]) -> list[CatalogTable]:
    rows = await fetch(connection, _TABLES.replace("WHICH", which), *values)
    return [msgspec.convert(row[0], CatalogTable) for row in rows]


_ALL = """c.relkind in ('r', 'p') and not c.relispartition and c.relpersistence = 'p'
    and n.nspname not in ('pg_catalog', 'information_schema', 'headwater')
    and n.nspname not like 'pg\\_%%'"""

_NAMED = "(n.nspname, c.relname) in (select * from unnest(%s::text[], %s::text[]))"

_TABLES = """
    select jsonb_build_object(
      'oid', c.oid::bigint, 'schema', n.nspname, 'name', c.relname, 'kind', c.relkind,
      'persistence', c.relpersistence, 'identity', c.relreplident,
      'is_partition', c.relispartition,
      'owned', pg_has_role(c.relowner, 'USAGE'),
      'readable', has_schema_privilege(n.oid, 'USAGE') and has_table_privilege(c.oid, 'SELECT'),
      'hides_rows', case when c.relrowsecurity and has_schema_privilege(n.oid, 'USAGE')
         then row_security_active(c.oid) else false end,
      'children', c.relkind = 'r' and exists (
         select from pg_inherits where inhparent = c.oid),
      'primary_key', (
        select coalesce(jsonb_agg(a.attname order by k.place), '[]')
        from pg_index i, unnest(i.indkey) with ordinality k(number, place), pg_attribute a
        where i.indrelid = c.oid and i.indisprimary and k.place <= i.indnkeyatts
          and a.attrelid = c.oid and a.attnum = k.number),
      'identity_key', (
        select coalesce(jsonb_agg(a.attname order by k.place), '[]')
        from pg_index i, unnest(i.indkey) with ordinality k(number, place), pg_attribute a
        where i.indrelid = c.oid and i.indisreplident and k.place <= i.indnkeyatts
          and a.attrelid = c.oid and a.attnum = k.number),
      'columns', (
        select coalesce(jsonb_agg(jsonb_build_object(
            'name', attname, 'type', atttypid::bigint, 'modifier', atttypmod,
            'generated', attgenerated,
            'bare', not (atthasdef or atthasmissing or attnotnull or attidentity <> ''),
            'number', attnum, 'xmin', xmin::text,
            'labels', (select coalesce(jsonb_object_agg(e.oid::text, e.enumlabel), '{}')
               from pg_enum e where e.enumtypid = atttypid)
          ) order by attnum), '[]')
        from pg_attribute where attrelid = c.oid and attnum > 0 and not attisdropped),
      'leaves', (
        select coalesce(jsonb_agg(jsonb_build_object(
            'oid', l.oid::bigint, 'name', l.oid::regclass::text,
            'file', coalesce(pg_relation_filenode(l.oid), 0)::bigint, 'identity', l.relreplident,
            'attached', coalesce(i.xmin <> y.xmin, false)
          ) order by l.oid), '[]')
        from (
          select relid from pg_partition_tree(c.oid) where isleaf and c.relkind = 'p'
          union all select c.oid where c.relkind = 'r'
        ) tree(relid)
        join pg_class l on l.oid = tree.relid
        left join pg_inherits i on i.inhrelid = l.oid and l.relispartition
        left join pg_type y on y.oid = l.reltype)
    )
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where WHICH
    order by n.nspname, c.relname
"""


# ------------------------------------------------------------------------ source tables


def target_of(spec: TableSpec, schema: str, name: str) -> str:
    return spec.target or name


def chosen(spec: TableSpec, names: Iterable[str]) -> list[str]:
    """The columns that the definition does not leave out."""
    if spec.columns is not None:
        return [name for name in names if name in spec.columns]
    return [name for name in names if name not in spec.exclude]


def source_table(
    spec: TableSpec, table: CatalogTable, types: TypeCatalog, version: int
) -> SourceTable:
    """The table as the catalog has it now."""
    columns = {c.name: (c.type, c.modifier) for c in table.published(version)}
    made = _made(spec, table.schema, table.name, columns, table.key, types)
    return msgspec.structs.replace(made, version=table.version)


def relation_table(
    spec: TableSpec, relation: Relation, catalog: CatalogTable | None, types: TypeCatalog,
    previous: SourceTable,
) -> SourceTable:  # fmt: skip
    """The table as the log has it for the changes that follow. It keeps its version: that of the
    catalog may be ahead of the log."""
    columns = {c.name: (c.type_oid, c.modifier) for c in relation.columns}
    key = _relation_key(relation, catalog, previous)
    made = _made(spec, relation.schema, relation.name, columns, key, types)
    return msgspec.structs.replace(made, version=previous.version)


def _relation_key(
    relation: Relation, catalog: CatalogTable | None, previous: SourceTable
) -> tuple[str, ...]:
    """In the order of the index, which the log does not have; under REPLICA IDENTITY FULL the log
    does not have the key at all."""
    flagged = tuple(c.name for c in relation.columns if c.key)
    if not flagged:
        return previous.key  # since removed; PostgreSQL refuses updates and deletes now
    known = [catalog.key] if catalog is not None else []
    for key in (*known, previous.key):
        if set(key) == set(flagged) or (relation.identity == "f" and set(key) <= set(flagged)):
            return key
    return flagged


def _made(
    spec: TableSpec, schema: str, name: str, columns: dict[str, tuple[int, int]],
    key: tuple[str, ...], types: TypeCatalog,
) -> SourceTable:  # fmt: skip
    """Only columns of the key are declared NOT NULL: another column may have had NULLs at a time
    that the catalog no longer shows."""
    return SourceTable(
        spec.name,
        target_of(spec, schema, name),
        tuple(
            SourceColumn(
                each, spec.types.get(each) or types.mirror_type(*columns[each]), each not in key
            )
            for each in chosen(spec, columns)
        ),
        key,
    )


def copies(before: SourceTable, after: SourceTable, catalog: CatalogTable | None,
           same_files: bool) -> bool:  # fmt: skip
    """Whether rows may have changed without changes in the log. Not if columns were only dropped,
    or added without a default while no row was written again. Columns in another order have each
    other's names."""
    known = {column.name: column.type for column in before.columns}
    present = [column.name for column in after.columns if column.name in known]
    if present != [name for name in known if name in set(present)]:
        return True
    bare = {c.name for c in catalog.columns if c.bare} if catalog and same_files else set()
    for column in after.columns:
        if column.name not in known:
            if column.name not in bare:
                return True
        elif known[column.name] != column.type:
            return True
    return before.key != after.key


def rewritten(before: CatalogTable, after: CatalogTable, same_files: bool) -> bool:
    """Whether a column has other values than the one that had its name before: it is another one
    (renamed, or dropped and added), all rows were written again after it was altered, or a label of
    its enumeration was renamed."""
    known = {column.name: column for column in before.columns}
    for column in after.columns:
        old = known.get(column.name)
        if old is None:
            continue
        if old.number != column.number or (old.xmin != column.xmin and not same_files):
            return True
        if any(column.labels.get(oid, label) != label for oid, label in old.labels.items()):
            return True
    return False
