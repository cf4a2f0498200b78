"""Logs for programs: one JSON object per line."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

import msgspec


def log_as_json(level: int = logging.INFO) -> None:
    """Write the log of the process to standard error as JSON, from this level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        document = {
            "at": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            document["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(document).decode()
