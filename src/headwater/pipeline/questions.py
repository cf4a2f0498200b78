"""What commands ask a lake, as values that can be sent: to a running pipeline, or to a Spark of
one's own. Nothing here needs Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from headwater import errors
from headwater.errors import HeadwaterError, Unavailable
from headwater.model import Position
from headwater.pipeline import standing
from headwater.pipeline.standing import Service

if TYPE_CHECKING:
    import pyarrow as pa


class AsOf(msgspec.Struct, frozen=True, tag="asof"):
    """The rows of a table at a time or a position; `where` is a list of conditions as typed."""

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


class History(msgspec.Struct, frozen=True, tag="history"):
    """The versions of a row; `plain` for those without the typed row."""

    table: str
    key: tuple[str, ...]
    plain: bool = False


class Audit(msgspec.Struct, frozen=True, tag="audit"):
    """Changes counted."""

    by: tuple[str, ...]
    since: datetime | None = None
    until: datetime | None = None
    limit: int | None = None


Question: TypeAlias = AsOf | History | Audit


class Failure(msgspec.Struct, frozen=True):
    """An error of ours, on its way to whoever asked."""

    kind: str
    message: str
    hint: str | None = None

    @classmethod
    def of(cls, error: HeadwaterError) -> Failure:
        return cls(type(error).__name__, str(error), error.hint)

    def error(self) -> HeadwaterError:
        found: Any = getattr(errors, self.kind, HeadwaterError)
        error: HeadwaterError = found(self.message, hint=self.hint)
        return error


class Head(msgspec.Struct, frozen=True):
    """The first line of an answer; without a failure rows follow, as an Arrow stream."""

    failure: Failure | None = None


def ask(service: Service, question: Question, *, patience: float | None = None) -> pa.Table:
    """Put a question to a running pipeline. Its errors are raised as if they had been here;
    TimeoutError where it says nothing for `patience` seconds."""
    import pyarrow as pa

    with (
        _lost(service),
        standing.opened(service, patience=patience) as connection,
        connection.makefile("rwb") as file,
    ):
        file.write(msgspec.json.encode(question) + b"\n")
        file.flush()
        head = msgspec.json.decode(file.readline(), type=Head)
        if head.failure is not None:
            raise head.failure.error()
        return pa.ipc.open_stream(file).read_all()


@contextmanager
def _lost(service: Service) -> Iterator[None]:
    """A pipeline that ends while it answers."""
    try:
        yield
    except TimeoutError:  # It is there, and busy.
        raise
    except (OSError, msgspec.DecodeError) as error:
        raise Unavailable(
            f"the pipeline (process {service.pid}) ended before it had answered",
            hint="Ask again: without a pipeline a Spark of its own is started.",
        ) from error
