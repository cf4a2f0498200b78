"""Chooses the server that a query is executed on."""

from __future__ import annotations

from collections.abc import Callable

from headwater.hub.reactive.execution import Execution
from headwater.hub.reactive.group import FlushMoment, QueryGroup
from headwater.hub.reactive.query_pool import Primary, QueryPool
from headwater.hub.reactive.replica_pool import ReplicaPool
from headwater.hub.reading.snapshot_pool import Export
from headwater.settings import Settings


class Placement:
    """The pools of the database, and of its replica if there is one. Queries with a user's role use
    connections of the question role, if there is one, and never a replica. `changed` is called when
    a flush can start more."""

    def __init__(
        self, url: str, settings: Settings, changed: Callable[[], None], execution: Execution
    ) -> None:
        size = settings.query.concurrency
        self._primary = Primary(url, size, changed, execution)
        self._replica: ReplicaPool | None = None
        if settings.replica.url is not None:
            self._replica = ReplicaPool(
                settings.replica.url,
                size,
                changed,
                execution,
                patience=settings.replica.wait_period.total_seconds(),
                fall_back=self._primary.want,
            )
        self._as_roles: Primary | None = None
        if settings.question_url is not None and settings.question_url != url:
            self._as_roles = Primary(settings.question_url, size, changed, execution)
        self._execution = execution
        pools = (self._primary, self._replica, self._as_roles)
        self._pools: tuple[QueryPool, ...] = tuple(pool for pool in pools if pool is not None)

    @property
    def can_start(self) -> bool:
        return any(pool.can_start for pool in self._pools)

    @property
    def oldest(self) -> int | None:
        """The flush of the oldest running execution."""
        return min((flush for pool in self._pools for flush in pool.flushes), default=None)

    def want(self, group: QueryGroup) -> None:
        """Execute it in the snapshot of a flush that begins after this."""
        replica = self._replica
        if self._as_roles is not None and group.identity.role is not None:
            self._as_roles.want(group)
        elif replica is None or group.query.consistent or not replica.is_up:
            self._primary.want(group)
        else:
            replica.want(group)

    async def start(self, export: Export, moment: FlushMoment) -> None:
        """Start the wanted queries. The snapshot must exist until this returns."""
        if self._replica is not None:
            self._replica.expect(moment)
            if self._replica.can_start:
                self._replica.start(moment)
        for pool in (self._primary, self._as_roles):
            if pool is not None and pool.can_start:
                await pool.start(export, moment)

    def close_idle(self) -> None:
        for pool in self._pools:
            pool.close_idle()

    @property
    def users(self) -> set[str]:
        """The users that queries without a role are executed as."""
        return self._execution.users

    def renew(self) -> None:
        """Execute all later queries in new sessions."""
        self._execution.outdate()
        for pool in self._pools:
            pool.close_outdated()

    def restart(self) -> None:
        """The database was lost: forget all wanted and running queries."""
        for pool in self._pools:
            pool.restart()

    async def close(self) -> None:
        for pool in self._pools:
            await pool.close()
