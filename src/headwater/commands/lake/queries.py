"""Queries over the lake: `asof`, `history` and `audit`.

A running pipeline answers them. Without one, this process reads single rows and small tables
itself, and starts Spark for everything else. Modules of other commands are not imported here, so
that an answer is fast.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.commands.lake.connection import open_lake
from headwater.commands.lake.moments import given_moment
from headwater.commands.lake.rows import (
    FormatOption,
    OutputFile,
    RowsPrinter,
    plan_in_json,
    plan_view,
    versions_view,
)
from headwater.commands.options import LAKE_PANEL, Json, LakeFolder, new_app
from headwater.commands.output import as_json, out
from headwater.errors import ConfigError
from headwater.model import Position
from headwater.pipeline import packages
from headwater.pipeline.reading.requests import (
    AsOfRequest,
    AuditRequest,
    LakeRequest,
    RowHistoryRequest,
    send_request,
)
from headwater.pipeline.spark import shared_session
from headwater.settings import load_settings

if TYPE_CHECKING:
    import pyarrow as pa

    from headwater.pipeline.reading.points import PointAnswer

app = new_app()

LogUrl = Annotated[
    str | None,
    typer.Option("--url", help="Also read what this database has and the lake does not have yet."),
]

Explain = Annotated[
    bool,
    typer.Option("--explain", help="Only show what is read, by which engine, and why."),
]


@app.command(rich_help_panel=LAKE_PANEL)
def asof(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="The table.")],
    when: Annotated[
        str,
        typer.Argument(metavar="WHEN", help="A time (UTC if it has no offset) or a position."),
    ],
    key: Annotated[
        list[str] | None, typer.Option(metavar="VALUE", help="Only the row with this key.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Only rows that match: 'amount > 100'. If given several times, all must match.",
        ),
    ] = None,
    as_text: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Read this column as PostgreSQL's text."),
    ] = None,
    lake: LakeFolder = None,
    url: LogUrl = None,
    explain: Explain = False,
    format: FormatOption = None,
    output: OutputFile = None,
    json: Json = False,
) -> None:
    """Show the rows of a table as they were at a time.

    Example: `headwater asof orders '2026-11-15 10:00' --where 'amount > 100'`
    """
    printer = RowsPrinter(format, output, json=json)
    moment = given_moment(when)
    request = AsOfRequest(
        table,
        moment if isinstance(moment, datetime) else None,
        str(moment) if isinstance(moment, Position) else None,
        key=tuple(key) if key else None,
        where=tuple(where or ()),
        as_text=tuple(as_text or ()),
        limit=printer.limit,
    )
    if explain:
        _explain(lake, request, _log_url(url), json=json)
    else:
        printer.print(_answer(lake, request, _log_url(url)))


@app.command(rich_help_panel=LAKE_PANEL)
def history(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="The table.")],
    key: Annotated[
        list[str],
        typer.Argument(metavar="KEY…", help="The primary key of the row, one value per column."),
    ],
    lake: LakeFolder = None,
    url: LogUrl = None,
    explain: Explain = False,
    format: FormatOption = None,
    output: OutputFile = None,
    json: Json = False,
) -> None:
    """Show the changes of a row: what changed, by whom and when.

    Example: `headwater history orders 42`
    """
    printer = RowsPrinter(format, output, json=json)
    request = RowHistoryRequest(table, tuple(key), plain=printer.is_on_screen)
    if explain:
        _explain(lake, request, _log_url(url), json=json)
        return
    versions = _answer(lake, request, _log_url(url))
    if printer.is_on_screen:
        out.print(versions_view(versions.to_pylist()))
    else:
        printer.print(versions)


@app.command(rich_help_panel=LAKE_PANEL)
def audit(
    today: Annotated[bool, typer.Option("--today", help="Only today's changes (UTC).")] = False,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only changes at or after this time.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only changes before this time.")
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            metavar="A,B,…", help="Count by these: day, user, table, operation, function, source."
        ),
    ] = "user,table,operation",
    lake: LakeFolder = None,
    url: LogUrl = None,
    format: FormatOption = None,
    output: OutputFile = None,
    json: Json = False,
) -> None:
    """Count changes by user, table and operation.

    Example: `headwater audit --today --by user,table`
    """
    printer = RowsPrinter(format, output, json=json)
    if today and since is not None:
        raise ConfigError("--today and --since contradict each other", hint="Give one of them.")
    start = _midnight() if today else _instant(since)
    names = [name.strip() for name in by.split(",") if name.strip()]
    request = AuditRequest(tuple(names), start, _instant(until), limit=printer.limit)
    printer.print(_answer(lake, request, _log_url(url)))


def _instant(text: str | None) -> datetime | None:
    if text is None:
        return None
    moment = given_moment(text)
    if isinstance(moment, Position):
        raise ConfigError(f"{text} is a position, not a time", hint="Write 2026-11-15.")
    return moment


def _midnight() -> datetime:
    return datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


def _log_url(url: str | None) -> str | None:
    return load_settings(overrides={"url": url}).url


def _answer(
    folder: str | None, request: LakeRequest, url: str | None = None
) -> pa.Table | PointAnswer:
    """The rows: from the running pipeline of the lake, or from this process, with a Spark where the
    request asks for much."""
    root = _root(folder)
    service = shared_session.find(root)
    if service is not None:
        return send_request(service, request)
    packages.require()
    if not isinstance(request, AuditRequest):
        from headwater.pipeline.reading import choice, points

        with points.opened(root, url) as reader:
            chosen = choice.plan(reader, request)
            if chosen.engine == "datafusion":
                return choice.run(reader, request, chosen)
    with open_lake(folder, url) as found:
        from headwater.pipeline.reading.request_server import run_with_spark

        return run_with_spark(found, request)


def _explain(folder: str | None, request: LakeRequest, url: str | None, *, json: bool) -> None:
    """Print what a request reads, by which engine, and why, without running it."""
    from headwater.pipeline.reading import choice, points

    root = _root(folder)
    packages.require()
    with points.opened(root, url) as reader:
        chosen = choice.plan(reader, request)
    service = shared_session.find(root)
    by = "this command" if service is None else f"the running pipeline (process {service.pid})"
    if json:
        sys.stdout.write(f"{as_json(plan_in_json(chosen, by))}\n")
    else:
        out.print(plan_view(chosen, by))


def _root(folder: str | None) -> str:
    return load_settings(overrides={"lake_location": folder}).lake.location
