"""The history of a row: recent changes from the log, older versions from the lake.

The lake is read by the Spark of a running pipeline. Without one, the answer has the command that
starts a Spark itself, because that takes longer than a web page should wait.
"""

from __future__ import annotations

import asyncio
import shlex
from datetime import datetime
from typing import Any

import msgspec

from headwater.admin.search import SearchResult
from headwater.errors import TimedOut
from headwater.limits import ADMIN_HISTORY_ROWS_MAX, ADMIN_LAKE_SECONDS_MAX
from headwater.model import Origin
from headwater.pipeline.reading.requests import RowHistoryRequest, send_request
from headwater.pipeline.spark import shared_session


class Version(msgspec.Struct, frozen=True, omit_defaults=True):
    """A version of a row in the lake."""

    at: datetime | None
    op: str
    before: msgspec.Raw | None = None
    after: msgspec.Raw | None = None
    user: str | None = None
    function: str | None = None
    trace: str | None = None
    origin: Origin | None = None


class Record(msgspec.Struct, frozen=True):
    """The history of a row. `log` is None if the log was not searched, `lake` is None if the lake
    was not read; `command` prints the history in the lake."""

    log: SearchResult | None
    lake: list[Version] | None
    command: str
    lake_error: str | None = None


def command(table: str, key: tuple[str, ...]) -> str:
    """The command that prints the whole history of a row.

    >>> command("sales.orders", ("7", "a b"))
    "headwater history sales.orders 7 'a b'"
    """
    return shlex.join(["headwater", "history", table, *key])


async def from_lake(
    lake: str, table: str, key: tuple[str, ...], slots: asyncio.Semaphore
) -> list[Version] | None:
    """The versions of a row in the lake, newest first; None if no pipeline is running. `slots`
    limits the requests at a time, because each occupies a thread."""
    try:
        async with asyncio.timeout(ADMIN_LAKE_SECONDS_MAX), slots:
            return await asyncio.to_thread(_ask, lake, RowHistoryRequest(table, key, plain=True))
    except TimeoutError:
        raise TimedOut(
            f"the lake did not answer within {ADMIN_LAKE_SECONDS_MAX:.0f} seconds",
            hint=f"On the command line it may take longer: {command(table, key)}",
        ) from None


def _ask(lake: str, request: RowHistoryRequest) -> list[Version] | None:
    service = shared_session.find(lake)
    if service is None:
        return None
    found = send_request(service, request, patience=ADMIN_LAKE_SECONDS_MAX)
    newest = found.slice(max(0, found.num_rows - ADMIN_HISTORY_ROWS_MAX))
    return [_version(row) for row in reversed(newest.to_pylist())]


def _version(row: dict[str, Any]) -> Version:
    return Version(
        row["valid_from"],
        row["op"],
        _raw(row["before"]),
        _raw(row["after"]),
        row["user_id"],
        row["function_name"],
        row["trace_id"],
        _origin(row),
    )


def _origin(row: dict[str, Any]) -> Origin | None:
    if row["source"] is None:
        return None
    return Origin(row["source"], row["source_position"], row["source_committed_at"])


def _raw(text: str | None) -> msgspec.Raw | None:
    return None if text is None else msgspec.Raw(text.encode())
