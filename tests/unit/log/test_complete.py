"""The wait until the log is complete, with the answers of a database and a clock that are given."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.errors import DatabaseError
from headwater.limits import WAL_CAPTURE_SECONDS
from headwater.log import complete


class Database:
    """Answers with how far the slot was confirmed, one after the other; the last one stays."""

    def __init__(
        self,
        confirmed: list[int | None],
        flushed: int = 1_000,
        sent: list[tuple[int, int]] | None = None,
    ) -> None:
        self.now = 0.0
        self.asked: list[str] = []
        self._confirmed = _lasting(confirmed)
        self._flushed = flushed
        self._sent = None if sent is None else _lasting(sent)

    def wait(self, upto: int, version: int = 180_000, *, holds_snapshot: bool = False) -> None:
        steps = complete._wait(
            "slot", upto, version, lambda: self.now, holds_snapshot=holds_snapshot
        )
        answer: tuple[Any, ...] | None = None
        try:
            while True:
                step = steps.send(answer)
                answer = None
                if isinstance(step, float):
                    self.now += step
                else:
                    answer = self._answer(step.statement)
        except StopIteration:
            return

    def _answer(self, statement: str) -> tuple[Any, ...] | None:
        if "emit_message" in statement:
            self.asked.append("flush")
            return ("0/0",)
        if "sent_lsn" in statement:
            self.asked.append("sent")
            return None if self._sent is None else next(self._sent)
        self.asked.append("confirmed")
        confirmed = next(self._confirmed)
        return None if confirmed is None else (confirmed, self._flushed)


def _lasting(values: list[Any]) -> Iterator[Any]:
    yield from values
    while True:
        yield values[-1]


def test_it_asks_once_where_the_log_is_complete() -> None:
    database = Database([100])
    database.wait(100)
    assert database.asked == ["confirmed"]


def test_it_waits_until_the_slot_was_confirmed() -> None:
    database = Database([10, 50, 99, 100])
    database.wait(100)
    assert database.asked == ["confirmed"] * 4
    assert database.now > 0


def test_what_is_not_on_disk_is_flushed_once() -> None:
    database = Database([10, 10, 10, 100], flushed=60)
    database.wait(100)
    assert database.asked.count("flush") == 1


def test_it_gives_up_where_nothing_reads_the_slot() -> None:
    database = Database([10])
    with pytest.raises(DatabaseError, match="not running: 90 bytes behind") as raised:
        database.wait(100)
    assert raised.value.retryable
    assert database.now > WAL_CAPTURE_SECONDS


def test_it_waits_longer_while_the_slot_makes_progress() -> None:
    database = Database([10], sent=[(20, 1), (30, 1), (40, 1), (40, 1)])
    with pytest.raises(DatabaseError, match="makes no progress"):
        database.wait(100)
    assert database.now > 3 * WAL_CAPTURE_SECONDS


def test_it_waits_longer_while_parts_of_one_transaction_are_appended() -> None:
    database = Database([10], sent=[(20, 1), (20, 2), (20, 3), (20, 3)])
    with pytest.raises(DatabaseError, match="makes no progress"):
        database.wait(100)
    assert database.now > 3 * WAL_CAPTURE_SECONDS


def test_a_caller_that_holds_a_snapshot_takes_another_while_there_is_progress() -> None:
    with pytest.raises(complete.StillBehind, match="90 bytes behind"):
        Database([10], sent=[(20, 1), (20, 2)]).wait(100, holds_snapshot=True)
    with pytest.raises(DatabaseError, match="makes no progress"):
        Database([10], sent=[(20, 1), (20, 1)]).wait(100, holds_snapshot=True)


def test_the_same_for_a_caller_that_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database([10], sent=[(20, 1), (20, 2)])

    def sleep(seconds: float) -> None:
        database.now += seconds

    clock = SimpleNamespace(monotonic=lambda: database.now, sleep=sleep)
    monkeypatch.setattr(complete, "time", clock)
    with pytest.raises(complete.StillBehind):
        complete.wait_blocking(
            lambda statement, _: database._answer(statement),
            "slot",
            100,
            180_000,
            holds_snapshot=True,
        )


def test_a_slot_that_is_gone_ends_the_wait() -> None:
    with pytest.raises(DatabaseError, match="ended or its slot slot was lost"):
        Database([10, None]).wait(100)
