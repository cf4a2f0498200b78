"""Reads the result of a view's function: its columns, its aggregates, its types in PostgreSQL.

All of it is in the schema of the result; nothing is executed. The plan is checked, too: what cannot
be maintained by adding weighted changes (a limit, an outer join, an aggregate of aggregates) is
refused before anything is written. The error names the view and the part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from headwater.errors import ConfigError
from headwater.pipeline.views.aggregates import FIELDS, SIDES, WEIGHT, rows_field
from headwater.pipeline.views.definitions import ROW_ID

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
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


class ViewResult(msgspec.Struct, frozen=True):
    """The columns of a view."""

    key: tuple[ResultField, ...]
    aggregates: tuple[Aggregate, ...]

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


def read_result(view: str, key: tuple[str, ...], schema: StructType) -> ViewResult:
    """The columns of a function's result, from its schema. ConfigError names the view and the
    column."""
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
    types = {field.name: field.dataType for field in schema.fields}
    fields = tuple(_field(view, name, types[name]) for name in key)
    rest = tuple(_aggregate(view, name, types[name]) for name in names if name not in key)
    if not rest:
        raise ConfigError(
            f"view {view} has no aggregate",
            hint='Add one: .agg(views.count().alias("rows")), from headwater import views.',
        )
    return ViewResult(fields, rest)


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


# ------------------------------------------------------------------------ the plan

_ROW_BY_ROW = (
    "Project", "Filter", "Generate", "SubqueryAlias", "View", "Sort", "ResolvedHint", "Repartition",
    "RepartitionByExpression", "DeserializeToObject", "SerializeFromObject", "LocalRelation",
    "LogicalRDD", "ExternalRDD", "Range", "OneRowRelation", "LogicalRelation", "MapInArrow",
    "PythonMapInArrow",
)  # fmt: skip
"""Steps of a plan that process each row by itself, and sources."""


_CLOCK = re.compile(r"\b(current_timestamp|current_date|current_time|localtimestamp|now)\(")


def check_plan(view: str, made: DataFrame, tables: int) -> None:
    """ConfigError for a function whose result cannot be maintained by adding weighted changes."""
    plan = made._jdf.queryExecution().analyzed()
    while plan.nodeName() in ("Project", "SubqueryAlias"):
        plan = plan.children().apply(0)
    if plan.nodeName() != "Aggregate":
        raise _refused(view, plan.nodeName(), "after the aggregate")
    if not plan.deterministic() or _CLOCK.search(plan.toString()):
        raise ConfigError(
            f"view {view}: the function uses a random value or the present time",
            hint="A removed row must give the same result as when it was added.",
        )
    found = _weighted(view, plan.children().apply(0), tables)
    if found != tables and tables > 1:
        raise ConfigError(
            f"view {view} has {tables} tables and uses {found} of their DataFrames",
            hint="Each parameter must be used once, with views.join.",
        )


def _weighted(view: str, plan: Any, tables: int) -> int:
    """How many DataFrames of the view's tables are below a step. ConfigError for invalid steps."""
    below = [_weighted(view, child, tables) for child in _each(plan.children())]
    name = plan.nodeName()
    if not below:
        return int(any(each.name() == WEIGHT for each in _each(plan.output())))
    if not any(below) or name in _ROW_BY_ROW:
        return sum(below)
    if name == "Join":
        return _joined(view, plan, below, tables)
    raise _refused(view, name, "before the aggregate")


def _joined(view: str, plan: Any, below: list[int], tables: int) -> int:
    if not all(below):
        return sum(below)
    for child in _each(plan.children()):
        if not any(each.name() in SIDES for each in _each(child.output())):
            raise ConfigError(
                f"view {view}: a join of its tables that is not views.join loses a weight",
                hint="Use views.join(left, right, on).",
            )
    kind = plan.joinType().sql()
    if kind not in ("INNER", "CROSS"):
        raise ConfigError(
            f"view {view}: a {kind} join of its tables cannot be maintained",
            hint="Use views.join(left, right, on), which is an inner join.",
        )
    if tables == 1:
        raise ConfigError(
            f"view {view} joins its table with itself through one parameter",
            hint='Use two parameters: def view(orders, others), tables={"others": "orders"}.',
        )
    return sum(below)


def _refused(view: str, step: str, where: str) -> ConfigError:
    return ConfigError(
        f"view {view}: {step} {where} cannot be maintained change by change",
        hint="Before the aggregate: filter, select, withColumn, explode, views.join. After it: no "
        "step. Order, limit and filter in the query that reads the view.",
    )


# ------------------------------------------------------------------------ used columns


def used_columns(made: DataFrame, frames: Mapping[str, DataFrame]) -> dict[str, frozenset[str]]:
    """The columns of each DataFrame that the function's result depends on: those that Spark's
    optimized plan refers to."""
    referred: set[int] = set()
    _collect(made._jdf.queryExecution().optimizedPlan(), referred)
    return {
        name: frozenset(
            each.name()
            for each in _each(frame._jdf.queryExecution().analyzed().output())
            if each.exprId().id() in referred
        )
        for name, frame in frames.items()
    }


def _collect(plan: Any, referred: set[int]) -> None:
    referred.update(each.exprId().id() for each in _each(plan.references().toSeq()))
    for child in _each(plan.children()):
        _collect(child, referred)


def _each(found: Any) -> Iterator[Any]:
    """The elements of a Scala sequence."""
    return (found.apply(at) for at in range(found.size()))
