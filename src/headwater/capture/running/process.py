"""The sources of a database in a child process: `headwater source run`. Reading a source never
shares an event loop with a gateway."""

from __future__ import annotations

from headwater.child_process import ChildProcess, log_line
from headwater.limits import SOURCE_PROCESS_RESTART_SECONDS, SOURCE_PROCESS_STOP_SECONDS
from headwater.settings.names import variable


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
