"""The access functions of topics and channels: who may follow, join or publish.

Such a function is called like a query, with a context and the parameters of the name. The function
of a channel may also take `action`, which is `join` or `publish`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from headwater.errors import ConfigError, InvalidQuery
from headwater.identity import Identity
from headwater.limits import TOPIC_NUMBER_MAX
from headwater.queries.arguments import Arguments, Signature, key_of, parameters_of, path_and_reason
from headwater.queries.functions import Body, Query
from headwater.queries.results import Returns
from headwater.topics.patterns import Pattern, written

NameKind: TypeAlias = Literal["topic", "channel"]
Action: TypeAlias = Literal["join", "publish"]
_ACTION = "action"


class AccessRunner(Protocol):
    """Runs a query for an identity, as `queries.execution.runner.QueryRunner` does."""

    async def run(self, query: Query, arguments: Arguments, identity: Identity) -> Any: ...


class AccessCheck(Query):
    """The access function of one topic or channel pattern."""

    def __init__(
        self, kind: NameKind, pattern: Pattern, body: Body, *, timeout: float | None = None
    ) -> None:
        self._declared_as = kind
        label = f"{kind} {pattern.text}"
        signature = Signature(label, parameters_of(body, label))
        super().__init__(
            pattern.text, body, signature=signature, returns=Returns(label), timeout=timeout
        )
        takes, parameters = set(signature.names), set(pattern.names)
        self.takes_action = kind == "channel" and _ACTION in takes - parameters
        """Whether a user who may join may be refused to publish."""
        if takes - ({_ACTION} if self.takes_action else set()) != parameters:
            action = ", and action if the function must distinguish join from publish"
            raise ConfigError(
                f"{label}: its function takes {', '.join(signature.names) or 'nothing'}, and the"
                f" pattern has {', '.join(pattern.names) or 'no parameters'}",
                hint="Its arguments after the context are the parameters of the pattern"
                f"{action if kind == 'channel' else ''}.",
            )

    @property
    def label(self) -> str:
        return f"{self._declared_as} {self.name}"

    def read(self, parameters: Mapping[str, str], action: Action = "join") -> Arguments:
        """The arguments, from the parameters of a name. InvalidQuery names the one that is wrong. A
        value may be written in one way only: otherwise one number would have two names, which are
        two topics or channels with the same rights."""
        texts = {**parameters, _ACTION: action} if self.takes_action else dict(parameters)
        try:
            read = msgspec.convert(texts, self.signature.struct, strict=False)
        except msgspec.ValidationError as error:
            path, reason = path_and_reason(error)
            raise InvalidQuery(reason, path=self._declared_as + path.removeprefix("$")) from None
        values = {name: getattr(read, name) for name in self.signature.names}
        for name, text in texts.items():
            _check_spelling(values[name], text, f"{self._declared_as}.{name}")
        return Arguments(values, key_of(values))


def _check_spelling(value: Any, text: str, path: str) -> None:
    if isinstance(value, int) and abs(value) > TOPIC_NUMBER_MAX:
        raise InvalidQuery(f"expected at most {TOPIC_NUMBER_MAX}", path=path)
    spelling = None if value is None else written(value) or text
    if spelling != text:
        wanted = "a value" if spelling is None else f"{spelling!r:.100}"
        raise InvalidQuery(f"expected {wanted}, got {text!r:.100}", path=path)
