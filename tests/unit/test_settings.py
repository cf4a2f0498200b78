"""Where a setting comes from, what it is called there, and the errors for wrong ones."""

from __future__ import annotations

import json
from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest

from headwater.errors import ConfigError
from headwater.settings import Settings, load_settings, make_settings
from headwater.settings.durations import parse_duration
from headwater.settings.groups import GatewaySettings, LogSettings
from headwater.settings.names import SETTINGS, Setting

VALUES: dict[str, list[Any]] = {
    "live_coalesce": ["50ms/200ms", "10ms/20ms"],
    "live_topic_window": ["16 ms", "17 ms"],
    "gateway_origins": [["https://a.example", "https://b.example"], ["*"]],
    "gateway_trusted_proxies": [["10.0.0.0/8", "unix"], ["2001:db8::1"]],
    "gateway_compression": [["gzip", "zstd"], ["br"]],
    "gateway_metrics_token": ["m" * 32, "n" * 32],
    "auth_secret": ["s" * 32, "t" * 32],
    "auth_public_key": ["-----BEGIN ONE", "-----BEGIN TWO"],
    "auth_jwks": ["https://one.example/keys", "https://two.example/keys"],
    "auth_algorithms": [["HS256", "ES256"], ["RS256"]],
}
"""Two values of each setting that does not take any text, any time, or the next number."""

DURATIONS = (
    "log_retention", "log_maintenance", "live_topic_window", "live_reconcile", "query_timeout",
    "query_sweep", "mutation_timeout", "mutation_retention", "replica_wait", "lake_interval",
    "lake_vacuum", "lake_retention", "gateway_keepalive", "gateway_drain", "gateway_recheck",
    "gateway_feed_history", "gateway_presence_timeout", "auth_leeway",
)  # fmt: skip

every_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


def two_values(setting: Setting) -> list[Any]:
    default = value_of(Settings(), setting)
    if setting.keyword in VALUES:
        return VALUES[setting.keyword]
    if setting.keyword in DURATIONS:
        return ["5 days", "6 days"]
    if get_origin(setting.type) is Literal:
        return list(get_args(setting.type)[-2:])
    if setting.type is int:
        return [default + 1, default + 2]
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


# ------------------------------------------------------------------------ names and sources


def test_one_rule_gives_every_name() -> None:
    groups = [field for field in msgspec.structs.fields(Settings) if field.name not in SETTINGS]
    assert " ".join(field.name for field in groups) == (
        "log live query mutation replica lake gateway limits auth"
    )
    for field in groups:
        assert field.type.section == field.name
    own = ["url", "question_url", "data_dir"]
    grouped = [f"{f.name}_{name}" for f in groups for name in f.type.__struct_fields__]
    assert list(SETTINGS) == own + grouped, "two settings have one name"
    assert (SETTINGS["auth_secret"].label, SETTINGS["url"].label) == ("[auth] secret", "url")


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


# ------------------------------------------------------------------------ old names

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
    """Whether an error refuses what is given by an old name, and says the new one."""
    new = [SETTINGS[name] for name in new_names(old)]
    if not new:
        return str(error).startswith(f"{given}: this is no setting any more: ")
    places = " or ".join(f"{each.label}, {each.variable}" for each in new)
    in_python = all(f"{each.keyword}=…" in (error.hint or "") for each in new)
    return str(error) == f"{given}: this setting is in a group now: {places}" and in_python


@pytest.mark.parametrize("old", sorted({*BEFORE, *BARE}))
def test_an_old_name_is_refused_and_the_new_one_said(old: str, tmp_path: Path) -> None:
    if old not in SETTINGS:  # as a keyword and in the environment, which are flat
        with pytest.raises(ConfigError) as in_call:
            load_settings(overrides={old: "closed"}, environment={}, folder=tmp_path)
        assert refused(in_call.value, old, old)
        name = f"HEADWATER_{old.upper()}"
        with pytest.raises(ConfigError) as in_environment:
            load_settings(environment={name: "closed"}, folder=tmp_path)
        assert refused(in_environment.value, name, old)
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


def test_other_variables_are_allowed(tmp_path: Path) -> None:
    names = "TOKEN FUZZ FUZZ_STATEMENTS FAILPOINT PARENT KILLS STAGE VECTORS PEERS WARM_OUTPUT"
    environment = {f"HEADWATER_{name}": "1" for name in names.split()}
    assert load_settings(environment=environment | {"PORT": "1"}, folder=tmp_path) == Settings()


@pytest.mark.parametrize("section", ["log", "gateway", "auth"])
def test_a_group_is_no_setting(section: str, tmp_path: Path) -> None:
    (tmp_path / "headwater.toml").write_text(f'{section} = "on"')
    with pytest.raises(ConfigError, match=f"^{section}: this is a group of settings$") as caught:
        load_settings(environment={}, folder=tmp_path)
    assert f"[{section}] " in (caught.value.hint or "")
    with pytest.raises(ConfigError, match=f"^{section}: this is a group of settings$"):
        load_settings(overrides={section: {}}, environment={}, folder=tmp_path)


# ------------------------------------------------------------------------ wrong values


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


@pytest.mark.parametrize("name", DURATIONS)
def test_what_is_not_a_length_of_time(name: str) -> None:
    for value, problem in (("soon", "is not a length of time"), ("200000 days", "is too long")):
        with pytest.raises(ConfigError) as caught:
            make_settings({name: value})
        assert str(caught.value) == f"{SETTINGS[name].label}: {value!r} {problem}"


@pytest.mark.parametrize("name", [n for n, setting in SETTINGS.items() if setting.type is int])
def test_a_number_out_of_its_range(name: str) -> None:
    for value in (-1, 2**60):
        with pytest.raises(ConfigError) as caught:
            make_settings({name: value})
        assert str(caught.value).startswith(f"{SETTINGS[name].label}: {value} is not in ")


WRONG = [
    ('retenshun = "1 day"', "retenshun: there is no such setting"),
    ('[log]\nretenshun = "1 day"', "[log] retenshun: there is no such setting"),
    ('[logs]\nretention = "1 day"', "logs: there is no such setting"),
    ("url = 5", "url: Expected `str | null`, got `int`"),
    ("url = ", "headwater.toml is not valid TOML"),
    ('[log]\nretention = "0 days"', "[log] retention: '0 days' is too short"),
    ('[log]\nmaintenance = "-1 s"', "[log] maintenance: '-1 s' is not a length of time"),
    ('[live]\ntopic_window = "11 s"', "[live] topic_window: '11 s' is too long"),
    ('[live]\nreconcile = "never"', "[live] reconcile: 'never' is not a length of time"),
    ('[mutation]\nretention = "1 hour"', "[mutation] retention: '1 hour' is too short"),
    ('[lake]\nvacuum = "59 minutes"', "[lake] vacuum: '59 minutes' is too short"),
    ('[lake]\nretention = "23 hours"', "[lake] retention: '23 hours' is too short"),
    ("[gateway]\nport = 65536", "[gateway] port: 65536 is not in 0 … 65535"),
    ('[gateway]\nkeepalive = "0 s"', "[gateway] keepalive: '0 s' is too short"),
    ('[gateway]\nrecheck = "0.5 s"', "[gateway] recheck: '0.5 s' is too short"),
    ('[gateway]\ntables = "shut"', "[gateway] tables: Invalid enum value 'shut'"),
    ('[gateway]\npresence_timeout = "0.9 s"', "[gateway] presence_timeout: '0.9 s' is too short"),
    ('[gateway]\nmetrics_token = "short"', "[gateway] metrics_token: shorter than 32 bytes"),
    ('[gateway]\ntrusted_proxies = ["10.0.0.1/8"]', "[gateway] trusted_proxies: 10.0.0.1/8 has"),
    ('[gateway]\ntrusted_proxies = ["a.example"]', "[gateway] trusted_proxies: 'a.example' does"),
    ('[gateway]\ncompression = ["deflate"]', "[gateway] compression: there is no 'deflate'"),
    ('[gateway]\norigins = ["https://a.b/"]', "[gateway] origins: 'https://a.b/' is not an origin"),
    ('[gateway]\norigins = ["app.example"]', "[gateway] origins: 'app.example' is not an origin"),
    ("[limits]\nsessions_per_user = 0", "[limits] sessions_per_user: 0 is not in 1"),
    ("[limits]\nsessions_per_ip = 0", "[limits] sessions_per_ip: 0 is not in 1"),
    ("[limits]\nsubscriptions_per_user = 0", "[limits] subscriptions_per_user: 0 is not in 1"),
    ("[limits]\nrequests_per_second = 0", "[limits] requests_per_second: 0 is not in 1"),
    ("[limits]\npublishes_per_second = 0", "[limits] publishes_per_second: 0 is not in 1"),
    ("[limits]\nbytes_total = 1024", "[limits] bytes_total: 1024 is not in 1048576"),
    ('[auth]\nsecret = "short"', "[auth] secret: shorter than 32 bytes"),
    ('[auth]\npublic_key = "no.pem"', "[auth] public_key: cannot read 'no.pem': No such file"),
    ('[auth]\njwks = "missing.json"', "[auth] jwks: cannot read 'missing.json': No such file"),
    ('[auth]\njwks = "ftp://a/keys"', "[auth] jwks: neither a file nor a URL"),
    ('[auth]\njwks = "https://"', "[auth] jwks: neither a file nor a URL"),
    ('[auth]\nalgorithms = ["none"]', "[auth] algorithms: there is no 'none'"),
    ('[auth]\nuser_claim = ""', "[auth] user_claim: a name is needed"),
    ('[auth]\nadmin_claim = ""', "[auth] admin_claim: a name is needed"),
    ('[auth]\nalgorithms = ["HS256"]', "[auth] algorithms: set, but there is no key"),
    ('[auth]\naudience = "shop"', "[auth] audience: set, but there is no key"),
    ('[auth]\nissuer = "shop"', "[auth] issuer: set, but there is no key"),
    ('[auth]\ntenants = ["acme"]', "[auth] tenants: set, but there is no key"),
    ('[auth]\nroles = ["web"]', "[auth] roles: set, but there is no key"),
    ('[auth]\ncookie = "token"', "[auth] cookie: set, but there is no key"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_wrong_file(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "headwater.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_settings(environment={}, folder=tmp_path)
    assert str(caught.value).startswith(message)


def test_a_group_checks_itself() -> None:
    with pytest.raises(ConfigError, match=r"\[log\] retention: 'soon'"):
        LogSettings(retention="soon")


def test_a_message_about_a_secret_does_not_tell_it(tmp_path: Path) -> None:
    for name in ("auth_secret", "gateway_metrics_token"):
        with pytest.raises(ConfigError) as caught:
            load_settings(overrides={name: "hunter2"}, environment={}, folder=tmp_path)
        assert "hunter2" not in f"{caught.value} {caught.value.hint}"


# ------------------------------------------------------------------------ derived


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30 days", 2_592_000),
        ("12h", 43_200),
        ("1.5 hours", 5_400),
        ("90s", 90),
        ("2 minutes", 120),
        ("1500ms", 1.5),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


def test_presence_is_sent_three_times_in_its_timeout() -> None:
    assert GatewaySettings().presence_period_seconds == 5
    shortest = GatewaySettings(presence_timeout="1 second")
    assert shortest.presence_period_seconds == pytest.approx(1 / 3)
