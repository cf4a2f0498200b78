"""The pass of a failpoint at which a process is killed."""

from __future__ import annotations

import os
import signal
from collections import Counter
from threading import Thread

import pytest

from headwater.pipeline import failpoints
from headwater.pipeline.failpoints import failpoint


class Interrupted(Counter[str]):
    """A counter during whose first change another thread passes the same failpoint."""

    thread: Thread | None = None

    def __setitem__(self, name: str, passes: int) -> None:
        super().__setitem__(name, passes)
        if self.thread is None:
            self.thread = Thread(target=failpoint, args=[name])
            self.thread.start()
            self.thread.join(0.1)


def test_every_pass_is_counted_when_threads_pass_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    passed = Interrupted()
    monkeypatch.setenv("HEADWATER_FAILPOINT", "written:1")
    monkeypatch.setattr(os, "kill", lambda _, number: killed.append(number))
    monkeypatch.setattr(failpoints, "_passed", passed)
    failpoint("written")
    assert passed.thread is not None
    passed.thread.join()
    assert killed == [signal.SIGKILL]
    assert passed == {"written": 2}
