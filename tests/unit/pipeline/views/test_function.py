"""Errors of Spark while the function of a view is executed."""

from __future__ import annotations

import pytest
from pyspark.errors import PythonException

from headwater.errors import TableLocked
from headwater.pipeline.views.definitions import define
from headwater.pipeline.views.function import ViewFunction

OF_A_TASK = """
An exception was thrown from the Python worker. Please see the stack trace below.
'Traceback (most recent call last):
  File "reader.py", line 104, in answer
headwater.errors.TableLocked: a table of postgresql://db/shop is being altered: [libpq] no lock
'
"""


def test_an_error_of_a_task_has_its_own_class() -> None:
    function = ViewFunction(define(lambda orders: orders, key="id", name="totals"), None)  # type: ignore[arg-type]
    with (
        pytest.raises(TableLocked, match=r"view totals: a table of .* is being altered") as error,
        function.executing(),
    ):
        raise PythonException(OF_A_TASK)
    assert error.value.retryable
