"""Where a setting comes from, and the error for a wrong one."""

from __future__ import annotations

from datetime import timedelta
from ipaddress import ip_network
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.settings import Settings, load_settings, parse_duration


def test_defaults(tmp_path: Path) -> None:
    assert load_settings(environment={}, folder=tmp_path) == Settings()


def test_the_call_goes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    (tmp_path / "headwater.toml").write_text('url = "file"\ndata_dir = "file"\nretention = "1 day"')
    found = load_settings(
        overrides={"url": "call", "data_dir": None},
        environment={"HEADWATER_URL": "environment", "HEADWATER_DATA_DIR": "environment"},
        folder=tmp_path,
    )
    assert found == Settings(url="call", data_dir="environment", retention="1 day")


WRONG = [
    ('retenshun = "1 day"', "retenshun"),
    ("url = 5", r"\$.url"),
    ("url = ", "not valid TOML"),
    ('retention = "soon"', "'soon' is not a length of time"),
    ('retention = "0 days"', "too short"),
    ('maintenance = "-1 s"', "maintenance: '-1 s' is not a length of time"),
    ('keepalive = "0 s"', "keepalive: '0 s' is too short"),
    ('drain = "later"', "drain: 'later' is not a length of time"),
    ('recheck = "0.5 s"', "recheck: '0.5 s' is too short"),
    ('mutation_retention = "1 hour"', "mutation_retention: '1 hour' is too short"),
    ('mutation_retention = "999999 days"', "mutation_retention: '999999 days' is too long"),
    ('reconcile_interval = "never"', "'never' is not a length of time"),
    ('presence_period = "20 ms"', "presence_period: '20 ms' is too short"),
    ('presence_timeout = "14 s"', "presence_timeout: '14 s' is too short"),
    ("publishes_per_second = 0", "publishes_per_second: 0 is not in 1"),
    ("port = 65536", "port: 65536 is not in 0"),
    ("sessions_per_user = 0", "sessions_per_user: 0 is not in 1"),
    ("sessions_per_ip = -1", "sessions_per_ip: -1 is not in 1"),
    ("subscriptions_per_user = 0", "subscriptions_per_user: 0 is not in 1"),
    ("requests_per_second = 0", "requests_per_second: 0 is not in 1"),
    ('trusted_proxies = ["10.0.0.1/8"]', r"trusted_proxies: 10\.0\.0\.1/8 has host bits set"),
    ('trusted_proxies = ["proxy.example"]', "trusted_proxies: 'proxy.example' does not appear"),
    ('compression = ["deflate"]', "compression: there is no 'deflate'"),
    ('origins = ["https://app.example/"]', "origins: 'https://app.example/' is not an origin"),
    ('origins = ["app.example"]', "origins: 'app.example' is not an origin"),
    ('auth_secret = "short"', "auth_secret: shorter than 32 bytes"),
    ('auth_public_key = "missing.pem"', "auth_public_key: cannot read 'missing.pem': No such file"),
    ('auth_jwks = "missing.json"', "auth_jwks: cannot read 'missing.json': No such file"),
    ('auth_jwks = "ftp://a/keys"', "auth_jwks: neither a file nor a URL"),
    ('auth_jwks = "https://"', "auth_jwks: neither a file nor a URL"),
    ('auth_algorithms = ["none"]', "auth_algorithms: there is no 'none'"),
    ('auth_leeway = "some"', "auth_leeway: 'some' is not a length of time"),
    ('auth_user_claim = ""', "auth_user_claim: a name is needed"),
    ('auth_audience = "shop"', "auth_audience: set, but there is no key"),
    ('auth_tenants = ["acme"]', "auth_tenants: set, but there is no key"),
    ('auth_cookie = "token"', "auth_cookie: set, but there is no key"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_a_wrong_file(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "headwater.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_settings(environment={}, folder=tmp_path)


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


def test_lists_and_numbers_from_the_environment(tmp_path: Path) -> None:
    environment = {
        "HEADWATER_TRUSTED_PROXIES": "10.0.0.0/8, 2001:db8::1,unix",
        "HEADWATER_SESSIONS_PER_USER": "3",
        "HEADWATER_COMPRESSION": "gzip",
        "HEADWATER_AUTH_LEEWAY": "0s",
    }
    found = load_settings(environment=environment, folder=tmp_path)
    assert found.trusted_proxies == ("10.0.0.0/8", "2001:db8::1", "unix")
    assert found.trusted_networks == (ip_network("10.0.0.0/8"), ip_network("2001:db8::1"))
    assert (found.sessions_per_user, found.compression) == (3, ("gzip",))
    assert found.auth_leeway_period == timedelta()


def test_a_key_may_be_in_a_file_or_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_text("-----BEGIN PUBLIC KEY-----")
    in_file = load_settings(
        overrides={"auth_public_key": str(tmp_path / "key.pem")}, folder=tmp_path
    )
    assert in_file.auth_public_key_text == "-----BEGIN PUBLIC KEY-----"
    environment = {"HEADWATER_AUTH_PUBLIC_KEY": r"-----BEGIN PUBLIC KEY-----\nMIIB"}
    in_one_line = load_settings(environment=environment, folder=tmp_path)
    assert in_one_line.auth_public_key_text == "-----BEGIN PUBLIC KEY-----\nMIIB"


def test_a_message_about_a_secret_does_not_contain_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(overrides={"auth_secret": "hunter2"}, environment={}, folder=tmp_path)
    assert "hunter2" not in f"{caught.value} {caught.value.hint}"
