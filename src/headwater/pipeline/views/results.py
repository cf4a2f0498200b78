"""Reads the result of a view's function: its columns, its aggregates, its types in PostgreSQL.

All of it is in the schema of the result; nothing is executed. Whether the function can be
maintained at all is decided in `plans`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from headwater.errors import ConfigError
from headwater.pipeline.views.aggregates import FIELDS, rows_field
from headwater.pipeline.views.definitions import ROW_ID
from headwater.pipeline.views.plans import Locality, Weighted

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructType

_TYPES = {
    "tinyint": "smallint",
    "smallint": "smallint",
    "int": "integer",
    "bigint": "bigint",
    "float": "real",
    "double": "double precision",
    "boolean": "boolean",
    "string": "text",
    "date": "date",
    "timestamp": "timestamp with time zone",
    "timestamp_ntz": "timestamp without time zone",
    "binary": "bytea",
}
_WHOLE = ("smallint", "integer", "bigint")
_FLOATS = ("real", "double precision")


class ResultField(msgspec.Struct, frozen=True):
    """A column of the result and its type in PostgreSQL. `scale` is that of a decimal."""

    name: str
    type: str
    scale: int | None = None


class Aggregate(msgspec.Struct, frozen=True):
    """An aggregate: `input` is the type of its argument (empty for a plain count)."""

    name: str
    kind: str
    input: str = ""
    scale: int | None = None
    call: int | None = None
    """The number of the call in the function that made it."""

    @property
    def has_values(self) -> bool:
        """Whether the values themselves are stored, each with its count. Floats are, too: sums of
        rounded values would drift, and NaN would never go away."""
        return self.kind in ("min", "max", "count_distinct") or self.input in _FLOATS

    @property
    def needs(self) -> tuple[str, ...]:
        """The fields of its struct that are needed."""
        if self.has_values:
            return ("rows", "values")
        return ("rows", "total") if self.kind == "count" else ("rows", "total", "added", "removed")

    @property
    def type(self) -> str:
        """The type of its column, as SQL has it."""
        match self.kind:
            case "count" | "count_distinct":
                return "bigint"
            case "min" | "max":
                return self.input
            case _ if self.input in _FLOATS:
                return "double precision"
            case "sum" if self.input in ("smallint", "integer"):
                return "bigint"
        return "numeric"


class ViewResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The columns of a view that adds weighted rows. `combined` says how it combines several
    tables."""

    key: tuple[ResultField, ...]
    aggregates: tuple[Aggregate, ...]
    combined: Weighted | None = None

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Names and types, as the table has them after its `row_id`."""
        fields = [(field.name, field.type) for field in self.key]
        return (*fields, *((each.name, each.type) for each in self.aggregates))

    @property
    def forms(self) -> tuple[tuple[str, ...], ...]:
        """The fields that each call of an aggregate in the function needs."""
        made = {each.call: each.needs for each in self.aggregates if each.call is not None}
        return tuple(made.get(call, ("rows",)) for call in range(max(made, default=-1) + 1))

    @property
    def text(self) -> str:
        return msgspec.json.encode(self).decode()


class RowResult(msgspec.Struct, frozen=True):
    """The columns of a view that is maintained key by key: those of its key, the others, and the
    columns that it is local to."""

    key: tuple[ResultField, ...]
    values: tuple[ResultField, ...]
    local: tuple[Locality, ...]

    @property
    def fields(self) -> tuple[ResultField, ...]:
        return (*self.key, *self.values)

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Names and types, as the table has them after its `row_id`."""
        return tuple((field.name, field.type) for field in self.fields)

    @property
    def text(self) -> str:
        return msgspec.json.encode(self).decode()


Result: TypeAlias = ViewResult | RowResult


def decoded(text: str) -> Result:
    """A result from its text."""
    if "aggregates" in msgspec.json.decode(text):
        return msgspec.json.decode(text, type=ViewResult)
    return msgspec.json.decode(text, type=RowResult)


def read_rows(
    view: str, key: tuple[str, ...], schema: StructType, local: tuple[Locality, ...]
) -> RowResult:
    """The columns of a function's result, from its schema. ConfigError names the view and the
    column."""
    names = _checked_names(view, key, schema)
    types = {field.name: field.dataType for field in schema.fields}
    fields = {name: _field(view, name, types[name]) for name in names}
    others = tuple(field for name, field in fields.items() if name not in key)
    return RowResult(tuple(fields[name] for name in key), others, local)


def read_result(view: str, key: tuple[str, ...], schema: StructType) -> ViewResult:
    """The same for a function that adds weighted rows."""
    names = _checked_names(view, key, schema)
    types = {field.name: field.dataType for field in schema.fields}
    fields = tuple(_field(view, name, types[name]) for name in key)
    rest = tuple(_aggregate(view, name, types[name]) for name in names if name not in key)
    if not rest:
        raise ConfigError(
            f"view {view} has no aggregate",
            hint='Add one: .agg(views.count().alias("rows")), from headwater import views.',
        )
    return ViewResult(fields, rest)


def _checked_names(view: str, key: tuple[str, ...], schema: StructType) -> list[str]:
    names = [field.name for field in schema.fields]
    for name in names:
        if names.count(name) > 1 or name == ROW_ID:
            raise ConfigError(
                f"view {view}: a column cannot be called {name}"
                f"{' twice' if names.count(name) > 1 else ''}",
                hint='Give it another name: .alias("…")',
            )
    if missing := [name for name in key if name not in names]:
        raise ConfigError(
            f"view {view}: the result has no column {missing[0]}, which is in its key",
            hint=f"Group by it: .groupBy({', '.join(map(repr, key))})",
        )
    return names


def _field(view: str, name: str, kind: DataType) -> ResultField:
    text = kind.simpleString()
    if text.startswith("decimal"):
        return ResultField(name, "numeric", getattr(kind, "scale", None))
    if text not in _TYPES:
        raise ConfigError(
            f"view {view}: {name} has Spark's type {text}, which a view cannot store",
            hint='Convert it: .cast("string"), or explode it.',
        )
    return ResultField(name, _TYPES[text])


def _aggregate(view: str, name: str, kind: DataType) -> Aggregate:
    fields: dict[str, Any] = {each.name: each.dataType for each in getattr(kind, "fields", ())}
    first = _FIRST.fullmatch(next(iter(fields), ""))
    if first is not None and len(fields) == len(FIELDS[first["kind"]]):
        call = None if first["call"] is None else int(first["call"])
        return _of_kind(view, name, first["kind"], call, fields)
    raise ConfigError(
        f"view {view}: column {name} is neither in the key nor an aggregate of headwater.views",
        hint=f"Add it to the key, or use one of these: {', '.join(f'views.{k}' for k in FIELDS)}.",
    )


_FIRST = re.compile(rf"(?P<kind>{'|'.join(FIELDS)})_rows(?:_(?P<call>[0-9]+))?")


def _of_kind(
    view: str, name: str, kind: str, call: int | None, fields: dict[str, Any]
) -> Aggregate:
    if kind == "count":
        return Aggregate(name, kind, call=call)
    value = _field(view, name, fields[f"{kind}_values"].elementType["value"].dataType)
    if kind in ("sum", "avg") and value.type not in (*_WHOLE, *_FLOATS, "numeric"):
        raise ConfigError(
            f"view {view}: {name} is the {kind} of a column that is not a number ({value.type})",
            hint='Convert the column: f.col("…").cast("decimal(12,2)")',
        )
    return Aggregate(name, kind, value.type, value.scale, call)


# ------------------------------------------------------------------------ partial aggregates


def partials(result: ViewResult) -> list[Column]:
    """The columns of a function's result that are added to the groups: `k0`, …, `rows`, and the
    fields that each aggregate needs."""
    columns = [_col(field.name).alias(f"k{at}") for at, field in enumerate(result.key)]
    columns.append(_part(result.aggregates[0], "rows").alias("rows"))
    for at, each in enumerate(result.aggregates):
        columns += (_part(each, part).alias(f"a{at}_{part}") for part in each.needs[1:])
    return columns


def _col(name: str) -> Column:
    from pyspark.sql import functions as f

    return f.col(f"`{name.replace('`', '``')}`")


def _part(each: Aggregate, part: str) -> Column:
    name = rows_field(each.kind, each.call) if part == "rows" else f"{each.kind}_{part}"
    return _col(each.name).getField(name)
