"""Requests about a lake as messages, for a running pipeline or for a Spark of this process.

Nothing here needs Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from headwater import errors
from headwater.errors import HeadwaterError, Unavailable
from headwater.model import Position
from headwater.pipeline.spark import shared_session
from headwater.pipeline.spark.shared_session import PipelineService

if TYPE_CHECKING:
    import pyarrow as pa


class AsOfRequest(msgspec.Struct, frozen=True, tag="asof"):
    """The rows of a table at a time or a position; `where` are conditions as people type them."""

    table: str
    at: datetime | None
    position: str | None = None
    key: tuple[str, ...] | None = None
    where: tuple[str, ...] = ()
    as_text: tuple[str, ...] = ()
    limit: int | None = None

    @property
    def when(self) -> datetime | Position:
        if self.position is not None:
            return Position.parse(self.position)
        assert self.at is not None
        return self.at


class RowHistoryRequest(msgspec.Struct, frozen=True, tag="history"):
    """The versions of a row; with `plain`, without the typed row."""

    table: str
    key: tuple[str, ...]
    plain: bool = False


class AuditRequest(msgspec.Struct, frozen=True, tag="audit"):
    """Counts of changes."""

    by: tuple[str, ...]
    since: datetime | None = None
    until: datetime | None = None
    limit: int | None = None


LakeRequest: TypeAlias = AsOfRequest | RowHistoryRequest | AuditRequest


class RequestError(msgspec.Struct, frozen=True):
    """An error of ours, as it is sent to the client."""

    kind: str
    message: str
    hint: str | None = None

    @classmethod
    def of(cls, error: HeadwaterError) -> RequestError:
        return cls(type(error).__name__, str(error), error.hint)

    def error(self) -> HeadwaterError:
        found: Any = getattr(errors, self.kind, HeadwaterError)
        error: HeadwaterError = found(self.message, hint=self.hint)
        return error


class ResponseHead(msgspec.Struct, frozen=True):
    """The first line of a response; without a failure, the rows follow as an Arrow stream."""

    failure: RequestError | None = None


def send_request(
    service: PipelineService, request: LakeRequest, *, patience: float | None = None
) -> pa.Table:
    """Send a request to a running pipeline. Its errors are raised here, with their own class.
    TimeoutError where it sends nothing for `patience` seconds."""
    import pyarrow as pa

    with (
        _pipeline_ended(service),
        shared_session.opened(service, patience=patience) as connection,
        connection.makefile("rwb") as file,
    ):
        file.write(msgspec.json.encode(request) + b"\n")
        file.flush()
        head = msgspec.json.decode(file.readline(), type=ResponseHead)
        if head.failure is not None:
            raise head.failure.error()
        return pa.ipc.open_stream(file).read_all()


@contextmanager
def _pipeline_ended(service: PipelineService) -> Iterator[None]:
    """Raise Unavailable for a pipeline that ends during a request."""
    try:
        yield
    except TimeoutError:  # it runs, and is busy
        raise
    except (OSError, msgspec.DecodeError) as error:
        raise Unavailable(
            f"the pipeline (process {service.pid}) ended before it answered",
            hint="Try again: without a running pipeline, the command starts its own Spark.",
        ) from error
