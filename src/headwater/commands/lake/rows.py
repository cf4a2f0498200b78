"""The rows that `asof`, `history` and `audit` print: a table for people, JSON lines, CSV or
Parquet; to standard output or to a file."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table as Grid
from rich.text import Text

from headwater.commands.output import OP_STYLES, as_json, out, short
from headwater.errors import ConfigError
from headwater.limits import LAKE_ROWS_SHOWN

if TYPE_CHECKING:
    import pyarrow as pa

    from headwater.pipeline.reading.choice import ReadPlan
    from headwater.pipeline.reading.points import PointAnswer


class Format(StrEnum):
    """How rows are printed. For JSON, use `--json`, as with every command."""

    TABLE = "table"
    CSV = "csv"
    PARQUET = "parquet"


FormatOption = Annotated[
    Format | None,
    typer.Option("--format", help="How rows are printed; default: table. Parquet needs --output."),
]
OutputFile = Annotated[
    str | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file.")
]


class RowsPrinter:
    """Prints rows as `--format`, `--json` and `--output` say. Made before the lake is read, so that
    contradictory options are an error at once."""

    def __init__(self, format: Format | None, output: str | None, *, json: bool) -> None:
        if json and format is not None:
            raise ConfigError("--json and --format contradict each other", hint="Give one of them.")
        if format is Format.PARQUET and output is None:
            raise ConfigError("parquet cannot be printed", hint="Name a file: --output FILE")
        self._json = json
        self._format = format or Format.TABLE
        self._output = output

    @property
    def is_table(self) -> bool:
        """Whether people read the rows."""
        return self._format is Format.TABLE and not self._json

    @property
    def is_on_screen(self) -> bool:
        return self.is_table and self._output is None

    @property
    def limit(self) -> int | None:
        """How many rows are needed: one more than a table shows, to know that there are more."""
        return LAKE_ROWS_SHOWN + 1 if self.is_table else None

    def print(self, table: pa.Table | PointAnswer) -> None:
        if self._output is None:
            sys.stdout.write(self._text(table))
            return
        try:
            if self._format is Format.PARQUET:
                _write_parquet(table, self._output)
            else:
                Path(self._output).write_text(self._text(table), encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write {self._output}: {error.strerror or error}",
                hint="Name another file: --output FILE",
            ) from error

    def _text(self, table: pa.Table | PointAnswer) -> str:
        if self._json:
            return "".join(f"{as_json(row)}\n" for row in table.to_pylist())
        return as_csv(table) if self._format is Format.CSV else _as_grid(table)


def _write_parquet(table: pa.Table | PointAnswer, output: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not isinstance(table, pa.Table):
        table = table.to_arrow()
    pq.write_table(table, output)


def _as_grid(table: pa.Table | PointAnswer) -> str:
    grid = Grid(box=None)
    for name in table.column_names:
        grid.add_column(Text(name))
    rows = table.to_pylist()
    for row in rows[:LAKE_ROWS_SHOWN]:
        grid.add_row(*(Text(short(value)) for value in row.values()))
    with out.capture() as captured:
        out.print(grid)
        if len(rows) > LAKE_ROWS_SHOWN:
            out.print(f"… and more: only {LAKE_ROWS_SHOWN:,} rows are shown. Try --format csv.")
    return captured.get()


def as_csv(table: pa.Table | PointAnswer) -> str:
    """Comma-separated values with a header line. NULL is an empty cell, an empty text is quoted."""
    lines = [table.column_names, *(row.values() for row in table.to_pylist())]
    return "".join(",".join(map(_cell, line)) + "\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list | dict | bytes):
        value = as_json(value).strip('"')
    text = str(value).lower() if isinstance(value, bool) else str(value)
    needs_quotes = not text or any(c in text for c in ',"\r\n')
    return '"' + text.replace('"', '""') + '"' if needs_quotes else text


def versions_view(versions: list[dict[str, Any]]) -> Text:
    """The history of a row for people: when, what, who, and which columns differ."""
    from headwater.pipeline.reading.history import difference

    if not versions:
        return Text("The lake has no change of this row.", style="dim")
    text = Text()
    for version in versions:
        begun = version["valid_from"]
        text.append(f"{begun:%Y-%m-%d %H:%M:%S}" if begun else "before", style="bold")
        text.append(f"  {version['op']}", style=OP_STYLES.get(version["op"], ""))
        who = [version[name] for name in ("user_id", "function_name", "trace_id")]
        text.append("".join(f"  {each}" for each in who if each), style="cyan")
        if version["source"] is not None:
            position = version["source_position"]
            text.append(f"  from {version['source']}", style="dim")
            text.append(f" at {short(position)}" if position else "", style="dim")
        text.append("\n")
        for name, old, new in difference(version["before"], version["after"]):
            text.append(f"    {name}: ")
            text.append(short(old), style="red") if old is not None else None
            text.append(" → ") if old is not None and new is not None else None
            text.append(short(new), style="green") if new is not None else None
            text.append("\n")
    return text


def plan_in_json(plan: ReadPlan, by: str) -> dict[str, Any]:
    """What a request reads, as `--explain --json` prints it."""
    names = ("table", "files", "of_files", "bytes")
    reads = [{name: getattr(read, name) for name in names} for read in plan.reads]
    return {
        "engine": plan.engine,
        "by": by,
        "reason": plan.reason,
        "reads": reads,
        "log": plan.log,
    }


def plan_view(plan: ReadPlan, by: str) -> Text:
    """The same for people."""
    engine = {"spark": "Spark", "datafusion": "DataFusion"}[plan.engine]
    text = Text()
    text.append(engine, style="bold").append(f" in {by}: {plan.reason}\n")
    for read in plan.reads:
        text.append(f"  {read.table}: {read.files:,} of {read.of_files:,} files, ")
        text.append(f"{read.bytes:,} bytes\n")
    if plan.log:
        text.append("  the end of the log: changes that the lake does not have yet\n")
    text.rstrip()
    return text
