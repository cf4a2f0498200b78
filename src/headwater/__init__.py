"""Headwater turns a database into live data.

The public names are those of `__init__.pyi`, and no others. Each is imported when it is first used:
a Spark worker needs few of them, and Spark starts many workers.
"""

from functools import cache
from importlib import import_module

__version__ = "0.1.0.dev0"


@cache
def _modules() -> dict[str, str]:
    """The module of every public name."""
    import ast
    from pkgutil import get_data

    lines = ast.parse(get_data(__name__, "__init__.pyi") or b"").body
    imports = [line for line in lines if isinstance(line, ast.ImportFrom)]
    return {alias.name: line.module or "" for line in imports for alias in line.names}


_PIPELINE = "headwater.pipeline."


def __getattr__(name: str) -> object:
    if name == "__all__":
        return _available_names()
    # Python looks for a few such names in every package that it imports.
    if name.startswith("__") or name not in _modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(_import(_modules()[name]), name)
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

    modules = _modules()
    names = sorted(modules)
    if missing():
        names = [name for name in names if not modules[name].startswith(_PIPELINE)]
    return [*names, "__version__"]


def __dir__() -> list[str]:
    return sorted({*globals(), *_available_names()})
