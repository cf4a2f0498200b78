"""Whether the log reaches back to a position: whether it has every change since, of the history
that the position belongs to.

It does not when the position is of another log, is ahead of the database, lies before what was
trimmed, or belongs to a history that was replaced by an earlier copy of the server's files. Each is
`ResyncRequired`, and its hint ends with the way out that the caller names.

A check before a read is not enough: the log can be trimmed while it is read. So a reader asks for
`FLOOR` again when its rows have arrived, and calls `check_floor`. The floor is a sequence, which
shows its present value to every transaction.

The check is a generator of questions to the database, so that it exists once for the live tier,
which awaits the answers, and for the pipeline, which blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

from headwater.database import Connection
from headwater.errors import ResyncRequired
from headwater.log import marks
from headwater.log.between import SINCE_RANGES, parameters
from headwater.model import Position

READ_AGAIN = "Read the tables again, then follow the log from its present position."
"""The way out for an application."""

FLOOR = "select last_value from headwater.log_floor"
"""The log has every change of the transactions from this id on."""

PRESENT = f"select headwater.log_id(), pg_current_snapshot()::text, ({FLOOR})"
"""The log's name, the present snapshot and the floor."""


class Question(NamedTuple):
    """A statement whose answer is one row."""

    statement: str
    values: dict[str, Any]


AnswerRow: TypeAlias = tuple[Any, ...]


async def check(connection: Connection, position: Position, log: str | None = None) -> None:
    """Raise ResyncRequired unless the log reaches back to the position. `log` is the name that the
    log had when the reader was opened; without it, the present name counts."""
    questions = _check(position, READ_AGAIN, log=log)
    try:
        question = next(questions)
        while True:
            cursor = await connection.execute(question.statement.encode(), question.values)
            answer = await cursor.fetchone()
            assert answer is not None
            question = questions.send(answer)
    except StopIteration:
        return


def check_blocking(
    ask: Callable[[str, dict[str, Any]], AnswerRow],
    position: Position,
    way_out: str,
    is_known: Callable[[], bool],
) -> None:
    """The same for a caller that blocks. `is_known` says whether the position's history was
    compared before over the connection that `ask` has now: over one connection, the server's files
    cannot be replaced."""
    questions = _check(position, way_out, is_known=is_known)
    try:
        question = next(questions)
        while True:
            question = questions.send(ask(*question))
    except StopIteration:
        return


def is_replaced_blocking(
    ask: Callable[[str, dict[str, Any]], AnswerRow], position: Position
) -> bool:
    """Whether the position is of this log by name, but of a history that was replaced: the same
    transaction ids mean other changes."""
    log, snapshot, _ = ask(PRESENT, {})
    if position.log != log:
        return False
    if not Position.of_snapshot(log, snapshot).covers(position):
        return True
    return position.mark is not None and not marks.agrees(
        position, ask(marks.COVERED, marks.covered_parameters(position))
    )


def _check(
    position: Position,
    way_out: str,
    *,
    log: str | None = None,
    is_known: Callable[[], bool] = lambda: False,
) -> Generator[Question, AnswerRow, None]:
    present_log, snapshot, floor = yield Question(PRESENT, {})
    log = log or present_log
    if position.log != log:
        raise ResyncRequired(
            f"position {position} belongs to another log than this database's ({log})",
            hint=f"The database was restored, failed over or installed again. {way_out}",
        )
    # Every id of the position, not only the last: an id that the server gives out a second time can
    # belong to a transaction that is running now.
    if not Position.of_snapshot(position.log, snapshot).covers(position):
        raise ResyncRequired(
            f"position {position} is ahead of the database",
            hint="The server crashed and lost what it had not yet written to disk, or its files "
            f"were replaced by an earlier copy. {way_out}",
        )
    check_floor(position, floor, way_out)
    if position.mark is None or is_known():
        return
    covered = yield Question(marks.COVERED, marks.covered_parameters(position))
    if marks.agrees(position, covered):
        return
    (later_floor,) = yield Question(FLOOR, {})
    if later_floor == floor:
        raise ResyncRequired(
            f"position {position} is of a history that this database no longer has",
            hint="The database's files were replaced by an earlier copy, for example a volume "
            f"snapshot, or the server lost what it had not yet written to disk. {way_out}",
        )
    # Rows of the mark may be missing because the log was trimmed between the questions.
    yield from _check(position, way_out, log=log, is_known=is_known)


def check_floor(position: Position, floor: int, way_out: str = READ_AGAIN) -> None:
    """Raise ResyncRequired if changes since the position were trimmed, by the value of `FLOOR`."""
    if position.xmin < floor:
        raise ResyncRequired(
            f"the log was trimmed past position {position}",
            hint=f"Its retention is over. {way_out} A longer retention is set with "
            "`[log] retention` in headwater.toml.",
        )


async def check_age(connection: Connection, position: Position, history: timedelta) -> None:
    """Raise ResyncRequired if a transaction since the position is older than `history`. Its last
    change decides. Transactions are looked at in order, so a position far back is refused by the
    first one."""
    cursor = await connection.execute(_TOO_OLD, {**parameters(position), "history": history})
    if await cursor.fetchone() is not None:
        raise ResyncRequired(
            f"position {position} lies further back than a feed may begin here",
            hint=f"{READ_AGAIN} How far back it may begin is decided by the setting"
            " [gateway] feed_history, or by the application's authorize hook.",
        )


_TOO_OLD = (
    " union all ".join(
        f"(select xid from headwater.log where {range_} group by xid"
        " having max(at) < clock_timestamp() - %(history)s limit 1)"
        for range_ in reversed(SINCE_RANGES)
    ).encode()
    + b" limit 1"
)
