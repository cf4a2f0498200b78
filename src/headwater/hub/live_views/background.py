"""Asks beside the flushes what live queries need, so that no policy and no slow query holds others.

A flush hands over the steps that must ask, by view. Those of one role, claims and table are asked
together, in the snapshot of the flush, over a connection of a pool: `question_url` for what is
asked as a user's role, `url` for the rest. Roles that answered quickly the last time share a
connection, and the flush waits a moment for them (`limits.FLUSH_BUDGET_SECONDS`); a slow one has a
connection to itself, and its views lag. When a job is done, its views are delivered as of the
position of its flush; what came since waits in their `Lag`, and is the next job.

Connections are given out by turns: the role and claims that were served longest ago come first.
To look at all rows that a user holds takes time on the event loop, too. It is taken in slices, and
a role and claims for which it was much rest for a multiple of it: their views lag meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Hashable,
    Iterable,
    Sequence,
)
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial

import psycopg

from headwater import limits
from headwater.database import Connection, connect
from headwater.hub.flush_state import FlushState
from headwater.hub.live_views.delivery import Delivery, Flushed
from headwater.hub.live_views.registry import LiveViews
from headwater.hub.live_views.steps import ViewStep
from headwater.hub.live_views.view import LiveView
from headwater.hub.live_views.visibility import guarded, hide
from headwater.hub.loop_time import Metered, Turn
from headwater.hub.reading.snapshot_pool import Export, SnapshotPool
from headwater.hub.reading.snapshot_queries import SnapshotQuery, ask_in_flush
from headwater.hub.reading.tables import FORMATS
from headwater.hub.resources import Resources
from headwater.live.needs import Need, Refill
from headwater.live.state.streamed import Streamed
from headwater.live.state.window import Window

_JOB_LOOP_SECONDS = 0.02
"""How long the event loop may be busy with one look at what a role with claims may see. After more,
nothing is asked for them for a while: they rest, and their live queries lag."""

_JOB_REST_TIMES = 4
"""How many times as long they rest."""

_JOB_REST_SECONDS_MAX = 2.0
"""They rest for at most this long. Then everything that came since is asked together."""

_QUESTION_CONNECTIONS_QUICK = 2
"""Of these, how many are never given to questions that took long the last time."""

_QUESTION_CONNECTIONS_PER_SCOPE = 2
"""Of these, how many ask slow questions for one role and claims at a time. Its others wait."""

_QUESTION_BATCH = 16
"""Roles with claims whose quick questions are asked together over one connection."""

_QUESTION_QUICK_SECONDS = 0.1
"""A question that takes longer is slow: it is asked again alone, and from then on beside the
flushes until it was quick once."""

_QUESTION_PACES_MAX = 10_000
"""Roles with claims, by table, of which is remembered how long their last question took. The oldest
is forgotten, and counts as quick."""


logger = logging.getLogger(__name__)

_OPTIONS = f"{FORMATS} -c jit=off"

_LOSSES_MAX = 3
"""How often a view is asked for again whose connection was lost. Its policy may be why."""


class Unit:
    """The steps of one view in a flush: its own, and those of results that have arrived for it."""

    __slots__ = ("seconds", "steps", "view")

    def __init__(self, view: LiveView, steps: list[ViewStep]) -> None:
        self.view = view
        self.steps = steps
        self.seconds = 0.0
        """How long the loop was busy with its changes."""

    @property
    def who(self) -> Hashable:
        """For whom it asks."""
        scope = self.view.scope
        return self.view.id if scope is None else (scope.role, scope.claims)

    @property
    def key(self) -> Hashable:
        """What is asked together, and remembered as quick or slow."""
        return self.who, self.view.known.table.id

    @property
    def rows(self) -> int:
        """How many are looked at, about."""
        held = (step.state.keys for step in self.steps if isinstance(step.state, Window))
        return sum(map(len, held)) + sum(len(each) for step in self.steps for each in step.changes)


def units_of(steps: Iterable[ViewStep]) -> list[Unit]:
    by_view: dict[LiveView, list[ViewStep]] = {}
    for step in steps:
        by_view.setdefault(step.view, []).append(step)
    return [Unit(view, found) for view, found in by_view.items()]


class BackgroundJob:
    """Units that are asked for over one connection, in one snapshot."""

    def __init__(self, groups: list[list[Unit]], flushed: Flushed, *, quick: bool) -> None:
        self.units = [unit for group in groups for unit in group]
        self.is_guarded = any(guarded(unit.view) for unit in self.units)
        self.flushed = flushed
        self.began = time.monotonic()
        self.stop: Callable[[], None] = lambda: None
        """Hangs up."""
        self.quick = quick
        """Whether it is several together, none of which may take long."""
        self.task: asyncio.Task[None] | None = None

    @property
    def seconds(self) -> float:
        """How long each question may take. What a role may see is soon asked again, alone; other
        views would have to be read again."""
        if not self.quick:
            return limits.QUESTION_SECONDS_MAX
        return _QUESTION_QUICK_SECONDS if self.is_guarded else limits.FLUSH_QUESTION_SECONDS

    @property
    def patience(self) -> float:
        """How long all of them may take."""
        count = _QUESTION_BATCH if self.quick else 2
        return count * self.seconds + 2 * limits.FLUSH_QUESTIONS_SECONDS

    @property
    def has_lasted(self) -> bool:
        """Whether it was hung up on because it took longer."""
        return time.monotonic() - self.began >= self.patience

    @property
    def who(self) -> set[Hashable]:
        return {unit.who for unit in self.units}

    def is_for(self, view: LiveView) -> bool:
        """Whether the view still waits for it."""
        return view.lag is not None and view.lag.job is self

    def left(self) -> None:
        """A view no longer waits for it. When none does, it is stopped."""
        if not any(self.is_for(unit.view) for unit in self.units):
            self.stop()


class BackgroundQueries:
    """All questions of a hub's live queries."""

    def __init__(
        self, resources: Resources, flushes: FlushState, views: LiveViews, delivery: Delivery
    ) -> None:
        self._flushes = flushes
        self._views = views
        self._delivery = delivery
        self._metrics = resources.metrics
        self._own = self._pool(resources.url, scoped=False)
        self._scoped = self._pool(resources.question_url or resources.url, scoped=True)
        self._jobs: dict[BackgroundJob, SnapshotPool] = {}
        self._slow: dict[Hashable, bool] = {}
        """By what is asked together, whether it took long the last time."""
        self._slow_tables: set[int] = set()
        self._turns: dict[Hashable, int] = {}
        self._turn = 0
        self._resting: dict[Hashable, asyncio.TimerHandle] = {}
        """Roles and claims that kept the loop busy, until their next job may begin."""
        self._patient_after = 0.0
        self._is_closing = False

    def _pool(self, url: str, *, scoped: bool) -> SnapshotPool:
        """With `scoped`, for connections that ask as users' roles. Over `question_url` their login
        role owns nothing and may read nothing: the code of a policy that leaves the role it was
        asked as finds itself with no rights; it finds names as the application's sessions do."""

        async def opened() -> Connection:
            # What the driver prepares would be discarded, and it would not know.
            return await connect(
                url,
                purpose="questions",
                options=_OPTIONS if scoped else f"{_OPTIONS} -c row_security=off",
                prepares=False,
                application_path=scoped,
            )

        return SnapshotPool(url, opened, self._look, purpose="questions")

    def _want(self, pool: SnapshotPool, idle: int) -> None:
        pool.want(idle, limits.QUESTION_CONNECTIONS)

    async def _lend(
        self, pool: SnapshotPool, seconds: Sequence[float], export: Export
    ) -> list[Connection | None]:
        """A connection in the snapshot of a flush for each of these statement timeouts; None where
        one could not import it. No more than are idle."""
        taken = pool.take(len(seconds))
        assert len(taken) == len(seconds)
        self._want(pool, 1)  # the next flush may come before these are back
        return await pool.begin(taken, export, seconds)

    def _take_back(self, pool: SnapshotPool, connection: Connection) -> None:
        """Its transaction is over. What code of others could leave in a session is discarded:
        settings, locks, prepared statements."""
        is_scoped = pool is self._scoped
        pool.clean(connection, ["rollback", "discard all"] if is_scoped else ["rollback"])

    def expect(self, view: LiveView) -> None:
        """A view that may have questions: have a connection for it by then."""
        self._want(self.pool_of(view), 1)

    def pool_of(self, view: LiveView) -> SnapshotPool:
        return self._own if view.scope is None else self._scoped

    async def start(self, units: Sequence[Unit], export: Export, flushed: Flushed) -> list[Unit]:
        """Begin with as many as connections are free; the others wait for a later flush. Returns
        those that cannot wait, since they have taken their changes already."""
        left: list[Unit] = []
        for unit in units:
            self._views.begin_lag(unit.view)
        for pool in (self._scoped, self._own):
            mine = [unit for unit in units if self.pool_of(unit.view) is pool]
            left += await self._start(pool, mine, export, flushed)
        return left

    def put_off(self, unit: Unit) -> None:
        """In the step of a flush: it has not taken its changes, and does so with a later flush."""
        self._views.begin_lag(unit.view)
        self._put_back(unit)

    async def _start(
        self, pool: SnapshotPool, units: list[Unit], export: Export, flushed: Flushed
    ) -> list[Unit]:
        resting = [unit for unit in units if self._rests(unit)]
        jobs, waiting = self._planned(
            pool, [unit for unit in units if not self._rests(unit)], flushed
        )
        lent: list[Connection | None] = []
        try:
            if jobs:
                lent = await self._lend(pool, [job.seconds for job in jobs], export)
        finally:
            for job, connection in zip(jobs, lent or [None] * len(jobs), strict=True):
                if connection is None:
                    waiting += job.units
                else:
                    self._run(pool, job, connection)
            left = [unit for unit in (*waiting, *resting) if not self._put_back(unit)]
        if waiting:
            self._want(pool, len(waiting))
        return left

    def _planned(
        self, pool: SnapshotPool, units: list[Unit], flushed: Flushed
    ) -> tuple[list[BackgroundJob], list[Unit]]:
        """What to begin with now, and what waits."""
        groups: dict[Hashable, list[Unit]] = {}
        for unit in sorted(units, key=lambda unit: self._turns.get(unit.who, 0)):
            groups.setdefault(unit.key, []).append(unit)
        quick = [group for group in groups.values() if not self._is_slow(group[0])]
        slow = [group for group in groups.values() if self._is_slow(group[0])]
        free, jobs = pool.idle, list[BackgroundJob]()
        if quick and free:
            count = min(free, -(-len(quick) // _QUESTION_BATCH))
            jobs = [BackgroundJob(quick[at::count], flushed, quick=True) for at in range(count)]
            quick = []
        waiting = [unit for group in quick for unit in group]
        running = [job for job, its in self._jobs.items() if its is pool and not job.quick]
        room = limits.QUESTION_CONNECTIONS - _QUESTION_CONNECTIONS_QUICK - len(running)
        for group in slow:
            who = group[0].who
            busy = sum(who in job.who for job in running)
            if len(jobs) < free and room > 0 and busy < _QUESTION_CONNECTIONS_PER_SCOPE:
                room -= 1
                jobs.append(BackgroundJob([group], flushed, quick=False))
                running.append(jobs[-1])
            else:
                waiting += group
        for job in jobs:
            self._turn += 1
            self._turns.update(dict.fromkeys(job.who, self._turn))
        while len(self._turns) > _QUESTION_PACES_MAX:
            del self._turns[next(iter(self._turns))]
        return jobs, waiting

    async def wait(self, flushed: Flushed, seconds: float) -> None:
        """Give those that are quick a moment, so that they are part of this flush."""
        quick = [
            job.task
            for job in self._jobs
            if job.quick and job.flushed is flushed and job.task is not None
        ]
        if not quick or time.monotonic() < self._patient_after:
            return
        _, pending = await asyncio.wait(quick, timeout=max(0.0, seconds))
        if pending:
            self._patient_after = time.monotonic() + limits.FLUSH_BUDGET_PAUSE_SECONDS

    @asynccontextmanager
    async def scoped_connection(
        self, export: Export, seconds: float
    ) -> AsyncIterator[Connection | None]:
        """One that asks as users' roles, in the snapshot of the flush; None while all are busy."""
        pool = self._scoped
        if not pool.idle:
            self._want(pool, 1)
            yield None
            return
        (connection,) = await self._lend(pool, [seconds], export)
        if connection is None:
            yield None
            return
        try:
            with pool.bounded(connection, 2 * limits.RECONCILE_SECONDS):
                yield connection
        finally:
            if connection.closed:
                pool.drop(connection, end=True)
            else:
                self._take_back(pool, connection)

    def is_slow(self, view: LiveView) -> bool:
        return self._is_slow(Unit(view, []))

    def was_slow(self, view: LiveView) -> None:
        """A question that was asked elsewhere took long."""
        self._took(Unit(view, []), slow=True)

    def sweep(self) -> None:
        self._own.close_idle()
        self._scoped.close_idle()

    async def close(self) -> None:
        tasks = [job.task for job in self._jobs if job.task is not None]
        self._is_closing = True
        for timer in self._resting.values():
            timer.cancel()
        for job in list(self._jobs):
            job.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._own.close()
        await self._scoped.close()

    # -------------------------------------------------------------------- quick and slow

    def _is_slow(self, unit: Unit) -> bool:
        """By the last time; for one that was never asked, by others of its table."""
        return self._slow.get(unit.key, unit.view.known.table.id in self._slow_tables)

    def _took(self, unit: Unit, *, slow: bool) -> None:
        self._slow.pop(unit.key, None)
        self._slow[unit.key] = slow or self._rests(unit)  # with others, they would wait for it
        if len(self._slow) > _QUESTION_PACES_MAX:
            del self._slow[next(iter(self._slow))]
        if unit.view.scope is not None:
            change = self._slow_tables.add if slow else self._slow_tables.discard
            change(unit.view.known.table.id)

    # -------------------------------------------------------------------- rest

    def _rests(self, unit: Unit) -> bool:
        return guarded(unit.view) and unit.who in self._resting

    def _charge(self, job: BackgroundJob, seconds: float) -> None:
        """Let those rest for whom a job kept the loop busy. Except for applying changes, what it
        did for one of them is measured by their rows."""
        if seconds <= _JOB_LOOP_SECONDS or self._is_closing:
            return
        rows = sum(unit.rows for unit in job.units) or 1
        a_row = max(0.0, seconds - sum(unit.seconds for unit in job.units)) / rows
        spent: dict[Hashable, float] = {}
        for unit in job.units:
            if guarded(unit.view):
                spent[unit.who] = spent.get(unit.who, 0.0) + unit.seconds + unit.rows * a_row
        for who, its in spent.items():
            if its > _JOB_LOOP_SECONDS:
                self._rest(who, its * _JOB_REST_TIMES)

    def _rest(self, who: Hashable, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if (timer := self._resting.get(who)) is not None:  # of a job beside this one
            timer.cancel()
            seconds += timer.when() - loop.time()
        seconds = min(seconds, _JOB_REST_SECONDS_MAX)
        self._resting[who] = loop.call_later(seconds, self._rested, who)

    def _rested(self, who: Hashable) -> None:
        del self._resting[who]
        self._look()

    # -------------------------------------------------------------------- a job

    def _run(self, pool: SnapshotPool, job: BackgroundJob, connection: Connection) -> None:
        # Views may have been left while the connection imported the snapshot.
        job.units = [unit for unit in job.units if unit.view.lag is not None]
        if not job.units:
            self._take_back(pool, connection)
            return
        for unit in job.units:
            assert unit.view.lag is not None
            unit.view.lag.job = job
            for step in unit.steps:
                step.done = True  # from here on the job answers for it
        self._jobs[job] = pool
        job.stop = partial(pool.hang_up, connection)
        job.began = time.monotonic()
        job.task = asyncio.create_task(self._work(pool, job, connection))
        job.task.add_done_callback(lambda _: self._jobs.pop(job, None))

    async def _work(self, pool: SnapshotPool, job: BackgroundJob, connection: Connection) -> None:
        """Ask, and deliver. Whatever goes wrong, each view is delivered, asked for again, or read
        again."""
        error: Exception | None = None
        try:
            # The server ends what takes too long; a policy can refuse to be ended.
            with pool.bounded(connection, job.patience):
                await self._ask(job, connection)
        except psycopg.Error as found:
            error = found
            if job.has_lasted:
                error = TimeoutError("the questions took too long")
            if not self._is_closing and any(job.is_for(unit.view) for unit in job.units):
                logger.warning("a connection for questions was lost: %r", error)
        except Exception as found:
            logger.exception("questions could not be asked")
            error = found
        if error is None:
            self._take_back(pool, connection)
        else:
            pool.drop(connection, end=True)
            if not self._is_closing:
                self._failed(job, error)
        self._look()

    def _look(self) -> None:
        """Have a flush begin with what waits."""
        if any(
            view.lag is not None and view.lag.job is None and not self._rests(Unit(view, []))
            for view in self._views.lagging
        ):
            self._flushes.wake()

    async def _ask(self, job: BackgroundJob, connection: Connection) -> None:
        began, turn = time.monotonic(), Turn()
        work = Metered(self._answer(job, connection))
        try:
            units = await work
        finally:
            self._charge(job, work.seconds)
        took = time.monotonic() - began
        for unit in units:
            cancelled = any(map(_was_cancelled, unit.steps))
            if not job.quick or cancelled or unit.key not in self._slow or self._rests(unit):
                slow = cancelled or (not job.quick and took > _QUESTION_QUICK_SECONDS)
                self._took(unit, slow=slow)
            self._finish(unit, job)
            await turn.over()

    async def _answer(self, job: BackgroundJob, connection: Connection) -> list[Unit]:
        """Take states to the job's flush. Returns the units whose views are to be delivered."""
        asked = await hide(connection, _steps(job.units), datetime.now(UTC))
        if asked:
            self._metrics.questions.labels("visibility").inc(asked)
        units = [unit for unit in job.units if job.is_for(unit.view)]
        if job.quick:
            units = [unit for unit in units if not self._postponed(unit)]
        turn = Turn()
        for unit in units:
            if guarded(unit.view):
                began = time.thread_time()
                for step in unit.steps:
                    self._delivery.apply(step)
                unit.seconds = time.thread_time() - began
                await turn.over()
        await self.settle(connection, _steps(units))
        return units

    def _postponed(self, unit: Unit) -> bool:
        """Whether it took too long to be asked with others; then it is asked alone, later."""
        if not guarded(unit.view) or not any(map(_was_cancelled, unit.steps)):
            return False
        self._took(unit, slow=True)
        self._put_back(unit)
        return True

    async def settle(
        self, connection: Connection, steps: Iterable[ViewStep], seconds: float | None = None
    ) -> None:
        """Ask what states need until they need nothing."""
        asking = [step for step in steps if step.need is not None]
        for step in asking:
            if isinstance(step.state, Streamed) and isinstance(step.need, Refill):
                # All of its members, page by page: that is read as a first result is.
                step.error = psycopg.errors.QueryCanceled("to be read beside the flush")
        asking = [step for step in asking if step.need is not None]
        bound = limits.FLUSH_QUESTIONS_SECONDS if seconds is None else seconds
        turn = Turn()
        while asking:
            asked = [each async for each in self._questions(asking, turn)]
            questions = [question for _, _, question in asked]
            answers = await ask_in_flush(connection, questions, seconds=bound)
            for (step, need, _), answer in zip(asked, answers, strict=True):
                self._metrics.questions.labels(type(need).__name__.lower()).inc()
                if isinstance(answer, Exception):
                    step.error = answer
                else:
                    self._delivery.attempt(step, partial(step.answer, need, answer))
                await turn.over()
            asking = [step for step in asking if step.need is not None]

    async def _questions(
        self, asking: Iterable[ViewStep], turn: Turn
    ) -> AsyncIterator[tuple[ViewStep, Need, SnapshotQuery]]:
        for step in asking:
            need, view = step.need, step.view
            assert need is not None
            try:
                yield step, need, SnapshotQuery.of_need(view.known, view.query, need, view.scope)
            except Exception as error:
                self._delivery.fault(step, error)
            await turn.over()

    # -------------------------------------------------------------------- its end

    def _finish(self, unit: Unit, job: BackgroundJob) -> None:
        """Its view is true as of the job's flush."""
        view, views = unit.view, self._views
        lag = view.lag
        if lag is None or lag.job is not job:
            return  # it was left, or is being read again
        lag.job, lag.losses = None, 0
        lag.reached, lag.text = job.flushed.position, job.flushed.text
        try:
            self._delivery.deliver(unit.steps, job.flushed)
        except Exception:
            logger.exception("view %d could not be delivered: it is read again", view.id)
            views.read_all_again([view])
        views.end_lag(view)

    def _failed(self, job: BackgroundJob, error: Exception) -> None:
        """Its connection was lost, or a fault of ours."""
        for unit in job.units:
            lag = unit.view.lag
            if lag is None or lag.job is not job:
                continue
            lag.losses += 1
            if isinstance(error, TimeoutError):
                self._took(unit, slow=True)
            is_asked_again = (
                (isinstance(error, psycopg.Error) or job.quick)
                and lag.losses < _LOSSES_MAX
                and self._put_back(unit)
            )
            if not is_asked_again:
                for step in unit.steps:
                    step.error = step.error or _as_step_error(error)
                self._finish(unit, job)

    def _put_back(self, unit: Unit) -> bool:
        """Let it wait for another flush. False for one that has taken its changes."""
        view, views = unit.view, self._views
        lag = view.lag
        if lag is None:
            return True  # it was left meanwhile
        if any(step.applied for step in unit.steps):
            return False
        lag.job = None
        for step in unit.steps:
            step.error, step.done = None, True
            if step.snapshot is not None:
                step.snapshot.put_back(step.changes)
                views.snapshots.arrived.append(step.snapshot)
            elif not lag.put_back(step.changes):
                views.read_again(view, "resync")
                return True
        return True


def _steps(units: Iterable[Unit]) -> list[ViewStep]:
    return [step for unit in units for step in unit.steps]


def _was_cancelled(step: ViewStep) -> bool:
    return isinstance(step.error, psycopg.errors.QueryCanceled)


def _as_step_error(error: Exception) -> Exception:
    if isinstance(error, TimeoutError):
        return psycopg.errors.QueryCanceled("the question took too long")
    return error
