from __future__ import annotations

import logging
from typing import Any

import psycopg

from headwater.errors import FunctionFailed, HeadwaterError, TimedOut


def as_error(error: Exception, function: Any, context: Any, seconds: float) -> HeadwaterError:
    if isinstance(error, TimeoutError | psycopg.errors.QueryCanceled):
        return TimedOut(f"{function.label} took longer than {seconds:g} seconds")
    if isinstance(error, HeadwaterError):
        return error
    logging.getLogger(__name__).exception("function failed")
    return FunctionFailed(f"{function.label} failed")
