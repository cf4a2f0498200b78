"""Translates errors of Spark, Arrow and delta-rs into the errors that a user sees.

Errors that Headwater raises in Spark's workers arrive here as text, and become errors of their own
class again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from headwater import errors
from headwater.errors import HeadwaterError, PipelineError, ResyncRequired
from headwater.pipeline.jobs.plan import VIEWS
from headwater.pipeline.spark import log_file


def explain(error: BaseException, name: str, lake: str = "FOLDER") -> HeadwaterError:
    """The error that a user sees for an error of Spark, Arrow or delta-rs in a stream."""
    if isinstance(error, ResyncRequired):
        return _ours("ResyncRequired", str(error), name, lake)
    if isinstance(error, HeadwaterError):
        return error
    text = "\n".join(map(str, _chain(error)))
    if re.search(_FULL, text):
        return PipelineError(
            f"the disk is full: stream {name} of the pipeline cannot write",
            hint="Free some space. No change is lost, and the stream continues by itself.",
            retryable=True,
        )
    if found := re.search(r"headwater\.errors\.(\w+): (.+)", text):
        return _ours(found[1], found[2].strip(), name, lake)
    return PipelineError(
        f"stream {name} of the pipeline failed: {log_file.cause(text) or type(error).__name__}",
        hint=log_file.record(error),
        retryable=True,
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes: the cause of a file that cannot be closed may be a full disk."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


_FULL = r"No space left on device|Disk quota exceeded|File too large|os error (28|122|27)\b"


def _ours(kind: str, message: str, name: str, lake: str) -> HeadwaterError:
    found = getattr(errors, kind, HeadwaterError)
    hint = _HINTS.get(kind, "").format(lake=lake) or None
    if found is errors.ResyncRequired and name == VIEWS:
        return PipelineError(
            message, hint="The stream of the views begins again from now.", retryable=True
        )
    error: HeadwaterError = found(message, hint=hint)
    return error


_HINTS = {
    "ResyncRequired": "To continue from now: headwater pipeline resnapshot --lake {lake}. The lake "
    "keeps its data; moments in the gap are unknown.",
    "NotInstalled": "Run: headwater init",
    "DatabaseError": "Check that the PostgreSQL server runs; the stream continues when it is back.",
}
