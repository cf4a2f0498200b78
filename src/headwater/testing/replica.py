"""A streaming replica of an embedded PostgreSQL, with an adjustable delay."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from headwater.embedded import EmbeddedPostgres
from headwater.embedded.account import account_for
from headwater.embedded.binaries import find_binaries
from headwater.embedded.folder import Folder, make_private
from headwater.errors import EmbeddedError
from headwater.limits import EMBEDDED_COMMAND_SECONDS


class ReplicaServer(EmbeddedPostgres):
    """A running replica."""

    def delay(self, seconds: float) -> None:
        """From now on apply every commit with this delay."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(
                f"alter system set recovery_min_apply_delay = '{int(seconds * 1000)}ms'".encode()
            )
            connection.execute("select pg_reload_conf()")


@contextmanager
def replica_of(
    primary: EmbeddedPostgres, data_dir: str | os.PathLike[str]
) -> Iterator[ReplicaServer]:
    """A replica of a running server, in a folder of its own, until the block ends."""
    folder = Folder(data_dir)
    account = account_for(folder.data_dir, folder.cluster)
    folder.create(account)
    make_private(folder.cluster, account)
    copy: list[str | Path] = [find_binaries(account) / "pg_basebackup", "-d", primary.url]
    copy += ["-D", folder.cluster, "-R", "-X", "stream", "-c", "fast"]
    done = account.run(copy, timeout=EMBEDDED_COMMAND_SECONDS)
    if done.returncode:
        raise EmbeddedError(f"the server could not be copied:\n{done.stdout.strip()}")
    with ReplicaServer(folder.data_dir) as server:
        assert isinstance(server, ReplicaServer)
        yield server
