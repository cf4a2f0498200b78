"""Answers requests about a lake: in this process, or for other processes while a pipeline runs.

A request is a line of JSON, over a socket that only the pipeline's user can reach. The response is
a line of JSON and then an Arrow stream. Each request runs in a thread of its own, with a limit on
how many run at once. Errors are sent to the client, and do not end the server.
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
from headwater.live.filters.text import parse_conditions
from headwater.pipeline.reading import choice, points
from headwater.pipeline.reading.lake import Lake
from headwater.pipeline.reading.requests import (
    AsOfRequest,
    AuditRequest,
    LakeRequest,
    RequestError,
    ResponseHead,
    RowHistoryRequest,
)
from headwater.pipeline.spark import launch, log_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)


def run_request(lake: Lake, request: LakeRequest, url: str | None = None) -> pa.Table:
    """The rows that answer a request, with the newest changes from the log of the database at
    `url`: without Spark where it asks for little."""
    with points.opened(lake.root, url) as reader:
        chosen = choice.plan(reader, request)
        if chosen.engine == "datafusion":
            return choice.run(reader, request, chosen).to_arrow()
    return run_with_spark(lake.with_log(url), request)


def run_with_spark(lake: Lake, request: LakeRequest) -> pa.Table:
    """The same by Spark."""
    with translated_errors():
        return _frame(lake, request).toArrow()


@contextmanager
def translated_errors() -> Iterator[None]:
    """Turn errors of Spark into ours: those that we raised in a worker, and Spark's own."""
    from pyspark.errors import PySparkException

    try:
        yield
    except HeadwaterError:
        raise
    except PySparkException as error:
        raise launch.lost(error) or _translated(error) from error
    except Exception as error:
        if (loss := launch.lost(error)) is None:
            raise
        raise loss from error


def _frame(lake: Lake, request: LakeRequest) -> DataFrame:
    match request:
        case AsOfRequest():
            where = parse_conditions(list(request.where)) if request.where else None
            return lake.as_of(
                request.table,
                request.when,
                key=request.key,
                where=where,
                as_text=request.as_text,
                limit=request.limit,
            )
        case RowHistoryRequest():
            versions = lake.history(request.table, request.key)
            return versions.drop("row") if request.plain else versions
        case AuditRequest():
            rows = lake.audit(request.by, since=request.since, until=request.until)
            return rows if request.limit is None else rows.limit(request.limit)
        case _:
            assert_never(request)


_OWN_ERROR = re.compile(r"^headwater\.errors\.InvalidQuery: (.*)$", re.M)


def _translated(error: Exception) -> HeadwaterError:
    if match := _OWN_ERROR.search(str(error)):
        return InvalidQuery(match[1], hint="Read that column as text: --as-text COLUMN.")
    what = log_file.cause(str(error)) or type(error).__name__
    return PipelineError(f"Spark could not run the request: {what}", hint=log_file.record(error))


# ------------------------------------------------------------------------ for other processes


@contextmanager
def serving(lake: Lake, path: str, url: str) -> Iterator[None]:
    """Answer requests over the socket at the path inside the block. Answers include the newest
    changes, from the log of the database at `url`."""
    with _RequestServer(lake, path, url) as server:
        os.chmod(path, 0o600)
        thread = threading.Thread(target=server.serve_forever, name="answers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()


class _RequestServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, lake: Lake, path: str, url: str) -> None:
        self.lake = lake
        self.url = url
        self.slots = threading.BoundedSemaphore(limits.LAKE_REQUESTS_AT_ONCE)
        super().__init__(path, _RequestHandler)


class _RequestHandler(socketserver.StreamRequestHandler):
    server: _RequestServer

    def handle(self) -> None:
        line = self.rfile.readline(limits.LAKE_REQUEST_BYTES_MAX)
        if not line:  # a client that only checks whether a pipeline runs
            return
        # The client may have disconnected.
        with suppress(BrokenPipeError, ConnectionResetError):
            try:
                request: LakeRequest = msgspec.json.decode(line, type=LakeRequest)
                with self.server.slots:
                    rows = run_request(self.server.lake, request, self.server.url)
            except HeadwaterError as error:
                self._head(ResponseHead(RequestError.of(error)))
            except msgspec.DecodeError as error:
                self._head(ResponseHead(RequestError("InvalidQuery", f"not a request: {error}")))
            except Exception as error:  # any error of delta-rs, Arrow or Spark
                what = log_file.cause(str(error)) or type(error).__name__
                message, hint = f"the lake could not be read: {what}", log_file.record(error)
                self._head(ResponseHead(RequestError("PipelineError", message, hint)))
            else:
                self._head(ResponseHead())
                with pa.ipc.new_stream(self.wfile, rows.schema) as stream:
                    stream.write_table(rows)

    def _head(self, head: ResponseHead) -> None:
        self.wfile.write(msgspec.json.encode(head) + b"\n")
