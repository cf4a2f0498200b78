"""Settings: from the call, else the environment (`HEADWATER_…`), else `headwater.toml`.

>>> parse_duration("90 days")
datetime.timedelta(days=90)
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from headwater.errors import ConfigError
from headwater.limits import MAINTENANCE_SECONDS

FILE_NAME = "headwater.toml"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every setting, with its default. docs/reference/settings.md is the page about them."""

    url: str | None = None
    """The database. Without one, `Headwater()` uses the embedded PostgreSQL."""

    data_dir: str | None = None
    """Where the embedded PostgreSQL keeps its data."""

    retention: str | None = None
    """How long the log keeps a change. Kept in the database; left as it is there unless given."""

    maintenance: str = f"{MAINTENANCE_SECONDS:.0f} seconds"
    """How often retention and altered tables are looked after."""

    @property
    def retention_period(self) -> timedelta | None:
        return None if self.retention is None else parse_duration(self.retention, name="retention")

    @property
    def maintenance_period(self) -> timedelta:
        return parse_duration(self.maintenance, name="maintenance")


def load_settings(
    *,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Settings:
    """The settings in force. Overrides that are None do not count."""
    environment = os.environ if environment is None else environment
    values = _from_file((folder or Path.cwd()) / FILE_NAME)
    for name in Settings.__struct_fields__:
        if text := environment.get(f"HEADWATER_{name.upper()}"):
            values[name] = text
    values |= {name: value for name, value in (overrides or {}).items() if value is not None}
    try:
        settings = msgspec.convert(values, Settings)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"wrong setting: {error}", hint="docs/reference/settings.md lists them all."
        ) from error
    # Say what is wrong at once, not when it is first used.
    _ = settings.retention_period, settings.maintenance_period
    return settings


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} is not valid TOML: {error}") from error


_UNITS = {
    "s": 1,
    "second": 1,
    "m": 60,
    "minute": 60,
    "h": 3600,
    "hour": 3600,
    "d": 86400,
    "day": 86400,
}


def parse_duration(text: str, *, name: str = "duration") -> timedelta:
    """A length of time as people write it: `30 days`, `12h`, `90 seconds`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)s?\s*", text)
    unit = _UNITS.get(match[2]) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{name}: {text!r} is not a length of time",
            hint="Write a number and a unit: 30 days, 12h, 90 seconds.",
        )
    period = timedelta(seconds=float(match[1]) * unit)
    if period < timedelta(seconds=1):
        raise ConfigError(f"{name}: {text!r} is too short", hint="One second is the least.")
    return period
