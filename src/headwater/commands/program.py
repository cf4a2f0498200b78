"""The entry point of `headwater`: runs a command, and turns an error into a message, a hint and an
exit code; with `--json` into one line of JSON.

A running pipeline answers `asof`, `history` and `audit` in less time than it takes to import all
other commands. So the other commands are imported only when they are needed.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn, cast

import typer
from rich.logging import RichHandler

from headwater.commands.output import as_json, err
from headwater.errors import (
    ConfigError,
    ConnectionFailed,
    DatabaseError,
    HeadwaterError,
    InvalidQuery,
    PermissionMissing,
    ResyncRequired,
    Unavailable,
)
from headwater.logs import log_as_json

if TYPE_CHECKING:
    from typer import Typer

QUICK = ("asof", "history", "audit")

_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
"""The base class of usage errors, which Typer does not export."""


def main() -> None:
    """Run the command of `sys.argv` and exit with its code."""
    json = "--json" in sys.argv
    if json:
        log_as_json(logging.WARNING)
    else:
        handler = RichHandler(console=err, show_path=False, show_time=False)
        logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    if sys.argv[1:3] == ["pipeline", "run"]:
        _begin_spark(sys.argv[3:])
    try:
        # Otherwise Typer prints usage errors itself, as text for people.
        sys.exit(_chosen(sys.argv[1:2])(prog_name="headwater", standalone_mode=not json))
    except HeadwaterError as error:
        _print_error(error, json=json)
        sys.exit(_exit_code(error))
    except _UsageError as error:
        _print_error(_explained(error), json=json)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):
            _exit_without_reader()
        raise
    except BrokenPipeError:
        _exit_without_reader()


def _begin_spark(options: list[str]) -> None:
    """Start Spark's Java for a pipeline before everything else is imported. A pipeline with other
    settings than expected, or none at all, does not use it."""
    # Whatever is wrong, the command itself says it.
    with suppress(Exception):
        from headwater.pipeline.spark.early import begin

        begin(options)


def _exit_without_reader() -> NoReturn:
    """The program that reads our output has ended, as `head` does. Python must not print an error
    at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(141)


def _chosen(command: list[str]) -> Typer:
    if command and command[0] in QUICK:
        from headwater.commands.lake.queries import app
    else:
        from headwater.commands.cli import app
    return app


def _explained(error: typer.BadParameter) -> ConfigError:
    """A usage error of Typer as a ConfigError."""
    command = error.ctx.command_path if error.ctx else "headwater"
    return ConfigError(error.format_message(), hint=f"{command} --help shows what it accepts.")


def _exit_code(error: HeadwaterError) -> int:
    match error:
        case ConfigError() | InvalidQuery():
            return 2
        case ResyncRequired():
            return 4
        case PermissionMissing():
            return 1
        case DatabaseError() | ConnectionFailed() | Unavailable():
            return 3
    return 1


def _print_error(error: HeadwaterError, *, json: bool) -> None:
    if json:
        document = {"error": {"code": error.code, "message": str(error), "hint": error.hint}}
        print(as_json(document), file=sys.stderr)
        return
    err.print(f"error: {error}", style="red", markup=False)
    if error.hint:
        err.print(f"hint: {error.hint}", markup=False)
