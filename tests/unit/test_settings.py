"""Where a setting comes from, and what a wrong one is told."""

from __future__ import annotations

from datetime import timedelta
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
    ],
)
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)
