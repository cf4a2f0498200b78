"""Starts and stops the server of a data folder, and checks whether it is alive.

initdb, the postmaster and all its children inherit a lock: while it is held, a process of the
server is alive. Process ids are not used for this, because a file may have the id of an ended
process, which the system gives out again. One loop starts the server, attaches to it, waits for its
recovery, and waits for the end of a killed one. The caller makes sure that no other process starts
or stops the server at the same time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Literal, TypeAlias
from urllib.parse import quote

import psycopg
from psycopg import pq

from headwater.database import connect_blocking
from headwater.embedded.account import Account, account_for
from headwater.embedded.binaries import find_binaries
from headwater.embedded.cluster import ensure_cluster
from headwater.embedded.folder import Folder, open_private
from headwater.embedded.locks import FileLock, polls, wait_until
from headwater.errors import EmbeddedError
from headwater.limits import (
    EMBEDDED_LOG_BYTES_MAX,
    EMBEDDED_LOG_TAIL_BYTES,
    EMBEDDED_START_SECONDS,
    EMBEDDED_STOP_SECONDS,
)

_EMBEDDED_LEAVING_SECONDS = 5.0
"""How long closing connections may take to end. Connections that are open after that count as
clients, and the server keeps running for them."""


StopMode: TypeAlias = Literal["fast", "immediate"]

_STOP_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}

# Given on the command line, because Headwater relies on them.
_SETTINGS = {
    "listen_addresses": "",
    "port": "5432",
    "wal_level": "logical",
    "track_commit_timestamp": "on",
    "logging_collector": "off",
}

_CLIENTS = (
    "select coalesce(nullif(application_name, ''), 'a client') || ' as ' || usename"
    " from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"
    " order by 1"
)


class Server:
    def __init__(self, folder: Folder, settings: Mapping[str, str]) -> None:
        self._folder = folder
        self._settings = dict(settings)

    @property
    def url(self) -> str:
        # With the port, because PGPORT would override the default.
        return (
            f"postgresql://postgres@:5432/postgres?host={quote(str(self._folder.socket_dir), '')}"
        )

    @property
    def pid(self) -> int | None:
        """The process id in the server's file, if a server is running."""
        return self._folder.postmaster_pid() if self._is_listening() else None

    def is_alive(self) -> bool:
        """Whether a process of the server is alive, also one that is starting or stopping."""
        with FileLock(self._folder.server_lock) as lock:
            return not lock.take()

    def bring_up(self, account: Account) -> None:
        """Wait until the server answers."""
        log_start: int | None = None
        for _ in polls(EMBEDDED_START_SECONDS):
            if self._ping() == pq.Ping.OK:
                return
            with FileLock(self._folder.server_lock) as lock:
                if not lock.take():
                    continue
                if log_start is not None:
                    raise self._did_not_start(log_start)
                try:
                    log_start = self._launch(account, lock)
                finally:
                    lock.hand_over()
        raise retryable_error(
            f"the embedded PostgreSQL in {self._folder.data_dir} does not answer",
            hint=f"Its log is {self._folder.log}. After a crash, let it recover and try again.",
        )

    def bring_down(self, mode: StopMode) -> None:
        """Wait until no process of the server is alive."""
        for step in dict.fromkeys((mode, "immediate")):
            if self._end(_STOP_SIGNALS[step]):
                return
        raise retryable_error(
            f"the embedded PostgreSQL in {self._folder.data_dir} does not stop",
            hint=f"Its log is {self._folder.log}. End its processes with kill.",
        )

    def clients(self) -> list[str]:
        """The names of connected clients. Waits a moment for clients that are disconnecting. Empty
        if the server does not answer."""
        try:
            with connect_blocking(self.url, purpose="embedded") as connection:
                wait_until(
                    lambda: connection.execute(_CLIENTS).fetchone() is None,
                    _EMBEDDED_LEAVING_SECONDS,
                )
                return [name for (name,) in connection.execute(_CLIENTS).fetchall()]
        except psycopg.Error:
            return []

    def _launch(self, account: Account, lock: FileLock) -> int:
        """Start the server without waiting for it. Returns the place in the server's log where it
        begins."""
        binaries = find_binaries(account)
        ensure_cluster(self._folder, account, binaries, lock.fileno())
        self._folder.remove_dead_server_files()
        sockets = str(self._folder.socket_dir).replace('"', '""')
        settings = _SETTINGS | self._settings | {"unix_socket_directories": f'"{sockets}"'}
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        # Started by a shell, so that the server is not a child process that we would have to wait
        # for.
        command = ["/bin/sh", "-c", 'exec "$@" </dev/null &', "sh"]
        command += [str(binaries / "postgres"), "-D", str(self._folder.cluster), *arguments]
        log = self._open_log()
        try:
            log_start = os.fstat(log).st_size
            account.run(command, output=log, keep_open=(lock.fileno(),))
            return log_start
        finally:
            os.close(log)

    def _end(self, stop: signal.Signals) -> bool:
        signalled = False
        for _ in polls(EMBEDDED_STOP_SECONDS):
            with FileLock(self._folder.server_lock) as lock:
                if lock.take():
                    return True
            # A server that does not listen yet is signalled when it does: only then is its id
            # known.
            if not signalled and (pid := self.pid) is not None:
                self._signal(pid, stop)
                signalled = True
        return False

    def _signal(self, pid: int, stop: signal.Signals) -> None:
        """The process id is from a file of the server's account, so the signal is sent with the
        rights of that account: root could signal any process."""
        account = account_for(self._folder.data_dir, self._folder.cluster)
        if account.is_other:
            # The shell's built-in command: small containers lack the program.
            account.run(["/bin/sh", "-c", 'kill -"$1" "$2"', "sh", str(stop.value), str(pid)])
        else:
            os.kill(pid, stop)

    def _is_listening(self) -> bool:
        return self._ping() in (pq.Ping.OK, pq.Ping.REJECT)

    def _ping(self) -> pq.Ping:
        # REJECT: alive, but starting, recovering or stopping. Out of connections counts as OK.
        return pq.Ping(pq.PGconn.ping(f"{self.url}&connect_timeout=2".encode()))

    def _open_log(self) -> int:
        log = self._folder.log
        if log.exists() and log.lstat().st_size > EMBEDDED_LOG_BYTES_MAX:
            log.rename(log.with_name(f"{log.name}.old"))
        return open_private(log)

    def _did_not_start(self, log_start: int) -> EmbeddedError:
        with self._folder.log.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(log_start, log.tell() - EMBEDDED_LOG_TAIL_BYTES))
            output = log.read().decode(errors="replace").strip()
        return EmbeddedError(
            f"the embedded PostgreSQL in {self._folder.data_dir} did not start:\n{output}",
            hint=f"The whole log of the server is {self._folder.log}.",
        )


def retryable_error(message: str, *, hint: str) -> EmbeddedError:
    """A retryable error, after a timeout."""
    error = EmbeddedError(message, hint=hint)
    error.retryable = True
    return error
