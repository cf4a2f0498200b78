"""Writes the filter of a definition for the source, so that fewer rows travel.

The runner applies every filter itself. Here only filters are pushed that mean the same at the
source as in the mirror: on built-in types, and for text only by equality and LIKE, since order
and case depend on collations. A publication may use only columns of the replica identity;
otherwise PostgreSQL would refuse the updates of the application.
"""

from __future__ import annotations

from headwater.capture.postgres.wal.catalog.describe import CatalogTable
from headwater.capture.postgres.wal.catalog.mirror_types import TypeCatalog
from headwater.capture.source import SourceTable, TableSpec
from headwater.errors import InvalidQuery
from headwater.live.filters.check import check
from headwater.live.filters.filter import Compare, Filter, In, IsNull, Like, conditions, from_json
from headwater.live.filters.sql import Sql, filter_sql
from headwater.model import Column, Table


def checked_filter(spec: TableSpec, table: SourceTable) -> Filter | None:
    """The filter with typed constants; None without one. InvalidQuery if it does not fit."""
    if spec.where is None:
        return None
    return check(from_json(spec.where), _model(table))


def pushed_filter(
    spec: TableSpec, catalog: CatalogTable, table: SourceTable, types: TypeCatalog
) -> Sql | None:
    """The condition for statements at the source; None if only the runner can apply it."""
    try:
        where = checked_filter(spec, table)
    except InvalidQuery:
        return None
    if where is None or not all(
        _means_the_same(c, catalog, table, types) for c in conditions(where)
    ):
        return None
    return filter_sql(where, _model(table))


def published_filter(
    spec: TableSpec, catalog: CatalogTable, table: SourceTable, types: TypeCatalog
) -> Sql | None:
    """The condition for the publication."""
    pushed = pushed_filter(spec, catalog, table, types)
    if pushed is None:
        return None
    used = {condition.column for condition in conditions(from_json(spec.where))}
    identities = {catalog.identity, *(leaf.identity for leaf in catalog.leaves)}
    return pushed if identities == {"f"} or used <= set(catalog.key) else None


def _means_the_same(
    condition: Compare | In | Like | IsNull, catalog: CatalogTable, table: SourceTable,
    types: TypeCatalog,
) -> bool:  # fmt: skip
    declared = {c.name: c.type for c in catalog.columns}.get(condition.column)
    mirrored = {c.name: c.type for c in table.columns}[condition.column]
    if isinstance(condition, IsNull):
        return True
    if declared is None or not types.is_built_in(declared) or types.becomes_text(declared):
        return False
    if _canonical(mirrored) != _canonical(types.mirror_type(declared, -1)):
        return False  # the definition gives it another type
    match condition:
        case Like(_, _, fold):
            return not fold
        case Compare(_, operator, _):
            return operator in ("=", "!=") or _canonical(mirrored) in _ORDERED
    return True


_ORDERED = frozenset(
    {
        "smallint", "integer", "bigint", "numeric", "real", "double precision", "boolean", "date",
        "timestamp with time zone", "timestamp without time zone", "time without time zone", "uuid",
    }
)  # fmt: skip


def _canonical(type_: str) -> str:
    """Without the modifier.

    >>> _canonical("numeric(12,2)"), _canonical("timestamp(3) with time zone")
    ('numeric', 'timestamp with time zone')
    """
    before, parenthesis, rest = type_.partition("(")
    return before + rest.partition(")")[2] if parenthesis else type_


def _model(table: SourceTable) -> Table:
    columns = tuple(
        Column(c.name, _canonical(c.type), c.type, "default" if _is_text(c.type) else None)
        for c in table.columns
    )
    return Table(0, "", table.name, columns, table.key)


def _is_text(type_: str) -> bool:
    return _canonical(type_) in ("text", "character varying", "character", "name")
