"""The pipeline that `headwater serve --with-pipeline` starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.app import Headwater
from headwater.commands.serve import pipeline_process
from headwater.settings import load_settings
from headwater.settings.groups import LakeSettings
from headwater.settings.names import SETTINGS, Setting
from headwater.settings.tables import TableEntry
from tests.unit.settings.test_loading import two_values, variable

LAKE = [setting for setting in SETTINGS.values() if setting.group is LakeSettings]

columns = st.lists(st.sampled_from("abc"), max_size=2)
table_options = st.fixed_dictionaries(
    {}, optional={name: columns for name in TableEntry.__struct_fields__ if name != "hash"}
).filter(
    lambda entry: (
        not (entry.get("include") and entry.get("exclude"))
        and len(used := [*entry.get("exclude", ()), *entry.get("mask", ())]) == len(set(used))
    )
)


def values(setting: Setting) -> st.SearchStrategy[Any]:
    return st.sampled_from([*two_values(setting), *([[]] if setting.is_list else ())])


def some_settings() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={each.keyword: values(each) for each in LAKE})


@given(
    in_file=some_settings(),
    in_environment=some_settings(),
    tables=st.dictionaries(st.sampled_from(["orders", "sales.lines"]), table_options),
)
def test_the_pipeline_has_the_lake_settings_of_the_gateway(
    in_file: dict[str, Any], in_environment: dict[str, Any], tables: dict[str, dict[str, list[str]]]
) -> None:
    environment = {"HEADWATER_URL": "postgresql://"}
    for keyword, value in in_environment.items():
        environment |= variable(SETTINGS[keyword], value)
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        write(Path(name), in_file, tables)
        patch.chdir(name)
        patch.setattr(os, "environ", environment)
        hw = Headwater()
        process = pipeline_process(hw, None, json=False)
        found = load_settings(environment=process.environment).lake
        expected = hw.settings.lake
        assert os.path.realpath(found.location) == os.path.realpath(expected.location)
        assert msgspec.structs.replace(found, location=expected.location) == expected


def write(folder: Path, lake: dict[str, Any], tables: dict[str, dict[str, list[str]]]) -> None:
    lines = [
        "[lake]",
        *(f"{SETTINGS[key].name} = {json.dumps(value)}" for key, value in lake.items()),
    ]
    for name, options in tables.items():
        lines.append(f"[lake.table.{json.dumps(name)}]")
        lines += [f"{option} = {json.dumps(value)}" for option, value in options.items()]
    (folder / "headwater.toml").write_text("\n".join(lines))
