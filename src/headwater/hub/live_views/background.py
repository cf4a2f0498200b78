"""Background queries of live views: beside the flushes, so that slow policies delay no other view.

A flush passes on the steps that need the database. Queries with the same role, claims and table are
one group. A job runs groups in the snapshot of the flush, over a connection of a pool: to
`question_url` for queries with a user's role, to `url` for the others. Groups that were quick the
last time share a job, and the flush waits for it for a short time (`limits.FLUSH_BUDGET_SECONDS`).
A slow group has a job of its own, and its views lag. When a job is done, its views are sent as of
the position of its flush. Changes since then are in their `Lag`, for the next job.

The role and claims that were served longest ago come first. Checking all rows of a user also keeps
the event loop busy, so it yields often. A role and claims that kept it busy for long rest for a
multiple of that time, and their views lag.
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
"""How long the event loop may be busy with one check for a role with claims. After a longer one,
they rest: nothing is checked for them for a while, and their live queries lag."""

_JOB_REST_TIMES = 4
"""They rest for this many times the time of the check."""

_JOB_REST_SECONDS_MAX = 2.0
"""They rest for at most this long. Then all changes since are checked together."""

_QUESTION_CONNECTIONS_QUICK = 2
"""Connections that are never used for queries that were slow the last time."""

_QUESTION_CONNECTIONS_PER_SCOPE = 2
"""Connections that slow queries of one role with claims use at the same time. Others wait."""

_QUESTION_BATCH = 16
"""Roles with claims whose quick queries share one connection."""

_QUESTION_QUICK_SECONDS = 0.1
"""A query that takes longer is slow: it is repeated alone, and from then on runs beside the flushes
until it was quick once."""

_QUESTION_PACES_MAX = 10_000
"""Roles with claims, by table, for which it is stored whether their last query was slow. The oldest
is dropped, and counts as quick."""


logger = logging.getLogger(__name__)

_OPTIONS = f"{FORMATS} -c jit=off"

_LOSSES_MAX = 3
"""How often queries are repeated after a lost connection. A policy may be the cause."""


class Unit:
    """The steps of one view in a flush: its own, and those of first results that have arrived."""

    __slots__ = ("seconds", "steps", "view")

    def __init__(self, view: LiveView, steps: list[ViewStep]) -> None:
        self.view = view
        self.steps = steps
        self.seconds = 0.0
        """How long applying its changes kept the event loop busy."""

    @property
    def who(self) -> Hashable:
        """The role and claims that it reads with; without a role, the view."""
        scope = self.view.scope
        return self.view.id if scope is None else (scope.role, scope.claims)

    @property
    def key(self) -> Hashable:
        """The group that runs together, and is slow or quick."""
        return self.who, self.view.known.table.id

    @property
    def rows(self) -> int:
        """About how many rows are checked."""
        held = (step.state.keys for step in self.steps if isinstance(step.state, Window))
        return sum(map(len, held)) + sum(len(each) for step in self.steps for each in step.changes)


def units_of(steps: Iterable[ViewStep]) -> list[Unit]:
    by_view: dict[LiveView, list[ViewStep]] = {}
    for step in steps:
        by_view.setdefault(step.view, []).append(step)
    return [Unit(view, found) for view, found in by_view.items()]


class BackgroundJob:
    """Units whose queries run over one connection, in one snapshot."""

    def __init__(self, groups: list[list[Unit]], flushed: Flushed, *, quick: bool) -> None:
        self.units = [unit for group in groups for unit in group]
        self.is_guarded = any(guarded(unit.view) for unit in self.units)
        self.flushed = flushed
        self.began = time.monotonic()
        self.stop: Callable[[], None] = lambda: None
        """Closes its connection."""
        self.quick = quick
        """Whether it has several groups, none of which may take long."""
        self.task: asyncio.Task[None] | None = None

    @property
    def seconds(self) -> float:
        """How long each query may take. A check of visibility can be repeated alone; other views
        would have to be read again."""
        if not self.quick:
            return limits.QUESTION_SECONDS_MAX
        return _QUESTION_QUICK_SECONDS if self.is_guarded else limits.FLUSH_QUESTION_SECONDS

    @property
    def patience(self) -> float:
        """How long the whole job may take."""
        count = _QUESTION_BATCH if self.quick else 2
        return count * self.seconds + 2 * limits.FLUSH_QUESTIONS_SECONDS

    @property
    def has_lasted(self) -> bool:
        """Whether its connection was closed because it took longer."""
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
    """The background queries of all live views of a hub."""

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
        """By group, whether it was slow the last time."""
        self._slow_tables: set[int] = set()
        self._turns: dict[Hashable, int] = {}
        self._turn = 0
        self._resting: dict[Hashable, asyncio.TimerHandle] = {}
        """Roles with claims that rest, with the timer that ends it."""
        self._patient_after = 0.0
        self._is_closing = False

    def _pool(self, url: str, *, scoped: bool) -> SnapshotPool:
        """With `scoped`, for queries with users' roles. The login role of `question_url` owns
        nothing and may read nothing, so code of a policy that leaves its role has no rights. Names
        are found as in the application's sessions."""

        async def opened() -> Connection:
            # `discard all` removes prepared statements, and the driver would not know.
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
        """A connection in the snapshot of the flush for each of these statement timeouts; None if
        importing the snapshot failed. There must be enough idle ones."""
        taken = pool.take(len(seconds))
        assert len(taken) == len(seconds)
        self._want(pool, 1)  # the next flush may need one before these are free
        return await pool.begin(taken, export, seconds)

    def _take_back(self, pool: SnapshotPool, connection: Connection) -> None:
        """Its transaction is over. Discard what code of others can leave in a session: settings,
        locks, prepared statements."""
        is_scoped = pool is self._scoped
        pool.clean(connection, ["rollback", "discard all"] if is_scoped else ["rollback"])

    def expect(self, view: LiveView) -> None:
        """Open a connection in advance for a view that may need one."""
        self._want(self.pool_of(view), 1)

    def pool_of(self, view: LiveView) -> SnapshotPool:
        return self._own if view.scope is None else self._scoped

    async def start(self, units: Sequence[Unit], export: Export, flushed: Flushed) -> list[Unit]:
        """Start jobs on the free connections; the other units wait for a later flush. Returns the
        units that cannot wait, because their changes are applied already."""
        left: list[Unit] = []
        for unit in units:
            self._views.begin_lag(unit.view)
        for pool in (self._scoped, self._own):
            mine = [unit for unit in units if self.pool_of(unit.view) is pool]
            left += await self._start(pool, mine, export, flushed)
        return left

    def put_off(self, unit: Unit) -> None:
        """In the step of a flush: its changes are not applied yet, and wait for a later flush."""
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
        """The jobs to start now, and the units that wait."""
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
        """Wait a short time for the quick jobs, so that they are sent with this flush."""
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
        """A connection for queries with users' roles, in the snapshot of the flush; None if all are
        busy."""
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
        """A query of this view that ran elsewhere was slow."""
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
        """By its last time; if there was none, by other groups of the table."""
        return self._slow.get(unit.key, unit.view.known.table.id in self._slow_tables)

    def _took(self, unit: Unit, *, slow: bool) -> None:
        self._slow.pop(unit.key, None)
        self._slow[unit.key] = slow or self._rests(unit)  # others would wait for it
        if len(self._slow) > _QUESTION_PACES_MAX:
            del self._slow[next(iter(self._slow))]
        if unit.view.scope is not None:
            change = self._slow_tables.add if slow else self._slow_tables.discard
            change(unit.view.known.table.id)

    # -------------------------------------------------------------------- rest

    def _rests(self, unit: Unit) -> bool:
        return guarded(unit.view) and unit.who in self._resting

    def _charge(self, job: BackgroundJob, seconds: float) -> None:
        """Let roles with claims rest if the job kept the event loop busy for them. The time is
        divided by rows, except for the time of applying changes, which is known."""
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
        if (timer := self._resting.get(who)) is not None:  # of another job
            timer.cancel()
            seconds += timer.when() - loop.time()
        seconds = min(seconds, _JOB_REST_SECONDS_MAX)
        self._resting[who] = loop.call_later(seconds, self._rested, who)

    def _rested(self, who: Hashable) -> None:
        del self._resting[who]
        self._look()

    # -------------------------------------------------------------------- a job

    def _run(self, pool: SnapshotPool, job: BackgroundJob, connection: Connection) -> None:
        # Views may have lost their subscribers while the connection imported the snapshot.
        job.units = [unit for unit in job.units if unit.view.lag is not None]
        if not job.units:
            self._take_back(pool, connection)
            return
        for unit in job.units:
            assert unit.view.lag is not None
            unit.view.lag.job = job
            for step in unit.steps:
                step.done = True  # from here on the job is responsible for it
        self._jobs[job] = pool
        job.stop = partial(pool.hang_up, connection)
        job.began = time.monotonic()
        job.task = asyncio.create_task(self._work(pool, job, connection))
        job.task.add_done_callback(lambda _: self._jobs.pop(job, None))

    async def _work(self, pool: SnapshotPool, job: BackgroundJob, connection: Connection) -> None:
        """Run the queries and deliver. After any error, each view is delivered, queued again, or
        read again."""
        error: Exception | None = None
        try:
            # The server ends slow statements, but code of a policy can prevent that.
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
        """Request a flush if a view waits for a job."""
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
        """Update states to the job's flush. Returns the units to deliver."""
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
        """Whether it took too long for a shared job. Then it runs alone, later."""
        if not guarded(unit.view) or not any(map(_was_cancelled, unit.steps)):
            return False
        self._took(unit, slow=True)
        self._put_back(unit)
        return True

    async def settle(
        self, connection: Connection, steps: Iterable[ViewStep], seconds: float | None = None
    ) -> None:
        """Read what states need until they need nothing."""
        asking = [step for step in steps if step.need is not None]
        for step in asking:
            if isinstance(step.state, Streamed) and isinstance(step.need, Refill):
                # All members must be read, page by page, as a first result is.
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

    # -------------------------------------------------------------------- the end of a job

    def _finish(self, unit: Unit, job: BackgroundJob) -> None:
        """Deliver its view as of the job's flush."""
        view, views = unit.view, self._views
        lag = view.lag
        if lag is None or lag.job is not job:
            return  # its subscribers have left, or it is being read again
        lag.job, lag.losses = None, 0
        lag.reached, lag.text = job.flushed.position, job.flushed.text
        try:
            self._delivery.deliver(unit.steps, job.flushed)
        except Exception:
            logger.exception("view %d could not be delivered: it is read again", view.id)
            views.read_all_again([view])
        views.end_lag(view)

    def _failed(self, job: BackgroundJob, error: Exception) -> None:
        """Its connection was lost, or there is a fault in our code."""
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
        """Let it wait for another flush. False if its changes are applied already."""
        view, views = unit.view, self._views
        lag = view.lag
        if lag is None:
            return True  # its subscribers have left
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
