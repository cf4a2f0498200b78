"""What Spark prints: a file that is bounded, for its owner alone."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from headwater.pipeline.spark import log_file
from headwater.pipeline.spark_errors import explain


def printed(path: Path, *chunks: str) -> None:
    """A program prints these, and ends."""
    pipe = log_file.LogPipe()
    try:
        for number, chunk in enumerate(chunks):
            out = pipe.descriptor
            subprocess.run(["printf", "%s", chunk], stdout=out, stderr=out, check=True)
            if number == 0:  # the file may be chosen later than the program starts
                pipe.write_to(path)
    finally:
        pipe.close()
    pipe.join()


def test_the_output_of_a_program_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "_spark.log"
    printed(path, "WARN this\n", "and that\n \n")
    assert path.read_text() == "WARN this\nand that\n \n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert log_file.last_line(path) == "and that"
    assert log_file.found(str(tmp_path), tmp_path) == str(path)
    printed(path, "later\n")
    assert path.read_text().endswith("\nlater\n")


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_file, "SPARK_LOG_BYTES_MAX", 100)
    path = tmp_path / "_spark.log"
    printed(path, *(f"{i}" * 60 for i in range(7)))
    sizes = {each.name: each.stat().st_size for each in tmp_path.iterdir()}
    assert sizes.keys() == {"_spark.log", "_spark.log.old"}
    assert max(sizes.values()) < 100 + log_file._READ_BYTES
    assert path.read_text().endswith("6")


def test_a_disk_without_room_does_not_hold_up_the_program(tmp_path: Path) -> None:
    printed(tmp_path / "missing" / "_spark.log", *["x" * 50_000] * 4)
    assert log_file.last_line(tmp_path / "missing" / "_spark.log") == ""
    assert log_file.found(str(tmp_path / "missing"), tmp_path) is None


def test_a_lake_under_a_url_has_its_file_on_this_machine(tmp_path: Path) -> None:
    assert log_file.of_lake("s3://bucket/lake", tmp_path) == tmp_path / "_spark.log"


def test_an_error_is_in_the_log_with_its_causes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = (
        "An exception was thrown from the Python worker.\n'Traceback (most recent call last):\n"
        '  File "a.py", line 1, in f\nValueError: no such region\n'
    )
    failed = RuntimeError(worker)
    failed.__cause__ = OSError("the file is not there")
    monkeypatch.setattr(log_file, "_current", None)
    assert "headwater status" in str(explain(failed, "stream events").hint)
    path = tmp_path / "spark.log"
    log_file.use(path)
    shown = explain(failed, "stream events")
    assert str(shown) == "stream events failed: ValueError: no such region"
    assert shown.hint == f"The whole error is in {path}."
    written = path.read_text()
    assert "OSError: the file is not there" in written
    assert worker in written
