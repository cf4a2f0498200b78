"""Headwater turns a database into live data.

The public names are those of `__init__.pyi`, and no others. Each is imported when it is first used:
a Spark worker needs few of them, and Spark starts many workers.
"""

import ast
from importlib import import_module
from pkgutil import get_data

__version__ = "0.1.0.dev0"


def _read_public_names() -> dict[str, str]:
    """The module of every public name."""
    lines = ast.parse(get_data(__name__, "__init__.pyi") or b"").body
    imports = [line for line in lines if isinstance(line, ast.ImportFrom)]
    return {alias.name: line.module or "" for line in imports for alias in line.names}


_MODULES = _read_public_names()

__all__ = [*sorted(_MODULES), "__version__"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(_import(_MODULES[name]), name)
    globals()[name] = value
    return value


def _import(module: str) -> object:
    if not module.startswith("headwater.pipeline."):
        return import_module(module)
    from headwater.pipeline.packages import spark_needed

    with spark_needed():
        return import_module(module)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
