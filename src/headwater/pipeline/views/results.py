"""Reads what a view's function made: which columns, which aggregates, which types in PostgreSQL.

The schema of the result says it all; nothing is executed. The plan is looked at, too: what cannot
be kept up to date by adding weighted changes (a limit, an outer join, an aggregate of aggregates)
is refused before anything is written, and the error says which part of which view it is.
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


class Field(msgspec.Struct, frozen=True):
    """A column of the result and its type in PostgreSQL. `scale` is that of a decimal."""

    name: str
    type: str
    scale: int | None = None


class Aggregate(msgspec.Struct, frozen=True):
    """An aggregate: `input` is the type of what it is taken of (empty for a plain count)."""

    name: str
    kind: str
    input: str = ""
    scale: int | None = None
    call: int | None = None
    """Which of the function's calls made it."""

    @property
    def has_values(self) -> bool:
        """Whether the values themselves are kept, each with how often it is there. Floats are, too:
        to add and take away what is rounded would drift, and NaN would stay for ever."""
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


class Result(msgspec.Struct, frozen=True):
    """The columns of a view."""

    key: tuple[Field, ...]
    aggregates: tuple[Aggregate, ...]

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Names and types, as the table has them after its `row_id`."""
        fields = [(field.name, field.type) for field in self.key]
        return (*fields, *((each.name, each.type) for each in self.aggregates))

    @property
    def forms(self) -> tuple[tuple[str, ...], ...]:
        """What each of the function's calls of an aggregate need make."""
        made = {each.call: each.needs for each in self.aggregates if each.call is not None}
        return tuple(made.get(call, ("rows",)) for call in range(max(made, default=-1) + 1))

    @property
    def text(self) -> str:
        return msgspec.json.encode(self).decode()


def read_result(view: str, key: tuple[str, ...], schema: StructType) -> Result:
    """What the schema of a function's result says. ConfigError names the view and the column."""
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
    return Result(fields, rest)


def _field(view: str, name: str, kind: DataType) -> Field:
    text = kind.simpleString()
    if text.startswith("decimal"):
        return Field(name, "numeric", getattr(kind, "scale", None))
    if text not in _TYPES:
        raise ConfigError(
            f"view {view}: {name} is of Spark's type {text}, which a view cannot keep",
            hint='Turn it into another: .cast("string"), or explode it.',
        )
    return Field(name, _TYPES[text])


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
            f"view {view}: {name} is the {kind} of something that is no number ({value.type})",
            hint='Turn it into one: f.col("…").cast("decimal(12,2)")',
        )
    return Aggregate(name, kind, value.type, value.scale, call)


# ------------------------------------------------------------------------ what a batch changes


def partials(result: Result) -> list[Column]:
    """What to take of a function's result, to be added to the groups: `k0`, …, `rows`, and for each
    aggregate what it needs."""
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
"""Steps that treat each row by itself, and sources."""


_CLOCK = re.compile(r"\b(current_timestamp|current_date|current_time|localtimestamp|now)\(")


def check_plan(view: str, made: DataFrame, tables: int) -> None:
    """ConfigError for a function whose result cannot be kept by adding weighted changes."""
    plan = made._jdf.queryExecution().analyzed()
    while plan.nodeName() in ("Project", "SubqueryAlias"):
        plan = plan.children().apply(0)
    if plan.nodeName() != "Aggregate":
        raise _refused(view, plan.nodeName(), "after the aggregate")
    if not plan.deterministic() or _CLOCK.search(plan.toString()):
        raise ConfigError(
            f"view {view}: the function uses something random, or the present time",
            hint="A row that goes must look as it did when it came.",
        )
    found = _weighted(view, plan.children().apply(0), tables)
    if found != tables and tables > 1:
        raise ConfigError(
            f"view {view} has {tables} tables and uses {found} of their frames",
            hint="Each parameter must be used once, with views.join.",
        )


def _weighted(view: str, plan: Any, tables: int) -> int:
    """How many frames of the view's tables lie beneath a step, all of them used as they may be."""
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
            f"view {view}: a {kind} join of its tables cannot be kept up to date",
            hint="Use views.join(left, right, on), which is an inner join.",
        )
    if tables == 1:
        raise ConfigError(
            f"view {view} joins its table with itself through one parameter",
            hint='Give it two: def view(orders, others), tables={"others": "orders"}.',
        )
    return sum(below)


def _refused(view: str, step: str, where: str) -> ConfigError:
    return ConfigError(
        f"view {view}: {step} {where} cannot be kept up to date change by change",
        hint="Before the aggregate: filter, select, withColumn, explode, views.join. After it: no "
        "step. Order, limit and filter in the query that reads the view.",
    )


# ------------------------------------------------------------------------ what is used


def used_columns(made: DataFrame, frames: Mapping[str, DataFrame]) -> dict[str, frozenset[str]]:
    """Which columns of each frame the function's result rests on: those that a step of Spark's own
    plan, which leaves out the rest, refers to."""
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
    """The members of one of Scala's sequences."""
    return (found.apply(at) for at in range(found.size()))
