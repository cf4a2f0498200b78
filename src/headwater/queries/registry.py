"""The queries and mutations of an application, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from headwater.errors import ConfigError
from headwater.identity import Identity
from headwater.limits import FUNCTION_NAME_CHARS_MAX
from headwater.queries.events import Events
from headwater.queries.execution.mutations import MutationRunner
from headwater.queries.execution.runner import QueryRunner
from headwater.queries.functions import Arguments, Body, Function, Mutation, Query, sql_query
from headwater.settings import Settings

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


class Functions:
    """What an application has registered. Functions are added before the start and run after."""

    def __init__(self) -> None:
        self.queries: dict[str, Query] = {}
        self.mutations: dict[str, Mutation] = {}
        self.events = Events()
        self.runner: MutationRunner | None = None
        """Runs mutations; None while Headwater does not run."""
        self.direct: QueryRunner | None = None
        """Runs queries by themselves; None while Headwater does not run."""

    # -------------------------------------------------------------------- registering

    def query(
        self,
        given: str | Body | None,
        *,
        sql: str | None = None,
        args: dict[str, Any] | None = None,
        returns: Any = Any,
        **options: Any,
    ) -> Query | Callable[[Body], Query]:
        """What `Headwater.query` does."""
        if sql is not None:
            if not isinstance(given, str):
                raise ConfigError("a query of SQL has no name", hint='hw.query("name", sql="…")')
            self._check(given, self.queries, "query")
            found = sql_query(given, sql, args, returns, call=self._call, **options)
            return self._add_query(found)
        if isinstance(given, str):
            self._check(given, self.queries, "query")
        if args is not None or returns is not Any:
            raise ConfigError(
                "args and returns are for queries that are SQL text",
                hint="Give a function type hints instead.",
            )

        def register(body: Body) -> Query:
            name = _name(given, body)
            self._check(name, self.queries, "query")
            return self._add_query(Query(name, body, call=self._call, **options))

        return register(given) if callable(given) else register

    def mutation(
        self, given: str | Body | None, **options: Any
    ) -> Mutation | Callable[[Body], Mutation]:
        """What `Headwater.mutation` does."""

        def register(body: Body) -> Mutation:
            name = _name(given, body)
            self._check(name, self.mutations, "mutation")
            self.mutations[name] = Mutation(name, body, call=self._call, **options)
            return self.mutations[name]

        return register(given) if callable(given) else register

    def _add_query(self, query: Query) -> Query:
        self.queries[query.name] = query
        return query

    def _check(self, name: str, known: dict[str, Any], kind: str) -> None:
        if self.runner is not None:
            raise ConfigError(
                f"{kind} {name} is registered too late: Headwater is running",
                hint="Register it before `async with`, where the module begins.",
            )
        if not _NAME.fullmatch(name) or len(name) > FUNCTION_NAME_CHARS_MAX:
            raise ConfigError(
                f"{name!r} cannot be the name of a {kind}",
                hint="A name begins with a letter or _, and continues with letters, digits, _, ."
                f' and -, up to {FUNCTION_NAME_CHARS_MAX} characters. Give one: @hw.{kind}("name").'
                ' SQL goes beside it: hw.query("name", sql="select …").',
            )
        if name in known:
            raise ConfigError(
                f"{kind} {name} is registered twice",
                hint=f'Give one of them another name: @hw.{kind}("other_name").',
            )

    # -------------------------------------------------------------------- running

    def start(self, url: str, settings: Settings) -> None:
        """From here on functions can be called."""
        self.runner = MutationRunner(url, settings, events=self.events)
        self.direct = QueryRunner(url, settings, events=self.events)

    async def close(self) -> None:
        """No calls any more."""
        runner, direct = self.runner, self.direct
        self.runner = self.direct = None
        if runner is not None and direct is not None:
            await runner.close()
            await direct.close()
        await self.events.close()

    async def _call(self, function: Function, arguments: Arguments, identity: Identity) -> Any:
        """Run a function by itself, called from Python."""
        if self.runner is None or self.direct is None:
            raise ConfigError(
                f"{function.label} is called while Headwater is not running",
                hint="Call it inside `async with hw:`, or with a context as its first argument.",
            )
        if isinstance(function, Mutation):
            value, _ = await self.runner.run(function, arguments, identity)
            return value
        assert isinstance(function, Query)
        return await self.direct.run(function, arguments, identity)


def _name(given: str | Body | None, body: Body) -> str:
    if not callable(body):
        raise ConfigError(
            f"{body!r} is not a function", hint="@hw.query is put above a function, or given SQL."
        )
    return given if isinstance(given, str) else str(getattr(body, "__name__", ""))
