"""Shares the server of a data folder between all its users.

Two file locks, which end with their process, decide:

- `users` is held shared by every user of the server. A process that gets it exclusively was the
last user. - `start` is held exclusively while the server is started or stopped, so these never
overlap.

If the last user is killed, the server keeps running. The next user attaches to it, and stops it
when it closes. A server that should keep running has a file `stays` beside its locks, and runs
until `stop`. The file is removed when a server is started: it is then left from before a crash.
"""

from __future__ import annotations

import atexit
import errno
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from headwater.embedded.account import account_for
from headwater.embedded.folder import ELSEWHERE, Folder, open_private
from headwater.embedded.locks import FileLock
from headwater.embedded.server import Server, StopMode, retryable_error
from headwater.errors import EmbeddedError
from headwater.limits import EMBEDDED_START_SECONDS, EMBEDDED_STOP_SECONDS

_open_servers: set[EmbeddedPostgres] = set()


class EmbeddedPostgres:
    """One user of the server of a data folder; the last user to close stops it.

    Any number of these, in any number of processes, share the server. `settings` are PostgreSQL
    settings, used when it is this object that starts the server. Open ones are closed at exit.

    A forked child is not a user: its copy of this object is closed. It can connect as long as its
    parent keeps the server, and can `start()` for itself. All calls block; from async code use
    `asyncio.to_thread`.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._folder = Folder(data_dir)
        self._server = Server(self._folder, settings)
        self._users: FileLock | None = None
        self._mutex = threading.Lock()

    @property
    def data_dir(self) -> Path:
        return self._folder.data_dir

    @property
    def url(self) -> str:
        """The URL for psycopg, psql and other libpq clients. It depends only on the data folder, so
        it is the same after every start."""
        return self._server.url

    @property
    def pid(self) -> int | None:
        """The process id of the running server."""
        return self._server.pid

    @property
    def is_open(self) -> bool:
        """Whether this object uses the server. While it does, no other user stops the server on
        close."""
        return self._users is not None and self._users.is_open

    def start(self) -> EmbeddedPostgres:
        """Start the server or attach to it; returns when it answers. If this object uses it
        already, only makes sure that the server runs."""
        with self._mutex, self._system_errors():
            account = account_for(self._folder.data_dir, self._folder.cluster)
            self._folder.create(account)
            with self._start_locked():
                self._join()
                try:
                    self._folder.create_socket_dir(account)
                    self._server.bring_up(account)
                except EmbeddedError:
                    # A server that is still recovering keeps running: a stop would lose its
                    # progress.
                    self._leave()
                    raise
                except BaseException:
                    self._leave()
                    self._stop_if_unused()
                    raise
        return self

    def close(self, *, keep_running: bool = False) -> None:
        """Stop using the server, and stop it if it has no other user and no connected client, such
        as psql. With `keep_running` it runs until `stop`. Safe to call again."""
        if not self.is_open:
            return
        with self._mutex, self._system_errors():
            self._leave()
            # PostgreSQL ends by itself when its data folder was removed.
            if self._folder.run.is_dir():
                with self._start_locked():
                    if keep_running:
                        self._mark_as_staying()
                    self._stop_if_unused()

    def stop(self, *, force: bool = False) -> bool:
        """Stop the server, also one that was to keep running. False if none runs. EmbeddedError
        while it has users or clients, unless forced."""
        with self._mutex, self._system_errors():
            if not self._folder.run.is_dir():
                return False
            with self._start_locked():
                if not self._server.is_alive():
                    self._folder.stays.unlink(missing_ok=True)
                    return False
                if not force:
                    self._check_unused()
                self._bring_down()
                return True

    def stop_now(self, mode: StopMode = "immediate") -> None:
        """Stop the server while it is used, as a crash (`immediate`) or an operator (`fast`) would.
        `start()` starts it again under the same URL."""
        with self._mutex, self._system_errors(), self._start_locked():
            self._server.bring_down(mode)

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop the server while it is used, and start it again."""
        with self._mutex, self._system_errors(), self._start_locked():
            stays = self._folder.stays.exists()
            self._server.bring_down(mode)
        self.start()
        if stays:
            with self._system_errors(), self._start_locked():
                self._mark_as_staying()

    def __enter__(self) -> EmbeddedPostgres:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self) -> None:
        if not self.is_open:
            self._users = FileLock(self._folder.users_lock)
            shared = self._users.share()
            assert shared, "only this process, with the start lock, may take it exclusively"
            _open_servers.add(self)

    def _leave(self) -> None:
        _open_servers.discard(self)
        if self._users is not None:
            self._users.close()

    def _mark_as_staying(self) -> None:
        if self._server.is_alive():
            os.close(open_private(self._folder.stays))

    def _stop_if_unused(self) -> None:
        if self._folder.stays.exists():
            return
        with FileLock(self._folder.users_lock) as users:
            if users.take() and not self._server.clients():
                self._bring_down()

    def _bring_down(self) -> None:
        self._server.bring_down("fast")
        self._folder.stays.unlink(missing_ok=True)
        self._folder.remove_socket_dir()

    def _check_unused(self) -> None:
        """EmbeddedError that names the users of the server."""
        clients = self._server.clients()
        with FileLock(self._folder.users_lock) as users:
            if users.take() and not clients:
                return
        names = ", ".join(dict.fromkeys(clients)) or "a process of Headwater"
        raise EmbeddedError(
            f"the embedded PostgreSQL in {self.data_dir} is in use: {names}",
            hint="Disconnect these first, or stop the server anyway with --force.",
        )

    @contextmanager
    def _start_locked(self) -> Iterator[None]:
        """Hold the start lock: no other process starts or stops the server meanwhile."""
        with FileLock(self._folder.start_lock) as lock:
            if not lock.take_within(EMBEDDED_START_SECONDS + EMBEDDED_STOP_SECONDS):
                raise retryable_error(
                    f"another process is starting or stopping the embedded PostgreSQL in"
                    f" {self.data_dir}",
                    hint=f"Try again. To find the process: fuser {self._folder.start_lock}",
                )
            yield

    @contextmanager
    def _system_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise EmbeddedError(
                f"the embedded PostgreSQL cannot use {self.data_dir}: {error}",
                hint=f"Free some disk space, or {ELSEWHERE}." if full else ELSEWHERE,
            ) from error


@atexit.register
def _close_all() -> None:
    for server in list(_open_servers):
        server.close()
