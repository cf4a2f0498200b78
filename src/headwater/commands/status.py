"""`status` shows the state of the installation; `doctor` checks what is missing."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import typer
from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from headwater.admin import sources as source_doctor
from headwater.admin.status import Status, read_status
from headwater.capture.postgres import doctor as database_doctor
from headwater.capture.postgres import schema
from headwater.commands.execution import connected, run
from headwater.commands.options import (
    DATABASE_PANEL,
    DataDir,
    Embedded,
    Json,
    LakeFolder,
    Url,
    settings_for,
)
from headwater.commands.output import print_result, short_period, short_size
from headwater.commands.source.show import sources_view
from headwater.pipeline.spark import doctor as pipeline_doctor

if TYPE_CHECKING:
    from headwater.capture.postgres.doctor import Finding
    from headwater.pipeline.stream.progress import PipelineStream

app = typer.Typer()
_STATE_STYLES = {
    "running": "green",
    "waiting": "yellow",
    "failed": "bold red",
    "not running": "bold red",
}
_LEVEL_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@app.command(rich_help_panel=DATABASE_PANEL)
def status(
    lake: LakeFolder = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show the log, the captured tables, the sources, the cursors, the readers and the pipeline.

    Example: `headwater status --json`
    """

    async def work() -> None:
        settings = settings_for(url, embedded, data_dir, lake)
        async with connected(settings) as connection:
            await schema.require(connection)
            found = await read_status(connection, settings.lake.location)
        print_result(found, status_view(found), json=json)

    run(work())


@app.command(rich_help_panel=DATABASE_PANEL)
def doctor(
    url: Url = None, embedded: Embedded = False, data_dir: DataDir = None, json: Json = False
) -> None:
    """Check the database, the sources and the pipeline: what is missing for which feature.

    Exits with 1 if something prevents Headwater from working.

    Example: `headwater doctor --url postgresql://localhost/shop`
    """

    async def work() -> None:
        settings = settings_for(url, embedded, data_dir)
        async with connected(settings) as connection:
            findings = await database_doctor.examine(connection)
            findings.append(await database_doctor.of_questions(connection, settings.question_url))
            if any(each.topic == "schema" and each.level == "ok" for each in findings):
                findings += await source_doctor.examine(connection, at_source=True)
        findings.append(database_doctor.of_clients(settings))
        findings += pipeline_doctor.examine(settings.lake.location)
        print_result(findings, findings_view(findings), json=json)
        if any(finding.level == "fail" for finding in findings):
            raise typer.Exit(1)

    run(work())


# ------------------------------------------------------------------------ for people


def status_view(status: Status) -> Group:
    log = status.log
    facts = Grid.grid(padding=(0, 2))
    facts.add_row(
        "log", f"{log.id}, {short_size(log.bytes)}, retention {short_period(log.retention)}"
    )
    facts.add_row("position", log.position)
    facts.add_row("oldest change", f"{log.oldest:%Y-%m-%d %H:%M:%S}" if log.oldest else "none")
    facts.add_row("readers", f"{log.readers}" + (", polling" if log.polling else ""))
    if (wal := status.wal_capture) is not None:
        state = "running" if wal.running else "not running: readers of the log wait"
        facts.add_row("WAL capture", f"{state}, {wal.behind_bytes:,} bytes behind ({wal.state})")
    parts: list[RenderableType] = [facts, "", _tables(status), "", _cursors(status)]
    if status.sources:
        parts += ["", sources_view(status.sources)]
    if status.lagging:
        parts += ["", _lagging(status)]
    if status.pipeline:
        parts += ["", _pipeline(status)]
    if status.pipeline and status.spark_log:
        parts.append(Text(f"The output of Spark is in {status.spark_log}", style="dim"))
    return Group(*parts)


def _tables(status: Status) -> Grid | Text:
    if not status.tables:
        return Text("No table is enabled. Enable one: headwater enable TABLE", style="dim")
    grid = Grid("table", "state", "relations", "changes in the last hour", box=None)
    for table in status.tables:
        if not table.exists:
            state = Text("dropped", style="red")
        elif not table.enabled:
            state = Text("disabled: subscriptions get no updates", style="yellow")
        elif table.altered:
            state = Text("altered, captured more slowly", style="yellow")
        else:
            state = Text("captured", style="green")
        if table.left_out:
            state.append(
                f", without virtual column{'s' * (len(table.left_out) > 1)}"
                f" {', '.join(table.left_out)}",
                style="yellow",
            )
        grid.add_row(table.name, state, str(table.members), str(table.changes))
    return grid


def _lagging(status: Status) -> Grid:
    grid = Grid("lagging live query", "table", "role", "since", box=None)
    for view in status.lagging:
        name = f"{view.view} at gateway {view.gateway}"
        grid.add_row(name, view.table, view.role or "–", f"{view.since:%Y-%m-%d %H:%M:%S}")
    return grid


def _cursors(status: Status) -> Grid | Text:
    if not status.cursors:
        return Text("No cursor is saved.", style="dim")
    grid = Grid("cursor", "position", "behind", "retention left", box=None)
    for cursor in status.cursors:
        left = short_period(cursor.left) if cursor.left is not None else "–"
        grid.add_row(
            cursor.name,
            str(cursor.position),
            short_period(cursor.lag) if cursor.lag is not None else "nothing",
            Text("lost: resync needed", style="bold red") if cursor.lost else left,
        )
    return grid


def _pipeline(status: Status) -> Grid:
    grid = Grid("pipeline", "state", "behind", "changes/s", "last error", box=None)
    for stream in status.pipeline:
        behind = "–"
        if stream.behind_changes is not None and stream.behind_seconds is not None:
            age = short_period(timedelta(seconds=round(stream.behind_seconds)))
            behind = (
                f"{stream.behind_changes} changes, {age}" if stream.behind_changes else "nothing"
            )
        grid.add_row(
            stream.name,
            Text(stream.state, style=_STATE_STYLES.get(stream.state, "dim")),
            _task(stream) or behind,
            f"{stream.processed_rate:,.0f}",
            Text(stream.error or "", style="red"),
        )
    return grid


def _task(stream: PipelineStream) -> str:
    """What a stream is busy with: `reading 3 tables: 40 %, 2 min left`."""
    if stream.task is None:
        return ""
    text = stream.task
    if stream.task_total:
        text += f": {100 * (stream.task_done or 0) // stream.task_total} %"
    if stream.task_seconds_left is not None:
        text += f", {short_period(timedelta(seconds=round(stream.task_seconds_left)))} left"
    return text


def findings_view(findings: list[Finding]) -> Grid:
    grid = Grid.grid(padding=(0, 2))
    for finding in findings:
        detail = Text(finding.detail)
        if finding.hint:
            detail.append(f"\n{finding.hint}", style="dim")
        level = Text(finding.level, style=_LEVEL_STYLES[finding.level])
        grid.add_row(level, Text(finding.topic, style="bold"), detail)
    return grid
