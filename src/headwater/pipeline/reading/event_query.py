"""Questions about events with small answers, in SQL that Spark, DataFusion and PostgreSQL read.

The plans for a state or a history are made from a few such questions. So the rules are written
once, and the engine that answers is chosen by the size of what it has to read: Spark for a table,
DataFusion for a row, PostgreSQL for the end of the log. Answers of two engines about different
events are merged here. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import date
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from headwater.pipeline.lake.delta import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

AnswerRow: TypeAlias = dict[str, Any]
Ask: TypeAlias = Callable[["EventQuery"], list[AnswerRow]]
"""Answers a question."""

KEY = ":key"
"""Stands for the key in conditions. Each engine writes texts in its own way."""


class EventQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of the events of some tables that match `where`.

    `any_of` are conditions of which no event meets two: they are asked one after the other where an
    engine skips more files that way. `order` has names of columns, with a minus for descending
    ones. With `spans`, the columns are groups, and `first` and `last` the lowest and highest `seq`
    of each. `days` and `among` only skip files.
    """

    relations: tuple[int, ...]
    where: tuple[str, ...] = ()
    columns: dict[str, str]
    any_of: tuple[str, ...] = ("true",)
    order: tuple[str, ...] = ()
    limit: int | None = None
    spans: bool = False
    key: str | None = None
    days: tuple[date | None, date | None] = (None, None)
    among: str = ""

    def file_condition(self) -> str:
        """A condition by whose statistics files are skipped. May be true too often."""
        found = self.among or f"relation in ({', '.join(map(str, self.relations))})"
        return found if self.key is None else found.replace(KEY, quoted(self.key))

    def condition(self, literal: Callable[[str], str], among: str | None = None) -> str:
        """The condition on the events: for all alternatives, or for one of them."""
        ids = ", ".join(map(str, self.relations))
        either = among or " or ".join(f"({each})" for each in self.any_of)
        text = " and ".join(
            [f"relation in ({ids})", *(f"({w})" for w in self.where), f"({either})"]
        )
        return text if self.key is None else text.replace(KEY, literal(self.key))

    def sql(self, source: str, among: str | None = None) -> str:
        """The question as a statement of DataFusion or PostgreSQL."""
        columns = [f"{text} as {name}" for name, text in self.columns.items()]
        groups = ", ".join(self.columns.values())
        if self.spans:
            columns += ["min(seq) as first", "max(seq) as last"]
        parts = [f"select {', '.join(columns)} from {source} where {self.condition(quoted, among)}"]
        if self.spans:
            parts.append(f"group by {groups}")
        if self.order:
            parts.append(f"order by {', '.join(_order(name) for name in self.order)}")
        if self.limit is not None:
            parts.append(f"limit {self.limit}")
        return " ".join(parts)

    def frame(self, events: DataFrame) -> DataFrame:
        """The answer in Spark."""
        from pyspark.sql import functions as f

        columns = [f.expr(text).alias(name) for name, text in self.columns.items()]
        rows = events.filter(self.condition(_spark_text))
        if self.spans:
            ends = f.min("seq").alias("first"), f.max("seq").alias("last")
            return rows.groupBy(*columns).agg(*ends)
        rows = rows.select(*columns)
        if self.order:
            rows = rows.orderBy(
                *(f.expr(_name(n)).desc() if n[0] == "-" else n for n in self.order)
            )
        return rows if self.limit is None else rows.limit(self.limit)

    def merged(self, answers: Iterable[list[AnswerRow]]) -> list[AnswerRow]:
        """One answer from those about different events."""
        rows = [row for answer in answers for row in answer]
        if self.spans:
            rows = _merged_spans(rows, tuple(self.columns))
        for name in reversed(self.order):
            rows.sort(key=itemgetter(_name(name)), reverse=name.startswith("-"))
        return rows[: self.limit]


def _merged_spans(rows: list[AnswerRow], names: Sequence[str]) -> list[AnswerRow]:
    def group(row: AnswerRow) -> tuple[Any, ...]:
        return tuple(row[name] for name in names)

    merged = []
    for _, found in groupby(sorted(rows, key=group), group):
        same = list(found)
        ends = {"first": min(r["first"] for r in same), "last": max(r["last"] for r in same)}
        merged.append(same[0] | ends)
    return merged


def _name(order: str) -> str:
    return order.removeprefix("-")


def _order(order: str) -> str:
    return f"{_name(order)} desc" if order.startswith("-") else order


def _spark_text(text: str) -> str:
    """A text in Spark's SQL, which reads backslashes."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
