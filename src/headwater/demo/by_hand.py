"""What a visitor may type: commands that look at the shop from outside, as they work from here."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from headwater.embedded import binaries


class About(msgspec.Struct, frozen=True):
    """Commands for the visitor of the page. Without a pipeline there is no lake to ask."""

    psql: str
    tail: str
    lake: str | None
    as_of: str | None
    """With `{moment}` for the moment to look at."""


def about(url: str, lake: str | None) -> About:
    """The commands for a shop."""
    return About(psql(url), tail(url), lake, as_of(lake, "{moment}") if lake else None)


def lines(home: str, url: str) -> list[str]:
    """Where the shop is, and how to look inside."""
    return [
        f"the page   {home}/demo/",
        f"console    {home}/demo/console.html",
        f"join in    {psql(url)}",
        f"changes    {tail(url)}",
    ]


def psql(url: str) -> str:
    return f"{shlex.quote(binaries.psql())} {shlex.quote(url)}"


def tail(url: str) -> str:
    return f"{_headwater()} tail orders --url {shlex.quote(url)}"


def as_of(lake: str, moment: str | None = None) -> str:
    """The orders at a moment; without one, at one that has just come."""
    soon = f"{datetime.now(UTC) + timedelta(seconds=5):%Y-%m-%d %H:%M:%S}"
    return f"{_headwater()} asof orders '{moment or soon}' --lake {shlex.quote(lake)}"


def _headwater() -> str:
    """The command as it can be called from this folder."""
    if shutil.which("headwater"):
        return "headwater"
    return shlex.quote(os.path.relpath(Path(sys.executable).parent / "headwater"))
