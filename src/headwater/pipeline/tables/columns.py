"""The columns of typed tables: their names and types, and how both follow the table's DDL. Pure.

A column has the type that requests about the past use (`lake.schemas`). Delta cannot alter the type
of a column in place, so where a type changes, the column gets a type that holds the old and the new
values, and the tables are written again: a wider number, else text. A value that its type cannot
hold (`infinity` in a date, NaN in a numeric) makes its column text as well. Columns are identified
by their names in PostgreSQL, which are in the metadata of the Delta columns.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

import msgspec
import pyarrow as pa

from headwater.model import Column, Table
from headwater.pipeline.lake.schemas import arrow_type
from headwater.pipeline.tables.layout import OWN
from headwater.pipeline.tables.options import TableOptions, Treatment

SOURCE = b"headwater.column"
"""The metadata of a Delta column that has the name of the column in PostgreSQL."""

_COMMENT = b"comment"

_MARKS = {"mask": ", masked", "hash": ", hashed", "exclude": ", excluded"}


class TypedColumn(msgspec.Struct, frozen=True):
    """A column of a typed table, and the PostgreSQL column that it shows; `column` is None for one
    that the table no longer has."""

    name: str
    type: pa.DataType
    source: str
    column: Column | None
    treatment: Treatment = "value"

    def field(self) -> pa.Field:
        declared = "dropped" if self.column is None else self.column.declared
        if self.treatment != "value":
            declared += _MARKS[self.treatment]
        comment = declared if self.name == self.source else f"{self.source}: {declared}"
        return pa.field(
            self.name, self.type, metadata={_COMMENT: comment.encode(), SOURCE: self.source}
        )


def columns_of(
    table: Table,
    options: TableOptions,
    stored: pa.Schema | None = None,
    text: Collection[str] = (),
) -> list[TypedColumn]:
    """The columns for a shape of a table: first those that the stored history has, in their order,
    then new ones. `text` are columns with values that their type cannot hold."""
    known = {} if stored is None else stored_columns(stored)
    present = {c.name: c for c in table.columns if options.includes(c.name, table)}
    found = [
        TypedColumn(
            old.name,
            pa.string() if source in text else old.type,
            source,
            None,
            options.treatment(source),
        )
        if source not in present
        else _column(present[source], old.name, options, text, old.type)
        for source, old in known.items()
    ]
    used = {column.name.casefold() for column in found} | {f.name for f in OWN["history"]}
    for source, column in present.items():
        if source not in known:
            name = _unused(delta_name(source), used)
            used.add(name.casefold())
            found.append(_column(column, name, options, text, None))
    return found


def stored_columns(schema: pa.Schema) -> dict[str, pa.Field]:
    """The columns of a stored typed table by their names in PostgreSQL."""
    return {
        field.metadata[SOURCE].decode(): field
        for field in schema
        if field.metadata and SOURCE in field.metadata
    }


def shows_hidden(stored: pa.Schema, options: TableOptions) -> bool:
    """Whether a stored typed table has values of a column that was found to be a hidden one."""
    known = stored_columns(stored)
    return any(
        not known[name].metadata.get(_COMMENT, b"").endswith(_MARKS[treatment].encode())
        for name, treatment in options.inherited
        if name in known
    )


def schema_of(which: str, columns: Iterable[TypedColumn]) -> pa.Schema:
    """The Delta table's schema. `current` has no columns that were dropped."""
    shown = (c.field() for c in columns if which == "history" or c.column is not None)
    return pa.schema([*shown, *OWN[which]])


def _column(
    column: Column,
    name: str,
    options: TableOptions,
    text: Collection[str],
    stored: pa.DataType | None,
) -> TypedColumn:
    treatment = options.treatment(column.name)
    if treatment != "value":
        return TypedColumn(name, pa.string(), column.name, column, treatment)
    is_text = column.name in text or column.name in options.as_text
    kind = pa.string() if is_text else arrow_type(column)
    return TypedColumn(name, common_type(kind, stored or kind), column.name, column)


# ------------------------------------------------------------------------ names


def delta_name(name: str) -> str:
    """The name of a column in Delta, where engines accept letters, digits and underscores.

    >>> delta_name("amount"), delta_name("größe (cm)")
    ('amount', 'größe__cm_')
    """
    return re.sub(r"\W", "_", name)


def _unused(name: str, used: Collection[str]) -> str:
    """The name, or one with a number: engines do not distinguish upper and lower case."""
    found, number = name, 1
    while found.casefold() in used:
        number += 1
        found = f"{name}_{number}"
    return found


# ------------------------------------------------------------------------ types


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The type that holds the values of both without a loss; text where only text does.

    >>> common_type(pa.int16(), pa.int64()), common_type(pa.int32(), pa.date32())
    (DataType(int64), DataType(string))
    """
    if one == other:
        return one
    if pa.types.is_integer(one) and pa.types.is_integer(other):
        return max(one, other, key=lambda kind: kind.bit_width)
    if pa.types.is_floating(one) and pa.types.is_floating(other):
        return pa.float64()
    if pa.types.is_decimal(one) and pa.types.is_decimal(other):
        scale = max(one.scale, other.scale)
        digits = max(one.precision - one.scale, other.precision - other.scale) + scale
        return pa.decimal128(digits, scale) if digits <= 38 else pa.string()
    return pa.string()


def differing(columns: Sequence[TypedColumn], stored: pa.Schema) -> dict[str, pa.DataType]:
    """The stored columns whose type is another one now, by their names there, with that type."""
    known = stored_columns(stored)
    return {
        known[column.source].name: column.type
        for column in columns
        if column.source in known and known[column.source].type != column.type
    }
