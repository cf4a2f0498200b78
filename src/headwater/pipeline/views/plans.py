"""Analyses the plan that Spark makes of a view's function: how its result depends on its tables.

The only module of the views that reads a plan. It takes Spark's plan as JSON, with one call into
the JVM for the analyzed and one for the optimized plan (`_jdf.queryExecution()`), and asks Spark
which expressions are not deterministic. Over Spark Connect these calls do not exist: there, views
cannot be defined. Everything after that is pure.

There are two kinds of functions. One that ends in aggregates of `headwater.views` adds weighted
rows: `check_weighted` refuses steps that do not. Any other function must be *local*: `locality`
finds columns of its result such that the rows with a value in such a column depend only on rows of
the tables with the same value in known columns. Then a change touches only the rows of its values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec

from headwater.errors import ConfigError
from headwater.pipeline.views.aggregates import SIDES, WEIGHT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SOURCE = "table of parameter "
"""How the alias of a table of a view begins in the plan. The name of the parameter follows."""

Source = tuple[str, str]
"""A column of a table of the view: the parameter and the column."""

Columns = Mapping[str, frozenset[str]]
"""Columns of the tables, by parameter."""


class Node(msgspec.Struct, frozen=True):
    """A step of a plan, or an expression."""

    name: str
    fields: dict[str, Any]
    children: tuple[Node, ...]

    def expressions(self, field: str) -> list[Node]:
        """The expressions of a field: one, several, or none."""
        return [_tree(each) for each in _lists(self.fields.get(field))]

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.walk()

    @property
    def id(self) -> int:
        found: int = self.fields["exprId"]["id"]
        return found


def analyzed(made: DataFrame) -> Node:
    """The plan of a DataFrame."""
    return _parsed(made._jdf.queryExecution().analyzed().toJSON())


def optimized(made: DataFrame) -> Node:
    """The plan of a DataFrame after Spark's optimizer, which has the columns that it needs."""
    return _parsed(made._jdf.queryExecution().optimizedPlan().toJSON())


def _parsed(text: str) -> Node:
    return _tree(json.loads(text))


def _tree(flat: Sequence[dict[str, Any]]) -> Node:
    """A tree from its nodes in preorder."""
    return _next(iter(flat))


def _lists(value: Any) -> Iterator[list[dict[str, Any]]]:
    """The trees in the value of a field; other values (numbers of children, hints) are skipped."""
    if isinstance(value, list) and value:
        if isinstance(value[0], dict) and "class" in value[0]:
            yield value
        else:
            for each in value:
                yield from _lists(each)


def _next(nodes: Iterator[dict[str, Any]]) -> Node:
    fields = next(nodes)
    children = tuple(_next(nodes) for _ in range(fields["num-children"]))
    name = str(fields["class"]).rpartition(".")[2]
    if name == "SubqueryAlias" and fields["identifier"]["name"].startswith(SOURCE):
        (leaf,) = children
        parameter = fields["identifier"]["name"].removeprefix(SOURCE)
        return Node(_TABLE, leaf.fields | {"parameter": parameter}, ())
    return Node(name, fields, children)


_TABLE = "Table"
"""A leaf that is a table of the view."""


# ------------------------------------------------------------------------ what both kinds refuse

_VARYING = (
    "CurrentTimestamp", "CurrentTimestampPrecision", "CurrentTimestampNanos",
    "CurrentTimestampLike", "CurrentDate", "CurrentTime", "LocalTimestamp", "LocalTimestampNanos",
    "UTCTimestamp", "Now", "CurrentBatchTimestamp", "AesEncrypt",
    "Rand", "Randn", "RandStr", "Uniform", "Uuid", "Shuffle", "CallMethodViaReflection",
    "SparkPartitionID", "MonotonicallyIncreasingID", "InputFileName", "InputFileBlockStart",
    "InputFileBlockLength",
)  # fmt: skip
"""Expressions whose value depends on more than the row. Those up to `AesEncrypt` (with its random
start) are deterministic to Spark, for which the present time is one value in a query."""

_SUBQUERIES = ("ScalarSubquery", "ListQuery", "Exists", "LateralSubquery", "InSubquery")


def check_steady(view: str, made: DataFrame, plan: Node) -> None:
    """ConfigError for a function that gives another result for the same rows."""
    names = {each.name for each in _all_expressions(plan)}
    if not names.isdisjoint(_SUBQUERIES):
        raise ConfigError(
            f"view {view}: the function has a subquery in an expression",
            hint="Join the tables instead.",
        )
    # The optimizer replaces functions by the expressions that they are made of.
    varying = names.intersection(_VARYING) or _random(made._jdf.queryExecution().optimizedPlan())
    if varying:
        raise ConfigError(
            f"view {view}: the function uses a random value or the present time"
            f" ({', '.join(sorted(varying))})",
            hint="A removed row must give the same result as when it was added.",
        )


def _random(plan: Any) -> set[str]:
    """The expressions of a plan in the JVM that Spark calls not deterministic."""
    if plan.deterministic():
        return set()
    below = (_random(child) for child in _items(plan.children()))
    return set[str]().union(*below, *map(_random_parts, _items(plan.expressions())))


def _random_parts(expression: Any) -> set[str]:
    if expression.deterministic():
        return set()
    found = set[str]().union(*map(_random_parts, _items(expression.children())))
    name = str(expression.getClass().getName())
    # Aggregates such as `first` depend on the order of the rows, which the function must state.
    if not found and ".aggregate." not in name:
        found.add(name.rpartition(".")[2])
    return found


def _items(sequence: Any) -> Iterator[Any]:
    """Of a sequence of Scala's."""
    return (sequence.apply(at) for at in range(sequence.size()))


def _all_expressions(plan: Node) -> Iterator[Node]:
    for step in plan.walk():
        for field, value in step.fields.items():
            if field != "output" and isinstance(value, list):
                for found in step.expressions(field):
                    yield from found.walk()


# ------------------------------------------------------------------------ columns

_SAME_ROWS = (
    "Filter", "SubqueryAlias", "View", "Sort", "ResolvedHint", "Repartition",
    "RepartitionByExpression",
)  # fmt: skip
"""Steps that have the columns of the step below."""

_PARTS = ("Union", "Intersect", "Except")
"""Steps whose parts have the same columns, by their places."""


def used_columns(plan: Node, optimized_plan: Node) -> dict[str, frozenset[str]]:
    """The columns of the tables that a result depends on: those that its optimized plan refers
    to."""
    used = {each.id for each in _all_expressions(optimized_plan) if each.name == _ATTRIBUTE}
    used |= {each.id for each in _outputs(plan)}
    found: dict[str, set[str]] = {}
    for step in plan.walk():
        if step.name in _PARTS:
            # What is above refers to the attributes of the first part.
            for same in zip(*(_outputs(child) for child in step.children), strict=True):
                if same[0].id in used:
                    used |= {each.id for each in same}
        for id, source in _sources(step).items():
            if source is not None and id in used:
                found.setdefault(source[0], set()).add(source[1])
    return {name: frozenset(columns) for name, columns in found.items()}


def _sources(leaf: Node) -> dict[int, Source | None]:
    """The attributes of a leaf; for those of a table of the view, which column it is."""
    attributes = leaf.expressions("output")
    if leaf.name != _TABLE:
        return {each.id: None for each in attributes}
    names = [str(each.fields["name"]) for each in attributes]
    if WEIGHT in names and f"{WEIGHT}_" in names:
        names = [
            WEIGHT if name == f"{WEIGHT}_" else "" if name == WEIGHT else name for name in names
        ]
    parameter = leaf.fields["parameter"]
    return {each.id: (parameter, name) for each, name in zip(attributes, names, strict=True)}


def _outputs(step: Node) -> list[Node]:
    """The attributes of a step, as named expressions with ids."""
    match step.name:
        case "Project":
            return step.expressions("projectList")
        case "Aggregate":
            return step.expressions("aggregateExpressions")
        case "Join" if _join_kind(step) in ("LeftSemi", "LeftAnti"):
            return _outputs(step.children[0])
        case "Join":
            return [*_outputs(step.children[0]), *_outputs(step.children[1])]
        case "Window":
            return [*_outputs(step.children[0]), *step.expressions("windowExpressions")]
        case "Generate":
            return [*_outputs(step.children[0]), *step.expressions("generatorOutput")]
    if not step.children:
        return step.expressions("output")
    # A union has the ids of its first part.
    return step.expressions("output") or _outputs(step.children[0])


def _join_kind(step: Node) -> str:
    found = step.fields["joinType"]
    name = found.get("object") or found.get("product-class") or ""
    return str(name).rpartition(".")[2].removesuffix("$")


def _equal_columns(step: Node) -> list[tuple[int, int]]:
    """The attributes that a join requires to be equal, as pairs of the left and the right side."""
    left = {each.id for each in _outputs(step.children[0])}
    found = []
    for condition in step.expressions("condition"):
        for each in _conjuncts(condition):
            if each.name not in ("EqualTo", "EqualNullSafe"):
                continue
            one, two = (_attribute(side) for side in each.children)
            if one is not None and two is not None:
                found.append((one, two) if one in left else (two, one))
    return found


_LEFT_BY_ITSELF = ("Inner", "Cross", "LeftOuter", "LeftSemi", "LeftAnti")
_RIGHT_BY_ITSELF = ("Inner", "Cross", "RightOuter")
"""Kinds of joins that process each row of a side by itself, where the other side never changes."""


def _conjuncts(condition: Node) -> Iterator[Node]:
    if condition.name == "And":
        for child in condition.children:
            yield from _conjuncts(child)
    else:
        yield condition


_WHOLE = ("short", "integer", "long")
"""Types of whole numbers, each wider than the one before."""


def _attribute(expression: Node) -> int | None:
    """The attribute that an expression is, also as a wider whole number. Where `spark.sql.ansi` is
    off, a narrower one may be another number."""
    if expression.name == "Cast" and expression.fields.get("dataType") in _WHOLE:
        (inner,) = expression.children
        narrower = _WHOLE[: _WHOLE.index(expression.fields["dataType"]) + 1]
        if inner.fields.get("dataType") in narrower:
            return _attribute(inner)
    return expression.id if expression.name == "AttributeReference" else None


# ------------------------------------------------------------------------ local functions


class Locality(msgspec.Struct, frozen=True):
    """A column of the result, and the columns of each table that have its values."""

    column: str
    columns: dict[str, tuple[str, ...]]


class _Local(msgspec.Struct, frozen=True):
    """A step: for attributes to which it is local, the columns of the tables. `pairs` are the two
    attributes of a full join, of which one may be NULL. `tables` are the parameters below."""

    by: dict[int, Columns]
    tables: frozenset[str]
    pairs: dict[frozenset[int], Columns] = {}


class _NotLocalError(Exception):
    """A step that is not local, in words that follow "the function"."""


def locality(view: str, plan: Node, tables: Sequence[str]) -> list[Locality]:
    """The columns of the result that it is local to. ConfigError where there is none."""
    try:
        found = _local(plan)
        if missing := [name for name in tables if name not in found.tables]:
            raise _NotLocalError(f"does not use its table {missing[0]}")
        columns = {each.id: str(each.fields["name"]) for each in _outputs(plan)}
        local = [
            Locality(columns[id], {n: tuple(sorted(c)) for n, c in by.items()})
            for id, by in found.by.items()
            if id in columns
        ]
        if not local:
            raise _NotLocalError(f"drops {_names(found.by) or 'the columns of its join'}")
    except _NotLocalError as error:
        raise ConfigError(
            f"view {view} cannot be maintained key by key: the function {error}",
            hint="One column of the result must be a column of every table: join by it, group by "
            "it, partition windows by it, and select it. Or end the function in aggregates of "
            "headwater.views.",
        ) from None
    return local


def _names(by: Mapping[int, Columns]) -> str:
    """The columns, for errors."""
    found = {f"{p}.{c}" for each in by.values() for p, columns in each.items() for c in columns}
    return ", ".join(sorted(found))


def _local(step: Node) -> _Local:
    below = [_local(child) for child in step.children]
    if not below:
        return _local_leaf(step)
    if step.name in _SAME_ROWS or not any(each.tables for each in below):
        return _merged_constants(step, below)
    found = _LOCAL[step.name](step, below) if step.name in _LOCAL else None
    if found is None:
        raise _NotLocalError(_REASONS.get(step.name, f"has a step {step.name}"))
    return found


def _local_leaf(step: Node) -> _Local:
    sources = _sources(step)
    by: dict[int, Columns] = {
        id: {} if source is None else {source[0]: frozenset({source[1]})}
        for id, source in sources.items()
    }
    return _Local(by, frozenset(each[0] for each in sources.values() if each is not None))


def _merged_constants(step: Node, below: list[_Local]) -> _Local:
    """A step with the columns of the step below; or one over rows that never change."""
    if any(each.tables for each in below):
        return below[0]
    return _Local({each.id: {} for each in _outputs(step)}, frozenset())


def _local_project(step: Node, below: list[_Local]) -> _Local:
    child, by = below[0], {}
    outputs = _outputs(step)
    ids = {each.id for each in outputs}
    for each in outputs:
        value = each.children[0] if each.name == "Alias" else each
        if value.name == "AttributeReference" and value.id in child.by:
            by[each.id] = child.by[value.id]
        elif value.name == "Coalesce":
            pair = frozenset(part.id for part in value.children if part.name == _ATTRIBUTE)
            if len(value.children) == len(pair) and pair in child.pairs:
                by[each.id] = child.pairs[pair]
    pairs = {pair: columns for pair, columns in child.pairs.items() if pair <= ids}
    if not by and not pairs:
        raise _NotLocalError(f"drops {_names(child.by) or 'the columns of its join'}")
    return _Local(by, child.tables, pairs)


_ATTRIBUTE = "AttributeReference"


def _local_aggregate(step: Node, below: list[_Local]) -> _Local:
    child = below[0]
    keys = {each.id for each in step.expressions("groupingExpressions") if each.name == _ATTRIBUTE}
    kept = {id: by for id, by in child.by.items() if id in keys}
    if not kept:
        raise _NotLocalError(f"groups by other columns than {_names(child.by)}")
    return _local_project(step, [_Local(kept, child.tables)])


def _local_window(step: Node, below: list[_Local]) -> _Local:
    keys = {each.id for each in step.expressions("partitionSpec") if each.name == _ATTRIBUTE}
    kept = {id: by for id, by in below[0].by.items() if id in keys}
    if not kept:
        raise _NotLocalError(f"has a window that is not partitioned by {_names(below[0].by)}")
    return _Local(kept, below[0].tables)


def _local_distinct(step: Node, below: list[_Local]) -> _Local:
    keys = {each.id for each in step.expressions("keys")}
    if step.name == "Deduplicate" and not keys >= {each.id for each in _outputs(step.children[0])}:
        raise _NotLocalError(
            "keeps any one of several rows (dropDuplicates of some columns): number them by a"
            " window with row_number"
        )
    return below[0]


def _local_union(step: Node, below: list[_Local]) -> _Local:
    outputs = [[each.id for each in _outputs(child)] for child in step.children]
    by = {}
    for ids in zip(*outputs, strict=True):
        if all(id in part.by for id, part in zip(ids, below, strict=True)):
            by[ids[0]] = _together(*(part.by[id] for id, part in zip(ids, below, strict=True)))
    if not by:
        raise _NotLocalError("has a union whose parts have no such column at the same place")
    return _Local(by, _tables(below))


def _local_join(step: Node, below: list[_Local]) -> _Local:
    (left, right), kind = below, _join_kind(step)
    both = {
        (x, y): _together(left.by[x], right.by[y])
        for x, y in _equal_columns(step)
        if x in left.by and y in right.by
    }
    by: dict[int, Columns] = {}
    pairs = {}
    if not right.tables and kind in _LEFT_BY_ITSELF:
        by |= left.by
    if not left.tables and kind in _RIGHT_BY_ITSELF:
        by |= right.by
    for (x, y), columns in both.items():
        if kind in ("Inner", "LeftOuter", "LeftSemi", "LeftAnti"):
            by.setdefault(x, columns)
        if kind in ("Inner", "RightOuter"):
            by.setdefault(y, columns)
        if kind == "FullOuter":
            pairs[frozenset({x, y})] = columns
    if not by and not pairs:
        raise _NotLocalError(
            f"joins {_names(left.by) or 'a side'} with {_names(right.by) or 'a side'} without an"
            " equality of two such columns of the same type"
        )
    return _Local(by, _tables(below), pairs)


def _together(*maps: Columns) -> Columns:
    """The columns of several steps."""
    found: dict[str, frozenset[str]] = {}
    for each in maps:
        for name, columns in each.items():
            found[name] = found.get(name, frozenset()) | columns
    return found


def _tables(below: list[_Local]) -> frozenset[str]:
    return frozenset[str]().union(*(each.tables for each in below))


_LOCAL: dict[str, Callable[[Node, list[_Local]], _Local]] = {
    "Project": _local_project,
    "Aggregate": _local_aggregate,
    "Window": _local_window,
    "Distinct": _local_distinct,
    "Deduplicate": _local_distinct,
    "Union": _local_union,
    "Intersect": _local_union,
    "Except": _local_union,
    "Join": _local_join,
    "Generate": lambda step, below: below[0],
}

_REASONS = {
    "GlobalLimit": "has a limit over all rows: number the rows of a key by a window instead",
    "LocalLimit": "has a limit over all rows: number the rows of a key by a window instead",
    "Tail": "has a limit over all rows: number the rows of a key by a window instead",
    "Offset": "has an offset over all rows",
    "Sample": "takes a sample",
    "Expand": "groups by several sets of columns (rollup or cube)",
}


# ------------------------------------------------------------------------ weighted functions

_ROW_BY_ROW = (
    *_SAME_ROWS, "Project", "Generate", "DeserializeToObject", "SerializeFromObject",
    "MapInArrow", "PythonMapInArrow",
)  # fmt: skip
"""Steps that process each row by itself."""


class Weighted(msgspec.Struct, frozen=True):
    """How a function of weighted rows combines its tables: for each parameter the tables that it is
    joined with, and the columns that the joins require to be equal."""

    partners: dict[str, frozenset[str]]
    equal: tuple[tuple[Source, Source], ...]


class _Added(msgspec.Struct, frozen=True):
    """A step over weighted rows: the parameters below, each time that one is used, the joins, and
    which attribute is which column."""

    tables: tuple[str, ...]
    partners: frozenset[tuple[str, str]] = frozenset()
    equal: tuple[tuple[Source, Source], ...] = ()
    sources: dict[int, Source] = {}


def check_weighted(view: str, plan: Node, tables: Sequence[str]) -> Weighted:
    """ConfigError for a function whose result cannot be maintained by adding weighted rows."""
    while plan.name in ("Project", "SubqueryAlias"):
        (plan,) = plan.children
    if plan.name != "Aggregate":
        raise _refused(view, plan.name, "after the aggregate")
    found = _added(view, plan.children[0], len(tables))
    if len(tables) > 1 and sorted(found.tables) != sorted(tables):
        raise ConfigError(
            f"view {view} has {len(tables)} tables and uses {len(found.tables)} of their"
            " DataFrames",
            hint="Each parameter must be used once, with views.join or a union.",
        )
    return Weighted(
        {name: frozenset(b for a, b in found.partners if a == name) for name in tables},
        found.equal,
    )


def _added(view: str, step: Node, tables: int) -> _Added:
    below = [_added(view, child, tables) for child in step.children]
    if not below:
        sources = _sources(step)
        known = {id: source for id, source in sources.items() if source is not None}
        return _Added(tuple({source[0] for source in known.values()}), sources=known)
    used = [each for each in below if each.tables]
    if not used:
        return _Added(())
    if step.name == "Join":
        return _added_join(view, step, below, tables)
    if step.name == "Union" and len(used) == len(below):
        parts = [each.partners for each in below]
        return _Added(
            tuple(name for each in below for name in each.tables),
            frozenset[tuple[str, str]]().union(*parts),
            tuple(pair for each in below for pair in each.equal),
        )
    if step.name in _ROW_BY_ROW:
        return msgspec.structs.replace(used[0], sources=_named(step, used[0].sources))
    raise _refused(view, step.name, "before the aggregate")


def _named(step: Node, sources: Mapping[int, Source]) -> dict[int, Source]:
    found = {}
    for each in _outputs(step):
        value = each.children[0] if each.name == "Alias" else each
        if value.name == _ATTRIBUTE and value.id in sources:
            found[each.id] = sources[value.id]
    return found


def _added_join(view: str, step: Node, below: list[_Added], tables: int) -> _Added:
    left, right = below
    sources = {**left.sources, **right.sources}
    if not left.tables or not right.tables:
        used, kinds = (left, _LEFT_BY_ITSELF) if left.tables else (right, _RIGHT_BY_ITSELF)
        if _join_kind(step) not in kinds:
            raise ConfigError(
                f"view {view}: a join with rows that are of no table returns some of them without"
                f" a row of {used.tables[0]}",
                hint=f"These have no {WEIGHT}. Use an inner join, or the outer join that returns"
                " all rows of the table; or Spark's own aggregates, grouped by the column of the"
                " join.",
            )
        return msgspec.structs.replace(used, sources=sources)
    for child in step.children:
        if not any(each.fields.get("name") in SIDES for each in _outputs(child)):
            raise ConfigError(
                f"view {view}: a join of its tables that is not views.join loses a {WEIGHT}",
                hint="Use views.join(left, right, on).",
            )
    if _join_kind(step) not in ("Inner", "Cross"):
        raise ConfigError(
            f"view {view}: an outer join of its tables cannot be maintained by adding rows",
            hint="Use views.join(left, right, on), which is an inner join; or Spark's own "
            "aggregates, grouped by the column of the join.",
        )
    if tables == 1:
        raise ConfigError(
            f"view {view} joins its table with itself through one parameter",
            hint='Use two parameters: def view(orders, others), tables={"others": "orders"}.',
        )
    between = {*product(left.tables, right.tables), *product(right.tables, left.tables)}
    equal = [
        (sources[x], sources[y])
        for x, y in _equal_columns(step)
        # A column with the name of the weight has another one in the rows.
        if x in sources and y in sources and WEIGHT not in (sources[x][1], sources[y][1])
    ]
    return _Added(
        (*left.tables, *right.tables),
        left.partners | right.partners | between,
        (*left.equal, *right.equal, *equal),
        sources,
    )


def _refused(view: str, step: str, where: str) -> ConfigError:
    return ConfigError(
        f"view {view}: {step} {where} cannot be maintained by adding rows",
        hint="Before the aggregate: filter, select, withColumn, explode, union, views.join. After "
        "it: no step. Order, limit and filter in the query that reads the view. Or use Spark's own "
        "aggregates for all columns, in a function that is local to a column.",
    )
