"""The command line. Each command: an example in its help, `--json`, an exit code that tells.

0 done · 1 an error · 2 wrong usage or settings · 3 the database cannot be reached · 4 resync needed

What takes long to import, and only one command needs, is imported there: the others start without.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import AsyncGenerator
from contextlib import (
    AbstractAsyncContextManager,
    aclosing,
    nullcontext,
)
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from headwater import __version__, lake_commands, pipeline_commands, render, replay_commands
from headwater import child as child_
from headwater.app import Headwater, database
from headwater.capture.postgres import doctor as doctor_
from headwater.capture.postgres import schema, triggers
from headwater.command_options import DataDir, Embedded, Json, LakeFolder, Url, settings_for
from headwater.command_work import chosen_headwater, connected, err, load, out, run, say, show
from headwater.demo import command as demo_command
from headwater.embedded import EmbeddedPostgres
from headwater.errors import ConfigError, InvalidQuery
from headwater.live.filter_text import parse_conditions
from headwater.live.order import OrderBy
from headwater.live.query import LiveQuery
from headwater.logs import log_as_json
from headwater.model import Position, Transaction
from headwater.pipeline import doctor as pipeline_doctor
from headwater.pipeline.views import catalog as view_catalog
from headwater.queries.statements import Executed, Statement
from headwater.settings import Settings
from headwater.status import status as read_status

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from headwater.client.connection import Connection as GatewayConnection
    from headwater.queries.analysis import Analysis

app = typer.Typer(
    name="headwater",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(lake_commands.app)
app.add_typer(replay_commands.app)
app.add_typer(demo_command.app)
app.add_typer(pipeline_commands.pipeline, name="pipeline")
app.add_typer(pipeline_commands.views, name="view")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headwater {__version__}")
        raise typer.Exit


@app.callback()
def every_command(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Turn a database into live data."""


@app.command()
def url(
    url: Url = None, embedded: Embedded = False, data_dir: DataDir = None, json: Json = False
) -> None:
    """Print the connection URL, for psql and drivers. An embedded server runs until
    `headwater stop`.

    Example: `psql "$(headwater url --embedded)"`
    """

    async def work() -> None:
        settings = settings_for(url, embedded, data_dir)
        async with database(settings, keep_running=True) as found:
            if settings.url is not None:
                say({"url": found}, found, json=json)
                return
            command = " ".join(("headwater stop --embedded", *_folder_option(data_dir)))
            say({"url": found, "stop": command}, found, json=json)
        if not json:
            err.print(f"The server runs until: {command}", markup=False, soft_wrap=True)

    run(work())


def _folder_option(data_dir: str | None) -> tuple[str, ...]:
    return () if data_dir is None else ("--data-dir", shlex.quote(data_dir))


@app.command()
def stop(
    force: Annotated[
        bool, typer.Option("--force", help="Also while it is used: its clients are cut off.")
    ] = False,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Stop an embedded server that `headwater url` left running.

    Example: `headwater stop --embedded`
    """
    if not embedded:
        raise ConfigError(
            "only the embedded PostgreSQL is Headwater's to stop", hint="headwater stop --embedded"
        )
    server = EmbeddedPostgres(settings_for(None, embedded, data_dir).data_dir)
    stopped = server.stop(force=force)
    text = "Stopped the server of" if stopped else "No server runs in"
    document = {"stopped": stopped, "data_dir": str(server.data_dir)}
    say(document, f"{text} {server.data_dir}.", json=json)


@app.command()
def init(
    url: Url = None, embedded: Embedded = False, data_dir: DataDir = None, json: Json = False
) -> None:
    """Install Headwater's schema in the database, or upgrade it. Safe to run again.

    Example: `headwater init --url postgresql://localhost/shop`
    """

    async def work() -> None:
        settings = settings_for(url, embedded, data_dir)
        async with connected(settings, installed=False) as connection:
            applied = await schema.install(connection)
        text = (
            f"Installed version {schema.LATEST} of the schema headwater."
            if applied
            else f"The schema headwater is there already, in version {schema.LATEST}."
        )
        say({"version": schema.LATEST, "applied": applied}, text, json=json)

    run(work())


Tables = Annotated[list[str], typer.Argument(metavar="TABLE…", help="One or more tables.")]


@app.command()
def enable(
    tables: Tables,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Capture the changes of tables from now on. Safe to run again.

    Example: `headwater enable orders sales.invoices '"Order Lines"'`
    """

    async def work() -> None:
        async with connected(settings_for(url, embedded, data_dir)) as connection:
            await schema.install(connection)
            for name in tables:
                label = await triggers.enable(connection, name)
                say({"table": label, "enabled": True}, f"Capturing {label}.", json=json)

    run(work())


@app.command()
def disable(
    tables: Tables,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Stop capturing the changes of tables. Subscriptions stay and wait.

    Example: `headwater disable orders`
    """

    async def work() -> None:
        async with connected(settings_for(url, embedded, data_dir)) as connection:
            await schema.require(connection)
            for name in tables:
                label = await triggers.disable(connection, name)
                text = f"No longer capturing {label}; subscriptions to it wait."
                say({"table": label, "enabled": False}, text, json=json)

    run(work())


@app.command()
def status(
    lake: LakeFolder = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show the log, the captured tables, the cursors and the readers.

    Example: `headwater status --json`
    """

    async def work() -> None:
        settings = settings_for(url, embedded, data_dir, lake)
        async with connected(settings) as connection:
            await schema.require(connection)
            found = await read_status(connection, settings.lake)
        show(found, render.status_view(found), json=json)

    run(work())


@app.command()
def doctor(
    url: Url = None, embedded: Embedded = False, data_dir: DataDir = None, json: Json = False
) -> None:
    """Check the database and the pipeline: what is missing for which feature.

    Exits with 1 when something keeps Headwater from working.

    Example: `headwater doctor --url postgresql://localhost/shop`
    """

    async def work() -> None:
        settings = settings_for(url, embedded, data_dir)
        async with connected(settings) as connection:
            findings = await doctor_.examine(connection)
            findings.append(await doctor_.of_questions(connection, settings.question_url))
        findings.append(doctor_.of_clients(settings))
        findings = [*findings, *pipeline_doctor.examine(settings.lake)]
        show(findings, render.findings_view(findings), json=json)
        if any(finding.level == "fail" for finding in findings):
            raise typer.Exit(1)

    run(work())


@app.command()
def tail(
    tables: Annotated[
        list[str] | None, typer.Argument(metavar="[TABLE…]", help="All tables when none is given.")
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="POSITION", help="Begin after this position.")
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Only rows that match, before or after: 'region = 7'. Several must all hold.",
        ),
    ] = None,
    cursor: Annotated[
        str | None, typer.Option(metavar="NAME", help="Go on where this cursor left off.")
    ] = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show changes as they are committed, until Ctrl-C.

    Example: `headwater tail orders --where 'amount > 100' --json`
    """

    async def work() -> None:
        position = _position(since)
        only = parse_conditions(where) if where else None
        settings = settings_for(url, embedded, data_dir)
        async with Headwater(settings=settings) as hw:
            if not json:
                err.print(f"Following {', '.join(tables or ['every table'])}. Ctrl-C ends it.")
            feed = hw.changes(*(tables or []), where=only, since=position, cursor=cursor)
            await _print_changes(feed, json=json)

    run(work())


@app.command()
def watch(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="The table to watch.")],
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Only rows that match: 'amount > 100'. Several must all hold.",
        ),
    ] = None,
    order: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Order by this: 'amount desc'. May be repeated."),
    ] = None,
    limit: Annotated[int, typer.Option(help="At most so many rows.")] = 20,
    columns: Annotated[
        str | None, typer.Option(metavar="A,B,…", help="Only these columns, and the key.")
    ] = None,
    gateway: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Watch through this gateway instead of the database."),
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="HEADWATER_TOKEN", help="The token for the gateway.")
    ] = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show the rows of a live query as they are, and as they change, until Ctrl-C.

    Example: `headwater watch orders --where 'amount > 100' --order 'amount desc'`
    """
    from headwater.client.connection import connect as connect_gateway
    from headwater.hub.hub import Hub
    from headwater.watch import link_to

    async def work() -> None:
        query = LiveQuery(
            table,
            where=parse_conditions(where or ()),
            order=tuple(map(OrderBy.parse, order or ())),
            limit=limit,
            columns=tuple(name.strip() for name in columns.split(",")) if columns else None,
        )
        if gateway is not None:
            if url is not None or embedded:
                raise ConfigError(
                    "--gateway and a database contradict each other", hint="Give one of them."
                )
            connecting = connect_gateway(gateway, token=token)
            await _watch(connecting, query, json=json)
            return
        settings = settings_for(url, embedded, data_dir)
        async with Headwater(settings=settings) as hw, Hub(hw.url) as hub:
            await _watch(connect_gateway("local", transport=link_to(hub)), query, json=json)

    run(work())


@app.command()
def explain(
    query: Annotated[
        str, typer.Argument(metavar="QUERY", help="SQL, or the name of a query of the application.")
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME=VALUE…]", help="What the query is called with."),
    ] = None,
    program: Annotated[
        str | None,
        typer.Option("--app", metavar="MODULE:NAME", help="The application that has the query."),
    ] = None,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Show what a query reads: which changes make it run again.

    Example: `headwater explain 'select * from orders where region = 7'`, or for a query of yours
    `headwater explain open_orders region=7 --app shop:hw`
    """

    async def work() -> None:
        if not any(map(str.isspace, query.strip())):
            found = await _explain_function(query, arguments or [], program)
        elif arguments or program is not None:
            raise ConfigError(
                "SQL takes no arguments and needs no application",
                hint="Write values into the statement, or $1, $2, … in their place.",
            )
        else:
            found = await _explain_sql(query, settings_for(url, embedded, data_dir))
        documents = [render.explained(*each) for each in found]
        if json:
            for document in documents:
                print(render.as_json(document))
        else:
            out.print(render.explained_view(documents))

    run(work())


async def _explain_sql(sql: str, settings: Settings) -> list[tuple[Executed, Analysis]]:
    from headwater.queries import explain as explain_

    async with database(settings) as url:
        found = await explain_.analyse(url, [Executed(Statement(sql))])
    for _, analysis in found:
        if analysis.refused is not None:
            raise InvalidQuery(f"the database cannot take this: {analysis.refused}")
    return found


async def _explain_function(
    name: str, arguments: list[str], program: str | None
) -> list[tuple[Executed, Analysis]]:
    """The statements that a query of the application runs, each with what it reads."""
    from headwater.queries import explain as explain_

    if program is None:
        raise ConfigError(
            f"{name!r} is not SQL, and no application is given",
            hint="Give the statement in quotes, 'select …', or the application: --app shop:hw",
        )
    hw = load(program)
    query = hw.queries.get(name)
    if query is None:
        known = ", ".join(hw.queries) or "none"
        raise ConfigError(f"{program} has no query {name!r}", hint=f"It has: {known}.")
    values = dict(map(_argument, arguments))
    seconds = hw.settings.query_timeout_period.total_seconds()
    async with database(hw.settings) as url:
        return await explain_.explain(url, query, query.bind(values), seconds)


def _argument(text: str) -> tuple[str, Any]:
    """`region=7` or `name=ann`: a value is JSON, or else the text itself."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} is not an argument", hint="Write NAME=VALUE: region=7")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


async def _watch(connecting: GatewayConnection, query: LiveQuery, *, json: bool) -> None:
    from headwater.watch import watch_as_lines, watch_on_screen

    def print_line(line: str) -> None:
        print(line, flush=True)

    async with connecting as connection:
        live = connection.live(query)
        if out.is_terminal and not json:
            await watch_on_screen(connection, live, f"{query.table}, live. Ctrl-C ends it", out)
        else:
            await watch_as_lines(live, print_line, json=json)


async def _print_changes(feed: AsyncGenerator[Transaction, None], *, json: bool) -> None:
    async with aclosing(feed):
        async for transaction in feed:
            for change in transaction.changes:
                if json:
                    print(render.change_as_json(change, transaction))
                else:
                    out.print(render.change_line(change))
            sys.stdout.flush()


def _position(text: str | None) -> Position | None:
    try:
        return Position.parse(text) if text is not None else None
    except ValueError as error:
        raise ConfigError(
            f"--since: {error}", hint="headwater status prints the present position."
        ) from error


@app.command()
def serve(
    program: Annotated[
        str | None,
        typer.Argument(help="A Headwater object of yours, as module:name; else one as configured."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="The port to listen on; 0 for any.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Let everybody who can reach it read everything.")
    ] = False,
    with_pipeline: Annotated[
        bool, typer.Option("--with-pipeline", help="Run the data pipeline beside it.")
    ] = False,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Serve queries, mutations, live queries and change feeds, until Ctrl-C.

    Example: `headwater serve --embedded --port 8484`
    """
    from headwater.gateway import server
    from headwater.gateway.app import LocalOnly

    if json:
        log_as_json()
    if with_pipeline:
        child_.require()

    async def work() -> None:
        hw = chosen_headwater(program, url, embedded, data_dir)
        settings = hw.settings
        address = host or settings.host
        asgi: ASGIApp = hw.asgi()
        if settings.has_auth or insecure:
            pass
        elif _is_local(address):
            asgi = LocalOnly(asgi)
        else:
            raise ConfigError(
                f"no authentication is configured, and {address} can be reached by others",
                hint="Set auth_secret, auth_public_key or auth_jwks; --insecure serves everybody.",
            )

        def ready(bound: int) -> None:
            where = f"http://{address if ':' not in address else f'[{address}]'}:{bound}"
            if json:
                print(render.as_json({"url": where}), flush=True)
            else:
                out.print(f"Serving {where}  (Ctrl-C stops)", markup=False)

        async with hw:
            assert hw.gateway is not None
            async with _pipeline_beside(hw, program, json=json) if with_pipeline else nullcontext():
                await server.serve(
                    asgi,
                    host=address,
                    port=settings.port if port is None else port,
                    drain=settings.drain_period.total_seconds(),
                    on_stopping=hw.gateway.stop,
                    ready=ready,
                    deflate=bool(settings.compression),
                )

    run(work(), server.new_event_loop)


def _pipeline_beside(
    hw: Headwater, program: str | None, *, json: bool
) -> AbstractAsyncContextManager[None]:
    """The pipeline as a child, for the same application, database, lake and settings."""

    def say(line: str) -> None:
        print(line if json and line.startswith("{") else f"pipeline │ {line}", file=sys.stderr)

    chosen = msgspec.structs.asdict(hw.settings).items()
    same = {
        f"HEADWATER_{name.upper()}": str(value)
        for name, value in chosen
        if name.startswith("lake_") and value is not None
    }
    options = [*(("--app", program) if program else ()), *(("--json",) if json else ())]
    lake = child_.absolute(hw.settings.lake)
    return child_.kept_running(child_.Child(hw.url, lake, say, options=options, settings=same))


def _is_local(address: str) -> bool:
    try:
        return address == "localhost" or ip_address(address).is_loopback
    except ValueError:
        return False


@app.command()
def uninstall(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Remove the schema headwater, its log and its triggers. Your tables stay untouched, and so do
    those of streaming views, which are named.

    Example: `headwater uninstall --yes`
    """
    if not yes:
        typer.confirm("Remove Headwater's log, cursors and triggers from the database?", abort=True)

    async def work() -> None:
        settings = settings_for(url, embedded, data_dir)
        async with connected(settings, installed=False) as connection:
            staying = await view_catalog.tables_of_views(connection)
            removed = await schema.uninstall(connection)
        text = "Removed." if removed else "Headwater was not installed."
        if staying:
            text += (
                f"\nThe tables of streaming views stay, as they are: {', '.join(staying)}."
                f"\nTo remove them, too: drop table {', '.join(staying)};"
            )
        say({"removed": removed, "tables_of_views": staying}, text, json=json)

    run(work())
