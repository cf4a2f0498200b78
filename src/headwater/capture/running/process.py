"""The sources of a database in a child process: `headwater source run`.

Reading a source never shares an event loop with a gateway. The child writes its log as JSON lines,
which become records of this process: they appear where the application's own log does.
"""

from __future__ import annotations

import logging

import msgspec

from headwater.child_process import ChildProcess
from headwater.limits import SOURCE_PROCESS_RESTART_SECONDS, SOURCE_PROCESS_STOP_SECONDS
from headwater.settings.names import variable

logger = logging.getLogger(__name__)


class SourcesProcess(ChildProcess):
    """Runs the sources of a database, and is restarted when it ends."""

    def __init__(self, url: str) -> None:
        super().__init__(
            ["source", "run", "--json"],
            log_line,
            environment={variable("url"): url},
            restart_seconds=SOURCE_PROCESS_RESTART_SECONDS,
            stop_seconds=SOURCE_PROCESS_STOP_SECONDS,
        )


class _Record(msgspec.Struct):
    """A line of `headwater.logs`."""

    level: str
    logger: str
    message: str
    error: str | None = None


_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "error": logging.ERROR}


def log_line(line: str) -> None:
    """Log a line that the child printed."""
    try:
        record = msgspec.json.decode(line, type=_Record)
    except msgspec.DecodeError:
        logger.warning("the process that runs the sources: %s", line)
        return
    text = record.message if record.error is None else f"{record.message}\n{record.error}"
    level = _LEVELS.get(record.level, logging.WARNING)
    logging.getLogger(record.logger).log(level, "%s", text)
