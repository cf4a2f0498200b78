"""Calls the function of a view. Its errors name the view."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headwater import errors as errors_
from headwater.errors import ConfigError, HeadwaterError, InvalidQuery, PipelineError
from headwater.model import Table
from headwater.pipeline.spark import log_file
from headwater.pipeline.views import plans
from headwater.pipeline.views.aggregates import WEIGHT, AggregateCalls, calls
from headwater.pipeline.views.definitions import StreamingView
from headwater.pipeline.views.results import (
    Result,
    ViewResult,
    partials,
    read_result,
    read_rows,
)
from headwater.pipeline.views.weighted import SourceTable

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_ALL = frozenset[str]()


class ViewFunction:
    """The function of a view. After `result`, `used` has the columns it uses of each table."""

    def __init__(self, view: StreamingView, spark: SparkSession) -> None:
        self.used: dict[str, frozenset[str]] = {}
        self._view = view
        self._spark = spark
        self._partials: tuple[ViewResult, list[Column]] | None = None

    def result(self, tables: Mapping[str, Table]) -> Result:
        """The columns of the function's result for these tables, found with empty DataFrames. A
        function that calls an aggregate of `headwater.views` adds weighted rows, any other one is
        maintained key by key."""
        counting, refused = AggregateCalls(), None
        try:
            made = self._call(self._empty(tables, has_weight=True), counting)
            if not counting.is_empty:
                return self._weighted(made, list(tables))
        except HeadwaterError as error:
            if not counting.is_empty:
                raise
            refused = error
        counting = AggregateCalls()
        try:
            made = self._call(self._empty(tables, has_weight=False), counting)
        except HeadwaterError:
            if refused is not None and not counting.is_empty:
                raise refused from None
            raise
        return self._by_key(made, list(tables))

    def _empty(self, tables: Mapping[str, Table], *, has_weight: bool) -> dict[str, DataFrame]:
        return {
            name: SourceTable(table, _ALL, has_weight).empty(self._spark, name)
            for name, table in tables.items()
        }

    def _weighted(self, made: DataFrame, tables: list[str]) -> Result:
        name = self._view.name
        result = read_result(name, self._view.key, made.schema)
        plan = plans.analyzed(made)
        plans.check_steady(name, made, plan)
        combined = plans.check_weighted(name, plan, tables)
        self._note_used(made, plan, tables)
        if len(tables) == 1:
            return result
        return ViewResult(result.key, result.aggregates, combined)

    def _by_key(self, made: DataFrame, tables: list[str]) -> Result:
        name = self._view.name
        plan = plans.analyzed(made)
        plans.check_steady(name, made, plan)
        local = tuple(plans.locality(name, plan, tables))
        self._note_used(made, plan, tables)
        return read_rows(name, self._view.key, made.schema, local)

    def _note_used(self, made: DataFrame, plan: plans.Node, tables: list[str]) -> None:
        used = plans.used_columns(plan, plans.optimized(made))
        self.used = {name: used.get(name, _ALL) for name in tables}

    def _call(self, frames: Mapping[str, DataFrame], counting: AggregateCalls) -> DataFrame:
        from pyspark.errors import AnalysisException
        from pyspark.sql import DataFrame

        name = self._view.name
        before = calls.set(counting)
        try:
            made = self._view.function(*(frames[each] for each in self._view.parameters))
        except HeadwaterError as error:
            raise type(error)(f"view {name}: {error}", hint=error.hint) from error
        except AnalysisException as error:
            raise _unresolved(name, error) from error
        except Exception as error:  # any error of the user's function
            raise PipelineError(
                f"view {name}: its function failed: {type(error).__name__}: {_first_line(error)}",
                hint="Correct the function, and start the pipeline again.",
            ) from error
        finally:
            calls.reset(before)
        if not isinstance(made, DataFrame):
            raise ConfigError(
                f"view {name}: its function returned {type(made).__name__}, not a DataFrame",
                hint="For example: return orders.groupBy(…).agg(…)",
            )
        return made

    def aggregated(self, frames: Mapping[str, DataFrame], result: ViewResult) -> DataFrame:
        """What weighted rows add to the groups of the result."""
        if self._partials is None or self._partials[0] != result:
            self._partials = result, partials(result)
        return self._call(frames, AggregateCalls(result.forms)).select(*self._partials[1])

    def rows(self, frames: Mapping[str, DataFrame], result: Result) -> DataFrame:
        """The rows of the result for rows of the tables."""
        names = ["`" + name.replace("`", "``") + "`" for name, _ in result.columns]
        return self._call(frames, AggregateCalls()).select(*names)

    @contextmanager
    def executing(self) -> Iterator[None]:
        """Errors of Spark inside the block are errors of the function, apart from those of the
        tasks that read tables. Most are not retryable: the same batch would fail again."""
        from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
        from pyspark import errors

        lasting = (
            errors.ArithmeticException,
            errors.DateTimeException,
            errors.IllegalArgumentException,
            errors.NumberFormatException,
            errors.PythonException,
            errors.SparkRuntimeException,
        )
        try:
            yield
        except InvalidQuery as error:
            raise self._unreadable(str(error)) from error
        # PySpark does not convert errors of the tasks that broadcast a table.
        except (errors.PySparkException, Py4JJavaError) as error:
            if found := re.search(r"headwater\.errors\.(\w+): (.+)", str(error)):
                raise self._of_task(found[1], found[2].strip()) from error
            raise PipelineError(
                f"view {self._view.name}: its function failed: {log_file.cause(str(error))}",
                hint="Correct the function, and start the pipeline again.",
                retryable=not isinstance(error, lasting),
            ) from error

    def _of_task(self, kind: str, message: str) -> HeadwaterError:
        if kind == "InvalidQuery":
            return self._unreadable(message)
        found: HeadwaterError = getattr(errors_, kind, PipelineError)(
            f"view {self._view.name}: {message}"
        )
        return found

    def _unreadable(self, message: str) -> HeadwaterError:
        """A value that Spark cannot hold, in a column that the function uses."""
        return PipelineError(
            f"view {self._view.name}: {message}",
            hint="Keep such values out of the column, or leave the column out of the view.",
        )


def _unresolved(view: str, error: Exception) -> HeadwaterError:
    text = _first_line(error)
    if f"`{WEIGHT}`" in text:
        return ConfigError(
            f"view {view}: the column {WEIGHT} is missing, or there are two: {text}",
            hint=f'Keep it in every select(…, "{WEIGHT}"), and join with views.join.',
        )
    return ConfigError(f"view {view}: {text}", hint="Correct the function of the view.")


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
