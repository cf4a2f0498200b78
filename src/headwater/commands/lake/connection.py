"""The lake with a Spark of this process, for commands that no running pipeline answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headwater.pipeline import packages
from headwater.settings import load_settings

if TYPE_CHECKING:
    from headwater.pipeline.reading.lake import Lake


@contextmanager
def open_lake(folder: str | None, url: str | None = None) -> Iterator[Lake]:
    """The lake with a Spark, and with the end of the log if the database can be reached. Errors
    that Spark's workers raised are raised as what they were."""
    root = load_settings(overrides={"lake_location": folder}).lake.location
    packages.require()
    from headwater.pipeline.reading.lake import Lake
    from headwater.pipeline.reading.request_server import translated_errors

    with translated_errors():
        yield Lake.connect(root).with_log(url)
