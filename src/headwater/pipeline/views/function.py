"""Calls a view's function, and says what is wrong with it in the view's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from headwater.errors import ConfigError, HeadwaterError, PipelineError
from headwater.model import Table
from headwater.pipeline.views import weighted
from headwater.pipeline.views.aggregates import WEIGHT, Calls, calls
from headwater.pipeline.views.definitions import View
from headwater.pipeline.views.results import Result, check_plan, partials, read_result, used_columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


class Function:
    """The function of a view. `used` has the columns it uses of each table, once `result` was
    asked."""

    def __init__(self, view: View, spark: SparkSession) -> None:
        self.used: dict[str, frozenset[str]] = {}
        self._view = view
        self._spark = spark
        self._partials: tuple[Result, list[Column]] | None = None

    def result(self, tables: Mapping[str, Table]) -> Result:
        """What the function makes of these tables, worked out on empty ones."""
        empty = {name: weighted.empty(self._spark, table) for name, table in tables.items()}
        made = self._call(empty, Calls())
        result = read_result(self._view.name, self._view.key, made.schema)
        check_plan(self._view.name, made, len(tables))
        self.used = used_columns(made, empty)
        return result

    def _call(self, frames: Mapping[str, DataFrame], counting: Calls) -> DataFrame:
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
        except Exception as error:  # whatever somebody's function does
            raise PipelineError(
                f"view {name}: its function failed: {type(error).__name__}: {_first_line(error)}",
                hint="Correct it, and start the pipeline again.",
            ) from error
        finally:
            calls.reset(before)
        if not isinstance(made, DataFrame):
            raise ConfigError(
                f"view {name}: its function returned {type(made).__name__}, not a DataFrame",
                hint="return orders.groupBy(…).agg(…)",
            )
        return made

    def aggregated(self, frames: Mapping[str, DataFrame], result: Result) -> pa.Table:
        if self._partials is None or self._partials[0] != result:
            self._partials = result, partials(result)
        with self.executing():
            return self._call(frames, Calls(result.forms)).select(*self._partials[1]).toArrow()

    @contextmanager
    def executing(self) -> Iterator[None]:
        """Errors in what the function has Spark do are the function's: the same batch would fail
        the same way."""
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
                hint="Correct it, and start the pipeline again.",
                retryable=not isinstance(error, lasting),
            ) from error


def _unresolved(view: str, error: Exception) -> HeadwaterError:
    text = _first_line(error)
    if f"`{WEIGHT}`" in text:
        return ConfigError(
            f"view {view}: the column {WEIGHT} is missing or there twice: {text}",
            hint=f'Keep it in every select(…, "{WEIGHT}"), and join with views.join.',
        )
    return ConfigError(f"view {view}: {text}", hint="Correct its function.")


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
