"""How a command runs: its event loop and signals, its connection, and the application that it
loads."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import Any

from headwater.app import Headwater, database
from headwater.commands.options import settings_for
from headwater.database import Connection, connect
from headwater.errors import ConfigError
from headwater.settings import Settings


@asynccontextmanager
async def connected(settings: Settings, *, installed: bool = True) -> AsyncIterator[Connection]:
    """A connection to the database of a command. Headwater is installed in an embedded database
    first, unless `installed` is False."""
    async with database(settings, installed=installed) as url:
        connection = await connect(url, purpose="cli")
        try:
            yield connection
        finally:
            await connection.close()


def run(
    work: Coroutine[Any, Any, None],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    """Run to the end. SIGTERM stops the work as Ctrl-C does, and so does a closed terminal
    (SIGHUP), unless that signal is ignored (nohup)."""

    async def until_signalled() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, _hang_up)
        await work

    with suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(until_signalled())


def _hang_up() -> None:
    """Handle SIGHUP as SIGTERM. Only once: the system and the shell both send it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.raise_signal(signal.SIGTERM)


def chosen_application(
    program: str | None, url: str | None, embedded: bool, data_dir: str | None
) -> Headwater:
    """The application `module:name`, or without one a Headwater object for the database that the
    options name."""
    if program is None:
        return Headwater(settings=settings_for(url, embedded, data_dir))
    if url is not None or embedded or data_dir is not None:
        raise ConfigError(
            f"{program} chooses its database itself",
            hint="Leave out --url, --embedded and --data-dir.",
        )
    return load_application(program)


def load_application(program: str) -> Headwater:
    """The Headwater object that `module:name` refers to; the name is `hw` if it is left out."""
    module, _, name = program.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module), name or "hw")
    except ConfigError as error:  # it has its own message and hint
        raise ConfigError(f"{program}: {error}", hint=error.hint) from error
    except Exception as error:  # a program can raise anything while it is imported
        raise ConfigError(
            f"cannot load {program}: {type(error).__name__}: {error}",
            hint="Write module:name, as in shop:hw.",
        ) from error
    if not isinstance(found, Headwater):
        raise ConfigError(f"{program} is not a Headwater object", hint="hw = Headwater(…)")
    return found
