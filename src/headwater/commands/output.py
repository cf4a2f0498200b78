"""The output of commands: JSON for programs, text for people. JSON is written to standard output
directly; Rich would wrap it and interpret markup in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.text import Text

from headwater.model import Change, Position, Transaction
from headwater.protocol import plain

OP_STYLES = {
    "insert": "green",
    "update": "yellow",
    "delete": "red",
    "truncate": "bold red",
    "reset": "magenta",
}
_VALUE_CHARACTERS_MAX = 60

out = Console(highlight=False, soft_wrap=True, emoji=False)
err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)

encode = msgspec.json.Encoder(decimal_format="number").encode
"""JSON as clients get it. Numerics keep their digits."""


def print_result(document: object, view: RenderableType, *, json: bool) -> None:
    """Print the result of a command: the document as JSON, or the view for people."""
    if json:
        print(as_json(document))
    else:
        out.print(view)


def print_message(document: Mapping[str, Any], text: str, *, json: bool) -> None:
    """Print a message about what a command did: the document as JSON, or a sentence."""
    print_result(document, Text(text), json=json)


def print_note(text: str) -> None:
    """Print a line for people to standard error."""
    err.print(text, markup=False)


@contextmanager
def progress_bar(what: str, *, shown: bool) -> Iterator[Callable[[int, int, float | None], None]]:
    """A bar on standard error while something takes long, where that is a terminal. Called with
    what is done, what there is, and the seconds left if they are known."""
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    bar = Progress(*columns, console=err, transient=True, disable=not (shown and err.is_terminal))
    with bar:
        task = bar.add_task(what, total=None)

        def show(done: int, total: int, seconds: float | None) -> None:
            left = "" if seconds is None else f", {short_period(timedelta(seconds=seconds))} left"
            bar.update(task, completed=done, total=total, description=what + left)

        yield show


def as_json(value: object) -> str:
    """One line of JSON. Numerics keep their digits; what JSON lacks is PostgreSQL's text."""
    return encode(_plain(value)).decode()


def _plain(value: Any) -> Any:
    match value:
        case float() | bytes():
            return plain(value)
        case Position():
            return str(value)
        case timedelta():
            return value.total_seconds()
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case msgspec.Struct():
            return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if hasattr(value, "is_finite") and not value.is_finite():
        return str(value)
    return value


def change_as_json(change: Change, transaction: Transaction) -> str:
    """A change as `headwater tail --json` prints it; docs/reference/cli.md explains the fields."""
    return as_json(
        {
            "position": transaction.position,
            "seq": change.seq,
            "xid": change.xid,
            "at": change.at,
            "table": change.table.label,
            "op": change.op,
            "key": dict(zip(change.table.key, change.key, strict=False)) or None,
            "before": change.before,
            "after": change.after,
            "changed": list(change.changed) if change.op == "update" else None,
            "user_id": change.actor.user_id,
            "function_name": change.actor.function_name,
            "trace_id": change.actor.trace_id,
            "origin": change.origin,
        }
    )


def short(value: Any) -> str:
    """A value for a terminal: on one line, shortened if it is long."""
    text = "∅" if value is None else str(_plain(value))
    # A value must not move the cursor or change the colours of the terminal.
    text = "".join(c if c.isprintable() else {"\n": "⏎"}.get(c, "·") for c in text)
    return text if len(text) <= _VALUE_CHARACTERS_MAX else text[: _VALUE_CHARACTERS_MAX - 1] + "…"


def short_size(count: int) -> str:
    """A size for a terminal."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.3g} {units[0]}"


def short_period(period: timedelta) -> str:
    """A length of time for a terminal."""
    seconds = period.total_seconds()
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
