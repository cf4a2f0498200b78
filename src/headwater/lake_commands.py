"""Commands that ask the lake: `asof`, `history`, `audit`, and `snapshot`, which adds to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from headwater import render
from headwater.command_options import (
    DataDir,
    Embedded,
    Json,
    LakeFolder,
    Url,
    settings_for,
    spark_needed,
)
from headwater.errors import ConfigError
from headwater.limits import LAKE_ROWS_SHOWN
from headwater.model import Position
from headwater.pipeline import standing
from headwater.pipeline.questions import AsOf, Audit, History, Question, ask
from headwater.settings import load_settings

if TYPE_CHECKING:
    import pyarrow as pa

    from headwater.pipeline.lake import Lake

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False)


class Format(StrEnum):
    """How rows are printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"


LogUrl = Annotated[
    str | None,
    typer.Option("--url", help="Also take what this database has and the lake has not yet."),
]
Printed = Annotated[
    Format, typer.Option("--format", help="How rows are printed; parquet needs --output.")
]
Output = Annotated[
    str | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file.")
]


@app.command()
def asof(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="The table.")],
    when: Annotated[
        str, typer.Argument(metavar="WHEN", help="A time (UTC unless it says so) or a position.")
    ],
    key: Annotated[
        list[str] | None, typer.Option(metavar="VALUE", help="Only the row with this key.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Only rows that match: 'amount > 100'. Several must all hold.",
        ),
    ] = None,
    as_text: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Read this column as PostgreSQL's text."),
    ] = None,
    lake: LakeFolder = None,
    url: LogUrl = None,
    format: Printed = Format.TABLE,
    output: Output = None,
) -> None:
    """Show the rows of a table as they were.

    Example: `headwater asof orders '2026-11-15 10:00' --where 'amount > 100'`
    """
    moment = parse_moment(when)
    question = AsOf(
        table,
        moment if isinstance(moment, datetime) else None,
        str(moment) if isinstance(moment, Position) else None,
        key=tuple(key) if key else None,
        where=tuple(where or ()),
        as_text=tuple(as_text or ()),
        limit=_limit(format),
    )
    _print(_answer(lake, question, _log_url(url)), format, output)


@app.command()
def history(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="The table.")],
    key: Annotated[
        list[str], typer.Argument(metavar="KEY…", help="The row's key, a value for each column.")
    ],
    lake: LakeFolder = None,
    url: LogUrl = None,
    format: Printed = Format.TABLE,
    output: Output = None,
) -> None:
    """Show what became of a row: what changed, by whom and when.

    Example: `headwater history orders 42`
    """
    for_people = format is Format.TABLE and output is None
    question = History(table, tuple(key), plain=for_people)
    versions = _answer(lake, question, _log_url(url))
    if for_people:
        out.print(versions_view(versions.to_pylist()))
    else:
        _print(versions, format, output)


@app.command()
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
            metavar="A,B,…", help="Count by these: day, user, table, operation, function."
        ),
    ] = "user,table,operation",
    lake: LakeFolder = None,
    format: Printed = Format.TABLE,
    output: Output = None,
) -> None:
    """Count who changed what.

    Example: `headwater audit --today --by user,table`
    """
    if today and since is not None:
        raise ConfigError("--today and --since contradict each other", hint="Give one of them.")
    start = _midnight() if today else _instant(since)
    names = [name.strip() for name in by.split(",") if name.strip()]
    question = Audit(tuple(names), start, _instant(until), limit=_limit(format))
    _print(_answer(lake, question), format, output)


@app.command()
def snapshot(
    tables: Annotated[list[str], typer.Argument(metavar="TABLE…", help="One or more tables.")],
    lake: LakeFolder = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Read captured tables as they are now and keep their rows in the lake.

    Example: `headwater snapshot orders --lake lake`
    """
    import asyncio

    from headwater.app import database

    with spark_needed():
        from headwater.pipeline.lake import Lake

    settings = settings_for(url, embedded, data_dir, lake)
    kept_in = Lake(settings.lake)

    async def work() -> None:
        async with database(settings) as found:
            for name in tables:
                taken = await asyncio.to_thread(kept_in.snapshot, found, name)
                document = {"table": name, "rows": taken.rows, "position": taken.position}
                text = f"Kept {taken.rows:,} rows of {name} at {taken.position}."
                print(render.as_json(document)) if json else out.print(Text(text))

    asyncio.run(work())


# ------------------------------------------------------------------------ arguments


def parse_moment(text: str) -> datetime | Position:
    """A position, or a time as people write it.

    >>> parse_moment("2026-11-15 10:00")
    datetime.datetime(2026, 11, 15, 10, 0, tzinfo=datetime.timezone.utc)
    """
    try:
        return Position.parse(text)
    except ValueError:
        pass
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ConfigError(
            f"{text!r:.100} is neither a time nor a position",
            hint="Write 2026-11-15, '2026-11-15 10:00', 2026-11-15T10:00:00+01:00, or a position.",
        ) from None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at


def _instant(text: str | None) -> datetime | None:
    if text is None:
        return None
    moment = parse_moment(text)
    if isinstance(moment, Position):
        raise ConfigError(f"{text} is a position", hint="Changes are counted by time.")
    return moment


def _log_url(url: str | None) -> str | None:
    return load_settings(overrides={"url": url}).url


def _midnight() -> datetime:
    return datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


@contextmanager
def opened(folder: str | None, url: str | None = None) -> Iterator[Lake]:
    """The lake with a Spark, and with the end of the log where the database can be asked; errors of
    ours that workers raised are ours again."""
    root = load_settings(overrides={"lake": folder}).lake
    with spark_needed():
        from headwater.pipeline.answers import understood
        from headwater.pipeline.lake import Lake
    with understood():
        yield Lake.connect(root).with_log(url)


def _answer(folder: str | None, question: Question, url: str | None = None) -> pa.Table:
    """The rows: from the pipeline that runs for the lake, else by a Spark of our own."""
    service = standing.find(load_settings(overrides={"lake": folder}).lake)
    if service is not None:
        return ask(service, question)
    with opened(folder, url) as found:
        from headwater.pipeline.answers import answer

        return answer(found, question)


def _limit(format: Format) -> int | None:
    return LAKE_ROWS_SHOWN + 1 if format is Format.TABLE else None


# ------------------------------------------------------------------------ printing


def _print(table: pa.Table, format: Format, output: str | None) -> None:
    match format:
        case Format.PARQUET:
            _write_parquet(table, output)
            return
        case Format.TABLE:
            text = _as_text(table)
        case Format.JSON:
            text = "".join(f"{render.as_json(row)}\n" for row in table.to_pylist())
        case Format.CSV:
            text = as_csv(table)
    if output is None:
        sys.stdout.write(text)
    else:
        Path(output).write_text(text, encoding="utf-8")


def _write_parquet(table: pa.Table, output: str | None) -> None:
    import pyarrow.parquet as pq

    if output is None:
        raise ConfigError("parquet is not for the screen", hint="Name a file: --output FILE.")
    pq.write_table(table, output)


def _as_text(table: pa.Table) -> str:
    grid = Grid(box=None)
    for name in table.column_names:
        grid.add_column(Text(name))
    rows = table.to_pylist()
    for row in rows[:LAKE_ROWS_SHOWN]:
        grid.add_row(*(Text(render.short(value)) for value in row.values()))
    with out.capture() as captured:
        out.print(grid)
        if len(rows) > LAKE_ROWS_SHOWN:
            out.print(f"… and more: only {LAKE_ROWS_SHOWN:,} rows are shown. Try --format csv.")
    return captured.get()


def as_csv(table: pa.Table) -> str:
    """Comma-separated values with a head line; NULL is nothing, and an empty text is quoted."""
    lines = [table.column_names, *(row.values() for row in table.to_pylist())]
    return "".join(",".join(map(_cell, line)) + "\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list | dict | bytes):
        value = render.as_json(value).strip('"')
    text = str(value).lower() if isinstance(value, bool) else str(value)
    needs_quotes = not text or any(c in text for c in ',"\r\n')
    return '"' + text.replace('"', '""') + '"' if needs_quotes else text


def versions_view(versions: list[dict[str, Any]]) -> Text:
    """A row's history for people to read: when, what, who, and what differs."""
    from headwater.pipeline.history import difference

    if not versions:
        return Text("The lake knows nothing of this row.", style="dim")
    text = Text()
    for version in versions:
        begun = version["valid_from"]
        text.append(f"{begun:%Y-%m-%d %H:%M:%S}" if begun else "before", style="bold")
        text.append(f"  {version['op']}", style=render.OP_STYLES.get(version["op"], ""))
        who = [version[name] for name in ("user_id", "function_name", "trace_id")]
        text.append("".join(f"  {each}" for each in who if each), style="cyan")
        text.append("\n")
        for name, old, new in difference(version["before"], version["after"]):
            text.append(f"    {name}: ")
            text.append(render.short(old), style="red") if old is not None else None
            text.append(" → ") if old is not None and new is not None else None
            text.append(render.short(new), style="green") if new is not None else None
            text.append("\n")
    return text
