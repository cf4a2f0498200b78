"""The program `headwater`: runs a command; errors become a message, a hint and an exit code.

Commands that only ask a lake are answered by a running pipeline in less time than it takes to load
all the others; so those are loaded for the others only.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.logging import RichHandler

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

if TYPE_CHECKING:
    from typer import Typer

QUICK = ("asof", "history", "audit")

err = Console(stderr=True, highlight=False)


def main() -> None:
    """Run a command and turn errors into a message, a hint and an exit code."""
    logging.basicConfig(
        level=logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=err, show_path=False, show_time=False)],
    )
    try:
        _chosen(sys.argv[1:2])()
    except HeadwaterError as error:
        _print_error(error, as_json="--json" in sys.argv)
        sys.exit(_exit_code(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has gone, as `head` does. Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _chosen(command: list[str]) -> Typer:
    if command and command[0] in QUICK:
        from headwater.lake_commands import app
    else:
        from headwater.cli import app
    return app


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


def _print_error(error: HeadwaterError, *, as_json: bool) -> None:
    if as_json:
        from headwater import render

        document = {"error": {"code": error.code, "message": str(error), "hint": error.hint}}
        print(render.as_json(document), file=sys.stderr)
        return
    err.print(f"error: {error}", style="red", markup=False)
    if error.hint:
        err.print(f"hint: {error.hint}", markup=False)
