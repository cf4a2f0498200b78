"""Commands that show the shop from a terminal: for the page, and for the output of the demo."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from headwater.embedded import binaries


class TerminalCommands(msgspec.Struct, frozen=True):
    """The commands on the page, and the folder of the lake. Without a pipeline there is no lake."""

    psql: str
    tail: str
    lake: str | None
    as_of: str | None
    """The page replaces `{moment}` by a time."""


def commands(url: str, lake: str | None) -> TerminalCommands:
    """The commands for the database at `url` and its lake."""
    return TerminalCommands(psql(url), tail(url), lake, as_of(lake, "{moment}") if lake else None)


def lines(home: str, url: str) -> list[str]:
    """The addresses and commands that are printed when the demo has started."""
    return [
        f"page       {home}/demo/",
        f"console    {home}/demo/console.html",
        f"database   {psql(url)}",
        f"changes    {tail(url)}",
    ]


def psql(url: str) -> str:
    return f"{shlex.quote(binaries.psql())} {shlex.quote(url)}"


def tail(url: str) -> str:
    return f"{_headwater()} tail orders --url {shlex.quote(url)}"


def as_of(lake: str, moment: str | None = None) -> str:
    """Prints the orders as they were at `moment`; by default, at a time a few seconds from now,
    which has passed when a person types the command."""
    soon = f"{datetime.now(UTC) + timedelta(seconds=5):%Y-%m-%d %H:%M:%S}"
    return f"{_headwater()} asof orders '{moment or soon}' --lake {shlex.quote(lake)}"


def _headwater() -> str:
    """The program `headwater`: its name if it is on the path, else its path from this folder."""
    if shutil.which("headwater"):
        return "headwater"
    return shlex.quote(os.path.relpath(Path(sys.executable).parent / "headwater"))
