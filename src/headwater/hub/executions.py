"""All executions of a hub: which server a query is executed on."""

from __future__ import annotations

from collections.abc import Callable

from headwater.hub.execution import Execution
from headwater.hub.group import Group, Moment
from headwater.hub.lanes import Export, Lane, Primary
from headwater.hub.replica import Replica
from headwater.settings import Settings


class Executions:
    """The database, and its replica if there is one. Queries that are executed as a user's role
    are executed over connections of the question role, if there is one, and never on a replica.
    `changed` is called when a flush could start more."""

    def __init__(
        self, url: str, settings: Settings, changed: Callable[[], None], execution: Execution
    ) -> None:
        size = settings.query_concurrency
        self._primary = Primary(url, size, changed, execution)
        self._replica: Replica | None = None
        if settings.replica_url is not None:
            self._replica = Replica(
                settings.replica_url,
                size,
                changed,
                execution,
                patience=settings.replica_wait_period.total_seconds(),
                fall_back=self._primary.want,
            )
        self._as_roles: Primary | None = None
        if settings.question_url is not None and settings.question_url != url:
            self._as_roles = Primary(settings.question_url, size, changed, execution)
        self._execution = execution
        lanes = (self._primary, self._replica, self._as_roles)
        self._lanes: tuple[Lane, ...] = tuple(lane for lane in lanes if lane is not None)

    @property
    def can_start(self) -> bool:
        return any(lane.can_start for lane in self._lanes)

    @property
    def oldest(self) -> int | None:
        """The flush of the oldest execution under way."""
        return min((flush for lane in self._lanes for flush in lane.flushes), default=None)

    def want(self, group: Group) -> None:
        """Execute it in the snapshot of a flush that begins after this."""
        replica = self._replica
        if self._as_roles is not None and group.identity.role is not None:
            self._as_roles.want(group)
        elif replica is None or group.query.consistent or not replica.is_up:
            self._primary.want(group)
        else:
            replica.want(group)

    async def start(self, export: Export, moment: Moment) -> None:
        """Share out what is wanted. The snapshot is lent until this returns."""
        if self._replica is not None:
            self._replica.expect(moment)
            if self._replica.can_start:
                self._replica.start(moment)
        for lane in (self._primary, self._as_roles):
            if lane is not None and lane.can_start:
                await lane.start(export, moment)

    def close_idle(self) -> None:
        for lane in self._lanes:
            lane.close_idle()

    @property
    def users(self) -> set[str]:
        """As whom queries are executed where no other role is set."""
        return self._execution.users

    def renew(self) -> None:
        """Have everything that is wanted from here on executed in new sessions."""
        self._execution.outdate()
        for lane in self._lanes:
            lane.close_outdated()

    def restart(self) -> None:
        """The database was lost: forget everything that is wanted or under way."""
        for lane in self._lanes:
            lane.restart()

    async def close(self) -> None:
        for lane in self._lanes:
            await lane.close()
