"""Lengths of time as people write them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from headwater.settings.durations import parse_duration


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
