"""Calls the function of a view. Its errors name the view."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from headwater.errors import ConfigError, HeadwaterError, PipelineError
from headwater.model import Table
from headwater.pipeline.views import weighted
from headwater.pipeline.views.aggregates import WEIGHT, AggregateCalls, calls
from headwater.pipeline.views.definitions import StreamingView
from headwater.pipeline.views.results import (
    ViewResult,
    check_plan,
    partials,
    read_result,
    used_columns,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


class ViewFunction:
    """The function of a view. After `result`, `used` has the columns it uses of each table."""

    def __init__(self, view: StreamingView, spark: SparkSession) -> None:
        self.used: dict[str, frozenset[str]] = {}
        self._view = view
        self._spark = spark
        self._partials: tuple[ViewResult, list[Column]] | None = None

    def result(self, tables: Mapping[str, Table]) -> ViewResult:
        """The columns of the function's result for these tables, found with empty DataFrames."""
        empty = {name: weighted.empty(self._spark, table) for name, table in tables.items()}
        made = self._call(empty, AggregateCalls())
        result = read_result(self._view.name, self._view.key, made.schema)
        check_plan(self._view.name, made, len(tables))
        self.used = used_columns(made, empty)
        return result

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

    def aggregated(self, frames: Mapping[str, DataFrame], result: ViewResult) -> pa.Table:
        if self._partials is None or self._partials[0] != result:
            self._partials = result, partials(result)
        with self.executing():
            return (
                self._call(frames, AggregateCalls(result.forms))
                .select(*self._partials[1])
                .toArrow()
            )

    @contextmanager
    def executing(self) -> Iterator[None]:
        """Errors of Spark inside the block are errors of the function. Most are not retryable: the
        same batch would fail again."""
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
        except errors.PySparkException as error:
            raise PipelineError(
                f"view {self._view.name}: its function failed: {_first_line(error)}",
                hint="Correct the function, and start the pipeline again.",
                retryable=not isinstance(error, lasting),
            ) from error


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
