"""Translates errors of Spark, Arrow and delta-rs into the errors that a user sees, for streams and
for the jobs beside them.

Errors that Headwater raises in Spark's workers arrive here as text, and become errors of their own
class again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from headwater import errors
from headwater.errors import HeadwaterError, PipelineError
from headwater.pipeline.spark import log_file


def explain(error: BaseException, what: str) -> HeadwaterError:
    """The error that a user sees for any error; `what` has failed. Errors of Headwater stay as they
    are."""
    if isinstance(error, HeadwaterError):
        return error
    text = "\n".join(map(str, _chain(error)))
    if re.search(_FULL, text):
        return PipelineError(
            f"the disk is full: {what} cannot write",
            hint="Free some space. No change is lost, and the pipeline continues by itself.",
            retryable=True,
        )
    if found := re.search(r"headwater\.errors\.(\w+): (.+)", text):
        kind: type[HeadwaterError] = getattr(errors, found[1], HeadwaterError)
        return kind(found[2].strip(), hint=_HINTS.get(found[1]))
    return PipelineError(
        f"{what} failed: {log_file.cause(text) or type(error).__name__}",
        hint=log_file.record(error),
        retryable=True,
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes: the cause of a file that cannot be closed may be a full disk."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


_FULL = r"No space left on device|Disk quota exceeded|File too large|os error (28|122|27)\b"

_HINTS = {
    "NotInstalled": "Run: headwater init",
    "DatabaseError": "Check that the PostgreSQL server runs; the pipeline continues when it is"
    " back.",
}
