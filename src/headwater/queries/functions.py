"""Queries and mutations as the application registers them: arguments from type hints, results
encoded by their types.

The registered name is called like the function it stands for. With a context first it runs inside
the calling function's transaction; without one it runs by itself, as the application.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, Literal, TypeAlias

import msgspec

from headwater.errors import ConfigError
from headwater.identity import ANONYMOUS, Identity, Sharing
from headwater.limits import FUNCTION_THREADS
from headwater.queries.analysis.placeholders import convert
from headwater.queries.arguments import (
    Arguments,
    Parameter,
    Signature,
    hints_of,
    parameters_of,
    underlying,
)
from headwater.queries.context import BlockingContext, Context
from headwater.queries.results import Returns

__all__ = ["Arguments", "Function", "Mutation", "Query"]

Body: TypeAlias = Callable[..., Any]
Call: TypeAlias = Callable[["Function", Arguments, Identity], Awaitable[Any]]
"""Runs a function in a transaction of its own, when Headwater has started."""


class Function:
    """The base class of queries and mutations."""

    kind: Literal["query", "mutation"]

    def __init__(
        self,
        name: str,
        body: Body,
        *,
        timeout: float | None = None,
        trusted: bool = False,
        signature: Signature | None = None,
        returns: Returns | None = None,
        call: Call | None = None,
    ) -> None:
        label = f"{self.kind} {name}"
        if timeout is not None and not timeout > 0:
            raise ConfigError(
                f"{label}: the timeout {timeout} is not more than 0",
                hint="It is in seconds; leave it out for the setting's.",
            )
        if inspect.isgeneratorfunction(underlying(body)) or inspect.isasyncgenfunction(
            underlying(body)
        ):
            raise ConfigError(
                f"{label} is a generator", hint="Return the whole result: a list instead of yield."
            )
        self.name = name
        self.timeout = timeout
        """In seconds; None for the setting's."""
        self.trusted = trusted
        """Whether it runs as Headwater's own database role, for every caller."""
        self.signature = signature or Signature(label, parameters_of(body, label))
        self.returns = returns or Returns(label, hints_of(body, label).get("return", Any))
        self.is_sql = False
        """Whether it is an SQL statement with the caller's values as parameters."""
        self._body = body
        self._is_async = any(map(inspect.iscoroutinefunction, (body, underlying(body))))
        self._call = call
        self.__doc__ = body.__doc__
        self.__wrapped__ = body

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"

    @property
    def label(self) -> str:
        """Its name in error messages."""
        return f"{self.kind} {self.name}"

    def bind(self, args: Mapping[str, Any], *, most: int | None = None) -> Arguments:
        """Check a call's arguments. InvalidQuery names the one that is wrong, or says that they
        have more than `most` values."""
        return self.signature.bind(args, most=most)

    async def run(self, context: Context, arguments: Arguments) -> Any:
        """Call the function: in a thread if it is not async. Raises its errors unchanged."""
        if self._is_async:
            return await self._body(context, **arguments.values)
        loop = asyncio.get_running_loop()
        blocking = BlockingContext(context, loop)
        work = partial(_in_thread, partial(self._body, blocking, **arguments.values))
        try:
            return await loop.run_in_executor(_threads(), contextvars.copy_context().run, work)
        finally:
            blocking.close()

    def convert(self, value: Any) -> Any:
        """The returned value as the declared type. ResultError if it does not fit."""
        return self.returns.convert(value)

    def encode(self, value: Any) -> bytes:
        """The returned value as JSON, by the declared type. ResultError if it does not fit or is
        too large."""
        return self.returns.encode(value)

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        """Inside another function, with its context first: run in that transaction. Without a
        context: run in its own transaction, as the application. The result is awaited, except with
        a context that blocks."""
        if not args or not isinstance(args[0], Context | BlockingContext):
            return self.call(ANONYMOUS, *args, **named)
        context, *rest = args
        self._check_within(context.kind, context.function)
        arguments = self.bind(self.signature.by_name(rest, named))
        if isinstance(context, Context):
            return self._within(context, arguments)
        if self._is_async:
            return context.wait(self._within(context.context, arguments))
        return self.convert(self._body(context, **arguments.values))

    async def _within(self, context: Context, arguments: Arguments) -> Any:
        return self.convert(await self.run(context, arguments))

    def _check_within(self, kind: str, name: str) -> None:
        """Raise ConfigError unless a function of that kind may call this one."""

    async def call(self, identity: Identity, /, *args: Any, **named: Any) -> Any:
        """Run it by itself as this identity, in a transaction of its own."""
        if self._call is None:
            raise ConfigError(
                f"{self.label} is called before Headwater has started",
                hint="Call it inside `async with hw:`, or with a context as its first argument.",
            )
        arguments = self.bind(self.signature.by_name(args, named))
        return await self._call(self, arguments, identity)


class Query(Function):
    """A reactive query."""

    kind = "query"

    def __init__(
        self,
        name: str,
        body: Body,
        *,
        key: str | Iterable[str] = (),
        consistent: bool = False,
        share: Sharing = "user",
        **options: Any,
    ) -> None:
        super().__init__(name, body, **options)
        if share not in ("user", "tenant", "everyone"):
            raise ConfigError(
                f"{self.label}: share={share!r} is unknown",
                hint='A result is shared by "user", "tenant" or "everyone".',
            )
        self.consistent = consistent
        """Always executed on the database itself, never on a replica."""
        self.share: Sharing = share
        self.key: tuple[str, ...] = (key,) if isinstance(key, str) else tuple(key)
        """The fields that identify a row of the result, for row deltas; empty for none."""

    def identity(self, caller: Identity) -> Identity:
        """The part of the caller's identity that it gets. Callers with the same part share a
        result."""
        known = caller.shared(self.share)
        return msgspec.structs.replace(known, role=None) if self.trusted else known


class Mutation(Function):
    """A function that writes."""

    kind = "mutation"

    def bind(self, args: Mapping[str, Any], *, most: int | None = None) -> Arguments:
        """The same without a key: results of mutations are not shared."""
        return self.signature.bind(args, most=most, keyed=False)

    def _check_within(self, kind: str, name: str) -> None:
        if kind == "query":
            raise ConfigError(
                f"query {name} calls {self.label}: queries do not write",
                hint="Call it from a mutation, or make the query one.",
            )


def sql_query(
    name: str, sql: str, args: Mapping[str, Any] | None = None, returns: Any = Any, **options: Any
) -> Query:
    """A query that is one statement; its arguments are the statement's `%(name)s`."""
    converted = convert(sql)
    label = f"query {name}"
    if converted.count and not converted.names:
        raise ConfigError(
            f"{label}: its arguments have no names", hint="Write %(region)s instead of %s."
        )
    declared = dict.fromkeys(converted.names, _SqlValue) if args is None else dict(args)
    if declared.keys() != set(converted.names):
        raise ConfigError(
            f"{label}: args are {', '.join(declared) or 'none'},"
            f" and its placeholders {', '.join(converted.names) or 'none'}",
            hint="Name each placeholder in args, or leave args out.",
        )
    text = sql if converted.names else converted.sql

    async def body(ctx: Context, /, **values: Any) -> Any:
        return await ctx.fetch(text, **values)

    query = Query(
        name,
        body,
        signature=Signature(label, [Parameter(each, type_) for each, type_ in declared.items()]),
        returns=Returns(label, returns),
        **options,
    )
    query.is_sql = True
    return query


_Scalar: TypeAlias = bool | int | float | str | None
_SqlValue: TypeAlias = _Scalar | list[_Scalar]


def _in_thread(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except StopIteration as error:
        # A future cannot hold a StopIteration: the caller would wait for ever.
        raise RuntimeError("the function raised StopIteration") from error


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(FUNCTION_THREADS, thread_name_prefix="headwater-function")
