"""Starts Java for `headwater pipeline run` while Python still imports the command.

The options of the command line are read in a simple way here, and again by the command. If both do
not come to the same settings, Java is started again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headwater.pipeline import packages, permissions
from headwater.pipeline.spark import connect_server
from headwater.pipeline.spark.memory import heap_setting
from headwater.pipeline.spark.session import begin as begin_session
from headwater.pipeline.spark.session import spark_folder
from headwater.settings import load_settings


def begin(options: Sequence[str]) -> None:
    """Start Java for these options, if they are for a pipeline on this machine."""
    master = _value(options, "--master")
    if "--help" in options or packages.missing() or not (master or "local").startswith("local"):
        return
    settings = load_settings(overrides={"lake_location": _value(options, "--lake")}).lake
    location = settings.location
    umask = None if "://" in location else permissions.future_umask(Path(location).expanduser())
    begin_session(
        spark_folder(),
        {"spark.driver.memory": heap_setting(settings.memory)},
        token=None if "--once" in options else connect_server.new_token(),
        umask=umask,
    )


def _value(options: Sequence[str], name: str) -> str | None:
    for at, option in enumerate(options):
        if option == name:
            return options[at + 1] if at + 1 < len(options) else None
        if option.startswith(f"{name}="):
            return option.partition("=")[2]
    return None
