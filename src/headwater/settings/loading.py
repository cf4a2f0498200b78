"""Reads settings: from the call, else the environment, else the file, else the default.

A name in the file or in the call that is no setting is an error, and so is a variable with the name
that a setting had before. Other variables that begin with `HEADWATER_` are ignored: commands and
tests have some of their own, and Kubernetes adds more.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from headwater.errors import ConfigError
from headwater.settings.groups import Settings
from headwater.settings.names import (
    GROUPS,
    LAKE_TABLE,
    OLD_NAMES,
    SEE,
    SETTINGS,
    SOURCE,
    Setting,
    unknown,
    variable,
)
from headwater.settings.sources import read_sources
from headwater.settings.tables import read_tables

FILE_NAME = "headwater.toml"


def load_settings(
    *,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Settings:
    """The settings in force. Overrides are by keyword; those that are None do not count."""
    values = dict(_from_file((folder or Path.cwd()) / FILE_NAME))
    values |= _from_environment(os.environ if environment is None else environment)
    values |= {name: value for name, value in (overrides or {}).items() if value is not None}
    return make_settings(values)


def make_settings(values: Mapping[str, Any]) -> Settings:
    """The settings with these values by keyword, such as `gateway_port`. No file and no environment
    is read."""
    own, groups = dict[str, Any](), {section: dict[str, Any]() for section in GROUPS}
    for keyword, value in values.items():
        if keyword == SOURCE:
            own[SOURCE] = read_sources(value)
            continue
        if keyword == LAKE_TABLE:
            groups["lake"]["table"] = read_tables(value)
            continue
        setting = SETTINGS.get(keyword)
        if setting is None:
            raise unknown(keyword, keyword)
        place = own if setting.group is None else groups[setting.group.section]
        place[setting.name] = _converted(setting, value)
    own |= {section: GROUPS[section](**given) for section, given in groups.items()}
    return Settings(**own)


def _converted(setting: Setting, value: Any) -> Any:
    try:
        return msgspec.convert(value, setting.type, strict=False)
    except msgspec.ValidationError as error:
        is_choice = get_origin(setting.type) is Literal
        hint = f"Use: {', '.join(get_args(setting.type))}." if is_choice else SEE
        raise ConfigError(f"{setting.label}: {error}", hint=hint) from error


# ------------------------------------------------------------------------ the environment


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """By keyword. An empty variable counts as none."""
    for name in sorted(OLD_NAMES):
        if environment.get(variable(name)):
            raise unknown(variable(name), name)
    for keyword, setting in SETTINGS.items():
        if text := environment.get(setting.variable):
            yield keyword, _split(text) if setting.is_list else text


def _split(text: str) -> list[str]:
    """A list in an environment variable: `a, b`."""
    return [item.strip() for item in text.split(",") if item.strip()]


# ------------------------------------------------------------------------ the file


def _from_file(path: Path) -> Iterator[tuple[str, Any]]:
    """By keyword."""
    for name, value in _read(path).items():
        if name in GROUPS and isinstance(value, dict):
            yield from _from_section(name, value)
        elif name == SOURCE or (name in SETTINGS and SETTINGS[name].group is None):
            yield name, value
        else:
            raise unknown(name, name)


def _from_section(section: str, values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        keyword, label = f"{section}_{name}", GROUPS[section].label(name)
        if keyword == LAKE_TABLE:
            yield keyword, value
            continue
        if keyword not in SETTINGS and name in SETTINGS and SETTINGS[name].group is None:
            raise ConfigError(
                f"{label}: this setting is in no group",
                hint="Write it above the first section of the file.",
            )
        if keyword not in SETTINGS and section == "sources" and isinstance(value, dict):
            raise ConfigError(
                f"[sources.{name}]: there is no such group",
                hint=f"A source is written [source.{name}], without the s.",
            )
        if keyword not in SETTINGS:
            raise unknown(label, name)
        yield keyword, value


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path.name} is not valid TOML: {error}") from error
