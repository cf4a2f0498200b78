"""`pipeline …`: runs the data pipeline, and maintains its lake."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
import typer

from headwater.app import database
from headwater.capture.postgres import schema
from headwater.child_process import stop_with_parent
from headwater.commands.execution import chosen_application, run
from headwater.commands.lake.connection import open_lake
from headwater.commands.options import (
    DataDir,
    Embedded,
    Json,
    LakeFolder,
    Tables,
    Url,
    new_app,
    settings_for,
)
from headwater.commands.output import print_message, print_note, progress_bar
from headwater.database import connect
from headwater.errors import ConfigError, HeadwaterError
from headwater.limits import PIPELINE_PROCESS_STOP_SECONDS
from headwater.logs import log_as_json
from headwater.pipeline import packages
from headwater.settings import load_settings

app = new_app(help="Run the data pipeline, which writes every change to the lake, and maintain it.")


@app.command("run")
def run_pipeline(
    once: Annotated[
        bool, typer.Option("--once", help="Write all changes up to now, and stop.")
    ] = False,
    master: Annotated[
        str | None, typer.Option(help="The Spark cluster; default: the cores of this machine.")
    ] = None,
    program: Annotated[
        str | None,
        typer.Option(
            "--app", metavar="MODULE:NAME", help="The application whose streaming views to update."
        ),
    ] = None,
    lake: LakeFolder = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help="Serve Prometheus metrics on this port of 127.0.0.1."),
    ] = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Write every change to the lake, exactly once, and update the streaming views of an
    application, until Ctrl-C.

    Example: `headwater pipeline run --lake /var/lib/shop/lake --app shop:hw`
    """
    packages.require()
    from headwater.pipeline import application
    from headwater.pipeline.spark import log_file, session

    session.refuse_connect(master)
    if json:
        log_as_json()
    stop_with_parent(PIPELINE_PROCESS_STOP_SECONDS)

    async def work() -> None:
        hw = chosen_application(program, url, embedded, data_dir)
        settings = hw.settings
        if lake is not None:
            elsewhere = msgspec.structs.replace(settings.lake, location=lake)
            settings = msgspec.structs.replace(settings, lake=elsewhere)
        async with database(settings) as found:
            connection = await connect(found, purpose="cli")
            await schema.require(connection)
            await connection.close()
            if not json:
                log = log_file.of_lake(settings.lake.location, session.spark_folder())
                print_note(f"Writing to {settings.lake.location}. Stop with Ctrl-C.")
                print_note(f"The output of Spark is in {log}.")
            streams = await application.run(
                found,
                settings,
                once=once,
                master=master,
                metrics_port=metrics_port,
                views=hw.views.values(),
            )
        for stream in streams:
            text = f"{stream.name}: {stream.changes} changes, at {stream.position or 'the start'}"
            print_message(msgspec.to_builtins(stream), text, json=json)

    run(work())


@app.command()
def warm(json: Json = False) -> None:
    """Make Spark start faster on this machine: store the classes that it loads in an archive.

    Example: `headwater pipeline warm`
    """
    packages.require()
    from headwater.pipeline.spark import class_archive, session

    if not json:
        print_note("Running Spark once to record what it loads. This takes about a minute …")
    made = class_archive.warm(session.spark_folder()).path
    size = made.stat().st_size
    text = f"Spark now starts from {made} ({size // 1_000_000} MB)."
    print_message({"archive": str(made), "bytes": size}, text, json=json)


@app.command()
def snapshot(
    tables: Tables,
    lake: LakeFolder = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Read captured tables as they are now, and store their rows in the lake.

    Example: `headwater pipeline snapshot orders --lake /var/lib/shop/lake`
    """
    packages.require()

    async def work() -> None:
        settings = settings_for(url, embedded, data_dir, lake)
        async with database(settings) as found:
            await asyncio.to_thread(_read_tables, settings.lake.location, found, tables, json)

    run(work())


def _read_tables(folder: str, url: str, tables: list[str], json: bool) -> None:
    """Read tables, and print each when it is in the lake. The error of the first that failed is
    raised when the others are read."""
    from headwater.pipeline.lake.snapshots import TableSnapshot
    from headwater.pipeline.snapshots.table_reads import FailedTable, ReadProgress

    failures: list[HeadwaterError] = []
    with open_lake(folder) as target, progress_bar("Reading", shown=not json) as show:
        for outcome in target.snapshots_of(url, tables):
            match outcome:
                case TableSnapshot():
                    name = target.label_of(outcome.relation)
                    document = {"table": name, "rows": outcome.rows, "position": outcome.position}
                    text = f"{name}: stored {outcome.rows:,} rows at {outcome.position}."
                    print_message(document, text, json=json)
                case FailedTable():
                    failures.append(outcome.error)
                case ReadProgress():
                    show(outcome.bytes_done, outcome.bytes, outcome.seconds_left)
    for error in failures:
        raise error


@app.command()
def resnapshot(
    lake: LakeFolder = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Continue from now when the log no longer has the changes that the lake needs next, or when
    the database was restored from a backup.

    Every captured table is read again. The lake keeps its data and records what is missing.

    Example: `headwater pipeline resnapshot --lake /var/lib/shop/lake`
    """
    packages.require()
    from headwater.pipeline.jobs.resnapshot import resnapshot as resnapshot_lake
    from headwater.pipeline.lake.gaps import LakeGap

    def work_in(folder: str, found: str) -> list[Any]:
        with open_lake(folder) as target:
            return list(resnapshot_lake(target, found))

    async def work() -> None:
        settings = settings_for(url, embedded, data_dir, lake)
        async with database(settings) as found:
            for done in await asyncio.to_thread(work_in, settings.lake.location, found):
                if isinstance(done, LakeGap):
                    text = f"The lake has no changes between {done.since} and {done.until}."
                elif done.error is not None:
                    text = f"{done.table}: {done.error}"
                else:
                    text = f"{done.table}: {done.rows} rows at {done.position}."
                print_message(_document(done), text, json=json)

    run(work())


def _document(value: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


@app.command()
def compact(lake: LakeFolder = None, json: Json = False) -> None:
    """Merge the small files of the lake. A running pipeline does this from time to time.

    Example: `headwater pipeline compact --lake /var/lib/shop/lake`
    """
    packages.require()
    from headwater.pipeline.compaction import tables
    from headwater.pipeline.spark.session import any_session

    root = lake or load_settings().lake.location
    for done in tables.compact(root, lambda: any_session(root)):
        text = f"{done.table}: {done.files_before} files, now {done.files_after}."
        print_message(msgspec.to_builtins(done), text, json=json)


@app.command()
def vacuum(
    lake: LakeFolder = None,
    keep: Annotated[
        str | None, typer.Option(metavar="TIME", help="Keep files that are younger: '7 days'.")
    ] = None,
    json: Json = False,
) -> None:
    """Remove files that the lake no longer uses. A running pipeline does this once a day.

    Example: `headwater pipeline vacuum --keep '7 days'`
    """
    packages.require()
    from headwater.pipeline.lake import maintenance

    settings = load_settings(overrides={"lake_location": lake, "lake_vacuum": keep})
    for done in maintenance.vacuum(settings.lake.location, settings.lake.vacuum_period):
        print_message(
            msgspec.to_builtins(done), f"{done.table}: {done.removed} files removed.", json=json
        )


@app.command()
def trim(
    lake: LakeFolder = None,
    keep: Annotated[
        str | None, typer.Option(metavar="TIME", help="Keep events that are younger: '90 days'.")
    ] = None,
    json: Json = False,
) -> None:
    """Remove events that are older than the retention. A running pipeline does this once a day.

    Example: `headwater pipeline trim --keep '90 days'`
    """
    packages.require()
    from headwater.pipeline.jobs.trim import trim as trim_lake

    settings = load_settings(overrides={"lake_location": lake, "lake_retention": keep})
    period = settings.lake.retention_period
    if period is None:
        raise ConfigError(
            "the lake keeps its events for ever: [lake] retention is not set",
            hint="Give a time: --keep '90 days', or [lake] retention in headwater.toml.",
        )
    with open_lake(settings.lake.location) as found:
        done = trim_lake(found, period)
    text = f"{done.days} days and {done.snapshots} snapshots removed."
    if done.held:
        text += (
            f" Older events of these tables stay, until a later snapshot: {', '.join(done.held)}."
        )
    print_message(msgspec.to_builtins(done), text, json=json)
