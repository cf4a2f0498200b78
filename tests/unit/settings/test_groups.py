"""Wrong values, and values that are derived from others."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.settings import load_settings, make_settings
from headwater.settings.groups import GatewaySettings, LogSettings
from headwater.settings.names import SETTINGS

DURATIONS = (
    "log_retention", "log_maintenance", "live_topic_window", "live_reconcile", "query_timeout",
    "query_sweep", "mutation_timeout", "mutation_retention", "replica_wait", "lake_interval",
    "lake_vacuum", "lake_retention", "lake_tables", "lake_reconcile",
    "gateway_keepalive", "gateway_drain", "gateway_recheck",
    "gateway_feed_history", "gateway_presence_timeout", "auth_leeway",
)  # fmt: skip


@pytest.mark.parametrize("name", DURATIONS)
def test_invalid_lengths_of_time(name: str) -> None:
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


def test_presence_is_sent_three_times_in_its_timeout() -> None:
    assert GatewaySettings().presence_period_seconds == 5
    shortest = GatewaySettings(presence_timeout="1 second")
    assert shortest.presence_period_seconds == pytest.approx(1 / 3)
