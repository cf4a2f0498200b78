"""The history of a row: recent changes from the log, older versions from the lake.

The lake is read without Spark, unless a row's past is spread over very many bytes. Then the answer
has the command that starts a Spark, because that takes longer than a web page should wait.
"""

from __future__ import annotations

import asyncio
import shlex
import time
from datetime import datetime
from typing import Any

import msgspec

from headwater.admin.search import SearchResult
from headwater.errors import TimedOut, Unavailable
from headwater.limits import ADMIN_HISTORY_ROWS_MAX, ADMIN_LAKE_SECONDS_MAX
from headwater.model import Origin
from headwater.pipeline.packages import spark_needed
from headwater.pipeline.reading.requests import RowHistoryRequest


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
    lake: str, url: str, table: str, key: tuple[str, ...], slots: asyncio.Semaphore
) -> list[Version]:
    """The versions of a row in the lake and in the log at `url`, newest first. `slots` limits the
    requests at a time, because each occupies a thread."""
    try:
        async with asyncio.timeout(ADMIN_LAKE_SECONDS_MAX), slots:
            return await asyncio.to_thread(_read, lake, url, RowHistoryRequest(table, key))
    except TimeoutError:
        raise TimedOut(
            f"the lake did not answer within {ADMIN_LAKE_SECONDS_MAX:.0f} seconds",
            hint=f"On the command line it may take longer: {command(table, key)}",
        ) from None


def _read(lake: str, url: str, request: RowHistoryRequest) -> list[Version]:
    with spark_needed():
        from headwater.pipeline.reading import choice, points
    end = time.monotonic() + ADMIN_LAKE_SECONDS_MAX

    def check() -> None:
        if time.monotonic() > end:
            raise TimedOut("no client waits for this answer any more")

    with points.opened(lake, url, seconds=ADMIN_LAKE_SECONDS_MAX, check=check) as reader:
        plan = choice.plan(reader, request)
        if plan.engine == "spark":
            raise Unavailable(
                f"only Spark reads this row's past: {plan.reason}",
                hint=f"On the command line: {command(request.table, request.key)}",
            )
        page = reader.newest_versions(request.table, request.key, limit=ADMIN_HISTORY_ROWS_MAX)
    return [_version(row) for row in page.versions]


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
