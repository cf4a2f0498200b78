"""An archive of classes is made in the background: with a small program in the place of Spark."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from headwater.errors import PipelineError
from headwater.limits import CLASS_ARCHIVE_UNUSED_SECONDS
from headwater.pipeline.spark import class_archive
from headwater.pipeline.spark.class_archive import Archive
from headwater.pipeline.spark.java import Java

MAKES = 'echo "classes, $HEADWATER_WARM_NICENESS $HEADWATER_PARENT" > "$HEADWATER_WARM_OUTPUT"'
FAILS = 'echo "no memory for Java"; echo half > "$HEADWATER_WARM_OUTPUT.part"; exit 1'
MAKES_NOTHING = "exit 0"
HANGS = 'echo half > "$HEADWATER_WARM_OUTPUT"; sleep 60'


class Machine:
    """A folder for archives, and what stands in for Spark."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._program, self._calls = folder / "program", folder / "calls"
        program = folder / "java" / "bin" / "java"
        program.parent.mkdir(parents=True)
        program.touch()
        self.java = Java(folder / "java", 21, supplied=False)
        self.folder = folder / "spark"
        self.folder.mkdir(0o700)
        self.archives = self.folder / "archives"
        self.stop = threading.Event()
        self.patch(patch)

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(class_archive, "find_java", lambda _: self.java)
        patch.setattr(class_archive, "sys", SimpleNamespace(executable=str(self._program)))
        patch.setattr(class_archive, "_LOOK_SECONDS", 0.01)

    def spark(self, script: str) -> None:
        self._program.write_text(f"#!/bin/sh\necho called >> {self._calls}\n{script}\n")
        self._program.chmod(0o755)

    def make_quietly(self) -> None:
        class_archive.make_quietly(self.folder, self.stop)

    @property
    def archive(self) -> Archive:
        return Archive.of(self.folder, self.java)

    @property
    def calls(self) -> int:
        return len(self._calls.read_text().splitlines()) if self._calls.exists() else 0

    @property
    def files(self) -> set[str]:
        return {each.name for each in self.archives.iterdir()} - {"_lock"}

    def other(self, name: str, age: float) -> Path:
        """An archive that was last used some seconds ago."""
        path = self.archives / name
        self.archives.mkdir(exist_ok=True)
        path.write_bytes(b"classes")
        os.utime(path, (time.time() - age,) * 2)
        return path


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_it_is_made_once_and_used(machine: Machine) -> None:
    machine.spark(MAKES)
    assert class_archive.options(machine.folder, machine.java) == ()
    for _ in "12":
        machine.make_quietly()
    assert machine.calls == 1
    assert machine.files == {machine.archive.path.name}
    assert machine.archive.path.read_text() == "classes, 19 1\n", "with the lowest priority"
    assert class_archive.options(machine.folder, machine.java)[0].endswith(
        str(machine.archive.path)
    )


@pytest.mark.parametrize("script", [FAILS, MAKES_NOTHING])
def test_it_fails_quietly(script: str, machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged once, and not tried again; Spark starts without it."""
    machine.spark(script)
    for _ in "12":
        machine.make_quietly()
    assert machine.calls == 1
    (logged,) = caplog.messages
    assert "could not be made" in logged
    assert ("no memory for Java" in logged) == (script == FAILS)
    assert machine.files == {machine.archive.path.name}, "nothing half made is left"
    assert class_archive.options(machine.folder, machine.java) == ()


def test_an_archive_that_takes_too_long(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(class_archive, "CLASS_ARCHIVE_SECONDS", 0.2)
    machine.spark(HANGS)
    began = time.monotonic()
    machine.make_quietly()
    assert time.monotonic() - began < 20
    assert "was not ready" in caplog.text
    assert machine.files == set()
    monkeypatch.undo()
    machine.patch(monkeypatch)
    machine.spark(MAKES)
    machine.make_quietly()
    assert machine.files == {machine.archive.path.name}, "the next one tries again"


def test_a_pipeline_that_stops_does_not_wait_for_it(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.spark(HANGS)
    threading.Timer(0.2, machine.stop.set).start()
    began = time.monotonic()
    machine.make_quietly()
    assert time.monotonic() - began < 20
    assert (machine.files, caplog.messages) == (set(), [])
    machine.stop.clear()
    machine.spark(MAKES)
    machine.make_quietly()
    assert machine.files == {machine.archive.path.name}, "it is made the next time"


TRAINS = """
import subprocess, time
from headwater.pipeline.spark import class_archive
class_archive.end_with_parent()
subprocess.Popen(["sleep", "600"])
print("started", flush=True)
time.sleep(600)
"""


def test_it_is_not_made_after_the_pipeline_was_killed() -> None:
    """What makes it ends, together with the Java that it has started."""
    with subprocess.Popen(
        [sys.executable, "-c", TRAINS],
        env=os.environ | {"HEADWATER_PARENT": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as training:
        assert training.stdin is not None
        assert training.stdout is not None
        assert training.stdout.readline() == b"started\n"
        training.stdin.close()
        assert training.stdout.read() == b"", "nothing holds this pipe any more"
        assert training.wait() == -signal.SIGKILL


@pytest.mark.parametrize("broken", ["folder", "java", "program"])
def test_whatever_is_broken_only_a_warning_is_logged(
    broken: str,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The thread that calls it shares Spark with other programs, and must go on."""
    match broken:
        case "folder":
            machine.archives.write_text("this is a file")
        case "java":
            monkeypatch.setattr(
                class_archive, "find_java", lambda _: Java(machine.folder / "gone", 21, False)
            )
        case "program":
            monkeypatch.setattr(class_archive, "sys", SimpleNamespace(executable="/nowhere/python"))
    machine.make_quietly()
    assert len(caplog.messages) == 1


def test_archives_that_no_spark_uses_are_removed(machine: Machine) -> None:
    machine.spark(MAKES)
    unused = machine.other("spark-3.5.0-java-17-1.jsa", CLASS_ARCHIVE_UNUSED_SECONDS + 60)
    half = machine.other("spark-4.0.0-java-21-1.jsa.77", 60)
    young = machine.other("spark-4.0.0-java-21-1.jsa", CLASS_ARCHIVE_UNUSED_SECONDS - 60)
    foreign = machine.other("notes", CLASS_ARCHIVE_UNUSED_SECONDS + 60)
    old = machine.other("spark-4.1.0-java-21-1.jsa", CLASS_ARCHIVE_UNUSED_SECONDS + 60)
    assert Archive(old, is_aot=False).use(), "to use it makes it young"
    machine.make_quietly()
    assert not unused.exists()
    assert not half.exists()
    assert machine.files == {each.name for each in (young, foreign, old, machine.archive.path)}
    os.utime(old, (0, 0))
    machine.make_quietly()
    assert not old.exists(), "also where the machine has its archive"
    assert machine.calls == 1


def test_only_one_process_makes_it(machine: Machine) -> None:
    machine.spark(MAKES)
    machine.archives.mkdir()
    with (machine.archives / "_lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        machine.make_quietly()
        with pytest.raises(PipelineError, match="is being made by another process"):
            class_archive.warm(machine.folder)
        assert machine.calls == 0
    machine.make_quietly()
    assert machine.calls == 1


def test_the_command_says_what_failed_and_replaces_an_archive(machine: Machine) -> None:
    machine.spark(FAILS)
    with pytest.raises(PipelineError, match="could not be made: no memory for Java"):
        class_archive.warm(machine.folder)
    assert machine.files == set()
    machine.spark(MAKES)
    for _ in "12":
        assert class_archive.warm(machine.folder).path.read_text() == "classes, 0 1\n"
    assert machine.calls == 3
