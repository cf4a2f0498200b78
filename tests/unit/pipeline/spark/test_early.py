"""For which command lines Java is started early, and with what. Nothing is started here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwater.pipeline import packages
from headwater.pipeline.spark import early


class Begun(list[dict[str, Any]]):
    """What was started."""

    def begin(self, folder: Path, settings: dict[str, str], **options: Any) -> None:
        self.append({"folder": folder, "settings": settings, **options})


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begun:
    begun = Begun()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HEADWATER_LAKE_MEMORY", raising=False)
    monkeypatch.setattr(early, "begin_session", begun.begin)
    monkeypatch.setattr(packages, "missing", list)
    return begun


@pytest.mark.parametrize(
    "options",
    [
        ["--help"],
        ["--lake", "lake", "--help"],
        ["--master", "spark://host:7077"],
        ["--master=k8s://host"],
        ["--master", "yarn", "--once"],
        ["--master", "sc://host:15002"],
    ],
)
def test_no_java_is_started(options: list[str], begun: Begun) -> None:
    early.begin(options)
    assert begun == []


def test_no_java_without_the_packages(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "missing", lambda: ["pyspark"])
    early.begin([])
    assert begun == []


@pytest.mark.parametrize(
    "options",
    [[], ["--master", "local[2]"], ["--master=local[*,4]"], ["--app", "--json"], ["--master"]],
)
def test_java_is_started(
    options: list[str], begun: Begun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWATER_LAKE_MEMORY", str(3 * 2**30))
    early.begin(options)
    (found,) = begun
    assert found["folder"] == tmp_path / "cache" / "headwater" / "spark"
    assert found["settings"] == {"spark.driver.memory": "3072m"}
    assert found["token"], "it will be shared"


def test_one_that_ends_by_itself_is_not_shared(begun: Begun) -> None:
    early.begin(["--once"])
    assert begun[0]["token"] is None


@pytest.mark.parametrize("form", [["--lake", "{}"], ["--lake={}"]])
@pytest.mark.parametrize(("mode", "umask"), [(0o700, 0o077), (0o750, 0o027), (0o755, 0o022)])
def test_files_of_java_are_as_open_as_the_lake(
    form: list[str], mode: int, umask: int, begun: Begun, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    lake.mkdir()
    lake.chmod(mode)
    early.begin([each.format(lake) for each in form])
    assert begun[0]["umask"] == umask


def test_a_lake_under_a_url_has_no_folder(begun: Begun) -> None:
    early.begin(["--lake", "s3://bucket/lake"])
    assert begun[0]["umask"] is None
