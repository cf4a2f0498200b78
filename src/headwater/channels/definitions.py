"""The channels that an application declares: their names, their history, and who may join and
publish.

An access function decides that. It is called like a query, with the parameters of the name as
arguments. If it takes an argument `action`, that is `join` or `publish`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from headwater.channels.bus_messages import Published
from headwater.errors import ConfigError, Forbidden, InvalidQuery, NotFound
from headwater.identity import Identity
from headwater.limits import (
    CHANNEL_HISTORY_MAX,
    CHANNEL_MESSAGE_BYTES_MAX,
    CHANNEL_PATTERNS_MAX,
    CHANNEL_STATE_BYTES_MAX,
)
from headwater.queries.functions import Body
from headwater.topics.access import AccessCheck, AccessRunner, Action
from headwater.topics.patterns import Pattern, check_name

BodyT = TypeVar("BodyT", bound=Callable[..., Any])


class ChannelDefinition:
    """One channel pattern of an application. As a decorator it takes the access function. Without
    one, every user of the gateway may join and publish."""

    def __init__(
        self,
        pattern: str,
        *,
        history: int = 50,
        presence: bool = True,
        access: Body | None = None,
        timeout: float | None = None,
    ) -> None:
        self.pattern = Pattern(pattern)
        if not 0 <= history <= CHANNEL_HISTORY_MAX:
            raise ConfigError(
                f"channel {pattern}: its history has 0 to {CHANNEL_HISTORY_MAX:,} messages,"
                f" not {history:,}",
                hint="Store messages that must last longer in a table.",
            )
        self.history = history
        """How many messages are stored for later subscribers."""
        self.presence = presence
        """Whether its subscribers are sent its members."""
        self.timeout = timeout
        self.access: AccessCheck | None = None
        if access is not None:
            self(access)

    def __repr__(self) -> str:
        return f"<channel {self.pattern.text}>"

    def __call__(self, function: BodyT, /) -> BodyT:
        """Set the access function. It is called with a context, the parameters of the name and, if
        it takes one, the `action`, and returns whether the user may."""
        if self.access is not None:
            raise ConfigError(f"channel {self.pattern.text} has an access function already")
        self.access = AccessCheck("channel", self.pattern, function, timeout=self.timeout)
        return function

    @property
    def takes_action(self) -> bool:
        """Whether a user who may join may be refused to publish."""
        return self.access is not None and self.access.takes_action


class Channels:
    """The channels of an application, by pattern."""

    def __init__(self) -> None:
        self._definitions: dict[str, ChannelDefinition] = {}
        self._runner: AccessRunner | None = None

    def __iter__(self) -> Iterator[ChannelDefinition]:
        return iter(self._definitions.values())

    def __bool__(self) -> bool:
        return bool(self._definitions)

    def add(self, definition: ChannelDefinition) -> ChannelDefinition:
        """ConfigError for a pattern that matches the same names as another one. If two overlap, the
        first one is used."""
        text = definition.pattern.text
        other = self._definitions.get(definition.pattern.skeleton)
        if other is not None:
            raise ConfigError(
                f"channel {text} matches the same names as {other.pattern.text}",
                hint="Start each pattern with a different word: room:{id}, game:{id}.",
            )
        if len(self._definitions) >= CHANNEL_PATTERNS_MAX:
            raise ConfigError(
                f"more than {CHANNEL_PATTERNS_MAX:,} channels",
                hint="Let one pattern match many names.",
            )
        self._definitions[definition.pattern.skeleton] = definition
        return definition

    def find(self, name: str) -> tuple[ChannelDefinition, dict[str, str]]:
        """The channel of that name, and its parameters. InvalidQuery for an invalid name, NotFound
        for one that no pattern matches."""
        check_name(name, path="channel")
        for definition in self:
            if (parameters := definition.pattern.match(name)) is not None:
                return definition, parameters
        raise NotFound(
            f"there is no channel {name!r:.220}",
            hint="Channels are declared in the application, with hw.channel.",
            code="channel_unknown",
        )

    # -------------------------------------------------------------------- access

    def start(self, runner: AccessRunner | None) -> None:
        """Set the runner of access functions; None when Headwater stops."""
        self._runner = runner

    async def check(
        self,
        definition: ChannelDefinition,
        parameters: Mapping[str, str],
        identity: Identity,
        action: Action,
    ) -> None:
        """Forbidden unless this user may do that now. Errors of the function are raised as those of
        a query."""
        if definition.access is None:
            return
        arguments = definition.access.read(parameters, action)
        if self._runner is None:
            raise ConfigError("channels can be joined only while Headwater runs")
        if await self._runner.run(definition.access, arguments, identity) is not True:
            name = definition.pattern.fill(parameters)
            doing = "publish on" if action == "publish" else "join"
            raise Forbidden(
                f"you may not {doing} channel {name}",
                hint="The application's access function denied it.",
            )


# ------------------------------------------------------------------------ messages


def message_json(data: Any) -> msgspec.Raw:
    """A message as it is sent. InvalidQuery if it is too large, or not possible in JSON."""
    return _json(data, "data", CHANNEL_MESSAGE_BYTES_MAX)


def published(
    name: str, data: msgspec.Raw, *, user: str | None = None, member: str | None = None
) -> Published:
    """A message on a channel, now."""
    return Published(name, data, datetime.now(UTC), user, member)


def check_state(state: Any) -> Any:
    """A member's state, as others will read it. InvalidQuery as for messages."""
    return msgspec.json.decode(_json(state, "state", CHANNEL_STATE_BYTES_MAX))


def _json(value: Any, path: str, most: int) -> msgspec.Raw:
    try:
        text = msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidQuery(f"cannot be sent as JSON: {error}", path=path) from None
    if len(text) > most:
        raise InvalidQuery(
            f"{len(text):,} bytes as JSON; the limit is {most:,}",
            path=path,
            hint="Store large data in a table, and send its key.",
        )
    return msgspec.Raw(text)
