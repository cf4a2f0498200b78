"""What an application declares: which names are channels, what is remembered of them, and who may
join and publish.

Who joins or publishes is asked about by a function that is called like a query, with the values in
the places of the name as arguments; with an argument `action` it hears which of the two it is.
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
    """One channel pattern of an application. As a decorator it takes the function that says who may
    join and publish; without one, everybody may whom the gateway lets in."""

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
        """Have the function say who may join and publish: it is called with a context, the places
        of the name and, if it takes it, the `action`, and says True or False."""
        if self.access is not None:
            raise ConfigError(f"channel {self.pattern.text} has an access function already")
        self.access = AccessCheck("channel", self.pattern, function, timeout=self.timeout)
        return function

    @property
    def takes_action(self) -> bool:
        """Whether one who may join may still not be allowed to publish."""
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
        """ConfigError for a pattern that another one equals; of two that overlap, the first
        counts."""
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
        """The channel of that name, and what stands in its places. InvalidQuery for what is no
        name, NotFound for one that no pattern matches."""
        check_name(name, path="channel")
        for definition in self:
            if (parameters := definition.pattern.match(name)) is not None:
                return definition, parameters
        raise NotFound(
            f"there is no channel {name!r:.220}",
            hint="Channels are declared in the application, with hw.channel.",
            code="channel_unknown",
        )

    # -------------------------------------------------------------------- who may

    def start(self, runner: AccessRunner | None) -> None:
        """From here on access functions can be asked; None for no longer."""
        self._runner = runner

    async def check(
        self,
        definition: ChannelDefinition,
        parameters: Mapping[str, str],
        identity: Identity,
        action: Action,
    ) -> None:
        """Forbidden unless this user may do that now. Raises what the function raises, as callers
        of queries are told it."""
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


# ------------------------------------------------------------------------ what is sent


def message_json(data: Any) -> msgspec.Raw:
    """A message as it travels; InvalidQuery for what is too large, or JSON cannot hold."""
    return _json(data, "data", CHANNEL_MESSAGE_BYTES_MAX)


def published(
    name: str, data: msgspec.Raw, *, user: str | None = None, member: str | None = None
) -> Published:
    """A message on a channel, now."""
    return Published(name, data, datetime.now(UTC), user, member)


def check_state(state: Any) -> Any:
    """A member's state, as others will read it; InvalidQuery as for messages."""
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
