"""Where a setting comes from: the file, the environment, the call."""

from __future__ import annotations

import json
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from headwater.errors import ConfigError
from headwater.settings import Settings, load_settings, make_settings
from headwater.settings.names import SETTINGS, Setting
from tests.unit.settings.test_groups import DURATIONS

VALUES: dict[str, list[Any]] = {
    "live_coalesce": ["50ms/200ms", "10ms/20ms"],
    "live_topic_window": ["16 ms", "17 ms"],
    "gateway_origins": [["https://a.example", "https://b.example"], ["*"]],
    "gateway_trusted_proxies": [["10.0.0.0/8", "unix"], ["2001:db8::1"]],
    "gateway_compression": [["gzip", "zstd"], ["br"]],
    "gateway_metrics_token": ["m" * 32, "n" * 32],
    "lake_tables_secret": ["s" * 32, "t" * 32],
    "auth_secret": ["s" * 32, "t" * 32],
    "auth_public_key": ["-----BEGIN ONE", "-----BEGIN TWO"],
    "auth_jwks": ["https://one.example/keys", "https://two.example/keys"],
    "auth_algorithms": [["HS256", "ES256"], ["RS256"]],
}
"""Two values of each setting that does not take any text, any time, or the next number."""


every_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


def two_values(setting: Setting) -> list[Any]:
    if setting.keyword in VALUES:
        return VALUES[setting.keyword]
    if setting.keyword in DURATIONS:
        return ["5 days", "6 days"]
    if get_origin(setting.type) is Literal:
        return list(get_args(setting.type)[-2:])
    if setting.type is bool:
        return [False, True]
    if setting.type is int:
        return [setting.default + 1, setting.default + 2]
    return [["one", "another"], ["third"]] if setting.is_list else ["one", "two"]


def key_for(setting: Setting) -> dict[str, str]:
    """Some settings need a key beside them."""
    is_key = setting.keyword in ("auth_secret", "auth_public_key", "auth_jwks")
    return {} if is_key else {"auth_secret": "k" * 32}


def value_of(settings: Settings, setting: Setting) -> Any:
    group = settings if setting.group is None else getattr(settings, setting.group.section)
    return getattr(group, setting.name)


def write(folder: Path, setting: Setting, value: Any) -> None:
    section = f"[{setting.group.section}]\n" if setting.group else ""
    (folder / "headwater.toml").write_text(f"{section}{setting.name} = {json.dumps(value)}\n")


def variable(setting: Setting, value: Any) -> dict[str, str]:
    group = f"{setting.group.section}_" if setting.group else ""
    text = ", ".join(value) if isinstance(value, list) else str(value)
    return {f"HEADWATER_{group}{setting.name}".upper(): text}


def keyword(setting: Setting, value: Any) -> dict[str, Any]:
    group = f"{setting.group.section}_" if setting.group else ""
    return {f"{group}{setting.name}": value}


def test_defaults(tmp_path: Path) -> None:
    assert load_settings(environment={}, folder=tmp_path) == Settings() == make_settings({})


@every_setting
def test_file_environment_and_call_give_the_same(setting: Setting, tmp_path: Path) -> None:
    key = key_for(setting)
    for value in two_values(setting):
        called = load_settings(
            overrides=key | keyword(setting, value), environment={}, folder=tmp_path
        )
        assert value_of(called, setting) == (tuple(value) if setting.is_list else value)
        environment = variable(setting, value)
        assert load_settings(overrides=key, environment=environment, folder=tmp_path) == called
        write(tmp_path, setting, value)
        assert load_settings(overrides=key, environment={}, folder=tmp_path) == called
        (tmp_path / "headwater.toml").unlink()


@every_setting
def test_the_call_goes_before_the_environment_and_that_before_the_file(
    setting: Setting, tmp_path: Path
) -> None:
    key, (one, two) = key_for(setting), two_values(setting)
    write(tmp_path, setting, one)

    def loaded(environment: dict[str, str], called: Any) -> Any:
        overrides = key | keyword(setting, called)
        found = load_settings(overrides=overrides, environment=environment, folder=tmp_path)
        value = value_of(found, setting)
        return list(value) if setting.is_list else value

    assert loaded({}, None) == one
    assert loaded(dict.fromkeys(variable(setting, one), ""), None) == one, "an empty one is none"
    assert loaded(variable(setting, two), None) == two
    assert loaded({}, two) == two
    assert loaded(variable(setting, two), one) == one


def test_lists_and_numbers_from_the_environment(tmp_path: Path) -> None:
    environment = {
        "HEADWATER_GATEWAY_TRUSTED_PROXIES": "10.0.0.0/8, 2001:db8::1,unix",
        "HEADWATER_LIMITS_SESSIONS_PER_USER": "3",
        "HEADWATER_GATEWAY_COMPRESSION": "gzip",
        "HEADWATER_AUTH_LEEWAY": "0s",
    }
    found = load_settings(environment=environment, folder=tmp_path)
    gateway = found.gateway
    assert gateway.trusted_proxies == ("10.0.0.0/8", "2001:db8::1", "unix")
    assert gateway.trusted_networks == (ip_network("10.0.0.0/8"), ip_network("2001:db8::1"))
    assert (found.limits.sessions_per_user, gateway.compression) == (3, ("gzip",))
    assert found.auth.leeway_period == timedelta()


def test_a_key_may_be_in_a_file_or_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("-----BEGIN PUBLIC KEY-----")
    in_file = load_settings(
        overrides={"auth_public_key": str(tmp_path / "key.pem")}, environment={}, folder=tmp_path
    )
    assert in_file.auth.public_key_text == "-----BEGIN PUBLIC KEY-----"
    environment = {"HEADWATER_AUTH_PUBLIC_KEY": r"-----BEGIN PUBLIC KEY-----\nMIIB"}
    in_one_line = load_settings(environment=environment, folder=tmp_path)
    assert in_one_line.auth.public_key_text == "-----BEGIN PUBLIC KEY-----\nMIIB"


def test_other_variables_are_allowed(tmp_path: Path) -> None:
    names = "TOKEN FUZZ FUZZ_STATEMENTS FAILPOINT PARENT KILLS STAGE VECTORS PEERS WARM_OUTPUT"
    environment = {f"HEADWATER_{name}": "1" for name in names.split()}
    assert load_settings(environment=environment | {"PORT": "1"}, folder=tmp_path) == Settings()


@every_setting
def test_a_value_of_another_type(setting: Setting, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as in_call:
        make_settings({setting.keyword: {"a": 1}})
    write(tmp_path, setting, [[1]])
    with pytest.raises(ConfigError) as in_file:
        load_settings(environment={}, folder=tmp_path)
    for caught in (in_call, in_file):
        assert str(caught.value).startswith(f"{setting.label}: ")
        assert caught.value.hint


def test_a_message_about_a_secret_does_not_contain_it(tmp_path: Path) -> None:
    for name in ("auth_secret", "gateway_metrics_token"):
        with pytest.raises(ConfigError) as caught:
            load_settings(overrides={name: "hunter2"}, environment={}, folder=tmp_path)
        assert "hunter2" not in f"{caught.value} {caught.value.hint}"


def test_the_tables_of_a_lake_have_options(tmp_path: Path) -> None:
    def loaded(text: str) -> Settings:
        (tmp_path / "headwater.toml").write_text(text)
        return load_settings(environment={}, folder=tmp_path)

    secret = f'[lake]\ntables_secret = "{"s" * 32}"\n'
    found = loaded(f'{secret}[lake.table.orders]\nmask = ["card"]\nhash = ["email"]\n')
    assert found.lake.table["orders"].mask == ("card",)
    assert found.lake.table["orders"].hash == ("email",)
    found = loaded('[lake.table.orders]\ninclude = ["card", "note"]\nmask = ["card"]\n')
    assert found.lake.table["orders"].include == ("card", "note")
    for text, message in [
        ('[lake.table.orders]\nhash = ["a"]', "hash: a secret is needed"),
        ('[lake.table.orders]\nhide = ["a"]', "unknown field `hide`"),
        ('[lake.table.orders]\ninclude = "a"', "Expected `array`, got `str`"),
        (
            '[lake.table.orders]\ninclude = ["a"]\nexclude = ["b"]',
            r"^\[lake.table.orders\]: include and exclude are both set$",
        ),
        ('[lake.table.orders]\nmask = ["a"]\nexclude = ["a"]', "a is named twice"),
        ("[lake]\ntable = 5", "expected one table for each table"),
        ('[lake]\ntables = "often"', "'often' is not a length of time"),
    ]:
        with pytest.raises(ConfigError, match=message):
            loaded(text)
