"""The data pipeline as a child process of a gateway or of the demo.

Spark runs in the child process only: nothing of it is imported here. How a child process is
started, restarted and stopped is in `headwater.child_process`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from headwater.child_process import ChildProcess
from headwater.limits import PIPELINE_PROCESS_RESTART_SECONDS, PIPELINE_PROCESS_STOP_SECONDS
from headwater.settings.names import variable


class PipelineProcess(ChildProcess):
    """A pipeline that is restarted when it ends."""

    def __init__(
        self,
        url: str,
        lake: str,
        print_line: Callable[[str], None],
        *,
        options: Sequence[str] = (),
        stop_seconds: float = PIPELINE_PROCESS_STOP_SECONDS,
    ) -> None:
        super().__init__(
            ["pipeline", "run", *options],
            print_line,
            environment={variable("url"): url, variable("lake_location"): lake},
            restart_seconds=PIPELINE_PROCESS_RESTART_SECONDS,
            stop_seconds=stop_seconds,
        )


def absolute_lake(lake: str) -> str:
    """The lake as a path or URL that also holds in another working directory."""
    return lake if "://" in lake else os.path.abspath(os.path.expanduser(lake))
