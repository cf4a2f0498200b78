"""Which Spark a session may be. Nothing is started here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from pyspark import SparkContext

from headwater.commands import execution, program
from headwater.commands.lake import pipeline
from headwater.errors import ConfigError
from headwater.pipeline.spark import class_archive, launch, session
from headwater.pipeline.spark.java import Java
from headwater.pipeline.spark.session import begin, refuse_connect, spark_session


@pytest.fixture(autouse=True)
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """Java is not even searched for."""

    def refuse(*_: object) -> Any:
        raise AssertionError("a Java is started")

    monkeypatch.delenv("SPARK_REMOTE", raising=False)
    for name in ("find_java", "make_private", "connected", "begin_java"):
        monkeypatch.setattr(session, name, refuse)


@pytest.mark.parametrize("master", [None, "local[*,4]", "spark://host:7077", "yarn", "k8s://h"])
def test_a_cluster_or_this_machine(master: str | None) -> None:
    refuse_connect(master, {"spark.ui.enabled": "false"})


def test_a_master_over_connect(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="does not run over Spark Connect, because it commits"
    ) as e:
        spark_session(tmp_path / "spark", master="sc://host:15002/;token=secret")
    assert "the master is sc://host:15002/, a Spark Connect server" in str(e.value)
    assert "spark://host:7077" in str(e.value.hint)
    assert "secret" not in f"{e.value}{e.value.hint}"
    assert not (tmp_path / "spark").exists()


def test_spark_itself_would_take_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PySpark prefers these to the master."""
    with pytest.raises(ConfigError, match=r"spark\.remote, .* is sc://other:1, a Spark"):
        spark_session(tmp_path, settings={"spark.remote": "sc://other:1"})
    monkeypatch.setenv("SPARK_REMOTE", "sc://databricks:443/;token=secret")
    for start in (lambda: spark_session(tmp_path), lambda: begin(tmp_path, {})):
        with pytest.raises(ConfigError, match="SPARK_REMOTE, is sc://databricks:443/, a") as error:
            start()
        assert "leave --master out and SPARK_REMOTE unset" in str(error.value.hint)


def test_the_command_says_so_before_anything_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> Any:
        raise AssertionError("the database is opened")

    monkeypatch.setattr(pipeline, "database", refuse)
    monkeypatch.setattr(execution, "settings_for", refuse)
    monkeypatch.setattr(
        sys, "argv", ["headwater", "pipeline", "run", "--master", "sc://host:15002", "--json"]
    )
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "a pipeline does not run over Spark Connect" in printed.err


@pytest.mark.parametrize("master", ["local[2]", "spark://host:7077", "yarn"])
def test_a_java_without_memory_ends(
    master: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every master, and beside the options that the user has chosen in any way."""
    monkeypatch.setattr(session, "find_java", lambda _: Java(tmp_path, 17, supplied=False))
    monkeypatch.setattr(session, "make_private", lambda _: None)
    monkeypatch.setattr(class_archive, "options", lambda *_: ())
    own = "-XX:+UseG1GC"
    for given in ("", "-Dmine=1"):
        with patch.dict(os.environ, SPARK_SUBMIT_OPTS=given):
            for _ in range(2):
                prepared, settings = session._prepared(
                    tmp_path, master, {"spark.driver.extraJavaOptions": own}
                )
                assert prepared is not None
                options = prepared.environment()["SPARK_SUBMIT_OPTS"]
                assert options.split() == ["-XX:+ExitOnOutOfMemoryError", *given.split()]
                assert settings["spark.driver.extraJavaOptions"].startswith(own)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("raise SystemExit(3)", "Spark's Java ran out of memory"),
        ("raise SystemExit(1)", "Spark's Java ended with exit code 1"),
        ("import os; os.kill(os.getpid(), 9)", "Spark's Java was killed (signal 9)"),
    ],
)
def test_why_java_has_ended(end: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", end]) as process:
        monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=process))
        assert launch.ended(patience=60.0) == said
