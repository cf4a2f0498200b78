"""The packages of `headwater[spark]`, which may be missing.

`missing` and `require` import nothing: PySpark takes a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from headwater.errors import ConfigError

PACKAGES = ("pyspark", "deltalake", "adbc_driver_postgresql", "pyarrow")
INSTALL = "pip install 'headwater[spark]'"


def missing() -> list[str]:
    """The packages that are not installed."""
    return [name for name in PACKAGES if find_spec(name) is None]


def require() -> None:
    """Raise a ConfigError if a package is not installed."""
    if names := missing():
        raise _not_installed(names[0])


@contextmanager
def spark_needed() -> Iterator[None]:
    """Around imports of the pipeline: the error for a missing package says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise _not_installed(error.name) from error


def _not_installed(name: str | None) -> ConfigError:
    return ConfigError(f"the pipeline needs {name}, which is not installed", hint=INSTALL)
