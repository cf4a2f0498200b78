"""Answers questions about a lake: here, or for others while the pipeline runs.

A question comes as a line of JSON, through a socket that only the pipeline's user can reach; the
answer is a line and then an Arrow stream. Each is answered in a thread of its own, so many at a
time; further ones wait. Errors go back to whoever asked, and end nothing here.
"""

from __future__ import annotations

import logging
import os
import re
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, assert_never

import msgspec
import pyarrow as pa

from headwater import limits
from headwater.errors import HeadwaterError, InvalidQuery, PipelineError
from headwater.live.filter_text import parse_conditions
from headwater.pipeline.lake import Lake
from headwater.pipeline.questions import AsOf, Audit, Failure, Head, History, Question

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)


def answer(lake: Lake, question: Question) -> pa.Table:
    """The rows of an answer."""
    with understood():
        return _frame(lake, question).toArrow()


@contextmanager
def understood() -> Iterator[None]:
    """Errors of ours that workers raised are ours again; Spark's own are told in a line."""
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        raise _translated(error) from error


def _frame(lake: Lake, question: Question) -> DataFrame:
    match question:
        case AsOf():
            where = parse_conditions(list(question.where)) if question.where else None
            return lake.as_of(
                question.table,
                question.when,
                key=question.key,
                where=where,
                as_text=question.as_text,
                limit=question.limit,
            )
        case History():
            versions = lake.history(question.table, question.key)
            return versions.drop("row") if question.plain else versions
        case Audit():
            rows = lake.audit(question.by, since=question.since, until=question.until)
            return rows if question.limit is None else rows.limit(question.limit)
        case _:
            assert_never(question)


_OURS = re.compile(r"^headwater\.errors\.InvalidQuery: (.*)$", re.M)


def _translated(error: Exception) -> HeadwaterError:
    if match := _OURS.search(str(error)):
        return InvalidQuery(match[1], hint="Read that column as text: --as-text COLUMN.")
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return PipelineError(f"Spark could not answer: {first}")


# ------------------------------------------------------------------------ for others


@contextmanager
def answering(lake: Lake, path: str, url: str) -> Iterator[None]:
    """Answer whoever asks through the socket at the path, for as long as this lasts. What the log
    of the database has already is in the answers."""
    with _Server(lake, path, url) as server:
        os.chmod(path, 0o600)
        thread = threading.Thread(target=server.serve_forever, name="answers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, lake: Lake, path: str, url: str) -> None:
        self.lake = lake
        self.url = url
        self.turns = threading.BoundedSemaphore(limits.ANSWERS_AT_ONCE)
        super().__init__(path, _Handler)


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        line = self.rfile.readline(limits.QUESTION_BYTES_MAX)
        if not line:  # somebody who only looks whether there is a pipeline
            return
        # Whoever asked may have gone.
        with suppress(BrokenPipeError, ConnectionResetError):
            try:
                question: Question = msgspec.json.decode(line, type=Question)
                with self.server.turns:
                    rows = answer(self.server.lake.with_log(self.server.url), question)
            except HeadwaterError as error:
                self._head(Head(Failure.of(error)))
            except msgspec.DecodeError as error:
                self._head(Head(Failure("InvalidQuery", f"not a question: {error}")))
            except Exception as error:  # whatever delta-rs, Arrow or Spark say
                log.warning("A question about the lake failed", exc_info=True)
                self._head(Head(Failure("PipelineError", f"the lake could not be asked: {error}")))
            else:
                self._head(Head())
                with pa.ipc.new_stream(self.wfile, rows.schema) as stream:
                    stream.write_table(rows)

    def _head(self, head: Head) -> None:
        self.wfile.write(msgspec.json.encode(head) + b"\n")
