"""Lines of a child process become records of the application's log."""

from __future__ import annotations

import logging

import pytest

from headwater.child_process import log_line


@pytest.mark.parametrize(
    ("line", "record"),
    [
        (
            '{"at":"2026-01-01T00:00:00Z","level":"error","logger":"headwater.a","message":"50%"}',
            ("headwater.a", logging.ERROR, "50%"),
        ),
        (
            '{"level":"info","logger":"headwater.b","message":"begun"}',
            ("headwater.b", logging.INFO, "begun"),
        ),
        (
            '{"level":"warning","logger":"x","message":"failed","error":"Traceback"}',
            ("x", logging.WARNING, "failed\nTraceback"),
        ),
        (
            "Segmentation fault",
            (
                "headwater.child_process",
                logging.WARNING,
                "a child process: Segmentation fault",
            ),
        ),
        (
            '{"error": {"code": "config"}}',
            (
                "headwater.child_process",
                logging.WARNING,
                'a child process: {"error": {"code": "config"}}',
            ),
        ),
    ],
)
def test_lines(line: str, record: tuple[str, int, str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_line(line)
    assert caplog.record_tuples == [record]
