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

_PIPELINE = "headwater.pipeline."


def __getattr__(name: str) -> object:
    if name == "__all__":
        return _available_names()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(_import(_MODULES[name]), name)
    globals()[name] = value
    return value


def _import(module: str) -> object:
    if not module.startswith(_PIPELINE):
        return import_module(module)
    from headwater.pipeline.packages import spark_needed

    with spark_needed():
        return import_module(module)


def _available_names() -> list[str]:
    """All public names. If packages of `headwater[spark]` are not installed, those of the pipeline
    are left out: a program that reads every name, as `import *` does, must not fail."""
    from headwater.pipeline.packages import missing

    names = sorted(_MODULES)
    if missing():
        names = [name for name in names if not _MODULES[name].startswith(_PIPELINE)]
    return [*names, "__version__"]


def __dir__() -> list[str]:
    return sorted({*globals(), *_available_names()})
