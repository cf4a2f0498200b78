"""Commands that run the data pipeline and look after it: `pipeline …`, and `view …`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
import typer

from headwater import child as child_
from headwater import lake_commands, render
from headwater.app import database
from headwater.capture.postgres import schema
from headwater.command_options import (
    DataDir,
    Embedded,
    Json,
    LakeFolder,
    Url,
    settings_for,
    spark_needed,
)
from headwater.command_work import chosen_headwater, connected, err, run, say, show
from headwater.database import connect
from headwater.errors import ConfigError
from headwater.logs import log_as_json
from headwater.pipeline.views import catalog as view_catalog
from headwater.settings import load_settings

pipeline = typer.Typer(
    help="The data pipeline: every change into a Delta lake, on Spark.", no_args_is_help=True
)


@pipeline.command("run")
def pipeline_run(
    once: Annotated[
        bool, typer.Option("--once", help="Take everything that is there, and end.")
    ] = False,
    master: Annotated[
        str | None, typer.Option(help="The Spark cluster; else this machine's cores.")
    ] = None,
    program: Annotated[
        str | None,
        typer.Option("--app", metavar="MODULE:NAME", help="The application whose views to keep."),
    ] = None,
    lake: LakeFolder = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Answer Prometheus on this port of 127.0.0.1.")
    ] = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Write every change to the lake, exactly once, and keep the views of an application, until
    Ctrl-C.

    Example: `headwater pipeline run --lake /var/lib/shop/lake --app shop:hw`
    """
    with spark_needed():
        from headwater.pipeline import application, session, spark_log
    if json:
        log_as_json()
    child_.end_with_parent()

    async def work() -> None:
        hw = chosen_headwater(program, url, embedded, data_dir)
        settings = msgspec.structs.replace(hw.settings, lake=lake or hw.settings.lake)
        async with database(settings) as found:
            connection = await connect(found, purpose="cli")
            await schema.require(connection)
            await connection.close()
            if not json:
                log = spark_log.of_lake(settings.lake, session.spark_folder())
                err.print(f"Writing to {settings.lake}. Ctrl-C ends it.", markup=False)
                err.print(f"What Spark prints is in {log}.", markup=False, soft_wrap=True)
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
            say(msgspec.to_builtins(stream), text, json=json)

    run(work())


@pipeline.command("warm")
def pipeline_warm(json: Json = False) -> None:
    """Make an archive of the classes that Spark loads, so that it starts faster on this machine.

    Example: `headwater pipeline warm`
    """
    child_.require()
    from headwater.pipeline import session, warming

    if not json:
        err.print("Running Spark once, to see what it loads. This takes about a minute …")
    made = warming.warm(session.spark_folder()).path
    size = made.stat().st_size
    text = f"Spark now starts from {made} ({size // 1_000_000} MB)."
    say({"archive": str(made), "bytes": size}, text, json=json)


@pipeline.command("resnapshot")
def pipeline_resnapshot(
    lake: LakeFolder = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Go on from now, where the log was trimmed past the lake or the database was restored.

    Every captured table is read anew. The lake keeps what it has, and knows what it misses.

    Example: `headwater pipeline resnapshot --lake /var/lib/shop/lake`
    """
    with spark_needed():
        from headwater.pipeline.gaps import Gap
        from headwater.pipeline.lake import Lake
        from headwater.pipeline.renewal import resnapshot

    async def work() -> None:
        settings = settings_for(url, embedded, data_dir, lake)
        opened = Lake(settings.lake)
        async with database(settings) as found:
            for done in await asyncio.to_thread(lambda: list(resnapshot(opened, found))):
                if isinstance(done, Gap):
                    text = f"The lake misses what happened between {done.since} and {done.until}."
                elif done.error is not None:
                    text = f"{done.table}: {done.error}"
                else:
                    text = f"{done.table}: {done.rows} rows at {done.position}."
                say(_document(done), text, json=json)

    run(work())


def _document(value: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


@pipeline.command("compact")
def pipeline_compact(lake: LakeFolder = None, json: Json = False) -> None:
    """Join the small files of the lake. A running pipeline does it by itself, now and then.

    Example: `headwater pipeline compact --lake /var/lib/shop/lake`
    """
    with spark_needed():
        from headwater.pipeline import maintenance

    for done in maintenance.compact(lake or load_settings().lake):
        text = f"{done.table}: {done.files_before} files, now {done.files_after}."
        say(msgspec.to_builtins(done), text, json=json)


@pipeline.command("vacuum")
def pipeline_vacuum(
    lake: LakeFolder = None,
    keep: Annotated[
        str | None, typer.Option(metavar="TIME", help="Spare what is younger: '7 days'.")
    ] = None,
    json: Json = False,
) -> None:
    """Remove files that no longer belong to the lake. A running pipeline does it once a day.

    Example: `headwater pipeline vacuum --keep '7 days'`
    """
    with spark_needed():
        from headwater.pipeline import maintenance

    settings = load_settings(overrides={"lake": lake, "lake_vacuum": keep})
    for done in maintenance.vacuum(settings.lake, settings.lake_vacuum_period):
        say(msgspec.to_builtins(done), f"{done.table}: {done.removed} files removed.", json=json)


@pipeline.command("trim")
def pipeline_trim(
    lake: LakeFolder = None,
    keep: Annotated[
        str | None, typer.Option(metavar="TIME", help="Keep events of this time: '90 days'.")
    ] = None,
    json: Json = False,
) -> None:
    """Remove events whose retention is over. A running pipeline does it once a day.

    Example: `headwater pipeline trim --keep '90 days'`
    """
    with spark_needed():
        from headwater.pipeline import retention

    settings = load_settings(overrides={"lake": lake, "lake_retention": keep})
    period = settings.lake_retention_period
    if period is None:
        raise ConfigError(
            "the lake keeps its events for ever: there is no lake_retention",
            hint="Say how long: --keep '90 days', or lake_retention in headwater.toml.",
        )
    with lake_commands.opened(settings.lake) as found:
        done = retention.trim(found, period)
    text = f"{done.days} days and {done.snapshots} snapshots removed."
    if done.held:
        text += f" Older events are kept for want of a later snapshot of: {', '.join(done.held)}."
    say(msgspec.to_builtins(done), text, json=json)


views = typer.Typer(
    help="Streaming views: tables that the pipeline keeps up to date.", no_args_is_help=True
)
ViewName = Annotated[str, typer.Argument(metavar="NAME", help="The view.")]


@views.command("list")
def view_list(
    url: Url = None, embedded: Embedded = False, data_dir: DataDir = None, json: Json = False
) -> None:
    """Show the streaming views: state, rows, position, error.

    Example: `headwater view list`
    """

    async def work() -> None:
        async with connected(settings_for(url, embedded, data_dir)) as connection:
            await schema.require(connection)
            found = await view_catalog.list_views(connection)
        show(found, render.views_view(found), json=json)

    run(work())


@views.command("rebuild")
def view_rebuild(
    name: ViewName,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Have a view built anew from its tables, by the pipeline that runs or by the next.

    Example: `headwater view rebuild revenue`
    """

    async def work() -> None:
        async with connected(settings_for(url, embedded, data_dir)) as connection:
            await schema.require(connection)
            await view_catalog.rebuild(connection, name)
        say({"view": name, "state": "due"}, f"The pipeline will build {name} anew.", json=json)

    run(work())


@views.command("drop")
def view_drop(
    name: ViewName,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Remove a view and its table. Take its function out of the application first.

    Example: `headwater view drop revenue`
    """
    if not yes:
        typer.confirm(f"Drop the view {name} and its table?", abort=True)

    async def work() -> None:
        async with connected(settings_for(url, embedded, data_dir)) as connection:
            await schema.require(connection)
            await view_catalog.drop(connection, name)
        say({"view": name, "dropped": True}, f"Dropped {name}.", json=json)

    run(work())
