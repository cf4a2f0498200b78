"""Permits are given in the order in which they were requested."""

from __future__ import annotations

import random
from threading import Barrier, Condition, Event, Thread

import pytest

from headwater.pipeline.views.permits import Permits


class Turns:
    """Threads that request permits, and the order in which they have them. One step at a time: each
    method returns when no thread has anything left to do."""

    def __init__(self, count: int) -> None:
        self.permits = Permits(count)
        self.order: list[int] = []
        self._changed = Condition()
        self._threads: list[tuple[Thread, Event]] = []

    @property
    def working(self) -> list[int]:
        return [number for number in self.order if not self._threads[number][1].is_set()]

    def request(self) -> None:
        """Request a permit in a thread of its own."""
        waiting, had = self.permits.waiting, len(self.order)
        done = Event()
        thread = Thread(target=self._work, args=(len(self._threads), done), daemon=True)
        self._threads.append((thread, done))
        thread.start()
        while self.permits.waiting == waiting and len(self.order) == had:
            thread.join(0.001)

    def _work(self, number: int, done: Event) -> None:
        self.permits.acquire()
        with self._changed:
            self.order.append(number)
            self._changed.notify_all()
        done.wait(60)
        self.permits.release()

    def finish(self, number: int) -> None:
        """End the work of a thread that has a permit."""
        thread, done = self._threads[number]
        expected = len(self.order) + (self.permits.waiting > 0)
        done.set()
        thread.join(60)
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.order) == expected, 60)


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_waiting_is_next(seed: int) -> None:
    chance = random.Random(seed)
    count = chance.randint(1, 4)
    turns = Turns(count)
    for requested in range(1, 30):
        turns.request()
        while turns.working and chance.random() < 0.5:
            turns.finish(chance.choice(turns.working))
        assert turns.order == list(range(len(turns.order)))
        assert len(turns.working) == min(count, requested - len(turns.order) + len(turns.working))
    while turns.working:
        turns.finish(turns.working[0])
    assert turns.order == list(range(29))


def test_a_thread_that_requests_again_at_once_is_behind_those_that_wait() -> None:
    permits = Permits(1)
    order: list[str] = []
    permits.acquire()
    begun = Barrier(2)

    def waiting() -> None:
        begun.wait()
        permits.acquire()
        order.append("waiting")
        permits.release()

    thread = Thread(target=waiting, daemon=True)
    thread.start()
    begun.wait()
    while not permits.waiting:
        thread.join(0.001)
    permits.release()
    permits.acquire()
    order.append("again")
    permits.release()
    thread.join(60)
    assert order == ["waiting", "again"]
