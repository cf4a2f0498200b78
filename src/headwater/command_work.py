"""What commands share when they work: a run to the end, a connection, a program of the user's, and
a way to say what was done."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from headwater import render
from headwater.app import Headwater, database
from headwater.command_options import settings_for
from headwater.database import Connection, connect
from headwater.errors import ConfigError
from headwater.settings import Settings

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False)


@asynccontextmanager
async def connected(settings: Settings, *, installed: bool = True) -> AsyncIterator[Connection]:
    """A connection to the database of a command. Headwater is installed in the embedded one,
    unless `installed` is False."""
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
    """Run to the end. SIGTERM ends it as Ctrl-C does, so that what was started is stopped; so does
    a terminal that is closed, unless it is not to be heard of (nohup)."""

    async def until_told() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, _hang_up)
        await work

    with suppress(asyncio.CancelledError), asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(until_told())


def _hang_up() -> None:
    """As SIGTERM, whatever that means by now. Once: the system and the shell both tell of it."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.raise_signal(signal.SIGTERM)


def show(document: object, view: RenderableType, *, json: bool) -> None:
    """The JSON goes out as it is: Rich would wrap it and read markup in it."""
    if json:
        print(render.as_json(document))
    else:
        out.print(view)


def say(document: dict[str, Any], text: str, *, json: bool) -> None:
    show(document, Text(text), json=json)


def chosen_headwater(
    program: str | None, url: str | None, embedded: bool, data_dir: str | None
) -> Headwater:
    """A program's Headwater object, or one for the database that the options name."""
    if program is None:
        return Headwater(settings=settings_for(url, embedded, data_dir))
    if url is not None or embedded or data_dir is not None:
        raise ConfigError(
            f"{program} says itself which database it uses",
            hint="Leave out --url, --embedded and --data-dir.",
        )
    return load(program)


def load(program: str) -> Headwater:
    """A Headwater object of a program, by where it is."""
    module, _, name = program.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module), name or "hw")
    except ConfigError as error:  # it says itself what is wrong, and the way out
        raise ConfigError(f"{program}: {error}", hint=error.hint) from error
    except Exception as error:  # whatever somebody's program does when it is loaded
        raise ConfigError(
            f"cannot load {program}: {type(error).__name__}: {error}",
            hint="Write module:name, as in shop:hw.",
        ) from error
    if not isinstance(found, Headwater):
        raise ConfigError(f"{program} is not a Headwater object", hint="hw = Headwater(…)")
    return found
