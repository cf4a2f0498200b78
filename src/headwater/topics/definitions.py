"""The topics that an application declares: their names, their rows, and who may follow them.

A topic sends rows of one table, or only that something changed (`poke`). The application signals
rows by their keys (`entity`), or each change of a row is a signal to the topic that its columns
name (`table`). An access function decides who may follow: it is called like a query, with the
parameters of the name as arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from headwater.errors import ConfigError, Forbidden, NotFound
from headwater.identity import Identity
from headwater.limits import TOPIC_PATTERNS_MAX
from headwater.queries.arguments import Arguments, key_of
from headwater.queries.functions import Body
from headwater.topics.access import AccessCheck, AccessRunner
from headwater.topics.patterns import Pattern, check_name

BodyT = TypeVar("BodyT", bound=Callable[..., Any])


class TopicDefinition:
    """One topic pattern of an application. As a decorator it takes the access function. Without
    one, every user of the gateway may follow."""

    def __init__(
        self,
        pattern: str,
        *,
        entity: str | None = None,
        table: str | None = None,
        poke: bool = False,
        parents: Mapping[str, str] | None = None,
        access: Body | None = None,
        trusted: bool = False,
        timeout: float | None = None,
    ) -> None:
        self.pattern = Pattern(pattern)
        if [bool(entity), bool(table), poke].count(True) != 1:
            raise ConfigError(
                f"topic {pattern}: it needs exactly one of entity, table and poke",
                hint='hw.topic("chat:{id}", entity="messages"), or table="messages" to signal its '
                "changes automatically, or poke=True to send no data.",
            )
        if table and not self.pattern.names:
            raise ConfigError(
                f"topic {pattern}: it has no parameter that a column of {table} could fill",
                hint=f'Name the columns: hw.topic("chat:{{chat_id}}", table="{table}").',
            )
        if poke and parents:
            raise ConfigError(f"topic {pattern}: a poke carries no rows, so it has no parents")
        self.table = table
        """Changes of its rows are signals; None for a topic that the application signals."""
        self.entity = table or entity
        """The table whose rows it sends; None for a poke."""
        self.poke = poke
        self.parents: dict[str, str] = dict(parents or {})
        """Tables whose rows are sent too, each with the column of the entity that has their key."""
        self.trusted = trusted
        """Whether rows are sent without a check of row-level security and grants."""
        self.timeout = timeout
        self.access: AccessCheck | None = None
        if access is not None:
            self(access)

    def __repr__(self) -> str:
        return f"<topic {self.pattern.text}>"

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables whose rows it sends; none for a poke."""
        return () if self.entity is None else (self.entity, *self.parents)

    def __call__(self, function: BodyT, /) -> BodyT:
        """Set the access function. It is called with a context and the parameters of the name, and
        returns whether the user may follow."""
        if self.access is not None:
            raise ConfigError(f"topic {self.pattern.text} has an access function already")
        self.access = AccessCheck("topic", self.pattern, function, timeout=self.timeout)
        return function

    def read(self, parameters: Mapping[str, str]) -> Arguments:
        """The arguments of its access function. InvalidQuery for parameters that do not fit."""
        if self.access is None:
            return Arguments(dict(parameters), key_of(dict(parameters)))
        return self.access.read(parameters)


class Topics:
    """The topics of an application, by pattern."""

    def __init__(self) -> None:
        self._definitions: dict[str, TopicDefinition] = {}
        self._runner: AccessRunner | None = None

    def __iter__(self) -> Iterator[TopicDefinition]:
        return iter(self._definitions.values())

    def __bool__(self) -> bool:
        return bool(self._definitions)

    def add(self, definition: TopicDefinition) -> TopicDefinition:
        """ConfigError for a pattern that matches the same names as another one. If two overlap, the
        first one is used."""
        text = definition.pattern.text
        other = self._definitions.get(definition.pattern.skeleton)
        if other is not None:
            raise ConfigError(
                f"topic {text} matches the same names as {other.pattern.text}",
                hint="Start each pattern with a different word: chat:{id}, room:{id}.",
            )
        if len(self._definitions) >= TOPIC_PATTERNS_MAX:
            raise ConfigError(
                f"more than {TOPIC_PATTERNS_MAX:,} topics", hint="Let one pattern match many names."
            )
        self._definitions[definition.pattern.skeleton] = definition
        return definition

    def find(self, name: str) -> tuple[TopicDefinition, dict[str, str]]:
        """The topic of that name, and its parameters. InvalidQuery for an invalid name, NotFound
        for one that no pattern matches."""
        check_name(name)
        for definition in self:
            if (parameters := definition.pattern.match(name)) is not None:
                return definition, parameters
        raise NotFound(
            f"there is no topic {name!r:.220}",
            hint="Topics are declared in the application, with hw.topic.",
            code="topic_unknown",
        )

    # -------------------------------------------------------------------- access

    def start(self, runner: AccessRunner | None) -> None:
        """Set the runner of access functions; None when Headwater stops."""
        self._runner = runner

    async def check(
        self, definition: TopicDefinition, parameters: Mapping[str, str], identity: Identity
    ) -> None:
        """Forbidden unless this user may follow the topic now. Errors of the function are raised as
        those of a query."""
        arguments = definition.read(parameters)
        if definition.access is None:
            return
        if self._runner is None:
            raise ConfigError("topics can be followed only while Headwater runs")
        if await self._runner.run(definition.access, arguments, identity) is not True:
            name = definition.pattern.fill(parameters)
            raise Forbidden(
                f"you may not follow topic {name}",
                hint="The application's access function denied it.",
            )
