"""`serve`: a gateway, and on request the data pipeline in a child process."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.app import Headwater
from headwater.child_process import supervised
from headwater.commands.execution import chosen_application, run
from headwater.commands.options import LIVE_PANEL, DataDir, Embedded, Json, Url
from headwater.commands.output import as_json, out
from headwater.errors import ConfigError
from headwater.logs import log_as_json
from headwater.pipeline import packages
from headwater.pipeline.process import PipelineProcess, absolute_lake

if TYPE_CHECKING:
    from starlette.types import ASGIApp

app = typer.Typer()


@app.command(rich_help_panel=LIVE_PANEL)
def serve(
    program: Annotated[
        str | None,
        typer.Argument(
            help="Your Headwater object, as module:name; default: one made from the settings."
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="The address to listen on.")] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, help="The port to listen on; 0 for any free port."),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Serve without authentication on an address that others can reach."
        ),
    ] = False,
    with_pipeline: Annotated[
        bool, typer.Option("--with-pipeline", help="Run the data pipeline in a child process.")
    ] = False,
    url: Url = None,
    embedded: Embedded = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Serve queries, mutations, live queries and change feeds, until Ctrl-C.

    Example: `headwater serve --embedded --port 8484`
    """
    from headwater.gateway.http import server

    if json:
        log_as_json()
    if with_pipeline:
        packages.require()

    async def work() -> None:
        hw = chosen_application(program, url, embedded, data_dir)
        settings = hw.settings
        address = host or settings.gateway.host
        asgi = _guarded(hw, address, insecure=insecure)

        def ready(bound: int) -> None:
            where = f"http://{address if ':' not in address else f'[{address}]'}:{bound}"
            if json:
                print(as_json({"url": where}), flush=True)
            else:
                out.print(f"Serving {where}  (Ctrl-C stops)", markup=False)

        async with hw:
            assert hw.gateway is not None
            process = pipeline_process(hw, program, json=json)
            async with supervised(process, "pipeline") if with_pipeline else nullcontext():
                await server.serve(
                    asgi,
                    host=address,
                    port=settings.gateway.port if port is None else port,
                    drain=settings.gateway.drain_period.total_seconds(),
                    on_stopping=hw.gateway.stop,
                    ready=ready,
                    deflate=bool(settings.gateway.compression),
                )

    run(work(), server.new_event_loop)


def _guarded(hw: Headwater, address: str, *, insecure: bool) -> ASGIApp:
    """The gateway's application. Without authentication it serves only this machine."""
    from headwater.gateway.http.app import LocalOnly

    if hw.settings.auth.has_key or insecure:
        return hw.asgi()
    if _is_local(address):
        return LocalOnly(hw.asgi())
    raise ConfigError(
        f"no authentication is configured, and others can reach {address}",
        hint="Set [auth] secret, public_key or jwks, or allow all clients: --insecure.",
    )


def _is_local(address: str) -> bool:
    try:
        return address == "localhost" or ip_address(address).is_loopback
    except ValueError:
        return False


def pipeline_process(hw: Headwater, program: str | None, *, json: bool) -> PipelineProcess:
    """The pipeline for the application, database and lake of the gateway. It reads the other
    settings itself, from the same folder and environment: a variable cannot hold them all."""

    def print_line(line: str) -> None:
        print(line if json and line.startswith("{") else f"pipeline │ {line}", file=sys.stderr)

    options = [*(("--app", program) if program else ()), *(("--json",) if json else ())]
    lake = absolute_lake(hw.settings.lake.location)
    return PipelineProcess(hw.url, lake, print_line, options=options)
