"""How things look in a terminal and as JSON lines. No I/O: values in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from headwater.live.filter import EVERYTHING, And
from headwater.live.filter_text import in_words
from headwater.model import (
    Change,
    Delta,
    Enter,
    Key,
    Leave,
    Match,
    Move,
    Position,
    Reset,
    Row,
    Transaction,
    Unmatch,
    Update,
)
from headwater.pipeline.views.catalog import ViewStatus
from headwater.protocol import plain

if TYPE_CHECKING:
    from headwater.capture.postgres.doctor import Finding
    from headwater.client.rows_state import Batch
    from headwater.queries.analysis import Analysis
    from headwater.queries.statements import Executed
    from headwater.status import Status

OP_STYLES = {
    "insert": "green",
    "update": "yellow",
    "delete": "red",
    "truncate": "bold red",
    "reset": "magenta",
}
_LEVEL_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_VALUE_CHARACTERS_MAX = 60
_encode = msgspec.json.Encoder(decimal_format="number").encode


def as_json(value: object) -> str:
    """One line of JSON. Numerics keep their digits; what JSON lacks is PostgreSQL's text."""
    return _encode(_plain(value)).decode()


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
        }
    )


def change_line(change: Change) -> Text:
    """A change for people: when, what, which row, and what is new about it."""
    line = Text()
    line.append(f"{change.at:%H:%M:%S.%f} "[:-4] + " ", style="dim")
    line.append(f"{change.op:<8} ", style=OP_STYLES[change.op])
    line.append(change.table.label, style="bold")
    if change.key:
        line.append(" " + ",".join(map(short, change.key)), style="cyan")
    match change.op:
        case "insert" | "delete":
            line.append("  " + _columns(change.after or change.before or {}, change.table.key))
        case "update":
            line.append("  ").append_text(_differences(change))
    if change.actor.user_id:
        line.append(f"  by {change.actor.user_id}", style="dim")
    return line


def rows_view(
    title: str, rows: Sequence[tuple[Key, Row]], styles: Mapping[Key, str], note: str
) -> Group:
    """The rows of a live query as a table; `styles` has those that are new or changed."""
    names = list(rows[0][1]) if rows else []
    grid = Grid(*names, box=None, header_style="bold", pad_edge=False)
    for key, row in rows:
        grid.add_row(*(Text(short(row.get(name))) for name in names), style=styles.get(key, ""))
    count = f"{len(rows)} row{'' if len(rows) == 1 else 's'}"
    caption = Text(" · ".join(filter(None, (title, count, note))), style="dim")
    return Group(grid, caption) if rows else Group(caption)


def batch_as_json(batch: Batch) -> str:
    """A batch as `headwater watch --json` prints it; docs/reference/cli.md explains the fields."""
    return _encode(batch).decode()


def batch_lines(batch: Batch) -> list[str]:
    """A batch for people who read it as text: a line for each delta."""
    return [line for delta in batch.deltas for line in _delta_lines(delta)]


def _delta_lines(delta: Delta) -> list[str]:
    name = type(delta).__name__.lower()
    match delta:
        case Reset(rows):
            return [name, *(line for row in rows for line in _delta_lines(row))]
        case Leave(key) | Unmatch(key):
            return [f"{name:<8}{_key(key)}"]
        case Enter(key, row) | Update(key, row) | Move(key, row) | Match(key, row):
            values = " ".join(f"{column}={short(value)}" for column, value in row.items())
            return [f"{name:<8}{_key(key)}  {values}"]


def _key(key: Key) -> str:
    return ",".join(map(short, key))


def _columns(row: Row, key: tuple[str, ...]) -> str:
    return " ".join(f"{name}={short(value)}" for name, value in row.items() if name not in key)


def _differences(change: Change) -> Text:
    text = Text()
    before, after = change.before or {}, change.after or {}
    for name in change.changed:
        text.append(" " if text else "").append(f"{name} ")
        text.append(short(before.get(name)), style="red").append("→", style="dim")
        text.append(short(after.get(name)), style="green")
    return text


def short(value: Any) -> str:
    text = "∅" if value is None else str(_plain(value))
    # What is in a row must not move the cursor or recolour the terminal.
    text = "".join(c if c.isprintable() else {"\n": "⏎"}.get(c, "·") for c in text)
    return text if len(text) <= _VALUE_CHARACTERS_MAX else text[: _VALUE_CHARACTERS_MAX - 1] + "…"


def status_view(status: Status) -> Group:
    log = status.log
    facts = Grid.grid(padding=(0, 2))
    facts.add_row("log", f"{log.id}, {_size(log.bytes)}, kept {_period(log.retention)}")
    facts.add_row("position", log.position)
    facts.add_row("oldest change", f"{log.oldest:%Y-%m-%d %H:%M:%S}" if log.oldest else "none")
    facts.add_row("readers", f"{log.readers}" + (", polling" if log.polling else ""))
    parts: list[RenderableType] = [facts, "", _tables(status), "", _cursors(status)]
    if status.lagging:
        parts += ["", _lagging(status)]
    if status.pipeline:
        parts += ["", _pipeline(status)]
    if status.pipeline and status.spark_log:
        parts.append(Text(f"What Spark prints is in {status.spark_log}", style="dim"))
    return Group(*parts)


def _tables(status: Status) -> Grid | Text:
    if not status.tables:
        return Text("No table is enabled. Enable one: headwater enable TABLE", style="dim")
    grid = Grid("table", "state", "relations", "changes in the last hour", box=None)
    for table in status.tables:
        if not table.exists:
            state = Text("dropped", style="red")
        elif not table.enabled:
            state = Text("disabled: subscriptions get no updates", style="yellow")
        elif table.altered:
            state = Text("altered, captured the slow way", style="yellow")
        else:
            state = Text("captured", style="green")
        if table.left_out:
            state.append(
                f", but for virtual column{'s' * (len(table.left_out) > 1)}"
                f" {', '.join(table.left_out)}",
                style="yellow",
            )
        grid.add_row(table.name, state, str(table.members), str(table.changes))
    return grid


def _lagging(status: Status) -> Grid:
    grid = Grid("lagging live query", "table", "role", "since", box=None)
    for view in status.lagging:
        name = f"{view.view} at gateway {view.gateway}"
        grid.add_row(name, view.table, view.role or "–", f"{view.since:%Y-%m-%d %H:%M:%S}")
    return grid


def _cursors(status: Status) -> Grid | Text:
    if not status.cursors:
        return Text("No cursor is saved.", style="dim")
    grid = Grid("cursor", "position", "behind", "retention left", box=None)
    for cursor in status.cursors:
        left = _period(cursor.left) if cursor.left is not None else "–"
        grid.add_row(
            cursor.name,
            str(cursor.position),
            _period(cursor.lag) if cursor.lag is not None else "nothing",
            Text("fell off: resync", style="bold red") if cursor.lost else left,
        )
    return grid


def views_view(views: Sequence[ViewStatus]) -> Grid | Text:
    """The streaming views."""
    if not views:
        return Text("There is no view. Write one: docs/howto/views.md", style="dim")
    grid = Grid("view", "state", "rows", "position", "changed", "error", box=None)
    for view in views:
        grid.add_row(
            view.name,
            Text("failed", style="red") if view.error else view.state,
            "its table is gone" if view.rows is None and view.built_at else str(view.rows or 0),
            view.position or "–",
            f"{view.changed_at:%Y-%m-%d %H:%M:%S}",
            Text(view.error or "", style="red"),
        )
    return grid


def _pipeline(status: Status) -> Grid:
    grid = Grid("pipeline", "state", "behind", "changes/s", "last error", box=None)
    for stream in status.pipeline:
        behind = "–"
        if stream.behind_changes is not None and stream.behind_seconds is not None:
            age = _period(timedelta(seconds=round(stream.behind_seconds)))
            behind = (
                f"{stream.behind_changes} changes, {age}" if stream.behind_changes else "nothing"
            )
        style = {"running": "green", "failed": "bold red", "waiting": "yellow"}
        grid.add_row(
            stream.name,
            Text(stream.state, style=style.get(stream.state, "dim")),
            behind,
            f"{stream.processed_rate:,.0f}",
            Text(stream.error or "", style="red"),
        )
    return grid


def findings_view(findings: list[Finding]) -> Grid:
    grid = Grid.grid(padding=(0, 2))
    for finding in findings:
        detail = Text(finding.detail)
        if finding.hint:
            detail.append(f"\n{finding.hint}", style="dim")
        level = Text(finding.level, style=_LEVEL_STYLES[finding.level])
        grid.add_row(level, Text(finding.topic, style="bold"), detail)
    return grid


def _size(count: int) -> str:
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.3g} {units[0]}"


def _period(period: timedelta) -> str:
    seconds = period.total_seconds()
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def explained(executed: Executed, analysis: Analysis) -> dict[str, Any]:
    """What a statement reads, as `headwater explain --json` prints it. Without the values of its
    parameters they are called `$1`, `$2`, …"""
    bound = analysis.reads(executed) if executed.values else ()
    filters = [read.where for read in bound] or [And(each.conditions) for each in analysis.tables]
    return {
        "sql": executed.statement.sql,
        "everything": analysis.everything,
        "tables": [
            {
                "table": each.table.label,
                "columns": None if each.columns is None else sorted(each.columns),
                "where": None if where == EVERYTHING else in_words(where),
                "through": list(each.through),
            }
            for each, where in zip(analysis.tables, filters, strict=True)
        ],
        "uncaptured": list(analysis.uncaptured),
        "notes": list(analysis.notes),
    }


def explained_view(documents: Sequence[Mapping[str, Any]]) -> Group:
    """The same for people, a statement after the other."""
    return Group(*(part for each in documents for part in _explained_parts(each)))


def _explained_parts(document: Mapping[str, Any]) -> list[Grid | Text]:
    parts: list[Grid | Text] = [Text(document["sql"].strip(), style="bold")]
    if document["tables"]:
        grid = Grid("table", "columns", "rows", "through", box=None)
        for each in document["tables"]:
            columns = each["columns"]
            grid.add_row(
                Text(each["table"]),
                Text("any" if columns is None else ", ".join(columns) or "none"),
                Text(each["where"] or "any"),
                Text(", ".join(each["through"])),
            )
        parts.append(grid)
    elif not document["everything"]:
        parts.append(Text("No captured table: no change concerns it.", style="dim"))
    if document["everything"]:
        parts.append(Text("Every change of a captured table counts.", style="yellow"))
    parts += [
        Text(f"Changes of {label} go unnoticed.", style="bold red")
        for label in document["uncaptured"]
    ]
    parts += [Text(f"· {note}", style="yellow") for note in document["notes"]]
    return parts
