"""What a setting is called in the file, in the environment and in a call; where old names went.

The setting `port` of the group `gateway` is `port` in the section `[gateway]` of the file,
`HEADWATER_GATEWAY_PORT` in the environment and `Headwater(gateway_port=…)` in a call.

>>> SETTINGS["gateway_port"].label, SETTINGS["gateway_port"].variable
('[gateway] port', 'HEADWATER_GATEWAY_PORT')
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from headwater.errors import ConfigError
from headwater.settings.groups import Group, Settings

SEE = "docs/reference/settings.md lists all settings."

_RENAMED = {
    "lake": "lake_location",
    "reconcile_interval": "live_reconcile",
    "retention": "log_retention",
}
"""Old names that are not the name of exactly one setting in a group."""

_DERIVED = {
    "activity": "a gateway reports its activity every two seconds",
    "presence_period": "it is a third of [gateway] presence_timeout",
}
"""Old names of what cannot be set any more."""


class Setting(NamedTuple):
    """One setting, by its names."""

    group: type[Group] | None
    name: str
    type: Any
    default: Any

    @property
    def label(self) -> str:
        """Its name in messages."""
        return self.name if self.group is None else self.group.label(self.name)

    @property
    def is_list(self) -> bool:
        return isinstance(self.default, tuple)

    @property
    def keyword(self) -> str:
        return self.name if self.group is None else f"{self.group.section}_{self.name}"

    @property
    def variable(self) -> str:
        return variable(self.keyword)


def variable(keyword: str) -> str:
    """The environment variable of a keyword."""
    return f"HEADWATER_{keyword.upper()}"


SOURCE = "source"
"""The keyword of `[source.NAME]`: not one setting, but a table for each source."""

LAKE_TABLE = "lake_table"
"""The keyword of `[lake.table.NAME]`: a table for each table of the lake that has options."""


def _settings(group: type[Group] | None = None) -> Iterator[Setting]:
    for field in msgspec.structs.fields(group or Settings):
        own = field.name if group is None else f"{group.section}_{field.name}"
        if own in (SOURCE, LAKE_TABLE):
            continue
        if isinstance(field.default, Group):
            yield from _settings(field.type)
        else:
            yield Setting(group, field.name, field.type, field.default)


SETTINGS = {setting.keyword: setting for setting in _settings()}
"""Every setting, by its keyword."""

GROUPS: dict[str, type[Group]] = {
    setting.group.section: setting.group for setting in SETTINGS.values() if setting.group
}

_NEW_GROUPS = ("log", "live", "gateway", "limits")
"""Groups whose settings had no prefix before there were groups."""

OLD_NAMES = {name for section in _NEW_GROUPS for name in GROUPS[section].__struct_fields__}
OLD_NAMES -= {SETTINGS[keyword].name for keyword in _RENAMED.values()}
OLD_NAMES |= {"admin_claim", *_RENAMED, *_DERIVED}
OLD_NAMES -= SETTINGS.keys()
"""Names of earlier versions. A variable with one of them is an error, because it would have no
effect."""


def unknown(given: str, name: str) -> ConfigError:
    """The error for `name`, which is not the name of a setting; with the new name, if there is
    one."""
    if name in _DERIVED:
        return ConfigError(f"{given}: this is no setting any more: {_DERIVED[name]}", hint=SEE)
    if places := _places(name):
        new = " or ".join(f"{each.label}, {each.variable}" for each in places)
        keywords = " or ".join(f"{each.keyword}=…" for each in places)
        return ConfigError(
            f"{given}: this setting is in a group now: {new}", hint=f"In Python: {keywords}. {SEE}"
        )
    if name in GROUPS:
        example = SETTINGS[f"{name}_{GROUPS[name].__struct_fields__[0]}"]
        return ConfigError(
            f"{given}: this is a group of settings",
            hint=f"Give its settings one by one, such as {example.label} in headwater.toml or, in"
            f" Python, {example.keyword}=…. {SEE}",
        )
    return ConfigError(f"{given}: there is no such setting", hint=SEE)


def _places(name: str) -> list[Setting]:
    """The settings that were probably meant."""
    keyword = _RENAMED.get(name, name)
    if keyword in SETTINGS:
        return [SETTINGS[keyword]]
    return [setting for setting in SETTINGS.values() if setting.name == name]
