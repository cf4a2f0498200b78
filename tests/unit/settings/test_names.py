"""The names of settings; old names are refused, and the error has the new name."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from headwater.errors import ConfigError
from headwater.settings import Settings, load_settings
from headwater.settings.names import LAKE_TABLE, SETTINGS, SOURCE
from tests.support.paths import ROOT

BEFORE = (
    "url", "question_url", "data_dir", "retention", "maintenance", "coalesce", "topic_window",
    "query_timeout", "mutation_timeout", "mutation_retention", "query_concurrency",
    "mutation_connections", "query_sweep", "reconcile_interval", "query_cache_bytes",
    "query_cache_entry_bytes", "replica_url", "replica_wait", "lake", "lake_interval",
    "lake_vacuum", "lake_snapshots", "lake_retention", "host", "port", "origins", "trusted_proxies",
    "compression", "keepalive", "drain", "recheck", "sessions_per_user", "sessions_per_ip",
    "subscriptions_per_user", "bytes_per_user", "bytes_total", "requests_per_second",
    "publishes_per_second", "presence_period", "presence_timeout", "auth_secret", "auth_public_key",
    "auth_jwks", "auth_algorithms", "auth_audience", "auth_issuer", "auth_leeway",
    "auth_user_claim", "auth_tenant_claim", "auth_tenants", "auth_role_claim", "auth_roles",
    "auth_role", "auth_cookie", "admin_claim", "tables", "feed_history", "metrics", "metrics_token",
    "openapi", "activity",
)  # fmt: skip
"""The names of all settings before there were groups."""

MOVED = {
    "lake": "lake_location",
    "reconcile_interval": "live_reconcile",
    "retention": "log_retention",
    "presence_period": None,
    "activity": None,
}
"""Old names whose new keyword is not found by the rule, and what is derived now."""


BARE = sorted({setting.name for setting in SETTINGS.values()} - SETTINGS.keys())


def new_names(old: str) -> list[str]:
    """The new keywords of an old name, or of one without its group."""
    if old in MOVED:
        return [moved] if (moved := MOVED[old]) else []
    if old in SETTINGS:
        return [old]
    return [name for name, setting in SETTINGS.items() if setting.name == old]


def refused(error: ConfigError, given: str, old: str) -> bool:
    """Whether an error refuses an old name, and has the new one."""
    new = [SETTINGS[name] for name in new_names(old)]
    if not new:
        return str(error).startswith(f"{given}: this is no setting any more: ")
    places = " or ".join(f"{each.label}, {each.variable}" for each in new)
    in_python = all(f"{each.keyword}=…" in (error.hint or "") for each in new)
    return str(error) == f"{given}: this setting is in a group now: {places}" and in_python


def test_one_rule_gives_every_name() -> None:
    names = {*SETTINGS, SOURCE}
    groups = [field for field in msgspec.structs.fields(Settings) if field.name not in names]
    assert " ".join(field.name for field in groups) == (
        "log live query mutation replica lake sources gateway limits auth"
    )
    for field in groups:
        assert field.type.section == field.name
    own = ["url", "question_url", "data_dir"]
    grouped = [f"{f.name}_{name}" for f in groups for name in f.type.__struct_fields__]
    grouped.remove(LAKE_TABLE)
    assert list(SETTINGS) == own + grouped, "two settings have one name"
    assert (SETTINGS["auth_secret"].label, SETTINGS["url"].label) == ("[auth] secret", "url")


@pytest.mark.parametrize("old", sorted({*BEFORE, *BARE}))
def test_an_old_name_is_refused_with_the_new_one(old: str, tmp_path: Path) -> None:
    if old not in SETTINGS:  # as a keyword and in the environment, which are flat
        with pytest.raises(ConfigError) as in_call:
            load_settings(overrides={old: "closed"}, environment={}, folder=tmp_path)
        assert refused(in_call.value, old, old)
        name = f"HEADWATER_{old.upper()}"
        if old in BEFORE:
            with pytest.raises(ConfigError) as in_environment:
                load_settings(environment={name: "closed"}, folder=tmp_path)
            assert refused(in_environment.value, name, old)
        else:  # it never was a setting, so it may be a variable of another program
            assert load_settings(environment={name: "closed"}, folder=tmp_path) == Settings()
        assert load_settings(environment={name: ""}, folder=tmp_path) == Settings()
    if old not in ("url", "question_url", "data_dir"):
        (tmp_path / "headwater.toml").write_text(f'{old} = "closed"')
        with pytest.raises(ConfigError) as in_file:
            load_settings(environment={}, folder=tmp_path)
        assert refused(in_file.value, old, old)


def test_a_name_that_stays_means_the_same() -> None:
    stays = [name for name in BEFORE if name in SETTINGS]
    own = ["url", "question_url", "data_dir"]
    groups = ("query_", "mutation_", "replica_", "lake_", "auth_")
    assert [name for name in stays if name not in own] == [
        name for name in BEFORE if name.startswith(groups)
    ]


def test_a_setting_of_another_group(tmp_path: Path) -> None:
    (tmp_path / "headwater.toml").write_text('[gateway]\nsecret = "closed"')
    with pytest.raises(ConfigError) as caught:
        load_settings(environment={}, folder=tmp_path)
    assert refused(caught.value, "[gateway] secret", "secret")
    (tmp_path / "headwater.toml").write_text('[gateway]\nurl = "postgresql://db"')
    with pytest.raises(ConfigError, match=r"\[gateway\] url: this setting is in no group") as below:
        load_settings(environment={}, folder=tmp_path)
    assert below.value.hint == "Write it above the first section of the file."


@pytest.mark.parametrize("section", ["log", "gateway", "auth"])
def test_a_group_is_not_a_setting(section: str, tmp_path: Path) -> None:
    (tmp_path / "headwater.toml").write_text(f'{section} = "on"')
    with pytest.raises(ConfigError, match=f"^{section}: this is a group of settings$") as caught:
        load_settings(environment={}, folder=tmp_path)
    assert f"[{section}] " in (caught.value.hint or "")
    with pytest.raises(ConfigError, match=f"^{section}: this is a group of settings$"):
        load_settings(overrides={section: {}}, environment={}, folder=tmp_path)


def test_no_source_and_no_page_uses_an_old_name() -> None:
    old = {f"HEADWATER_{name.upper()}" for name in {*BEFORE, *BARE} - SETTINGS.keys()}
    folders = ("src", "docs", "examples", "benchmarks", "clients/js/src", "clients/js/tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    assert len(files) > 400
    for path in files:
        if path.suffix in (".py", ".md", ".js", ".toml") and path.name != "settings.md":
            used = set(re.findall(r"\bHEADWATER_[A-Z_]+\b", path.read_text()))
            assert not used & old, f"{path}: {used & old}"
