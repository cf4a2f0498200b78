"""Every command of the command line, found by walking the tree of the program itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from headwater.commands.cli import app


def commands_of(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_of(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


COMMANDS = dict(commands_of(get_command(app)))


def options_of(command: str) -> set[str]:
    parameters = COMMANDS[command].params
    names = {name for p in parameters for name in (*p.opts, *p.secondary_opts)}
    return {name for name in names if name.startswith("--")} | {"--help"}
